"""Look-ups by attention: the task, and what heads do to it at a reduced size."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import lookups


def test_the_answers_are_the_values_beside_different_keys():
    batch = lookups.queries(3, 7, num_keys=16, num_lookups=4, count=50)
    values_BS, named_BM = (np.asarray(batch[name]) for name in ('values_BS', 'named_BM'))
    assert values_BS.shape == (50, 16)
    assert all(len(set(row)) == 4 for row in named_BM)
    expected = [
        [values[key] for key in keys] for values, keys in zip(values_BS, named_BM, strict=True)
    ]
    np.testing.assert_array_equal(lookups.answers(batch), expected)
    assert set(values_BS.ravel()) == set(range(16))


def test_batches_differ_between_steps_and_seeds():
    batches = [
        lookups.queries(seed, step, num_keys=16, num_lookups=2)['values_BS']
        for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    assert jnp.array_equal(batches[0], batches[3])
    assert not jnp.array_equal(batches[0], batches[1])
    assert not jnp.array_equal(batches[0], batches[2])


def test_only_a_clear_difference_decides():
    def verdict(better, worse):
        accuracy = {(16, 2, 2): np.array(better), (16, 2, 1): np.array(worse)}
        (claim,) = lookups.judge(accuracy)
        return claim.verdict

    assert verdict([1.0, 0.99, 1.0], [0.07, 0.08, 0.07]) == 'holds'
    assert verdict([0.9, 0.91, 0.9], [0.6, 0.61, 0.6]) == 'does not hold'
    assert verdict([1.0, 0.5, 1.0], [0.1, 0.6, 0.2]) == 'not decided'


@pytest.mark.slow
def test_too_few_heads_fail_by_look_ups_and_too_many_by_their_width():
    accuracy = {
        (lookups_, heads): lookups.train(16, lookups_, heads, seeds=(0,), num_steps=600)[2].mean()
        for lookups_, heads in ((1, 1), (4, 4), (4, 64))
    }
    assert accuracy[1, 1] > 0.95
    assert accuracy[4, 4] > 0.9
    assert accuracy[4, 64] < 0.3


@pytest.mark.slow
def test_two_look_ups_need_two_heads():
    one, two = (lookups.train(8, 2, heads, seeds=(0, 1), num_steps=300)[2] for heads in (1, 2))
    assert (two - one > 0.5).all()
    assert (two > 0.95).all()
