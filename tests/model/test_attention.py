"""Attention against a naive NumPy version, and its two multi-head forms against each other."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.model.attention import (
    FusedMultiHeadAttention,
    MultiHeadAttention,
    dot_product_attention,
    fuse_heads,
    init_cache,
    split_heads,
)
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config


def naive_attention(q, k, v, may_attend, bias):
    """One query at a time, in float64: (outputs BTHK, weights BHTS)."""
    B, T, H, K = q.shape
    S = k.shape[1]
    y, weights = np.zeros((B, T, H, K)), np.zeros((B, H, T, S))
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        keys = [s for s in range(S) if may_attend(b, h, t, s)]
        if not keys:
            continue
        scores = np.array([q[b, t, h] @ k[b, s, h] / np.sqrt(K) + bias[b, h, t, s] for s in keys])
        p = np.exp(scores - scores.max())
        p /= p.sum()
        weights[b, h, t, keys] = p
        y[b, t, h] = p @ v[b, keys, h]
    return y, weights


B, T, S, H, K = 2, 5, 7, 3, 4
LENGTHS = np.array([7, 4])
IDS_BT = np.array([[0, 0, 1, 1, 2], [5, 5, 5, 6, 9]])  # 9 is no key's id: that query sees nothing
IDS_BS = np.array([[0, 0, 1, 1, 1, 2, 2], [5, 6, 5, 6, 6, 6, 6]])
MASK = np.random.default_rng(3).random((B, 1, T, S)) < 0.6
MASK_OF_BIAS = np.random.default_rng(4).random((B, 1, T, S)) < 0.4
MASK_OF_BIAS[:, :, 1] = False  # a query that sees nothing
CONDITIONS = {
    'causal': (dict(causal=True), lambda b, h, t, s: s <= t),
    'behind a cache': (dict(causal=True, q_offset=2), lambda b, h, t, s: s <= t + 2),
    'lengths': (dict(kv_lengths_B=LENGTHS), lambda b, h, t, s: s < LENGTHS[b]),
    'segments': (
        dict(segment_ids=(IDS_BT, IDS_BS)),
        lambda b, h, t, s: IDS_BT[b, t] == IDS_BS[b, s],
    ),
    'mask': (dict(mask=MASK), lambda b, h, t, s: MASK[b, 0, t, s]),
    'a bias of -inf': (
        dict(bias=np.where(MASK_OF_BIAS, 0, -np.inf)),
        lambda b, h, t, s: MASK_OF_BIAS[b, 0, t, s],
    ),
}
PAIRS = [p for p in itertools.combinations(CONDITIONS, 2) if p != ('causal', 'behind a cache')]
CASES = [(), *((name,) for name in CONDITIONS), *PAIRS]
CASES.append(tuple(CONDITIONS)[1:])


def arrays(seed=0, shapes=((B, T, H, K), (B, S, H, K), (B, S, H, K))):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize('names', CASES, ids=' + '.join)
@pytest.mark.parametrize('with_bias', [False, True])
def test_equals_naive_numpy_under_every_condition(names, with_bias):
    q, k, v = arrays()
    bias = np.random.default_rng(1).standard_normal((B, H, T, S)).astype(np.float32) * with_bias
    arguments = {'bias': bias} if with_bias else {}
    for name in names:
        arguments |= CONDITIONS[name][0]
    if with_bias and 'a bias of -inf' in names:
        arguments['bias'] = arguments['bias'] + bias

    def may_attend(*index):
        return all(CONDITIONS[name][1](*index) for name in names)

    y, weights = dot_product_attention(q, k, v, return_weights=True, **arguments)
    expected_y, expected_weights = naive_attention(q, k, v, may_attend, bias)
    np.testing.assert_allclose(y, expected_y, atol=2e-6)
    np.testing.assert_allclose(weights, expected_weights, atol=2e-6)
    assert (np.asarray(weights)[expected_weights == 0] == 0).all()  # to the bit


def test_a_query_that_may_attend_to_nothing_gives_zeros_and_finite_gradients():
    q, k, v = arrays()
    mask = np.ones((1, 1, T, S), bool)
    mask[0, 0, 2] = False

    def total(q, k, v):
        return dot_product_attention(q, k, v, mask=mask).sum()

    assert (np.asarray(dot_product_attention(q, k, v, mask=mask))[:, 2] == 0).all()
    gradients = jax.grad(total, (0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() for g in gradients)
    assert (np.asarray(gradients[0])[:, 2] == 0).all()
    assert np.abs(gradients[2]).min() > 0


def test_the_worked_example_of_four_tokens():
    X = np.array([[0, 0, 1, 0], [1, 1, 1, 0], [1, 1, 0, 1], [0, 0, 0, 1]], np.float32)
    W_Q = np.array([[0, -1, -1, -1], [-1, 1, 1, -1], [0, -1, 1, 1], [0, -1, -1, 0]])
    W_K = np.array([[0, -1, 0, 1], [1, -1, 0, 1], [1, 1, -1, -1], [0, 1, 1, 0]])
    W_V = np.array([[1, 0, 2, 0], [0, 2, 0, 1], [2, 1, 0, 0], [0, 0, 1, 2]])
    q, k, v = (jnp.asarray(X @ W)[None, :, None] for W in (W_Q, W_K, W_V))
    y, weights = dot_product_attention(q, k, v, return_weights=True)
    np.testing.assert_array_equal(
        X @ W_Q @ (X @ W_K).T, [[-3, 1, 4, 0], [-2, -3, -1, 0], [1, -2, -5, -2], [0, 2, 0, -2]]
    )
    expected = [
        [0.0217, 0.1607, 0.7201, 0.0975],
        [0.1674, 0.1015, 0.2760, 0.4551],
        [0.6684, 0.1491, 0.0333, 0.1491],
        [0.1966, 0.5344, 0.1966, 0.0723],
    ]
    np.testing.assert_allclose(weights[0, 0], expected, atol=5e-5)
    np.testing.assert_allclose(y[0, 0, 0], [1.2456, 1.9440, 2.5792, 2.5159], atol=5e-5)
    _, causal = dot_product_attention(q, k, v, causal=True, return_weights=True)
    np.testing.assert_allclose(causal[0, 0, 1], [0.6225, 0.3775, 0, 0], atol=5e-5)
    np.testing.assert_allclose(causal[0, 0, 2], [0.7856, 0.1753, 0.0391, 0], atol=5e-5)
    np.testing.assert_array_equal(causal[0, 0, 3], weights[0, 0, 3])


def test_dropout_acts_on_the_weights_only_with_a_key():
    q, k, v = (np.ones(shape, np.float32) for shape in [(1, 1, 1, 4), *[(1, 4000, 1, 4)] * 2])
    plain = dot_product_attention(q, k, v, dropout_rate=0.25)
    np.testing.assert_allclose(plain, 1, rtol=1e-5)
    dropped = dot_product_attention(q, k, v, dropout_rate=0.25, dropout_key=jax.random.key(0))
    assert 0.9 < dropped[0, 0, 0, 0] < 1.1  # the mean is kept
    assert abs(dropped[0, 0, 0, 0] - 1) > 1e-4  # but weights did fall out


def test_an_unknown_implementation_names_those_that_exist():
    with pytest.raises(ValueError, match='plain'):
        dot_product_attention(*arrays(), implementation='flash')


# The two forms of multi-head attention.


def attention_config(**values):
    return resolve(tiny_config(**values)).model


def both_forms(**values):
    """(per-head module, fused module with the same parameters)."""
    config = attention_config(**{'model.d_model': 24, 'model.num_heads': 3} | values)
    per_head = MultiHeadAttention(config, rngs=nnx.Rngs(params=1))
    fused = FusedMultiHeadAttention(config, rngs=nnx.Rngs(params=2))
    nnx.update(fused, pure_state(fuse_heads(nnx.to_pure_dict(nnx.state(per_head))), fused))
    return per_head, fused


def pure_state(params, module):
    state = nnx.state(module)
    nnx.replace_by_pure_dict(state, params)
    return state


@pytest.mark.parametrize('use_bias', [False, True])
def test_heads_of_a_textbook_equal_the_fused_form(use_bias):
    per_head, fused = both_forms(**{'model.use_bias': use_bias})
    x_BTD = np.random.default_rng(0).standard_normal((2, 6, 24)).astype(np.float32)

    def apply(module):
        definition, state = nnx.split(module)

        def total(state, x):
            y, _ = nnx.merge(definition, state)(x)
            return (y**2).sum(), y

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True)), state

    (one, one_state), (other, other_state) = apply(per_head), apply(fused)
    (_, y), (gradient, x_gradient) = one(one_state, x_BTD)
    (_, fused_y), (fused_gradient, fused_x_gradient) = other(other_state, x_BTD)
    np.testing.assert_allclose(y, fused_y, atol=1e-5)
    np.testing.assert_allclose(x_gradient, fused_x_gradient, atol=1e-5)
    expected = fuse_heads(nnx.to_pure_dict(gradient))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        expected,
        nnx.to_pure_dict(fused_gradient),
    )
    # They are two programs: the textbook multiplies once a head and projection, the other once.
    products = [
        f.lower(s, x_BTD).as_text().count('dot_general')
        for f, s in ((one, one_state), (other, other_state))
    ]
    assert products[0] > 2 * products[1]


def test_converting_heads_there_and_back_changes_nothing():
    per_head, _ = both_forms(**{'model.use_bias': True})
    params = nnx.to_pure_dict(nnx.state(per_head))
    back = split_heads(fuse_heads(params))
    assert jax.tree.structure(params) == jax.tree.structure(back)
    jax.tree.map(np.testing.assert_array_equal, params, back)


def test_both_forms_agree_behind_a_cache():
    per_head, fused = both_forms()
    x_BTD = np.random.default_rng(0).standard_normal((2, 6, 24)).astype(np.float32)
    full, _ = fused(x_BTD)
    for module in (per_head, fused):
        cache = init_cache(2, 8, 3, 8)
        first, cache = module(x_BTD[:, :4], cache=cache)
        second, cache = module(x_BTD[:, 4:], cache=cache, position=4)
        np.testing.assert_allclose(np.concatenate([first, second], 1), full, atol=1e-5)


@pytest.mark.parametrize('module', [MultiHeadAttention, FusedMultiHeadAttention])
def test_heads_share_the_width_and_leave_the_parameter_count_alone(module):
    def count(num_heads):
        config = attention_config(**{'model.d_model': 64, 'model.num_heads': num_heads})
        state = nnx.state(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(params=0))))
        return sum(x.size for x in jax.tree.leaves(state))

    assert {count(h) for h in (1, 2, 4, 16, 64)} == {4 * 64**2}


@pytest.mark.parametrize('module', [MultiHeadAttention, FusedMultiHeadAttention])
def test_dropout_of_a_module_follows_its_key(module):
    config = attention_config(**{'model.dropout_rate': 0.5})
    attention = module(config, rngs=nnx.Rngs(params=0))
    x_BTD = np.random.default_rng(0).standard_normal((2, 6, 16)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0))
    off, one, again, other = (
        np.asarray(attention(x_BTD, dropout_key=key)[0])
        for key in (None, keys[0], keys[0], keys[1])
    )
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)
    assert not np.allclose(one, off)
    assert (one == 0).mean() > 0.3  # dropout on the output zeroes about a half
