"""Flash attention of cuDNN and of Pallas, and which implementation 'auto' takes.

Neither kernel runs here. That of Pallas is interpreted; in the place of cuDNN's the wrapper around
it calls XLA; and both are lowered for their platform, forward and backward.
"""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax.experimental.pallas import tpu as pltpu

from minigpt_jax.model import attention, flash
from minigpt_jax.model.attention import dot_product_attention
from minigpt_jax.model.kernels import may_attend
from tests.model.test_kernels import (
    CONDITIONS,
    IDS,
    LENGTHS,
    B,
    S,
    T,
    attention_inputs,
    random_bias,
    with_gradients,
)

HOPPER, TPU = flash.Device('cuda', (9, 0)), flash.Device('tpu')
WITHOUT_CACHE = {name: case for name, case in CONDITIONS.items() if 'cache' not in name}


@pytest.fixture
def on(monkeypatch):
    """on(device): as if programs were compiled for it."""
    return lambda device: monkeypatch.setattr(flash, 'device', lambda: device)


def naive_with_gradients(qkv, dy, bias, causal=False, q_offset=0, **conditions):
    """All of it at once, in float64: (y, dq, dk, dv), and the bias's gradient if there is one."""
    q, k, v, dy = (np.float64(np.asarray(x).astype(np.float32)) for x in (*qkv, dy))
    scale = q.shape[-1] ** -0.5
    scores = np.einsum('bthk,bshk->bhts', q, k) * scale
    if bias is not None:
        scores += bias
    allowed = may_attend(
        scores.shape, causal, q_offset,
        *(conditions.get(name) for name in ('kv_lengths_B', 'segment_ids', 'mask')),
    )  # fmt: skip
    scores = scores if allowed is None else np.where(allowed, scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    y = np.einsum('bhts,bshk->bthk', weights, v)
    dweights = np.einsum('bthk,bshk->bhts', dy, v)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    gradients = (
        np.einsum('bhts,bshk->bthk', dscores, k) * scale,
        np.einsum('bhts,bthk->bshk', dscores, q) * scale,
        np.einsum('bhts,bthk->bshk', weights, dy),
    )
    if bias is None:
        return y, *gradients
    shape = (1,) * (4 - bias.ndim) + bias.shape
    summed = tuple(axis for axis in range(4) if shape[axis] == 1)
    return y, *gradients, dscores.sum(summed, keepdims=True).reshape(bias.shape)


def check(implementation, conditions, dtype='float32'):
    qkv, dy, arguments = attention_inputs(conditions, dtype)
    bias = arguments.pop('bias', None)
    function = functools.partial(dot_product_attention, implementation=implementation)
    ours = with_gradients(function, qkv, dy, bias, **arguments)
    naive = naive_with_gradients(qkv, dy, bias, **arguments)
    tolerance = dict(atol=5e-6) if dtype == 'float32' else dict(atol=0.06, rtol=0.03)
    assert ours[0].dtype == np.float32
    for a, b in zip(ours, naive, strict=True):
        np.testing.assert_allclose(np.float32(a), b, **tolerance)


@pytest.mark.parametrize('name', CONDITIONS)
@pytest.mark.parametrize('implementation', ['plain', 'blockwise'])
def test_equals_naive_numpy_with_gradients(implementation, name):
    check(implementation, CONDITIONS[name])


@pytest.mark.parametrize('name', WITHOUT_CACHE)
def test_what_is_handed_to_cudnn_means_the_same(name, on, monkeypatch):
    """XLA computes it, and in float32: the kernel itself is not run here."""
    on(HOPPER)
    by_xla = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, 'dot_product_attention',
        lambda *args, implementation, **kwargs: by_xla(*args, implementation='xla', **kwargs),
    )  # fmt: skip
    monkeypatch.setitem(attention.DEVICE_OBSTACLES, 'cudnn', lambda demand: None)
    check('cudnn', WITHOUT_CACHE[name])


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', WITHOUT_CACHE)
def test_the_interpreted_kernel_of_pallas_equals_naive_numpy_with_gradients(name, dtype, on):
    on(TPU)
    with pltpu.force_tpu_interpret_mode():
        check('pallas', WITHOUT_CACHE[name], dtype)


