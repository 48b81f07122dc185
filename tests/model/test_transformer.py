"""MiniGPT: parameters, operations, number types, layers in a loop, intermediates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.analysis.programs import multiply_adds
from minigpt_jax.model import kernels
from minigpt_jax.model.attention import fuse_heads, split_heads
from minigpt_jax.model.layers import NO_TAP
from minigpt_jax.model.positions import POSITIONS
from minigpt_jax.model.transformer import (
    ACTIVATIONS,
    CAPTURES,
    MiniGPT,
    flops_per_token,
    stack_layers,
    unstack_layers,
)
from minigpt_jax.training import steps
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config

V = 11
tokens_BT = np.random.default_rng(0).integers(0, V, (2, 8))


def model_config(**values):
    return resolve(tiny_config(**{f'model.{name}': value for name, value in values.items()})).model


@functools.cache
def build(**values):
    """(model, parameters) of a tiny MiniGPT; values of the `model` group.

    The parameters are larger than freshly initialised ones, so that every part of the model shows
    in its output.
    """
    config = model_config(**values)
    rng = np.random.default_rng(0)
    model, params = nnx.split(nnx.eval_shape(lambda: MiniGPT(config, V, rngs=nnx.Rngs(params=0))))
    return model, jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0.3, 0.4, x.shape), x.dtype), params
    )


def from_dict(like, params):
    state = jax.tree.map(lambda x: x, like)
    nnx.replace_by_pure_dict(state, params)
    return state


def count(**values):
    return sum(x.size for x in jax.tree.leaves(build(**values)[1]))


# Parameters.


def test_the_head_count_changes_the_number_of_parameters_by_positions_and_qk_norm_alone():
    heads = (1, 2, 4, 8)
    for positions in set(POSITIONS) - {'relative'}:
        assert len({count(num_heads=h, positions=positions) for h in heads}) == 1
    plain = count()
    for h in heads:
        d_head = 16 // h
        relative = count(num_heads=h, positions='relative')
        assert relative == count(positions='none') + 33 * d_head
        assert count(num_heads=h, qk_norm=True) == plain + 2 * d_head


def test_parameters_of_the_cpu_recipe():
    values = {'model.d_model': 128, 'model.num_layers': 4, 'model.context_length': 64}
    config = resolve(tiny_config(**values)).model
    model = nnx.eval_shape(lambda: MiniGPT(config, 65, rngs=nnx.Rngs(params=0)))
    size = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    assert size == 4 * (12 * 128**2 + 2 * 128) + 128 + 65 * 128 + 64 * 128


def test_post_norm_leaves_every_position_normalised():
    model, params = build(norm_placement='post', use_bias=True)
    module = nnx.merge(model, params)
    for residual in (module.blocks[0].attention_residual, module.blocks[0].feed_forward_residual):
        residual.norm.scale[...], residual.norm.bias[...] = jnp.ones(16), jnp.zeros(16)
    x_BTD, _ = module.hidden(tokens_BT)
    np.testing.assert_allclose(x_BTD.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(x_BTD.std(-1), 1, atol=1e-2)


@pytest.mark.parametrize('use_bias', [False, True])
def test_tied_embeddings_are_the_output_layer_and_untied_ones_are_not(use_bias):
    tied, untied = (
        nnx.merge(*build(tie_embeddings=tie, use_bias=use_bias)) for tie in (True, False)
    )
    sizes = [sum(x.size for x in jax.tree.leaves(nnx.state(m))) for m in (tied, untied)]
    assert sizes[1] - sizes[0] == V * 16 + use_bias * V
    x_BTD = np.random.default_rng(0).standard_normal((1, 2, 16)).astype(np.float32)
    table = np.asarray(tied.embed.embedding[...])
    np.testing.assert_allclose(tied.logits(x_BTD), x_BTD @ table.T, atol=1e-5)
    if use_bias:
        untied.unembed.bias[...] = jnp.arange(V, dtype=jnp.float32)
    expected = x_BTD @ np.asarray(untied.unembed.kernel[...]) + use_bias * np.arange(V)
    np.testing.assert_allclose(untied.logits(x_BTD), expected, atol=1e-5)


# Operations.


def equations(jaxpr):
    """Every equation in a program and in the programs within."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')
        ):
            inner = getattr(value, 'jaxpr', value)
            if hasattr(inner, 'eqns'):
                yield from equations(inner)


CHOICES = [
    *({'positions': positions} for positions in POSITIONS),
    *({'activation': activation, 'd_ff': 40} for activation in ACTIVATIONS),
    {'attention_form': 'per_head', 'positions': 'relative'},
    {'tie_embeddings': False, 'num_heads': 4},
    {'qk_norm': True, 'norm_placement': 'sandwich', 'scan_layers': True},
    {'dtype': 'bfloat16', 'positions': 'relative'},
]


