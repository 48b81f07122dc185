"""The mesh changes no numbers: whatever is split over it, a run is that of one device."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from minigpt_jax.report.writers import read_lines
from minigpt_jax.training import loop, sharding, steps, sweep
from minigpt_jax.training.config import ConfigError, resolve
from minigpt_jax.training.optim import parameter_name
from tests.conftest import tiny_config

ONE = {'data': 1}
MESHES = [
    {'data': 8},
    {'fsdp': 8},
    {'tensor': 8},
    {'data': 2, 'fsdp': 2, 'tensor': 2},
]
V, K, B, T = 24, 5, 8, 8
VALUES = {'model.num_heads': 8, 'train.steps_per_call': 1, 'optim.learning_rate': 1e-2}
FAMILIES = {
    'decoder': (V, {}),
    'encoder_decoder': ((V, 16), {'data.corpus': 'dates', 'model.encoder_layers': 1}),
    'encoder': (V, {'model.tie_embeddings': False}),
    'image': ((4, 10), {'data.corpus': 'digits', 'model.context_length': 16}),
}
LOSSES = {'decoder': steps.token_losses, 'encoder_decoder': steps.pair_losses}


@functools.cache
def setting(family, **further):
    size, values = FAMILIES[family]
    further = {name.replace('__', '.'): value for name, value in further.items()}
    config = resolve(tiny_config(**{'model.family': family} | VALUES | values | further))
    return config, size, steps.make_init(config, size)


def mesh_of(sizes, num_seeds=1):
    return sharding.make_mesh(ConfigDict(sizes), num_seeds=num_seeds)


@functools.cache
def batches(family, seed=0):
    """What a call of K steps trains on; of pairs with ragged lengths."""
    rng = np.random.default_rng(seed)

    def integers(below, *shape):
        return rng.integers(0, below, shape).astype(np.int32)

    if family == 'decoder':
        return {'tokens_BT1': integers(V, K, B, T + 1)}
    return {
        'source_BS': integers(V, K, B, T),
        'source_lengths_B': 1 + integers(T, K, B),
        'target_BT1': integers(16, K, B, T + 1),
        'target_lengths_B': 1 + integers(T, K, B),
    }


@functools.cache
def outcome(family, mesh):
    """(first loss and gradients, parameters and losses after K steps, the compiled K steps)."""
    config, size, init = setting(family)
    mesh, batch = mesh_of(dict(mesh)), batches(family)
    model, losses = steps.build_model(config, size), LOSSES[family]
    own = sharding.state_sharding(mesh, jax.eval_shape(init, 0))
    state = jax.jit(init, out_shardings=own)(0)
    first = jax.jit(
        lambda params, batch: steps.loss_and_gradient(
            functools.partial(losses, model=model), params, batch, None
        ),
        in_shardings=(own.params, sharding.batch_sharding(mesh, 0)),
        out_shardings=(sharding.replicated(mesh), own.params),
    )(state.params, jax.tree.map(lambda x: x[0], batch))
    call = jax.jit(
        steps.make_train_call(config, model, losses=losses, mesh=mesh),
        in_shardings=(own, sharding.batch_sharding(mesh, 1)),
        out_shardings=(own, sharding.replicated(mesh)),
    )
    compiled = call.lower(state, batch).compile()
    after, metrics = compiled(state, jax.device_put(batch, sharding.batch_sharding(mesh, 1)))
    return first, (after.params, metrics['train_loss']), compiled.as_text()


@pytest.mark.parametrize('family', ['decoder', 'encoder_decoder'])
@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_a_mesh_trains_as_one_device_does(family, mesh):
    first, last, program = outcome(family, tuple(mesh.items()))
    own_first, own_last, own_program = outcome(family, tuple(ONE.items()))
    (loss, grads), (own_loss, own_grads) = first, own_first
    np.testing.assert_allclose(loss, own_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, own_grads)
    np.testing.assert_allclose(last[1], own_last[1], rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), last[0], own_last[0])
    moved = jax.tree.map(lambda a: float(jnp.abs(a).max()), grads)
    assert min(jax.tree.leaves(moved)) > 0  # every parameter is in it
    # They are different programs, and what is split is held in parts.
    assert 'all-reduce' in program
    assert 'all-reduce' not in own_program
    kernel = last[0]['blocks'][0] if family == 'decoder' else last[0]['decoder']['blocks'][0]
    hidden = kernel['feed_forward']['hidden']['kernel'][...]
    split = mesh.get('fsdp', 1) * mesh.get('tensor', 1)
    assert hidden.addressable_shards[0].data.size * split == hidden.size


def test_seeds_over_devices_equal_seeds_on_one_and_do_not_communicate():
    config, size, init = setting('decoder')
    model, seeds = steps.build_model(config, size), range(8)
    batch = jax.tree.map(lambda *x: np.stack(x), *(batches('decoder', seed) for seed in seeds))
    results, programs = [], []
    for sizes in ({'seed': 1}, {'seed': 4}, {'seed': 8}, {'seed': 4, 'data': 2}):
        mesh = mesh_of(sizes, num_seeds=len(seeds))
        own = sharding.state_sharding(mesh, jax.eval_shape(init, 0), of_seeds=True)
        rows = sharding.batch_sharding(mesh, 2, of_seeds=True)
        call = jax.jit(
            steps.make_train_call(config, model, 'map', mesh=mesh),
            in_shardings=(own, rows),
            out_shardings=(own, sharding.seed_sharding(mesh, of_seeds=True)),
        )
        state = jax.tree.map(lambda *x: jnp.stack(x), *map(init, seeds))
        compiled = call.lower(state, batch).compile()
        results.append(compiled(jax.device_put(state, own), jax.device_put(batch, rows)))
        programs.append(compiled.as_text())
    one, four, eight, both = jax.device_get(results)
    for few in (four, eight):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, few)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), one, both)
    for collective in ('all-reduce', 'all-gather', 'collective-permute', 'all-to-all'):
        assert collective not in programs[1] + programs[2]
    assert 'all-reduce' in programs[3]  # of the two devices that share a batch
    held = results[2][0].params['blocks'][0]['feed_forward']['hidden']['kernel'][...]
    assert held.addressable_shards[0].data.shape == (1, *held.shape[1:])


def test_devices_that_do_not_share_the_seeds_evenly_stay_out():
    used = {E: mesh_of({'seed': 8}, num_seeds=E).shape['seed'] for E in (1, 3, 6, 8, 12)}
    assert used == {1: 1, 3: 3, 6: 6, 8: 8, 12: 6}


# What lies where.


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('form', ['fused', 'per_head'])
@pytest.mark.parametrize('scan_layers', [False, True])
def test_each_matrix_is_split_and_optimizer_state_lies_as_its_parameter(family, form, scan_layers):
    _, _, init = setting(
        family, model__attention_form=form, model__scan_layers=scan_layers, model__use_bias=True
    )
    state = jax.eval_shape(init, 0)
    mesh = mesh_of({'fsdp': 2, 'tensor': 2})
    own = sharding.state_sharding(mesh, state)
    specs = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state.params):
        name = parameter_name(path)
        specs[name], complaints = sharding.layout(name, x.shape, mesh)
        assert not complaints
        is_matrix = x.ndim - scan_layers * ('blocks' in name) > 1 and 'bias' not in name
        if is_matrix:
            assert 'fsdp' in specs[name], name
        whole_heads = form == 'per_head' and '.heads.' in name
        outside = re.search(r'positions\.table|^embed\.kernel|classes', name)
        if is_matrix and not whole_heads and not outside:
            assert 'tensor' in specs[name], name
    moments = {
        parameter_name(path).split('.mu.')[1]: x.spec
        for path, x in jax.tree_util.tree_leaves_with_path(own.opt_state)
        if '.mu.' in parameter_name(path)
    }
    assert moments == specs


def test_what_a_device_holds_is_the_arithmetic_of_the_split():
    config, _, init = setting('decoder')
    state = jax.eval_shape(init, 0)
    D, F = config.model.d_model, config.model.d_ff
    matrices = V * D + 4 * D * D + 2 * D * F
    for sizes, cut in (({'fsdp': 4}, (4, 4)), ({'tensor': 8}, (8, 1)), ({'data': 8}, (1, 1))):
        mesh = mesh_of(sizes)
        held = sharding.bytes_held(state.params, sharding.state_sharding(mesh, state).params)
        assert held == 4 * (matrices // cut[0] + T * D // cut[1] + 3 * D)
        assert f'each holds {held / 2**20:,.1f} of' in sharding.describe_mesh(mesh, state)


def test_a_dimension_that_does_not_divide_is_whole_and_said_so():
    mesh = mesh_of({'tensor': 3, 'fsdp': 2})
    spec, complaints = sharding.layout('blocks.0.feed_forward.hidden.kernel', (16, 64), mesh)
    assert spec == jax.sharding.PartitionSpec('fsdp', None)
    assert complaints == ['64 of mesh.tensor=3']
    name = 'blocks.0.feed_forward.hidden.kernel'
    held, text = sharding.describe_split(name, (16, 64), mesh)
    assert (held, text) == (512, 'fsdp × – (64 of mesh.tensor=3: not even)')


@pytest.mark.parametrize(
    ('mesh', 'line'),
    [
        ({'data': -1, 'fsdp': -1}, 'mesh.fsdp=-1: mesh.data takes the rest already'),
        ({'data': 3, 'tensor': 3}, 'mesh.data=3 · mesh.tensor=3: there are 8 devices'),
        ({'tensor': 16}, 'mesh.tensor=16: there are 8 devices'),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(mesh, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        mesh_of(mesh)


def test_the_rest_of_the_devices_goes_to_the_axis_that_asks_for_it():
    assert sharding.mesh_sizes(ConfigDict({'data': -1, 'tensor': 2}), 8)['data'] == 4
    mesh = mesh_of({'data': 2, 'fsdp': -1})
    assert math.prod(mesh.shape.values()) == 8
    assert mesh.shape['fsdp'] == 4


# Checkpoints.


@pytest.mark.slow
@pytest.mark.parametrize(
    ('before', 'after'),
    [
        ({'fsdp': 8}, {'data': 1}),
        ({'fsdp': 2, 'tensor': 2}, {'tensor': 4}),
        ({'data': 2}, {'data': 2, 'fsdp': 2, 'tensor': 2}),
        ({'data': 8}, {'data': 8}),
        ({'tensor': 4, 'fsdp': 2}, {'tensor': 4, 'fsdp': 2}),
    ],
    ids=str,
)
def test_a_run_continues_on_any_mesh(before, after, text_file, tmp_path, monkeypatch):
    values = {'model.num_heads': 8, 'mesh.data': 1}
    first = tiny_config(text_file, **values | {f'mesh.{x}': n for x, n in before.items()})
    second = tiny_config(text_file, **values | {f'mesh.{x}': n for x, n in after.items()})
    assert sweep.run(first, tmp_path / 'whole') == 0
    call, calls = loop.Program.train_call, []

    def fails_in_the_fifth_call(self, state, batches):
        calls.append(0)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return call(self, state, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Program, 'train_call', fails_in_the_fifth_call)
        with pytest.raises(KeyboardInterrupt):
            sweep.run(first, tmp_path / 'moved')
    assert sweep.run(second, tmp_path / 'moved') == 0
    whole, moved = (read_lines(tmp_path / name / 'metrics.jsonl') for name in ('whole', 'moved'))
    if before == after:
        assert whole == moved
    for line, other in zip(whole, moved, strict=True):
        assert line.keys() == other.keys()
        for name in line:
            np.testing.assert_allclose(line[name], other[name], rtol=1e-3, err_msg=name)