def test_the_interpreted_kernel_of_pallas_under_all_conditions_over_several_blocks(on):
    on(TPU)
    rng = np.random.default_rng(0)
    q, k, v, dy = (jnp.asarray(rng.standard_normal((1, 150, 1, 8)), 'float32') for _ in range(4))
    arguments = dict(
        causal=True,
        kv_lengths_B=np.array([140]),
        segment_ids=np.arange(150)[None] // 70,
        mask=rng.random((150, 150)) < 0.05,  # of the 10 queries behind the lengths, some see none
    )
    bias = rng.standard_normal((1, 1, 150, 150)).astype(np.float32)
    function = functools.partial(dot_product_attention, implementation='pallas')
    with pltpu.force_tpu_interpret_mode():
        ours = with_gradients(function, (q, k, v), dy, bias, **arguments)
    naive = naive_with_gradients((q, k, v), dy, bias, **arguments)
    assert (naive[0] == 0).all(-1).any()
    for a, b in zip(ours, naive, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


# Lowered for their platforms.

STRUCTURED = {
    'causal': dict(causal=True),
    'causal, lengths': dict(causal=True, kv_lengths_B=LENGTHS),
    'causal segments': dict(causal=True, segment_ids=IDS),
    'bias of all rows': dict(bias=random_bias(3, T - 1, S - 1)),
}


def lowered(implementation, platform, conditions, seeds=None, dtype='bfloat16'):
    """The program of a forward and backward pass, of even lengths, over seeds with an axis E."""
    arguments = dict(conditions)
    bias, ids = arguments.pop('bias', None), arguments.get('segment_ids')
    if ids is not None:
        arguments['segment_ids'] = ids[:, :-1]

    def step(qkv, dy, bias=None):
        def attend(qkv, bias):
            return dot_product_attention(
                *qkv, bias=bias, implementation=implementation, **arguments
            )

        y, backward = jax.vjp(attend, qkv, bias)
        return y, backward(dy)

    shape = (B, T - 1, 3, 16) if seeds is None else (seeds, B, T - 1, 3, 16)
    step = step if seeds is None else jax.vmap(step, in_axes=(0, 0, None))
    x = jax.ShapeDtypeStruct(shape, dtype)
    calls = ('fmhaSoftmax', 'fmhaScaleBiasSoftmax')
    allowed = [
        export.DisabledSafetyCheck.custom_call(f'__cudnn${name}{end}')
        for name in calls
        for end in ('', 'Backward')
    ]
    exported = export.export(jax.jit(step), platforms=[platform], disabled_checks=allowed)
    return exported((x, x, x), jax.ShapeDtypeStruct(shape, np.float32), bias).mlir_module()


@pytest.fixture
def cudnn(on, monkeypatch):
    """As if an H100 were here; jax asks for the version of a library that is not."""
    on(HOPPER)
    monkeypatch.setattr(jax_cudnn, 'check_cudnn_version', lambda: 91300)


@pytest.mark.parametrize('seeds', [None, 2])
@pytest.mark.parametrize('name', STRUCTURED)
def test_cudnn_is_lowered_for_nvidia_forward_and_backward(name, seeds, cudnn):
    module = lowered('cudnn', 'cuda', STRUCTURED[name], seeds)
    calls = set(re.findall(r'__cudnn\$(\w+)', module))
    kind = 'fmhaSoftmax' if name in ('causal', 'causal, lengths') else 'fmhaScaleBiasSoftmax'
    assert calls == {kind, f'{kind}Backward'}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', STRUCTURED)
def test_pallas_is_lowered_for_tpus_forward_and_backward(name, dtype, on):
    on(TPU)
    module = lowered('pallas', 'tpu', STRUCTURED[name], dtype=dtype)
    assert module.count('@tpu_custom_call') == 3  # forward, of queries, of keys and values


# Which one.


def demand(length, dtype='float32', **others):
    return flash.Demand(dtype=dtype, d_head=64, lengths=(length, length), **others)


WEIGHTS, OFFSET, SCORES = ({name: True} for name in ('needs_weights', 'has_offset', 'has_scores'))


@pytest.mark.parametrize(
    ('device', 'asked', 'taken'),
    [
        ('cpu', demand(127), 'plain'),
        ('cpu', demand(128), 'blockwise'),
        ('cpu', demand(1024, **WEIGHTS), 'plain'),
        ('cpu', demand(1024, **OFFSET), 'blockwise'),
        ('cpu', demand(1024)._replace(lengths=(1, 4096)), 'plain'),
        (HOPPER, demand(512, 'bfloat16'), 'cudnn'),
        (HOPPER, demand(512, 'float16'), 'cudnn'),
        (HOPPER, demand(512, 'float32'), 'plain'),
        (HOPPER, demand(2048, 'float32'), 'blockwise'),
        (HOPPER, demand(2048, 'bfloat16', **OFFSET), 'blockwise'),
        (HOPPER, demand(2048, 'bfloat16', **WEIGHTS), 'plain'),
        (HOPPER, demand(512, 'bfloat16', **SCORES), 'cudnn'),
        (HOPPER, demand(513, 'bfloat16', **SCORES), 'plain'),
        (HOPPER, demand(1024, 'bfloat16', **SCORES), 'blockwise'),
        (HOPPER, demand(64, 'bfloat16'), 'plain'),
        (flash.Device('cuda', (7, 5)), demand(512, 'bfloat16'), 'plain'),
        (flash.Device('rocm'), demand(512, 'bfloat16'), 'plain'),
        (flash.Device('rocm'), demand(2048, 'bfloat16'), 'blockwise'),
        (TPU, demand(512), 'pallas'),
        (TPU, demand(512, num_devices=8), 'plain'),
        (TPU, demand(2048, num_devices=8), 'blockwise'),
        (TPU, demand(256), 'plain'),
        (flash.Device('metal'), demand(512), 'plain'),
    ],
)
def test_auto_takes_what_can_run(device, asked, taken, on):
    on(flash.Device(device) if device == 'cpu' else device)
    assert attention.choose_implementation(asked) == taken


def test_the_choice_is_logged_once(on, caplog):
    attention._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger='absl'):
        for length in (8, 16, 1024, 2048):
            attention.choose_implementation(demand(length))
    assert [record.getMessage() for record in caplog.records] == [
        'attention on cpu: auto takes plain',
        'attention on cpu: auto takes blockwise',
    ]


