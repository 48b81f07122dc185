"""The dense product: the numbers of `lax.dot_general`, by another program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from minigpt_jax.model.kernels import dense_product, dot_general, product

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
    with pytest.raises(ValueError, match='results are float32'):
        dot_general(x, x.T, (((1,), (0,)), ((), ())), preferred_element_type='bfloat16')


def rounded(x):
    """To the eight bits of bfloat16, as float64."""
    return np.float64(np.asarray(x).astype(jnp.bfloat16))


SPECS = {
    'scores': ('BTHK,BSHK->BHTS', (2, 5, 3, 4), (2, 6, 3, 4)),
    'sums': ('BHTS,BSHK->BTHK', (2, 3, 5, 6), (2, 6, 3, 4)),
    'relative': ('BTHK,TSK->BHTS', (2, 5, 3, 4), (5, 6, 4)),
    'logits': ('BTD,VD->BTV', (2, 5, 8), (7, 8)),
    'dense': ('BTD,DF->BTF', (2, 5, 8), (8, 9)),
}


@pytest.mark.parametrize(('spec', 'a_shape', 'b_shape'), SPECS.values(), ids=SPECS)
def test_bfloat16_products_round_operands_alone(spec, a_shape, b_shape):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in (a_shape, b_shape))

    def multiply(a, b):
        if spec == 'BTD,DF->BTF':
            return dense_product('bfloat16')(a, b, (((2,), (0,)), ((), ())))
        return product(spec, a, b, 'bfloat16')

    y, backward = jax.vjp(multiply, a, b)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    da, db = backward(dy)
    assert {x.dtype for x in (y, da, db)} == {np.dtype('float32')}
    left, right, result = spec.replace('->', ',').split(',')
    terms = {left: rounded(a), right: rounded(b), result: rounded(dy)}
    for value, target in ((y, result), (da, left), (db, right)):
        names = [name for name in terms if name != target]
        equation = f'{",".join(names)}->{target}'
        expected = np.einsum(equation, *(terms[name] for name in names))
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    exact = np.einsum(spec, np.float64(a), np.float64(b))
    assert np.abs(y - exact).max() > 1e-3
