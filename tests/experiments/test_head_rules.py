"""What every head keeps to, and that the experiment would notice if it did not."""

import jax
import numpy as np

from experiments import head_rules


def test_the_sizes_of_heads_and_the_refusal():
    assert {pair: head_rules.size_of_a_head(*pair) for pair in head_rules.SIZES} == head_rules.SIZES
    assert 'does not divide model.d_model=128' in head_rules.refusal(128, 3)
    assert head_rules.refusal(128, 4) is None


def test_no_head_sees_a_later_token():
    x_BTD = head_rules.inputs()
    for form in ('fused', 'per_head'):
        assert (head_rules.later_weights(form, 4, x_BTD) == 0).all()


def test_dropout_takes_its_share_and_leaves_the_mean():
    layer = head_rules.make_layer(4)
    dropout = head_rules.measure_dropout(layer, head_rules.inputs())
    np.testing.assert_allclose([share for share, _ in dropout.values()], 0.2, atol=0.01)
    assert abs(dropout['weights'][1] - 1) < 0.02
    weights_BHTS = head_rules.weights_of(layer, head_rules.inputs())
    dropped_BHTS = head_rules.dropped_weights(layer, head_rules.inputs(), jax.random.key(1))
    kept = dropped_BHTS > 0
    np.testing.assert_allclose(dropped_BHTS[kept], weights_BHTS[kept] / 0.8, rtol=1e-5)


def test_what_does_not_hold_is_not_said_to_hold():
    later = {1: {'fused': np.array([0.0, 1e-9])}}
    claims = head_rules.judge(
        {(256, 4): 63}, None, later, {'weights': (0.1, 1), 'output': (0, None)}
    )
    assert [claim.verdict for claim in claims] == ['does not hold'] * 3
