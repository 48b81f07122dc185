"""Position encodings against naive NumPy versions, one query and key at a time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.model.attention import (
    FusedMultiHeadAttention,
    MultiHeadAttention,
    fuse_heads,
    split_heads,
)
from minigpt_jax.model.positions import (
    ATTENTION_POSITIONS,
    POSITIONS,
    RELATIVE_CLIP,
    alibi_slopes,
    rotate,
    sinusoidal_encoding,
)
from minigpt_jax.model.transformer import MiniGPT
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config

D, H, K, T = 48, 12, 4, 20  # twelve heads: no power of two; twenty positions: beyond the clip of 16


def naive_rotation(x, t):
    """The pairs of x as complex numbers, each times e^(i·angle)."""
    pairs = x[0::2] + 1j * x[1::2]
    angles = [t / 10000 ** (2 * i / len(x)) for i in range(len(pairs))]
    turned = pairs * np.exp(1j * np.array(angles))
    return np.stack([turned.real, turned.imag], -1).reshape(len(x))


# Twelve heads, from the paper's rule: those of eight heads, then every other one of sixteen.
SLOPES = [2.0**-n for n in range(1, 9)] + [2.0**-n for n in (0.5, 1.5, 2.5, 3.5)]


def naive_norm(x, scale):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * scale


def naive_layer(params, x, positions, qk_norm, scale):
    """Causal self-attention of a fused layer for one sequence x of (T, D), in float64 loops."""
    qkv = np.einsum('td,dphk->tphk', x, params['qkv']['kernel'])
    y = np.zeros((len(x), H, K))
    for t, h in itertools.product(range(len(x)), range(H)):
        scores = []
        for s in range(t + 1):
            q, k = qkv[t, 0, h], qkv[s, 1, h]
            if qk_norm:
                q = naive_norm(q, params['attend']['query_norm']['scale'])
                k = naive_norm(k, params['attend']['key_norm']['scale'])
            bias = 0.0
            if positions == 'rotary':
                q, k = naive_rotation(q, t), naive_rotation(k, s)
            if positions == 'alibi':
                bias = -SLOPES[h] * (t - s)
            if positions == 'relative':
                distance = max(-16, min(16, s - t))
                k = k + params['attend']['positions']['table'][16 + distance]
            scores.append(q @ k * scale + bias)
        p = np.exp(np.array(scores) - max(scores))
        y[t, h] = (p / p.sum()) @ qkv[: t + 1, 2, h]
    return y.reshape(len(x), D) @ params['out']['kernel']


def layer(form, **values):
    values = {'model.d_model': D, 'model.num_heads': H} | values
    return form(resolve(tiny_config(**values)).model, rngs=nnx.Rngs(params=0))


def with_params(module, params):
    state = nnx.state(module)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(module, state)
    return module


@pytest.mark.parametrize('qk_norm', [False, True])
@pytest.mark.parametrize('scale_scores', [True, False])
@pytest.mark.parametrize('positions', [*ATTENTION_POSITIONS, 'none'])
def test_a_layer_equals_a_naive_one_in_both_forms(positions, scale_scores, qk_norm):
    values = {
        'model.positions': positions,
        'model.scale_scores': scale_scores,
        'model.qk_norm': qk_norm,
    }
    fused = layer(FusedMultiHeadAttention, **values)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32),
        nnx.to_pure_dict(nnx.state(fused)),
    )
    x_TD = rng.standard_normal((T, D)).astype(np.float32)
    expected = naive_layer(params, x_TD, positions, qk_norm, K**-0.5 if scale_scores else 1.0)
    y_BTD, _ = with_params(fused, params)(x_TD[None])
    np.testing.assert_allclose(y_BTD[0], expected, rtol=1e-4, atol=5e-5)
    per_head = with_params(layer(MultiHeadAttention, **values), split_heads(params))
    np.testing.assert_allclose(per_head(x_TD[None])[0][0], expected, rtol=1e-4, atol=5e-5)
    jax.tree.map(np.testing.assert_array_equal, fuse_heads(split_heads(params)), params)


def test_slopes_of_eight_and_of_twelve_heads_are_the_papers():
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    np.testing.assert_allclose(alibi_slopes(12), SLOPES)
    assert alibi_slopes(1) == [2.0**-8]
    assert len(set(alibi_slopes(24))) == 24


def test_rotated_products_depend_on_the_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 8)).astype(np.float32)

    def product(t, s):
        return (rotate(q, jnp.array([t])) * rotate(k, jnp.array([s]))).sum()

    np.testing.assert_allclose(product(3, 1), product(103, 101), atol=1e-4)
    assert abs(product(3, 1) - product(3, 2)) > 1e-2


def test_relative_positions_beyond_the_clip_share_a_vector():
    module = ATTENTION_POSITIONS['relative'](resolve(tiny_config()).model, rngs=nnx.Rngs(params=0))
    q = np.random.default_rng(0).standard_normal((1, 60, 2, 8)).astype(np.float32)
    _, _, bias_BHTS = module(q, q)
    np.testing.assert_array_equal(bias_BHTS[0, 0, 59, :44], bias_BHTS[0, 0, 59, 0])
    assert abs(bias_BHTS[0, 0, 59, 44] - bias_BHTS[0, 0, 59, 43]) > 1e-5
    assert module.table.shape == (2 * RELATIVE_CLIP + 1, 8)


def test_sinusoidal_encoding_against_the_formula():
    table = sinusoidal_encoding(jnp.arange(64), 128)
    expected = np.zeros((64, 128))
    for t, i in itertools.product(range(64), range(64)):
        angle = t / 10000 ** (2 * i / 128)
        expected[t, 2 * i], expected[t, 2 * i + 1] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(table, expected, atol=1e-5)
    np.testing.assert_allclose((table**2).sum(-1), 64, rtol=1e-5)


def model(positions):
    config = resolve(tiny_config(**{'model.positions': positions})).model
    return MiniGPT(config, 11, rngs=nnx.Rngs(params=0))


def test_learned_positions_refuse_what_lies_beyond_the_context():
    tokens_BT = np.zeros((1, 9), int)
    for refused in (
        lambda: model('learned')(tokens_BT),
        lambda: model('learned').hidden(tokens_BT[:, :1], position=8),
        lambda: model('learned').init_caches(1, 9),
    ):
        with pytest.raises(ValueError, match='end at context_length=8, and 9 tokens were given'):
            refused()


@pytest.mark.parametrize('positions', [name for name in POSITIONS if name != 'learned'])
def test_all_others_go_beyond_the_context_and_tell_what_order_is(positions):
    longer = model(positions)
    tokens_BT = np.random.default_rng(0).integers(0, 11, (1, 16))
    logits_BTV = longer(tokens_BT)
    assert np.isfinite(logits_BTV).all()
    assert longer.init_caches(1, 16)[0]['self']['k_BSHK'].shape[1] == 16
    # The first two tokens change places: the last one notices only if it knows their positions.
    # A causal mask alone tells a position by what it sees, but one layer forgets the order of it.
    swapped_BT = tokens_BT.copy()
    swapped_BT[0, :2] = tokens_BT[0, 1::-1]
    assert (tokens_BT != swapped_BT).any()
    difference = np.abs(longer(swapped_BT) - logits_BTV)[0, -1].max()
    assert (difference < 1e-6) == (positions == 'none')