@pytest.mark.parametrize(
    ('device', 'implementation', 'asked', 'line'),
    [
        (flash.Device('cpu'), 'cudnn', demand(64), 'runs on NVIDIA GPUs alone, and this is a cpu'),
        (flash.Device('cpu'), 'pallas', demand(64), 'runs on TPUs alone, and this is a cpu'),
        (flash.Device('cuda', (7, 5)), 'cudnn', demand(64, 'bfloat16'), 'and this one has 7.5'),
        (HOPPER, 'cudnn', demand(64), 'in bfloat16 or float16, not in float32'),
        (HOPPER, 'cudnn', demand(64, 'bfloat16')._replace(d_head=12), 'multiple of 8 up to 256'),
        (HOPPER, 'cudnn', demand(64, 'bfloat16', **OFFSET), 'behind a cache'),
        (HOPPER, 'cudnn', demand(63, 'bfloat16', **SCORES), 'even lengths'),
        (TPU, 'pallas', demand(64)._replace(d_head=192), 'at most 128 in it or a multiple'),
        (TPU, 'pallas', demand(64, **OFFSET), 'behind a cache'),
        (TPU, 'pallas', demand(64, num_devices=8), 'set mesh.data=1'),
        (TPU, 'pallas', demand(64, **WEIGHTS), "choose implementation='plain'"),
        (HOPPER, 'cudnn', demand(64, 'bfloat16', **WEIGHTS), "choose implementation='plain'"),
    ],
)
def test_what_cannot_run_says_why(device, implementation, asked, line, on):
    on(device)
    assert line in attention.obstacle(implementation, asked)


@pytest.mark.parametrize('implementation', ['cudnn', 'pallas'])
def test_what_cannot_run_here_is_refused(implementation):
    qkv, *_ = attention_inputs({})
    with pytest.raises(ValueError, match=f'{implementation} attention runs on .* this is a cpu'):
        dot_product_attention(*qkv, implementation=implementation)
