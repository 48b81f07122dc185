"""Norms, where they stand, and how dense layers start, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.model.layers import INITS, NORM_PLACEMENTS, NORMS, dense, make_norm
from minigpt_jax.model.transformer import ACTIVATIONS, Block, FeedForward, MiniGPT
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config

N = 3


def model_config(**values):
    values = {'model.d_model': 64, 'model.num_heads': 2, 'model.num_layers': N} | values
    return resolve(tiny_config(**values)).model


def naive_norm(x, norm):
    centred = x - x.mean(-1, keepdims=True) if norm == 'layer' else x
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def randomised(module, seed=0):
    """The module with parameters that are not what they start as, and these as a dict."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(1, 0.5, x.shape), x.dtype),
        nnx.to_pure_dict(nnx.state(module)),
    )
    state = nnx.state(module)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(module, state)
    return module, params


x_BTD = np.random.default_rng(1).normal(0.7, 2, (2, 5, 64)).astype(np.float32)


@pytest.mark.parametrize('norm', NORMS)
def test_norms_against_numpy(norm):
    config = model_config(**{'model.norm': norm, 'model.use_bias': True})
    module, params = randomised(make_norm(config, 64, rngs=nnx.Rngs(params=0)))
    assert set(params) == ({'scale', 'bias'} if norm == 'layer' else {'scale'})
    expected = naive_norm(x_BTD, norm) * params['scale'] + params.get('bias', 0)
    np.testing.assert_allclose(module(x_BTD), expected, atol=1e-5)


def branch(x):
    return x[..., ::-1] * 0.5 + 1, 'rest'


PLACEMENTS = {
    'pre': lambda x, f, norms: x + f(norms['norm'](x)),
    'post': lambda x, f, norms: norms['norm'](x + f(x)),
    'sandwich': lambda x, f, norms: x + norms['after'](f(norms['before'](x))),
    'deepnorm': lambda x, f, norms: norms['norm']((2 * N) ** 0.25 * x + f(x)),
    'none': lambda x, f, norms: x + f(x),
}


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('placement', NORM_PLACEMENTS)
def test_norms_stand_where_they_should(placement, norm):
    config = model_config(**{'model.norm_placement': placement, 'model.norm': norm})
    residual, params = randomised(NORM_PLACEMENTS[placement](config, rngs=nnx.Rngs(params=0)))
    norms = {
        name: lambda x, scale=own['scale']: naive_norm(x, norm) * scale
        for name, own in params.items()
    }
    y_BTD, rest = residual(x_BTD, branch)
    expected = PLACEMENTS[placement](x_BTD, lambda x: branch(x)[0], norms)
    np.testing.assert_allclose(y_BTD, expected, atol=1e-5)
    assert rest == 'rest'


@pytest.mark.parametrize('placement', ['pre', 'post', 'sandwich', 'none'])
def test_without_the_residual_a_branch_stands_alone(placement):
    config = model_config(**{'model.norm_placement': placement, 'model.residual': False})
    residual, params = randomised(NORM_PLACEMENTS[placement](config, rngs=nnx.Rngs(params=0)))
    norm = {k: lambda x, s=v['scale']: naive_norm(x, 'layer') * s for k, v in params.items()}
    expected = {
        'pre': lambda: branch(norm['norm'](x_BTD))[0],
        'post': lambda: norm['norm'](branch(x_BTD)[0]),
        'sandwich': lambda: norm['after'](branch(norm['before'](x_BTD))[0]),
        'none': lambda: branch(x_BTD)[0],
    }[placement]()
    np.testing.assert_allclose(residual(x_BTD, branch)[0], expected, atol=1e-5)


@pytest.mark.parametrize('placement', NORM_PLACEMENTS)
def test_a_stream_that_is_not_normalised_gets_a_norm_before_the_logits(placement):
    model = nnx.eval_shape(
        lambda: MiniGPT(
            model_config(**{'model.norm_placement': placement}), 11, rngs=nnx.Rngs(params=0)
        )
    )
    params = nnx.to_pure_dict(nnx.state(model))
    assert ('final_norm' in params) == (placement in ('pre', 'sandwich'))
    scales = [p for p, _ in jax.tree_util.tree_leaves_with_path(params) if 'scale' in str(p[-1])]
    per_branch = {'pre': 1, 'post': 1, 'sandwich': 2, 'deepnorm': 1, 'none': 0}[placement]
    assert len(scales) == 2 * N * per_branch + ('final_norm' in params)


