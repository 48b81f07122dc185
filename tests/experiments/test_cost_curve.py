"""What attention and an LSTM cost: the formulas, the crossings, the compiler's memory."""

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import cost_curve
from experiments.cost_curve import BLOCKWISE, LSTM, PLAIN, compile_pass, memory_bytes


def test_operations_are_equal_at_twice_the_width():
    d = cost_curve.WIDTH
    plain, lstm = (cost_curve.multiply_adds(form, 2 * d) for form in (PLAIN, LSTM))
    assert plain == lstm == 16 * d**3
    assert cost_curve.multiply_adds(PLAIN, d) == 0.75 * cost_curve.multiply_adds(LSTM, d)


def test_the_parameters_are_those_of_the_formulas():
    d = cost_curve.WIDTH
    for form, matrices in ((PLAIN, 4), (BLOCKWISE, 4), (LSTM, 8)):
        state = nnx.state(nnx.eval_shape(lambda form=form: cost_curve.make_layer(form)))
        kernels = [x.size for x in jax.tree.leaves(state) if len(x.shape) > 1]
        assert sum(kernels) == matrices * d**2


def test_a_crossing_lies_on_the_line_between_two_lengths():
    lengths = [128, 512]
    assert cost_curve.crossing(lengths, [1, 4], [2, 2]) == pytest.approx(256)
    assert cost_curve.crossing(lengths, [1, 4], [8, 8]) is None
    memory = [row[1] for row in cost_curve.THEIRS.values()]
    plain, _, lstm = zip(*memory, strict=True)
    theirs = cost_curve.crossing(list(cost_curve.THEIRS), plain, lstm)
    assert theirs == pytest.approx(268, abs=3)


def test_plain_and_blockwise_layers_compute_the_same():
    x_BTD = np.random.default_rng(0).standard_normal((1, 24, 32)).astype(np.float32)
    plain, blockwise = (
        cost_curve.make_layer(form, width=32, num_heads=4)(x_BTD) for form in (PLAIN, BLOCKWISE)
    )
    np.testing.assert_allclose(plain, blockwise, atol=1e-5)


@pytest.mark.slow
def test_only_the_memory_of_plain_attention_grows_with_the_square():
    grown = {
        form: memory_bytes(compile_pass(form, 4096, 1)) / memory_bytes(compile_pass(form, 1024, 1))
        for form in cost_curve.FORMS
    }
    assert grown[PLAIN] > 10
    assert grown[BLOCKWISE] < 4.2
    assert grown[LSTM] < 4.2
