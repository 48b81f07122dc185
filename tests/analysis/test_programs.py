"""Products counted in traced programs, against counting by hand."""

import jax
import jax.numpy as jnp
import pytest

from minigpt_jax.analysis.programs import multiply_adds, products_in_sequence
from minigpt_jax.model.kernels import dense_product

X = jax.ShapeDtypeStruct((3, 4), jnp.float32)
W = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def chain(x, w):
    return (x @ w) @ w + x @ w


def looped(x, w):
    """Five products after each other, and five that wait for nothing."""

    def step(carry, _):
        return jnp.tanh(carry @ w), x @ w

    return jax.lax.scan(step, x, None, length=5)


def own_gradient(x, w):
    return dense_product('bfloat16')(x, w, (((1,), (0,)), ((), ())))


@pytest.mark.parametrize(
    ('function', 'products', 'in_sequence'),
    [
        (chain, 3, 2),
        (jax.jit(chain), 3, 2),
        (looped, 10, 5),
        (jax.checkpoint(looped), 10, 5),
        (own_gradient, 1, 1),
        (lambda x, w: x + 1, 0, 0),
        (lambda x, w: 1.0, 0, 0),
    ],
)
def test_counts_products_and_how_many_wait_for_each_other(function, products, in_sequence):
    assert multiply_adds(function, X, W) == products * 3 * 4 * 4
    assert products_in_sequence(function, X, W) == in_sequence


def test_a_loop_without_a_fixed_length_has_no_depth():
    def function(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ w, x)

    with pytest.raises(ValueError, match='`while`'):
        products_in_sequence(function, X, W)