@pytest.mark.parametrize('values', CHOICES, ids=str)
def test_the_formula_of_operations_counts_every_product(values):
    values = {'num_layers': 2} | values
    model, params = build(**values)

    def loss(params):
        return nnx.merge(model, params)(tokens_BT).sum()

    expected = flops_per_token(model_config(**values), V) * tokens_BT.size
    assert 3 * 2 * multiply_adds(loss, params) == expected
    assert 2 * multiply_adds(jax.grad(loss), params) == expected


def test_the_number_of_heads_is_not_in_the_operations_but_in_the_scores():
    assert flops_per_token(model_config(num_heads=1), 50) == flops_per_token(
        model_config(num_heads=8), 50
    )


# bfloat16.


def test_bfloat16_is_for_the_operands_of_products_alone(monkeypatch):
    monkeypatch.setattr(kernels, '_rounds_instead', lambda spec: False)  # as on an accelerator
    config = resolve(
        tiny_config(
            **{
                'model.dtype': 'bfloat16',
                'model.positions': 'relative',
                'model.qk_norm': True,
                'model.activation': 'swiglu',
                'model.dropout_rate': 0.1,
            }
        )
    )
    state = jax.eval_shape(steps.make_init(config, V), 0)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype('float32')}
    step = steps.make_train_step(config, steps.build_model(config, V), steps.token_losses)
    batch = {'tokens_BT1': jax.ShapeDtypeStruct((2, 9), np.int32)}
    program = jax.make_jaxpr(step)(state, batch)
    dots = 0
    for equation in equations(program.jaxpr):
        types = [x.aval.dtype.name for x in (*equation.invars, *equation.outvars)]
        if equation.primitive.name == 'dot_general':
            dots += 1
            assert types == ['bfloat16', 'bfloat16', 'float32']
        if equation.primitive.name in ('exp', 'logistic', 'rsqrt', 'reduce_max', 'log', 'sqrt'):
            assert 'bfloat16' not in types
    # Forward and two gradients of: qkv, scores, relative, sum, out, three of swiglu, logits.
    assert dots == 3 * 9


@pytest.mark.parametrize('form', ['fused', 'per_head'])
def test_bfloat16_is_near_float32_but_not_the_same(form):
    models = [build(dtype=d, attention_form=form)[0] for d in ('float32', 'bfloat16')]
    params = build(attention_form=form)[1]
    exact, rounded = (nnx.merge(model, params)(tokens_BT) for model in models)
    assert rounded.dtype == jnp.float32
    np.testing.assert_allclose(rounded, exact, atol=0.03 * np.abs(exact).max())
    assert np.abs(rounded - exact).max() > 1e-4
    caches = nnx.merge(models[1], params).init_caches(2)
    assert {x.dtype for x in jax.tree.leaves(caches)} == {jnp.dtype('bfloat16')}


# Layers in a loop, and computed again.

LAYERS = [
    {'positions': 'rotary', 'qk_norm': True, 'activation': 'swiglu', 'dropout_rate': 0.3},
    {'positions': 'relative', 'attention_form': 'per_head', 'norm_placement': 'deepnorm'},
]


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(model, params):
    def loss(params):
        logits_BTV, captured = nnx.merge(model, params)(
            tokens_BT, dropout_key=jax.random.key(7), capture=CAPTURES
        )
        return (logits_BTV**2).mean(), captured

    return jax.value_and_grad(loss, has_aux=True)(params)


def assert_close(a, b, rtol=1e-4):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(a).max()), a, b
    )


@pytest.mark.parametrize('values', LAYERS, ids=str)
def test_scanned_layers_equal_unrolled_ones(values):
    unrolled, params = build(num_layers=2, **values)
    scanned, stacked = build(num_layers=2, scan_layers=True, **values)
    as_dict = nnx.to_pure_dict(params)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stack_layers(as_dict)), as_dict)
    stacked = from_dict(stacked, stack_layers(as_dict))
    one, one_gradient = loss_and_gradient(unrolled, params)
    other, other_gradient = loss_and_gradient(scanned, stacked)
    assert_close(one, other)
    as_dict = nnx.to_pure_dict(one_gradient)
    assert_close(as_dict, unstack_layers(nnx.to_pure_dict(other_gradient)))
    first, second = (own['block_outputs'] for own in one[1].values())
    assert np.abs(first - second).max() > 0.1
    products = [
        loss_and_gradient.lower(*pair).as_text().count('dot_general')
        for pair in ((unrolled, params), (scanned, stacked))
    ]
    assert products[0] > 1.5 * products[1]


def test_scanned_layers_start_as_unrolled_ones():
    configs = [model_config(num_layers=2, scan_layers=scan, init='torch') for scan in (False, True)]
    unrolled, scanned = (
        nnx.to_pure_dict(nnx.state(MiniGPT(config, V, rngs=nnx.Rngs(params=0))))
        for config in configs
    )
    assert_close(stack_layers(unrolled), scanned, rtol=1e-6)
    first, second = (unrolled['blocks'][i]['attention']['qkv']['kernel'] for i in (0, 1))
    assert np.abs(first - second).min() > 0


