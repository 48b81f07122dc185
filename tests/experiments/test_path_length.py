"""Gradients over a distance, in attention and in an LSTM."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import path_length
from experiments.path_length import LAYERS


@pytest.mark.parametrize('length', [2, 9])
def test_products_in_sequence(length):
    counts = {name: path_length.sequential_products(make, length) for name, make in LAYERS.items()}
    assert counts == {'attention': 4, 'LSTM': length, 'LSTM, open forget gate': length}


@pytest.mark.slow
def test_norms_are_those_of_the_jacobian():
    layer = path_length.Recurrent(rngs=nnx.Rngs(params=0))
    x_TD = jax.random.normal(jax.random.key(0), (3, path_length.WIDTH))
    norms_T = path_length.gradient_norms(layer, x_TD)
    jacobian_DTD = jax.jacrev(lambda x_TD: layer(x_TD)[-1])(x_TD)
    expected = [jnp.linalg.norm(jacobian_DTD[:, t]) for t in range(3)]
    np.testing.assert_allclose(norms_T, expected, rtol=1e-4)


def test_the_forget_gate_is_what_the_bias_opens():
    closed, opened = (path_length.Recurrent(bias, rngs=nnx.Rngs(params=0)) for bias in (0.0, 50.0))
    # Without inputs nothing is added: what stays of a cell's state is the forget gate.
    carry = (jnp.ones(path_length.WIDTH), jnp.zeros(path_length.WIDTH))
    states = [layer.cell(carry, jnp.zeros(path_length.WIDTH))[0][0] for layer in (closed, opened)]
    np.testing.assert_allclose(states[0], 0.5, rtol=1e-6)
    np.testing.assert_allclose(states[1], 1.0, rtol=1e-6)


@pytest.mark.slow
def test_the_lstm_forgets_by_distance_and_attention_does_not():
    norms = {name: path_length.measure_layer(make, 32, (0, 1)) for name, make in LAYERS.items()}
    near, far = slice(16, 31), slice(0, 16)  # of the inputs, before the last
    ratios = {name: x[:, far].mean() / x[:, near].mean() for name, x in norms.items()}
    assert 0.8 < ratios['attention'] < 1.25
    assert ratios['LSTM'] < 1e-2
    assert ratios['LSTM'] < ratios['LSTM, open forget gate'] < 0.7
