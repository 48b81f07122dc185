"""How fast this project is, beside PyTorch on the same machine and beside what the machine can do.

    python -m experiments.benchmark [--vs=torch] [--part=train,attention,decode,seeds,startup]
    python -m experiments.benchmark --part=gpu      on one NVIDIA card, under 8 minutes

Without --vs=torch only our own figures; it needs `pip install -e .[bench]` and, to compile, a C++
compiler. About … minutes on two cores, which should have nothing else to do.

All that is compared runs in one process and has turns, round by round. A ratio is taken in each
round; printed are its median and its quartiles over the rounds, after two rounds to warm up. Our
side is what the commands run: the train call of `minigpt_jax.train` (several steps in one dispatch,
a CPU's cores sharing the batch) and the loop of `minigpt_jax.sample`. PyTorch's side is in
`torch_models`: the same function, which starts from our parameters and trains on our batches, so
that both losses are the same; eager and compiled are both timed, and the faster one counts.

FLOP/s are those of the formula (`flops_per_token`; a masked score counts). The peak is that of a
large product in the same dtype among the same rounds, by whichever library has the faster one.

train      small: 4 layers, 4 heads, width 128, 12 × 64 tokens; baby: 6, 6, 384, 16 × 256;
           Transformer-Tiny: 4 + 4 layers, 4 heads, width 128, 128 × (20 + 20), vocabulary 10,000
attention  forward and backward between given queries, keys and values, 16 × 256 × 6 × 64, causal
decode     256 tokens of small, of one text and of 16
seeds      small for several seeds: in one program, and one at a time
startup    the command for `configs/heads_sweep.py:quick` until its first line of metrics
gpu        GPT-2 of 124 M parameters in bfloat16, the cost curve to n = 16384, seeds in one program
"""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from experiments import workloads
from minigpt_jax import cli, experiment
from minigpt_jax.analysis.programs import multiply_adds
from minigpt_jax.model.attention import dot_product_attention
from minigpt_jax.report.figures import PALETTE, styled
from minigpt_jax.training import sharding
from minigpt_jax.training.optim import make_schedule

ROOT = pathlib.Path(__file__).parent.parent
EAGER, COMPILED = TORCH_FORMS = ('PyTorch, eager', 'PyTorch, compiled')
OURS = 'ours'

DEFAULT_PARTS = ('train', 'attention', 'decode', 'seeds', 'startup')
_PARTS = flags.DEFINE_list('part', list(DEFAULT_PARTS), 'What to time; gpu has to be asked for.')
_VS = flags.DEFINE_enum('vs', None, ['torch'], 'Also time the same in this library.')