@pytest.mark.parametrize('values', LAYERS, ids=str)
def test_remat_changes_no_numbers_and_computes_twice(values):
    models = [build(num_layers=2, remat=remat, **values)[0] for remat in (False, True)]
    params = build(num_layers=2, **values)[1]
    assert_close(*(loss_and_gradient(model, params) for model in models))
    once, twice = (multiply_adds(functools.partial(loss_and_gradient, m), params) for m in models)
    assert twice > 1.2 * once
    # And the compiler does not undo it.
    compiled = [loss_and_gradient.lower(model, params).compile().as_text() for model in models]
    assert compiled[1].count(' dot(') > compiled[0].count(' dot(')


# Intermediates.


@pytest.mark.parametrize('positions', ['learned', 'alibi'])
def test_intermediates_are_what_they_say_in_both_forms(positions):
    model, params = build(num_layers=2, num_heads=4, positions=positions)
    logits_BTV, captured = nnx.merge(model, params)(tokens_BT, capture=CAPTURES)
    np.testing.assert_allclose(logits_BTV, nnx.merge(model, params)(tokens_BT), atol=1e-5)
    assert list(captured) == [0, 1]
    for own in captured.values():
        assert {name: x.shape for name, x in own.items()} == {
            'attention_weights': (2, 4, 8, 8),
            'head_outputs': (2, 8, 4, 4),
            'block_outputs': (2, 8, 16),
        }
        np.testing.assert_allclose(own['attention_weights'].sum(-1), 1, rtol=1e-5)
        assert (np.triu(own['attention_weights'], 1) == 0).all()
    module = nnx.merge(model, params)
    last_BTD = module.final_norm(captured[1]['block_outputs'])
    np.testing.assert_allclose(module.logits(last_BTD), logits_BTV, atol=1e-4)
    x_BTD = captured[0]['block_outputs']
    heads_BTD = captured[1]['head_outputs'].reshape(2, 8, 16)
    block = module.blocks[1]
    x_BTD = x_BTD + block.attention.out(heads_BTD)
    x_BTD, _ = block.feed_forward_residual(x_BTD, lambda x: (block.feed_forward(x), None))
    np.testing.assert_allclose(x_BTD, captured[1]['block_outputs'], atol=1e-4)

    per_head, like = build(
        num_layers=2, num_heads=4, positions=positions, attention_form='per_head'
    )
    split = nnx.to_pure_dict(params)
    for block in split['blocks'].values():
        block['attention'] = split_heads(block['attention'])
    other = nnx.merge(per_head, from_dict(like, split))(tokens_BT, capture=CAPTURES)
    assert_close((logits_BTV, captured), other)
    assert fuse_heads(split['blocks'][0]['attention']).keys() >= {'qkv', 'out'}


def test_only_what_is_asked_for_is_returned():
    module = nnx.merge(*build())
    _, captured = module(tokens_BT, capture=('block_outputs',))
    assert {name for own in captured.values() for name in own} == {'block_outputs'}
    assert len(module.hidden(tokens_BT)) == 2
    with pytest.raises(ValueError, match='capture: heads: choose from attention_weights, head_out'):
        module(tokens_BT, capture=('heads',))


class Nothing:
    """A tap without the code of one."""

    names = ()

    def __init__(self, names=()):
        self.values = {}

    def wants(self, name):
        return False

    def __call__(self, name, value):
        return value


@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize('form', ['fused', 'per_head'])
def test_intermediates_that_are_not_asked_for_leave_no_mark(form, scan_layers, monkeypatch):
    config = resolve(
        tiny_config(**{'model.attention_form': form, 'model.scan_layers': scan_layers})
    )
    state = jax.eval_shape(steps.make_init(config, V), 0)
    batches = {'tokens_BT1': jax.ShapeDtypeStruct((2, 8, 9), np.int32)}

    def lowered():
        call = steps.make_train_call(config, steps.build_model(config, V))
        return jax.jit(call).lower(state, batches).as_text()

    with_code = lowered()
    with monkeypatch.context() as without:
        for module in ('transformer', 'attention'):
            without.setattr(f'minigpt_jax.model.{module}.Tap', Nothing)
        assert lowered() == with_code
    assert NO_TAP.values == {}

    # Asked for, they are in the program.
    def forward(params, capture):
        return nnx.merge(steps.build_model(config, V), params)(tokens_BT, capture=capture)

    names = [(), ('head_outputs',)]
    programs = [jax.make_jaxpr(functools.partial(forward, capture=c))(state.params) for c in names]
    assert [len(p.out_avals) for p in programs] == [1, 2]
