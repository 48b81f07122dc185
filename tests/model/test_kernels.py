"""The dense product: the numbers of `lax.dot_general`, by another program."""

import jax
import numpy as np
import pytest
from jax import lax

from minigpt_jax.model.kernels import dot_general

SHAPES = {
    'matrix': ((5, 6), (6, 7), ((1,), (0,))),
    'tokens': ((2, 3, 6), (6, 7), ((2,), (0,))),
    'heads out': ((2, 3, 6), (6, 3, 2, 4), ((2,), (0,))),
    'heads in': ((2, 3, 4, 5), (4, 5, 7), ((2, 3), (0, 1))),
}


@pytest.mark.parametrize(('x_shape', 'w_shape', 'axes'), SHAPES.values(), ids=SHAPES)
def test_equals_lax_with_gradients(x_shape, w_shape, axes):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (x_shape, w_shape))

    def loss(product):
        return lambda x, w: (product(x, w, (axes, ((), ()))) ** 2).sum()

    ours, lax_s = (
        jax.jit(jax.value_and_grad(loss(product), (0, 1)))
        for product in (dot_general, lax.dot_general)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), ours(x, w), lax_s(x, w)
    )


def test_the_weight_gradient_needs_no_transpose():
    x, w = np.ones((8, 4, 6), np.float32), np.ones((6, 7), np.float32)

    def gradient(product):
        loss = lambda w: product(x, w, (((2,), (0,)), ((), ()))).sum()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(w).as_text()

    assert 'transpose' in gradient(lax.dot_general)
    assert 'transpose' not in gradient(dot_general)


def test_other_contractions_are_refused():
    x, w = np.ones((4, 6)), np.ones((7, 6))
    with pytest.raises(ValueError, match='last axes of x with the first axes of w'):
        dot_general(x, w, (((1,), (1,)), ((), ())))