@flags.validator('part', f'choose from {", ".join((*DEFAULT_PARTS, "gpu"))}')
def _are_parts(names):
    return bool(names) and set(names) <= {*DEFAULT_PARTS, 'gpu'}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A figure of each round, and the bound that its median is held against.

    Attributes:
      what: of what, and by what it is divided.
      values: a ratio, or seconds, of each round.
      bound: at least this, or with `at_most` no more; None where nothing is asked for.
    """

    what: str
    values: np.ndarray
    bound: float | None = None
    at_most: bool = False

    @property
    def quartiles(self):
        """(first quartile, median, third quartile)."""
        return tuple(np.quantile(self.values, (0.25, 0.5, 0.75)))

    @property
    def verdict(self):
        if self.bound is None:
            return None
        median = self.quartiles[1]
        reached = median <= self.bound if self.at_most else median >= self.bound
        return 'holds' if reached else 'does not hold'

    @property
    def asked(self):
        return '' if self.bound is None else f'{"≤" if self.at_most else "≥"} {self.bound:g}'

    def __str__(self):
        low, median, high = self.quartiles
        return f'{median:.3g} ({low:.3g} to {high:.3g})'


@dataclasses.dataclass(frozen=True)
class Part:
    """What a part of the benchmark found."""

    tables: list
    numbers: dict
    comparisons: list


def ratios(slow, fast):
    """How many times as long the one takes as the other, round by round."""
    return np.asarray(slow) / np.asarray(fast)


def fastest(seconds, names):
    """The name of those with the smallest median; None if there are no names."""
    return min(names, key=lambda name: np.median(seconds[name]), default=None)


def load_torch():
    """The PyTorch side, with as many threads as we have devices; ends the command without it."""
    try:
        import torch

        from experiments import torch_models
    except ModuleNotFoundError as error:
        if error.name != 'torch':
            raise
        cli.fail('--vs=torch: PyTorch is not installed; pip install -e .[bench]')
    torch.set_num_threads(cli.cpu_cores())
    return torch_models


# Training.


def train_groups(quick):
    """Workloads, in groups that have turns with each other."""
    recipes = [
        [('small', workloads.small(), workloads.CHARACTERS)],
        [
            ('baby', workloads.baby(), workloads.CHARACTERS),
            ('baby', workloads.baby('bfloat16'), workloads.CHARACTERS),
        ],
        [('Transformer-Tiny', workloads.transformer_tiny(), (workloads.WORD_PIECES,) * 2)],
    ]
    return [
        [
            workloads.make_workload(
                f'{name}, {c.model.dtype}', workloads.shrunk(c) if quick else c, vocab_size
            )
            for name, c, vocab_size in group
        ]
        for group in recipes
    ]


def time_train(quick, torch_models):
    rows, numbers, seconds = [], {}, {}
    for group in train_groups(quick):
        sides = {workload.name: make_sides(workload, torch_models) for workload in group}
        calls = {(name, side): f for name, own in sides.items() for side, f in own.items()}
        dtypes = {workload.dtype for workload in group}
        products = make_products(dtypes, quick, torch_models)
        times = timed(calls | products, quick, rounds=12)
        peaks = peaks_of(times, products, quick)
        for workload in group:
            own = {side: times[workload.name, side] for side in sides[workload.name]}
            seconds[workload.name] = own
            losses = {side: float(f()) for side, f in sides[workload.name].items()}
            rows += train_rows(workload, own, peaks, losses)
            numbers[workload.name] = {
                'seconds_per_call': own,
                'steps_per_call': workload.config.train.steps_per_call,
                'tokens_per_call': workload.tokens_per_call,
                'flops_per_call': workload.flops_per_call,
                'peak_flops': peaks[workload.dtype],
                'losses': losses,
            }
    headers = ['model', 'side', 'step, ms', 'quartiles', 'tokens/s', 'GFLOP/s']
    headers += ['of the peak', 'loss']
    return Part(
        [('Training', headers, rows), peak_table(numbers)],
        numbers,
        compare_train(seconds, numbers),
    )


def make_sides(workload, torch_models):
    """{side: its train call}: all from the same parameters, on the same batches."""
    ours = workloads.Training(workload)
    sides = {OURS: ours}
    if torch_models:
        config = workload.config
        params = jax.tree.map(np.asarray, nnx.to_pure_dict(ours.params))
        schedule = make_schedule(config.optim, config.train.steps)
        rates = np.asarray(jax.vmap(schedule)(np.arange(config.train.steps))).tolist()
        for form in TORCH_FORMS:
            module = torch_models.MODELS[config.model.family](config.model, workload.vocab_size)
            module.load(params)
            count = sum(x.size for x in jax.tree.leaves(params))
            assert torch_models.num_parameters(module) == count, workload.name
            sides[form] = torch_models.Training(
                config, module, ours.batches, rates, compiled=form == COMPILED
            )
    return sides


def train_rows(workload, seconds, peaks, losses):
    rows = []
    for side, values in seconds.items():
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
        steps = workload.config.train.steps_per_call
        flops = workload.flops_per_call / median
        rows.append(
            [
                workload.name,
                side,
                f'{1e3 * median / steps:,.1f}',
                f'{1e3 * low / steps:,.1f} to {1e3 * high / steps:,.1f}',
                f'{workload.tokens_per_call / median:,.0f}',
                f'{flops / 1e9:,.0f}',
                f'{flops / max(peaks[workload.dtype].values()):.0%}',
                f'{losses[side]:.4f}',
            ]
        )
    return rows


def compare_train(seconds, numbers):
    """The rows of training in the table of bounds."""
    bounds = {'small, float32': 1.3, 'baby, float32': 1.0, 'Transformer-Tiny, float32': 1.3}
    found = []
    for name, own in seconds.items():
        if torch_form := fastest(own, [form for form in TORCH_FORMS if form in own]):
            values = ratios(own[torch_form], own[OURS])
            what = f'training tokens/s, {name}, ours / {torch_form}'
            found.append(Comparison(what, values, bounds.get(name)))
    single, half = (seconds[f'baby, {dtype}'][OURS] for dtype in ('float32', 'bfloat16'))
    peak, half_peak = (
        max(numbers[f'baby, {dtype}']['peak_flops'].values()) for dtype in ('float32', 'bfloat16')
    )
    # The bound is for processors with units for bfloat16, such as AMX.
    bound = 1.5 if half_peak > 1.5 * peak else None
    what = 'training tokens/s, baby, our bfloat16 / our float32'
    return [*found, Comparison(what, ratios(single, half), bound)]


# The machine's own peak.


def product_size(quick):
    return 256 if quick else 2048 if jax.default_backend() == 'cpu' else 8192


def make_products(dtypes, quick, torch_models):
    """{(dtype, library): a call of a large product}."""
    size = product_size(quick)
    products = {(dtype, 'jax'): workloads.make_product(dtype, size) for dtype in dtypes}
    if torch_models:
        for dtype in dtypes:
            products[dtype, 'PyTorch'] = torch_models.make_product(dtype, size)
    return products


def peaks_of(seconds, products, quick):
    """{dtype: {library: FLOP/s of its fastest round}}."""
    peaks = {}
    for dtype, library in products:
        flops = 2 * product_size(quick) ** 3 / seconds[dtype, library].min()
        peaks.setdefault(dtype, {})[library] = flops
    return peaks


def peak_table(numbers):
    rows = [
        [name, library, f'{flops / 1e9:,.0f}']
        for name, own in numbers.items()
        for library, flops in own['peak_flops'].items()
    ]
    return 'The peak: a large product, the fastest round', ['among', 'library', 'GFLOP/s'], rows


def timed(functions, quick, rounds):
    """Seconds of each round of functions that have turns."""
    return experiment.interleaved_times(functions, 2 if quick else rounds, 1 if quick else 2)


# Attention.


def time_attention(quick, torch_models):
    shape_BTHK = (8, 32, 2, 8) if quick else (16, 256, 6, 64)
    functions = {name: attention_call(name, shape_BTHK) for name in ('auto', 'plain')}
    if torch_models:
        functions['PyTorch'] = torch_models.make_attention(shape_BTHK)
    seconds = timed(functions, quick, rounds=30)
    # Plain attention's, whoever skips or recomputes what.
    flops = 2 * multiply_adds(attention_pass('plain'), *[jnp.zeros(shape_BTHK)] * 4)
    rows = []
    for name, values in seconds.items():
        low, median, high = 1e3 * np.quantile(values, (0.25, 0.5, 0.75))
        rows.append([name, f'{median:,.2f}', f'{low:,.2f} to {high:,.2f}', f'{flops / median / 1e6:,.0f}'])
    sizes = ' × '.join(map(str, shape_BTHK))
    comparisons = [
        Comparison(
            'attention, forward and backward, time of auto / plain',
            ratios(seconds['auto'], seconds['plain']),
            0.6,
            at_most=True,
        )
    ]
    if torch_models:
        values = ratios(seconds['auto'], seconds['PyTorch'])
        what = 'attention, forward and backward, time of auto / PyTorch'
        comparisons.append(Comparison(what, values))
    return Part(
        [(f'Causal attention, {sizes}, float32', ['form', 'ms', 'quartiles', 'GFLOP/s'], rows)],
        {'shape_BTHK': shape_BTHK, 'flops': flops, 'seconds': seconds},
        comparisons,
    )


def attention_pass(implementation):
    def forward_backward(q_BTHK, k_BSHK, v_BSHK, dy_BTHK):
        attend = functools.partial(
            dot_product_attention, causal=True, implementation=implementation
        )
        y_BTHK, backward = jax.vjp(attend, q_BTHK, k_BSHK, v_BSHK)
        return y_BTHK, backward(dy_BTHK)

    return forward_backward


def attention_call(implementation, shape_BTHK):
    """A forward and backward pass, the batch shared by the devices as in a train step."""
    cores = len(jax.devices())
    devices = jax.devices()[: sharding.devices_for_cores(cores, {shape_BTHK[0]})]
    ...