def naive_activation(name, x):
    if name == 'relu':
        return np.maximum(x, 0)
    if name == 'swiglu':
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize('use_bias', [False, True])
@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_feed_forward_against_numpy(activation, use_bias):
    config = model_config(
        **{'model.activation': activation, 'model.use_bias': use_bias, 'model.d_ff': 24}
    )
    module = FeedForward(config, rngs=nnx.Rngs(params=0))
    state = nnx.state(module)
    rng = np.random.default_rng(3)
    p = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), state)
    nnx.update(module, p)
    p = nnx.to_pure_dict(p)

    def affine(name, x):
        return x @ p[name]['kernel'] + p[name].get('bias', 0)

    if activation == 'swiglu':
        h = naive_activation('swiglu', affine('gate', x_BTD)) * affine('hidden', x_BTD)
        assert p['gate']['kernel'].shape == p['hidden']['kernel'].shape == (64, 24)
    else:
        h = naive_activation(activation, affine('hidden', x_BTD))
        assert 'gate' not in p
    np.testing.assert_allclose(module(x_BTD), affine('out', h), atol=1e-4)


# How parameters start.


@functools.cache
def initial(init, form='fused', placement='pre', seed=0):
    config = model_config(
        **{
            'model.init': init,
            'model.attention_form': form,
            'model.norm_placement': placement,
            'model.use_bias': True,
        }
    )
    block = jax.jit(lambda: nnx.state(Block(config, rngs=nnx.Rngs(params=seed))))()
    flat = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(block))
    return {jax.tree_util.keystr(path, simple=True, separator='.'): np.array(x) for path, x in flat}


def is_uniform(x, bound):
    """Whether x looks drawn from U(±bound): all within, some near it, and the right variance."""
    return bool(
        np.abs(x).max() <= bound
        and np.abs(x).max() > bound * (1 - 8 / x.size)
        and abs(x.std() / (bound / 3**0.5) - 1) < 3 / x.size**0.5
    )


FANS = {  # (in, out) of the matrices that Glorot's rule speaks of: one for each of q, k and v
    'attention.qkv.kernel': (64, 64),
    'attention.out.kernel': (64, 64),
    'feed_forward.hidden.kernel': (64, 256),
    'feed_forward.out.kernel': (256, 64),
}


def test_xavier_is_uniform_by_both_fans():
    params = initial('xavier')
    for name, (fan_in, fan_out) in FANS.items():
        assert is_uniform(params[name], (6 / (fan_in + fan_out)) ** 0.5), name
        assert (params[name.replace('kernel', 'bias')] == 0).all()
    per_head = initial('xavier', 'per_head')
    assert is_uniform(per_head['attention.heads.1.key.kernel'], (6 / 128) ** 0.5)


def test_torch_is_uniform_by_the_fan_in_biases_too():
    params = initial('torch')
    for name, (fan_in, _) in FANS.items():
        assert is_uniform(params[name], fan_in**-0.5), name
        assert is_uniform(params[name.replace('kernel', 'bias')], fan_in**-0.5), name


def test_gpt2_is_normal_and_divides_the_outputs_of_branches():
    params = initial('gpt2')
    for name in FANS:
        expected = 0.02 / (2 * N) ** 0.5 if '.out.' in name else 0.02
        assert abs(params[name].std() / expected - 1) < 3 / params[name].size ** 0.5, name
        assert np.abs(params[name]).max() > 3 * expected  # not uniform
        assert (params[name.replace('kernel', 'bias')] == 0).all()


@pytest.mark.parametrize(
    ('init', 'form'), [*((init, 'fused') for init in INITS), ('xavier', 'per_head')]
)
def test_deepnorm_makes_branches_but_not_queries_and_keys_smaller(init, form):
    beta = (8 * N) ** -0.25
    plain, deep = (initial(init, form, placement) for placement in ('post', 'deepnorm'))
    assert set(plain) == set(deep)
    divided = (2 * N) ** -0.5 if init == 'gpt2' else 1.0  # which β replaces
    for name, before in plain.items():
        if 'qkv.kernel' in name:
            factor = np.array([1, 1, beta])[:, None, None]
        elif 'kernel' not in name or 'query' in name or 'key' in name:
            factor = 1.0
        else:
            factor = beta / (divided if '.out.' in name else 1.0)
        np.testing.assert_allclose(deep[name], before * factor, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize('init', INITS)
def test_embedding_tables_start_small_whatever_the_dense_layers_do(init):
    values = {'model.init': init, 'model.context_length': 64, 'model.num_layers': 1}
    config = model_config(**values)
    model = MiniGPT(config, 50, rngs=nnx.Rngs(params=0))
    for table in (model.embed.embedding, model.positions.table):
        assert abs(table[...].std() / 0.02 - 1) < 0.05


def test_a_gain_multiplies_what_an_initialisation_gives():
    config = model_config(**{'model.init': 'xavier'})
    one, half = (
        dense(config, 64, 32, rngs=nnx.Rngs(params=0), gain=gain).kernel[...] for gain in (1, 0.5)
    )
    np.testing.assert_allclose(half, one * 0.5)
