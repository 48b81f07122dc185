"""Schedules against their formulas, optimizers against three steps by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from minigpt_jax.training import optim
from minigpt_jax.training.config import ImpossibleError, resolve
from tests.conftest import tiny_config

TOTAL = 24


def optim_config(**values):
    values = {'train.steps': TOTAL} | {f'optim.{k}': v for k, v in values.items()}
    return resolve(tiny_config(**values)).optim


def rates(steps=range(TOTAL + 1), **values):
    schedule = optim.make_schedule(optim_config(**values), TOTAL)
    return [float(schedule(jnp.int32(t))) for t in steps]


PEAK, FINAL, WARMUP = 1.0, 0.1, 4
AFTER = {
    'constant': lambda t: PEAK,
    'cosine': lambda t: FINAL + (PEAK - FINAL) * (1 + np.cos(np.pi * t / (TOTAL - WARMUP))) / 2,
    'linear': lambda t: PEAK + (FINAL - PEAK) * t / (TOTAL - WARMUP),
    'inverse_sqrt': lambda t: PEAK * (WARMUP / (WARMUP + t)) ** 0.5,
}


@pytest.mark.parametrize('schedule', optim.SCHEDULES)
def test_schedules_against_their_formulas(schedule):
    given = rates(
        schedule=schedule, learning_rate=PEAK, final_learning_rate=FINAL, warmup_steps=WARMUP
    )
    expected = [0, 0.25, 0.5, 0.75] + [AFTER[schedule](t) for t in range(TOTAL - WARMUP + 1)]
    np.testing.assert_allclose(given, expected, atol=1e-6)


@pytest.mark.parametrize('schedule', ['constant', 'cosine', 'linear'])
def test_without_warm_up_the_first_rate_is_the_peak(schedule):
    first, later = rates((0, 12), schedule=schedule, learning_rate=PEAK, warmup_steps=0)
    np.testing.assert_allclose(first, PEAK)
    assert (later == PEAK) == (schedule == 'constant')


def test_inverse_sqrt_is_the_papers_rate_with_the_peak_that_the_docstring_names():
    d_model, warmup = 512, 8
    given = rates(
        range(1, 25),
        schedule='inverse_sqrt',
        learning_rate=(d_model * warmup) ** -0.5,
        warmup_steps=warmup,
    )
    paper = [d_model**-0.5 * min(t**-0.5, t * warmup**-1.5) for t in range(1, 25)]
    np.testing.assert_allclose(given, paper, rtol=1e-5)


def test_a_schedule_that_falls_from_no_warm_up_is_refused():
    with pytest.raises(ImpossibleError, match=r'optim\.warmup_steps=0: inverse_sqrt falls from'):
        optim_config(schedule='inverse_sqrt', warmup_steps=0)
    for schedule in ('cosine', 'linear'):
        with pytest.raises(ImpossibleError, match=r'must be below train\.steps=24'):
            optim_config(schedule=schedule, warmup_steps=24)


# A parameter p with gradients 0.3, 0.6, 0.9, decayed by 0.1.

RATE, B1, B2, DECAY = 0.01, 0.9, 0.99, 0.1


def by_hand(name, p, g):
    m = v = 0.0
    for t in (1, 2, 3):
        gradient = g * t + (DECAY * p if name != 'adamw' else 0.0)
        if name == 'sgd':
            m = B1 * m + gradient
            p = p - RATE * m
            continue
        m = B1 * m + (1 - B1) * gradient
        v = B2 * v + (1 - B2) * gradient**2
        update = (m / (1 - B1**t)) / (np.sqrt(v / (1 - B2**t)) + 1e-8)
        p = p - RATE * (update + (DECAY * p if name == 'adamw' else 0.0))
    return p


ELEMENTWISE = ('adamw', 'adam', 'sgd')


@pytest.mark.parametrize('name', ELEMENTWISE)
def test_optimizers_by_hand(name):
    config = optim_config(
        name=name, learning_rate=RATE, schedule='constant', warmup_steps=0, b1=B1, b2=B2,
        weight_decay=DECAY, clip_norm=0.0, rules=(('.*bias', 'weight_decay', 0.0),),
    )  # fmt: skip
    optimizer = optim.make_optimizer(config, TOTAL)
    params = {'kernel': jnp.array([1.0, -2.0, 30.0]), 'bias': jnp.array([1.0])}
    start, state = params['kernel'], optimizer.init(params)
    for t in (1, 2, 3):
        grads = {'kernel': jnp.array([0.3, -0.1, 0.02]) * t, 'bias': jnp.array([0.0])}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    expected = by_hand(name, np.float64(start), np.array([0.3, -0.1, 0.02]))
    np.testing.assert_allclose(params['kernel'], expected, rtol=1e-6)
    np.testing.assert_array_equal(params['bias'], 1)  # its rule spares it, in each of them
    others = [by_hand(n, np.float64(start), np.array([0.3, -0.1, 0.02])) for n in ELEMENTWISE]
    assert sum(np.allclose(expected, other, rtol=1e-6) for other in others) == 1


@pytest.mark.parametrize(
    ('name', 'shape', 'matrices'),
    [
        ('blocks.0.attention.out.kernel', (8, 8), (1, 8, 8)),
        ('blocks.10.attention.qkv.kernel', (8, 3, 2, 4), (3, 8, 8)),
        ('decoder.blocks.1.cross_attention.query.kernel', (8, 2, 4), (1, 8, 8)),
        ('blocks.attention.qkv.kernel', (5, 8, 3, 2, 4), (15, 8, 8)),  # scan_layers
        ('encoder.blocks.feed_forward.hidden.kernel', (5, 8, 16), (5, 8, 16)),
        ('blocks.0.attention.heads.0.query.kernel', (8, 4), (1, 8, 4)),
        ('blocks.0.feed_forward.hidden.bias', (16,), None),
        ('embed.embedding', (11, 8), None),
        ('unembed.kernel', (8, 11), None),
    ],
)
def test_muon_takes_the_matrices_of_blocks(name, shape, matrices):
    axes = optim.matrix_axes(name, len(shape))
    if matrices is None:
        assert axes is None
        return
    rows, columns = shape[axes.reduction_axis], math.prod(shape[i] for i in axes.output_axis)
    assert (math.prod(shape) // rows // columns, rows, columns) == matrices


def update_of(name, params, grads, **values):
    config = optim_config(
        name=name, learning_rate=RATE, schedule='constant', warmup_steps=0, b1=B1, b2=B2,
        weight_decay=DECAY, clip_norm=0.0, **values,
    )  # fmt: skip
    optimizer = optim.make_optimizer(config, TOTAL)
    return optimizer.update(grads, optimizer.init(params), params)[0]


def random_params(seed=0):
    shapes = {'qkv': (8, 3, 2, 4), 'hidden': (8, 16)}
    rng = np.random.default_rng(seed)
    kernels = {name: {'kernel': rng.standard_normal(shape)} for name, shape in shapes.items()}
    return {'blocks': {0: kernels}, 'embed': {'embedding': rng.standard_normal((11, 8))}}


def test_muon_steps_are_orthogonal_and_all_else_is_adamw():
    params, grads = random_params(0), random_params(1)
    steps, adamw = (update_of(name, params, grads) for name in ('muon', 'adamw'))
    np.testing.assert_allclose(steps['embed']['embedding'], adamw['embed']['embedding'], rtol=1e-6)
    for name, gradient in grads['blocks'][0].items():
        own, start = steps['blocks'][0][name]['kernel'], params['blocks'][0][name]['kernel']
        direction = -own / RATE - DECAY * start
        columns = 16 if name == 'hidden' else 8
        directions, gradients = (
            np.moveaxis(np.reshape(x, (8, -1, columns)), 1, 0)
            for x in (direction, gradient['kernel'])
        )
        for one, g in zip(directions / (0.2 * columns**0.5), gradients, strict=True):
            values = np.linalg.svd(one, compute_uv=False)
            assert 0.65 < values.min() < values.max() < 1.25
            left, _, right = np.linalg.svd(g, full_matrices=False)
            assert np.sum(one * (left @ right)) > 0.8 * len(values)


def test_muon_in_scanned_layers_is_muon_in_each():
    params, grads = ([random_params(2 * i + j)['blocks'][0] for i in range(2)] for j in range(2))
    stack = functools.partial(jax.tree.map, lambda *layers: np.stack(layers))
    scanned = update_of('muon', {'blocks': stack(*params)}, {'blocks': stack(*grads)})
    apart = update_of(
        'muon', {'blocks': dict(enumerate(params))}, {'blocks': dict(enumerate(grads))}
    )
    for name in params[0]:
        for i in range(2):
            own, other = scanned['blocks'][name]['kernel'][i], apart['blocks'][i][name]['kernel']
            # Sums of five Newton-Schulz steps: what rounding leaves is a share of the largest.
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-5 * np.abs(other).max())
