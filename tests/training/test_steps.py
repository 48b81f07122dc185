"""The step: several steps, seeds or devices in one program change no numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from minigpt_jax.training import optim, sharding, steps
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config

V = 13


@functools.cache
def setting(**values):
    config = resolve(tiny_config(**{k.replace('__', '.'): v for k, v in values.items()}))
    return config, steps.build_model(config, V), steps.make_init(config, V)


@functools.cache
def train_call(mode='separate', **values):
    config, model, _ = setting(**values)
    return jax.jit(steps.make_train_call(config, model, mode))


def batches(num_steps, seed=0, batch_size=8, context_length=8):
    """What a call of that many steps trains on."""
    rng = np.random.default_rng(seed)
    tokens_KBT1 = rng.integers(0, V, (num_steps, batch_size, context_length + 1))
    return {'tokens_BT1': tokens_KBT1.astype(np.int32)}


def of_seeds(num_steps, seeds):
    return stacked(functools.partial(batches, num_steps), seeds)


def stacked(function, seeds):
    return jax.tree.map(lambda *x: jnp.stack(x), *map(function, seeds))


def part(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


DROPOUT = dict(model__dropout_rate=0.2)


def test_several_steps_in_a_call_equal_as_many_calls():
    init = setting(**DROPOUT)[2]
    call, six = train_call(**DROPOUT), batches(6)
    at_once, metrics = call(init(0), six)
    one_by_one, losses = init(0), []
    for k in range(6):
        one_by_one, m = call(one_by_one, part(six, slice(k, k + 1)))
        losses.append(m['train_loss'][0])
    assert_same_bits(at_once, one_by_one)
    # A loop of one step is unrolled, and its reported loss summed in another order.
    np.testing.assert_allclose(metrics['train_loss'], losses, rtol=1e-6)
    assert len(set(map(float, losses))) == 6
    assert int(at_once.step) == int(one_by_one.step) == 6
    programs = [call.lower(init(0), part(six, slice(k))).as_text() for k in (1, 6)]
    assert 'tensor<6x8x9xi32>' in programs[1]
    assert 'tensor<6x8x9xi32>' not in programs[0]


def test_mapped_seeds_have_the_bits_of_separate_runs():
    init = setting(**DROPOUT)[2]
    seeds = (0, 5, 7)
    of_all = of_seeds(4, seeds)
    mapped, metrics = train_call('map', **DROPOUT)(stacked(init, seeds), of_all)
    for e, seed in enumerate(seeds):
        state, own_metrics = train_call(**DROPOUT)(init(seed), part(of_all, e))
        assert_same_bits(part(mapped, e), state)
        assert_same_bits(part(metrics, e), own_metrics)
    assert (np.diff(metrics['train_loss'][:, 0]) != 0).all()
    programs = {
        mode: train_call(mode, **DROPOUT).lower(stacked(init, seeds), of_all).as_text()
        for mode in ('map', 'vmap')
    }
    assert programs['map'] != programs['vmap']


def test_batched_seeds_equal_separate_runs_but_for_rounding():
    init = setting(**DROPOUT)[2]
    seeds = (0, 5)
    of_all = of_seeds(2, seeds)
    _, metrics = train_call('vmap', **DROPOUT)(stacked(init, seeds), of_all)
    for e, seed in enumerate(seeds):
        _, own_metrics = train_call(**DROPOUT)(init(seed), part(of_all, e))
        np.testing.assert_allclose(metrics['train_loss'][e], own_metrics['train_loss'], rtol=1e-5)


def test_eight_devices_equal_one():
    config, model, init = setting(**DROPOUT)
    results, devices_used = [], []
    for count in (1, 8):
        mesh = sharding.make_mesh(resolve(tiny_config(**{'mesh.data': count})).mesh)
        everywhere, rows = sharding.replicated(mesh), sharding.batch_sharding(mesh, 1)
        call = jax.jit(
            steps.make_train_call(config, model),
            in_shardings=(everywhere, rows),
            out_shardings=everywhere,
        )
        tokens = jax.device_put(batches(5), rows)
        devices_used.append(len({x.device for x in tokens['tokens_BT1'].addressable_shards}))
        compiled = call.lower(init(0), tokens).compile()
        results.append(compiled(jax.device_put(init(0), everywhere), tokens))
        reduces = 'all-reduce' in compiled.as_text()
        assert reduces == (count == 8)  # the two are different programs
    assert devices_used == [1, 8]
    (state, metrics), (other_state, other_metrics) = results
    np.testing.assert_allclose(metrics['train_loss'], other_metrics['train_loss'], rtol=1e-5)
    np.testing.assert_allclose(metrics['grad_norm'], other_metrics['grad_norm'], rtol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), state.params, other_state.params
    )


def test_a_batch_that_the_devices_cannot_share_evenly_is_refused():
    mesh = sharding.make_mesh(resolve(tiny_config(**{'mesh.data': 8})).mesh)
    sharding.check_batch_size('data.batch_size', 16, mesh)
    with pytest.raises(ValueError, match=r'data\.batch_size=12: 8 devices need a multiple of 8'):
        sharding.check_batch_size('data.batch_size', 12, mesh)
    with pytest.raises(ValueError, match='there are 8 devices'):
        sharding.make_mesh(resolve(tiny_config(**{'mesh.data': 9})).mesh)


def test_a_step_that_is_not_finite_leaves_the_state_as_it_was():
    init = setting()[2]
    good, _ = train_call()(init(0), batches(2))
    broken = good._replace(
        params=jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), good.params)
    )
    after, metrics = train_call()(broken, batches(2))
    assert np.isnan(metrics['train_loss']).all()
    assert not after.finite
    assert_same_bits(after._replace(finite=broken.finite), broken)
    # Once the flag is down, a sound state does not go on either.
    stopped, _ = train_call()(good._replace(finite=jnp.bool_(False)), batches(2))
    assert_same_bits(stopped.params, good.params)


def test_one_broken_seed_does_not_stop_the_others():
    init = setting()[2]
    states = [init(0), init(1)]
    states[0] = states[0]._replace(params=jax.tree.map(lambda x: x * jnp.nan, states[0].params))
    tokens = of_seeds(2, (0, 1))
    after, _ = train_call('map')(jax.tree.map(lambda *x: jnp.stack(x), *states), tokens)
    np.testing.assert_array_equal(after.finite, [False, True])
    np.testing.assert_array_equal(after.step, [0, 2])


def test_dropout_follows_seed_and_step():
    config, model, init = setting(**DROPOUT)
    state = init(0)
    loss = jax.jit(
        lambda state: steps.token_losses(
            state.params,
            part(batches(1), 0),
            steps.dropout_key(config, state),
            model=model,
        )[0]
    )
    variants = [state, state._replace(step=jnp.int32(1)), state._replace(seed=jnp.uint32(1))]
    assert len({float(loss(s)) for s in variants}) == 3
    assert loss(state) == loss(state)
    assert steps.dropout_key(setting()[0], state) is None


def test_evaluation_counts_every_unmasked_token_once():
    _, model, init = setting()
    params = init(0).params
    tokens_NBT1 = batches(3)['tokens_BT1']
    mask_NBT = np.random.default_rng(1).random((3, 8, 8)) < 0.7
    batches_N = {'tokens_BT1': tokens_NBT1, 'mask_BT': mask_NBT}
    total, count = jax.jit(steps.make_evaluate(model))(params, batches_N)
    flat = tokens_NBT1.reshape(24, 9)
    log_p = jax.nn.log_softmax(nnx.merge(model, params)(flat[:, :-1]))
    nll = -np.take_along_axis(np.asarray(log_p), flat[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(total, nll[mask_NBT.reshape(24, 8)].sum(), rtol=1e-5)
    assert count == mask_NBT.sum()


# The optimizer.


def moved_by(rules, **values):
    """How far an update with gradients of zero and parameters of one moves each parameter."""
    config, _, init = setting(
        model__use_bias=True,
        optim__weight_decay=0.5,
        optim__learning_rate=0.1,
        optim__warmup_steps=0,
        optim__rules=rules,
        **values,
    )
    params = jax.tree.map(jnp.ones_like, init(0).params)
    optimizer = optim.make_optimizer(config.optim, 12)
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    return {
        optim.parameter_name(path): round(float(jnp.abs(update).max()), 6)
        for path, update in jax.tree_util.tree_leaves_with_path(updates)
    }


def test_weight_decay_spares_biases_and_scales_by_the_rule_of_the_recipes():
    moved = moved_by(tiny_config().optim.rules)
    spared = {name for name, size in moved.items() if size == 0}
    assert spared == {n for n in moved if n.endswith(('bias', 'scale'))}
    assert 0 < len(spared) < len(moved)
    assert {size for name, size in moved.items() if name not in spared} == {0.05}


def test_rules_match_whole_paths_and_the_last_one_counts():
    """`attention` also begins `attention_residual`, and `out` ends several layers."""
    moved = moved_by(
        (
            (r'blocks\.0\.attention\..*', 'weight_decay', 2.0),
            (r'.*\.out\.kernel', 'weight_decay', 0.5),
            (r'blocks\.0\.feed_forward\..*', 'learning_rate', 0.1),
        )
    )
    assert moved['blocks.0.attention.qkv.kernel'] == 0.1
    assert moved['blocks.0.attention.qkv.bias'] == 0.1
    assert moved['blocks.0.attention.out.kernel'] == 0.025  # the later of two rules
    assert moved['blocks.0.attention_residual.norm.scale'] == 0.05  # no rule
    assert moved['blocks.0.feed_forward.hidden.kernel'] == 0.005
    assert moved['blocks.0.feed_forward.out.kernel'] == 0.0025  # two settings, both count
    assert moved['blocks.0.feed_forward_residual.norm.scale'] == 0.05


def test_a_rule_that_matches_nothing_is_named():
    names = ['blocks.0.attention.out.kernel', 'embed.embedding']
    assert optim.check_rules_match((('.*kernel', 'weight_decay', 0.0),), names) is None
    complaint = optim.check_rules_match((('attention', 'weight_decay', 0.0),), names)
    assert "'attention' matches no parameter as a whole" in complaint


# A batch in parts.


@pytest.mark.parametrize('parts', [2, 4, 8])
def test_accumulation_over_unequal_padding_equals_the_full_batch(parts):
    _, model, init = setting()
    params = init(0).params
    lengths_B = np.array([8, 1, 2, 7, 1, 1, 8, 3])
    batch = part(batches(1), 0) | {'mask_BT': np.arange(8) < lengths_B[:, None]}
    losses = functools.partial(steps.token_losses, model=model)
    run = jax.jit(
        lambda params, parts: steps.loss_and_gradient(losses, params, batch, None, parts),
        static_argnums=1,
    )
    (full, full_grads), (split, split_grads) = run(params, 1), run(params, parts)
    np.testing.assert_allclose(split, full, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), split_grads, full_grads)
    # The mean of the parts' means, the usual mistake, is far from it.
    means = [
        run_mean(losses, params, jax.tree.map(lambda x, p=p: x[p::parts], batch))
        for p in range(parts)
    ]
    assert abs(np.mean(means) - full) > 1e-4
    assert run.lower(params, parts).as_text() != run.lower(params, 1).as_text()


def test_a_batch_of_padding_alone_has_no_loss_and_no_gradient():
    _, model, init = setting()
    batch = part(batches(1), 0) | {'mask_BT': np.zeros((8, 8), bool)}
    losses = functools.partial(steps.token_losses, model=model)
    loss, grads = steps.loss_and_gradient(losses, init(0).params, batch, None)
    assert loss == 0
    assert all((x == 0).all() for x in jax.tree.leaves(grads))


def run_mean(losses, params, batch):
    total, count = losses(params, batch, None)
    return total / count


def test_gradient_norms_of_layers_add_up_to_the_global_one():
    init = setting()[2]
    _, metrics = train_call(train__log_layer_norms=True)(init(0), batches(2))
    layers = {name: x for name, x in metrics.items() if name.startswith('grad_norm/')}
    assert set(layers) == {
        f'grad_norm/{x}' for x in ('blocks.0', 'embed', 'final_norm', 'positions')
    }
    total = sum(x**2 for x in layers.values()) ** 0.5
    np.testing.assert_allclose(total, metrics['grad_norm'], rtol=1e-5)


PARTS = dict(
    model__num_layers=2,
    model__positions='rotary',
    model__norm='rms',
    model__qk_norm=True,
    model__activation='swiglu',
    model__dropout_rate=0.2,
    train__log_layer_norms=True,
)
FORM = dict(model__scan_layers=True, model__remat=True)


@pytest.mark.slow
def test_layers_scanned_and_computed_again_train_and_log_the_same():
    """From the same seed, dropout and the norms of single layers included."""
    tokens_KBT1 = batches(4)
    state, metrics = train_call(**PARTS)(setting(**PARTS)[2](0), tokens_KBT1)
    other, other_metrics = train_call(**PARTS, **FORM)(setting(**PARTS, **FORM)[2](0), tokens_KBT1)
    assert metrics.keys() == other_metrics.keys() >= {'grad_norm/blocks.0', 'grad_norm/blocks.1'}
    for name, values in metrics.items():
        np.testing.assert_allclose(other_metrics[name], values, rtol=2e-4, err_msg=name)
    sizes = [len(jax.tree.leaves(s.params)) for s in (state, other)]
    assert sizes[0] > 1.5 * sizes[1]


@pytest.mark.parametrize(
    ('mode', 'dtype'),
    [('vmap', 'bfloat16'), ('map', 'float32')],
)
@pytest.mark.slow
def test_all_parts_at_once_on_eight_devices_and_over_seeds(mode, dtype):
    values = PARTS | FORM | dict(model__dtype=dtype)
    config, model, init = setting(**values)
    mesh = sharding.make_mesh(resolve(tiny_config(**{'mesh.data': 8})).mesh)
    everywhere, rows = sharding.replicated(mesh), sharding.batch_sharding(mesh, 2)
    call = jax.jit(
        steps.make_train_call(config, model, mode),
        in_shardings=(everywhere, rows),
        out_shardings=everywhere,
    )
    seeds = (0, 5)
    of_all = of_seeds(3, seeds)
    states = jax.device_put(stacked(init, seeds), everywhere)
    after, metrics = call(states, jax.device_put(of_all, rows))
    np.testing.assert_array_equal(after.step, [3, 3])
    assert 'all-reduce' in call.lower(states, of_all).compile().as_text()
    for e, seed in enumerate(seeds):
        _, own = train_call(**values)(init(seed), part(of_all, e))
        rtol = 1e-4 if dtype == 'float32' else 1e-2
        for name in ('train_loss', 'grad_norm'):
            np.testing.assert_allclose(metrics[name][e], own[name], rtol=rtol)
    differ = np.abs(metrics['grad_norm'][0] / metrics['grad_norm'][1] - 1)
    assert differ.max() > 3 * rtol  # the seeds are told apart


def test_gradients_are_clipped_to_the_norm():
    init = setting()[2]
    params = init(0).params
    grads = jax.tree.map(lambda x: 10 * jnp.ones_like(x), params)

    def first_moment(clip_norm):
        config = resolve(tiny_config(**{'optim.clip_norm': clip_norm})).optim
        optimizer = optim.make_optimizer(config, 12)
        _, state = optimizer.update(grads, optimizer.init(params), params)
        return optax.tree.norm(optax.tree.get(state, 'mu'))

    norm = optax.tree.norm(grads)
    np.testing.assert_allclose(first_moment(0.5), 0.1 * 0.5, rtol=1e-5)
    np.testing.assert_allclose(first_moment(0.0), 0.1 * norm, rtol=1e-5)
