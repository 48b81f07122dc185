"""How fast this project is, beside PyTorch on the same machine and beside what the machine can do.

    python -m experiments.benchmark [--vs=torch] [--part=train,attention,decode,seeds,startup]
    python -m experiments.benchmark [--vs=torch] --part=speedrun --text=FILE
    python -m experiments.benchmark --part=gpu      on one NVIDIA card, under 8 minutes

Without --vs=torch only our own figures; it needs `pip install -e .[bench]` and, to compile, a C++
compiler. A quarter of an hour on two cores, which should have nothing else to do; the speedrun
takes half of that again.

What train, attention, decode and seeds compare runs in one process and has turns, round by round,
with a pause before each. A ratio is taken in each round; printed are its median and its quartiles
over the rounds, after two rounds to warm up. Startup and speedrun run commands, one after the
other. Our side is what the commands run: the train call of `minigpt_jax.train` (several steps in
one dispatch, a CPU's cores sharing the batch) and the loop of `minigpt_jax.sample`. PyTorch's side
is in `torch_models`: the same function, which starts from our parameters and trains on our batches,
so that both losses are the same; eager and compiled are both timed, and the faster one counts.

FLOP/s are those of the formula (`flops_per_token`; a masked score counts). The peak is that of a
large product in the same dtype among the same rounds, by whichever library has the faster one.

train      small: 4 layers, 4 heads, width 128, 12 × 64 tokens; baby: 6, 6, 384, 16 × 256;
           Transformer-Tiny: 4 + 4 layers, 4 heads, width 128, 128 × (20 + 20), vocabulary 10,000
attention  forward and backward between given queries, keys and values, 16 × 256 × 6 × 64, causal
decode     256 tokens of small, of one text and of 16
seeds      small for several seeds: in one program, and one at a time
startup    the command for `configs/heads_sweep.py:quick` until its first line of metrics
speedrun   the command for `configs/shakespeare_speedrun.py`, three seeds, FILE being tiny
           Shakespeare; PyTorch trains the recipe of `configs/shakespeare_char.py`
gpu        GPT-2 of 124 M parameters in bfloat16, the cost curve to n = 16384, seeds in one program
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from absl import flags
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from configs import shakespeare_char, shakespeare_speedrun
from experiments import workloads
from minigpt_jax import cli, experiment
from minigpt_jax.data.batches import load_tokenized
from minigpt_jax.report.figures import PALETTE, styled
from minigpt_jax.training.config import resolve
from minigpt_jax.training.optim import make_schedule
from minigpt_jax.training.steps import make_init
from minigpt_jax.training.tasks import TASKS

OURS = 'ours'
EAGER, COMPILED = TORCH_FORMS = ('PyTorch, eager', 'PyTorch, compiled')
DEFAULT_PARTS = ('train', 'attention', 'decode', 'seeds', 'startup')
WARM_UPS, QUICK_WARM_UPS, QUICK_ROUNDS = 2, 1, 2
UNITS = 1.5  # times the rate of float32: from there on a processor has units for bfloat16

_PARTS = flags.DEFINE_list(
    'part', list(DEFAULT_PARTS), 'What to time; speedrun and gpu have to be asked for.'
)
_TEXT = flags.DEFINE_string('text', None, 'Of --part=speedrun: the file of tiny Shakespeare.')
_VS = flags.DEFINE_enum('vs', None, ['torch'], 'Also time the same in this library.')


ALL_PARTS = (*DEFAULT_PARTS, 'speedrun', 'gpu')


@flags.validator('part', f'choose from {", ".join(ALL_PARTS)}, each once')
def _are_parts(names):
    return bool(names) and set(names) <= set(ALL_PARTS) and len(set(names)) == len(names)


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
    """What a part of the benchmark found: see `experiment.Outcome`."""

    tables: list
    numbers: dict
    comparisons: list


def ratios(seconds, slower, faster):
    """How many times as long the one takes as the other, round by round."""
    return seconds[slower] / seconds[faster]


def fastest(seconds, names):
    """Of those names that were timed the one with the smallest median, or None."""
    timed = [name for name in names if name in seconds]
    return min(timed, key=lambda name: np.median(seconds[name]), default=None)


def take_turns(functions, rounds, quick):
    """Seconds of each round of each function: see `experiment.interleaved_times`."""
    if quick:
        return experiment.interleaved_times(functions, QUICK_ROUNDS, QUICK_WARM_UPS)
    return experiment.interleaved_times(functions, rounds, WARM_UPS)


def milliseconds(seconds, parts=1):
    """Median and quartiles of the time of a part, as two cells of a table."""
    low, median, high = 1e3 * np.quantile(seconds, (0.25, 0.5, 0.75)) / parts
    return [f'{median:,.2f}', f'{low:,.2f} to {high:,.2f}']


def load_torch():
    """The PyTorch side, with a thread a core; ends the command where there is no PyTorch."""
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


def training_groups(quick, dtypes):
    """Workloads, in groups that have turns with each other."""
    characters, pieces = workloads.CHARACTERS, (workloads.WORD_PIECES,) * 2
    groups = (
        [('small', workloads.small(), characters)],
        [('baby', workloads.baby(dtype), characters) for dtype in dtypes],
        [('Transformer-Tiny', workloads.transformer_tiny(), pieces)],
    )
    return [
        [
            workloads.make_workload(name, workloads.shrunk(c) if quick else c, vocab_size)
            for name, c, vocab_size in group
        ]
        for group in groups
    ]


def time_training(quick, torch_models):
    rows, numbers, seconds = [], {}, {}
    for group in training_groups(quick, dtypes_worth_timing(quick, torch_models)):
        calls = {
            (workload.name, side): call
            for workload in group
            for side, call in make_sides(workload, torch_models).items()
        }
        products = make_products({workload.dtype for workload in group}, quick, torch_models)
        print(f'{", ".join(workload.name for workload in group)}: in turns', flush=True)
        times = take_turns(calls | products, 8, quick)
        for workload in group:
            peaks = peak_flops(times, workload.dtype, quick)
            own = {side: x for (name, side), x in times.items() if name == workload.name}
            losses = {side: float(calls[workload.name, side]()) for side in own}
            seconds[workload.name] = own
            rows += training_rows(workload, own, losses, max(peaks.values()))
            numbers[workload.name] = {
                'seconds_per_call': own,
                'steps_per_call': workload.config.train.steps_per_call,
                'tokens_per_call': workload.tokens_per_call,
                'flops_per_call': workload.flops_per_call,
                'peak_flops': peaks,
                'losses': losses,
            }
    return Part(
        [('Training', TRAINING_HEADERS, rows), peak_table(numbers)],
        numbers,
        compare_training(seconds),
    )


def dtypes_worth_timing(quick, torch_models):
    """bfloat16 only where the processor has units for it, such as AMX; elsewhere it is no gain.

    PyTorch alone would take an hour for it on a processor without.
    """
    dtypes = ('float32', 'bfloat16')
    seconds = experiment.interleaved_times(make_products(set(dtypes), quick, torch_models), 3, 1)
    single, half = (max(peak_flops(seconds, dtype, quick).values()) for dtype in dtypes)
    if quick or half > UNITS * single:
        return dtypes
    print(
        f'baby, bfloat16: not timed, since this processor has no units for it: a large product '
        f'has {half / 1e9:,.0f} GFLOP/s, in float32 {single / 1e9:,.0f}'
    )
    return dtypes[:1]


def make_sides(workload, torch_models):
    """{side: its train call}: all from the same parameters, on the same batches."""
    ours = workloads.Training(workloads.make_program(workload), seeds=[0])
    sides = {OURS: ours}
    if torch_models is not None:
        config = workload.config
        params = jax.tree.map(np.asarray, nnx.to_pure_dict(ours.program.init(0).params))
        steps = np.arange(config.train.steps)
        rates = make_schedule(config.optim, config.train.steps)(steps).tolist()
        for form in TORCH_FORMS:
            module = torch_models.MODELS[config.model.family](config.model, workload.vocab_size)
            module.load(params)
            num_parameters = sum(x.size for x in jax.tree.leaves(params))
            assert torch_models.num_parameters(module) == num_parameters, workload.name
            sides[form] = torch_models.Training(
                config, module, ours.batches, rates, compiled=form == COMPILED
            )
    return sides


TRAINING_HEADERS = ['model', 'side', 'step, ms', 'quartiles', 'tokens/s', 'GFLOP/s', 'of the peak']
TRAINING_HEADERS += ['loss']


def training_rows(workload, seconds, losses, peak):
    rows = []
    for side, values in seconds.items():
        median = np.median(values)
        flops = workload.flops_per_call / median
        rows.append(
            [
                workload.name,
                side,
                *milliseconds(values, workload.config.train.steps_per_call),
                f'{workload.tokens_per_call / median:,.0f}',
                f'{flops / 1e9:,.0f}',
                f'{flops / peak:.0%}',
                f'{losses[side]:.4f}',
            ]
        )
    return rows


def compare_training(seconds):
    """The rows of training in the table of bounds."""
    bounds = {'small, float32': 1.3, 'baby, float32': 1.0, 'Transformer-Tiny, float32': 1.3}
    found = []
    for name, own in seconds.items():
        if form := fastest(own, TORCH_FORMS):
            what = f'training tokens/s, {name}, ours / {form}'
            found.append(Comparison(what, ratios(own, form, OURS), bounds.get(name)))
    single, half = (f'baby, {dtype}' for dtype in ('float32', 'bfloat16'))
    if half in seconds:
        by_dtype = {name: seconds[name][OURS] for name in (single, half)}
        what = 'training tokens/s, baby, our bfloat16 / our float32'
        found.append(Comparison(what, ratios(by_dtype, single, half), 1.5))
    return found


# The peak of the machine.


def product_size(quick):
    return 128 if quick else 2048 if jax.default_backend() == 'cpu' else 8192


def make_products(dtypes, quick, torch_models):
    """{(dtype, library): a call of a large product}."""
    libraries = {'JAX': workloads} | ({} if torch_models is None else {'PyTorch': torch_models})
    return {
        (dtype, name): library.make_product(dtype, product_size(quick))
        for dtype in sorted(dtypes)
        for name, library in libraries.items()
    }


def peak_flops(seconds, dtype, quick):
    """{library: FLOP/s of the fastest round of its product}."""
    flops = 2 * product_size(quick) ** 3
    return {library: flops / x.min() for (kind, library), x in seconds.items() if kind == dtype}


def peak_table(numbers):
    rows = [
        [name, library, f'{flops / 1e9:,.0f}']
        for name, own in numbers.items()
        for library, flops in own['peak_flops'].items()
    ]
    return 'The peak: the fastest round of a large product', ['model', 'library', 'GFLOP/s'], rows


# Attention.


def time_attention(quick, torch_models):
    shape_BTHK = (8, 32, 2, 8) if quick else (16, 256, 6, 64)
    calls = {name: workloads.make_attention(name, shape_BTHK) for name in ('auto', 'plain')}
    if torch_models is not None:
        calls['PyTorch'] = torch_models.make_attention(shape_BTHK)
    seconds = take_turns(calls, 30, quick)
    flops = workloads.attention_flops(shape_BTHK)
    rows = [
        [name, *milliseconds(values), f'{flops / np.median(values) / 1e9:,.0f}']
        for name, values in seconds.items()
    ]
    title = f'Attention, {" × ".join(map(str, shape_BTHK))}, causal, float32, forward and backward'
    what = 'attention forward + backward, time of auto / '
    comparisons = [Comparison(f'{what}plain', ratios(seconds, 'auto', 'plain'), 0.6, at_most=True)]
    if torch_models is not None:
        comparisons.append(Comparison(f'{what}PyTorch', ratios(seconds, 'auto', 'PyTorch')))
    return Part(
        [(title, ['form', 'ms', 'quartiles', 'GFLOP/s'], rows)],
        {'shape_BTHK': shape_BTHK, 'flops': flops, 'seconds': seconds},
        comparisons,
    )


# Decoding.


def time_decoding(quick, torch_models):
    num_tokens = 12 if quick else 256
    recipe = workloads.shrunk(workloads.small()) if quick else workloads.small()
    workload = workloads.make_workload('small', recipe, workloads.CHARACTERS)
    rows, numbers, comparisons = [], {}, []
    for batch_size in (1, 16):
        ours = workloads.Generation(workload, batch_size, num_tokens)
        calls = {OURS: ours}
        if torch_models is not None:
            gpt = torch_models.GPT(workload.config.model, workload.vocab_size)
            gpt.load(jax.tree.map(np.asarray, nnx.to_pure_dict(ours.params)))
            calls |= torch_models.make_generations(gpt, batch_size, num_tokens)
        seconds = take_turns(calls, 10, quick)
        numbers[f'batch {batch_size}'] = {'num_tokens': num_tokens, 'seconds': seconds}
        for side, values in seconds.items():
            speed = batch_size * num_tokens / np.median(values)
            rows.append([f'{batch_size}', side, *milliseconds(values, num_tokens), f'{speed:,.0f}'])
        for how, bound in (('without a cache', 10), ('with a cache', 3)):
            if form := fastest(seconds, [name for name in seconds if how in name]):
                what = f'generation, small, batch {batch_size}, ours / {form}'
                asked = bound if batch_size == 1 else None
                comparisons.append(Comparison(what, ratios(seconds, form, OURS), asked))
    headers = ['batch', 'side', 'token of each text, ms', 'quartiles', 'tokens/s']
    title = f'Generation, small, {num_tokens} tokens behind one'
    return Part([(title, headers, rows)], numbers, comparisons)


# Seeds.


def time_seeds(quick, torch_models=None):
    del torch_models  # it has nothing of the kind
    recipe = workloads.shrunk(workloads.small()) if quick else workloads.small()
    workload = workloads.make_workload('small', recipe, workloads.CHARACTERS)
    single = workloads.make_program(workload)
    counts, calls = (1, 2, 4, 8), {}
    for E in counts:
        seeds = [workloads.Training(single, [seed]) for seed in range(E)]
        calls[E, 'one at a time'] = lambda seeds=seeds: [
            jax.block_until_ready(train()) for train in seeds
        ]
        if E > 1:
            program = workloads.make_program(workload, num_seeds=E)
            calls[E, 'one program'] = workloads.Training(program, range(E))
    seconds = take_turns(calls, 4, quick)
    steps = workload.config.train.steps_per_call
    rows = [
        [f'{E}', how, *milliseconds(values, E * steps), f'{E * steps / np.median(values):,.1f}']
        for (E, how), values in seconds.items()
    ]
    comparisons = [
        Comparison(
            f'seeds/s, {E} in one program / one at a time',
            ratios(seconds, (E, 'one at a time'), (E, 'one program')),
        )
        for E in counts[1:]
    ]
    title = f'Seeds of small, in one program by {program.mode}'
    headers = ['seeds', 'trained', 'step of a seed, ms', 'quartiles', 'steps/s of all']
    numbers = {f'{E} seeds, {how}': values for (E, how), values in seconds.items()}
    return Part(
        [(title, headers, rows)],
        {'mode': program.mode, 'steps_per_call': steps, 'seconds_per_call': numbers},
        comparisons,
    )


# The start of a command.


def time_startup(quick, torch_models=None):
    del torch_models
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        # The first of them fills the cache of compiled programs, and prepares the text if need be.
        seconds = [
            seconds_to_first_step(directory / f'{i}', cache=directory / 'cache')
            for i in range(1 + (1 if quick else 5))
        ]
    cold, warm = seconds[0], np.array(seconds[1:])
    what = 'command to first step, warm cache, configs/heads_sweep.py:quick, seconds'
    comparison = Comparison(what, warm, 10, at_most=True)
    rows = [['cold', f'{cold:.1f}'], ['warm', f'{comparison}']]
    return Part(
        [('Seconds from the command to its first line of metrics', ['cache', 'seconds'], rows)],
        {'cold_seconds': cold, 'warm_seconds': warm},
        [comparison],
    )


def start_training(workdir, cache, *arguments):
    """The process of a train command with a compilation cache of its own."""
    with open(f'{workdir}.errors', 'wb') as errors:
        return subprocess.Popen(
            [sys.executable, '-m', 'minigpt_jax.train', f'--workdir={workdir}', *arguments],
            cwd=pathlib.Path(__file__).parent.parent,
            env=os.environ | {'JAX_COMPILATION_CACHE_DIR': str(cache)},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def fail_as(process, workdir):
    """Ends this command with what that of a workdir said last."""
    lines = pathlib.Path(f'{workdir}.errors').read_text(encoding='utf-8').splitlines()
    cli.fail(f'{" ".join(process.args)}: {(lines or ["no metrics in 300 s"])[-1]}')


def seconds_to_first_step(workdir, cache):
    """Until the command has written the first metrics, a call of steps; then it is stopped."""
    started = time.monotonic()
    process = start_training(workdir, cache, '--config=configs/heads_sweep.py:quick')
    try:
        while not any(x.stat().st_size for x in workdir.glob('points/*/seed-*/metrics.jsonl')):
            if process.poll() is not None or time.monotonic() - started > 300:
                fail_as(process, workdir)
            time.sleep(0.01)
        return time.monotonic() - started
    finally:
        process.terminate()
        process.wait()


# Training to a quality.

TARGET_LOSS = 1.90


def time_speedrun(quick, torch_models):
    """Seconds of training alone, without evaluation: our command, and PyTorch's 2000 steps."""
    text = os.path.abspath(_TEXT.value)
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        # The first of them fills the cache of compiled programs.
        runs = [
            run_speedrun(directory / f'{i}', directory / 'cache', text, seed, quick)
            for i, seed in enumerate((0,) if quick else (0, 0, 1, 2))
        ]
    warm = runs[1:] or runs
    rows = [
        [f'ours, seed {run["seed"]}', *(f'{run[x]:.1f}' for x in ('train_s', 'wall_s'))]
        + [f'{run["val_loss"]:.4f}']
        for run in runs
    ]
    rows[0][0] += ', no program compiled before'
    theirs = {}
    if torch_models is not None:
        for form in TORCH_FORMS:
            theirs[form] = torch_speedrun(torch_models, text, form == COMPILED, quick)
            rows.append([form, f'{theirs[form][0]:.1f}', '', f'{theirs[form][1]:.4f}'])
    headers = ['side', 'training, s', 'command, s', 'val_loss']
    losses = np.array([run['val_loss'] for run in warm])
    comparisons = [
        Comparison('speedrun, val_loss, seeds 0 to 2', losses, TARGET_LOSS, at_most=True)
    ]
    if theirs:
        form = min(theirs, key=lambda name: theirs[name][0])
        ratio = np.array([run['train_s'] for run in warm]) / theirs[form][0]
        what = f'speedrun, training time, ours / {form} (2000 steps)'
        # Of a time to a loss that was not reached there is nothing to say.
        bound = 0.4 if np.median(losses) <= TARGET_LOSS else None
        comparisons.append(Comparison(what, ratio, bound, at_most=True))
    numbers = {'runs': runs, 'torch': theirs}
    return Part([('Tiny Shakespeare', headers, rows)], numbers, comparisons)


def run_speedrun(workdir, cache, text, seed, quick):
    """The summary of a run of the command, with `wall_s`, the seconds of the whole process."""
    steps = 40 if quick else shakespeare_speedrun.get_config().train.steps  # beyond the warm-up
    started = time.monotonic()
    process = start_training(
        workdir, cache, '--config=configs/shakespeare_speedrun.py', f'--config.data.path={text}',
        f'--config.seed={seed}', f'--config.train.steps={steps}',
    )  # fmt: skip
    if process.wait():
        fail_as(process, workdir)
    summary = json.loads((workdir / 'summary.json').read_text(encoding='utf-8'))
    return summary | {'wall_s': time.monotonic() - started}


def torch_speedrun(torch_models, text, compiled, quick):
    """(seconds of PyTorch's training, its validation loss) by the recipe of shakespeare_char."""
    c = shakespeare_char.get_config()
    c.data.path, c.sweep = text, ()
    config = resolve(c)
    corpus = load_tokenized(config.data)
    task = TASKS['decoder'](config, corpus)
    vocab_size = corpus.tokenizer.vocab_size
    params = make_init(config, vocab_size)(0).params
    module = torch_models.GPT(config.model, vocab_size)
    module.load(jax.tree.map(np.asarray, nnx.to_pure_dict(params)))
    steps = 40 if quick else config.train.steps
    rates = [float(make_schedule(config.optim, config.train.steps)(step)) for step in range(steps)]
    batches = task.batches(0, 0)
    training = torch_models.Training(config, module, next(batches), rates, compiled=compiled)
    training.warm_up()
    seconds = 0.0
    for _ in range(steps // config.train.steps_per_call):
        started = time.monotonic()
        training()
        seconds += time.monotonic() - started
        training.batches = next(batches)
    return seconds, torch_models.validation_loss(module, *task.validation())


# A GPU.


def time_gpu(quick, torch_models=None):
    del torch_models
    parts = (time_gpt2(quick), time_cost_curve(quick), time_seeds(quick))
    return Part(
        [table for part in parts for table in part.tables],
        dict(zip(('gpt2', 'cost_curve', 'seeds'), (part.numbers for part in parts), strict=True)),
        [comparison for part in parts for comparison in part.comparisons],
    )


def time_gpt2(quick):
    workload, call = largest_that_fits(quick)
    times = take_turns(
        {(workload.name, OURS): call} | make_products({workload.dtype}, quick, None), 10, quick
    )
    peaks = peak_flops(times, workload.dtype, quick)
    own = {OURS: times[workload.name, OURS]}
    title = f'Training, {workload.config.data.batch_size} × {workload.config.model.context_length}'
    rows = training_rows(workload, own, {OURS: float(call())}, max(peaks.values()))
    numbers = {
        'batch_size': workload.config.data.batch_size,
        'seconds_per_call': own,
        'tokens_per_call': workload.tokens_per_call,
        'flops_per_call': workload.flops_per_call,
        'peak_flops': peaks,
    }
    return Part(
        [(title, TRAINING_HEADERS, rows), peak_table({workload.name: numbers})], numbers, []
    )


def largest_that_fits(quick, batch_size=64):
    """(workload, its train call) of GPT-2, the batch the largest power of two that fits."""
    from experiments.cost_curve import device_memory  # its flags are not those of this command

    while batch_size:
        recipe = workloads.gpt2(batch_size)
        workload = workloads.make_workload(
            'GPT-2, 124 M', workloads.shrunk(recipe) if quick else recipe, workloads.GPT2_TOKENS
        )
        try:
            program = workloads.make_program(workload)
            needed, free = program.peak_memory_mb, device_memory()[1] / 2**20
            if needed <= free:
                call = workloads.Training(program, [0])
                jax.block_until_ready(call())
                return workload, call
            share, reason = free / needed, f'needs {needed:,.0f} MiB of {free:,.0f} free'
        except jax.errors.JaxRuntimeError as error:
            if 'RESOURCE_EXHAUSTED' not in str(error):
                raise
            share, reason = 0.5, 'runs out of memory'
        print(f'{workload.name}, batch {batch_size}: not run, {reason}', flush=True)
        # Each try is compiled, which takes long: what cannot fit is not tried.
        fitting = int(batch_size * share)
        batch_size = min(batch_size // 2, 1 << fitting.bit_length() - 1 if fitting else 0)
    cli.fail('--part=gpu: not one text of GPT-2 fits into the memory of this GPU')


def time_cost_curve(quick):
    from experiments import cost_curve

    lengths = (16, 32) if quick else (128, 512, 2048, 4096, 8192, 16_384)
    results = cost_curve.time_lengths(lengths, cost_curve.BATCH, WARM_UPS, cost_curve.ROUNDS)
    return Part(cost_curve.make_tables(results)[:1], results, [])


# All of it.

# Training comes behind the parts of short calls: the memory that it leaves in pieces slows those.
PARTS = {
    'attention': time_attention,
    'decode': time_decoding,
    'seeds': time_seeds,
    'train': time_training,
    'startup': time_startup,
    'speedrun': time_speedrun,
    'gpu': time_gpu,
}


def measure(setting):
    names = _PARTS.value
    if _VS.value and jax.default_backend() != 'cpu':
        cli.fail('--vs=torch: compares on a CPU; JAX_PLATFORMS=cpu leaves jax nothing else')
    if _TEXT.value and 'speedrun' not in names:
        cli.fail('--text: is of --part=speedrun')
    if 'gpu' in names and jax.default_backend() != 'gpu':
        cli.fail(f'--part=gpu: jax sees no GPU here, only {jax.devices()[0].device_kind}')
    if 'speedrun' in names and not (_TEXT.value and os.path.isfile(_TEXT.value)):
        cli.fail('--part=speedrun: --text=FILE names the file of tiny Shakespeare')
    torch_models = load_torch() if _VS.value else None
    found = {}
    for name, part in PARTS.items():
        if name in names:
            print(f'==== {name}', flush=True)
            found[name] = part(setting.quick, torch_models)
    comparisons = [x for part in found.values() for x in part.comparisons]
    rows = [[x.what, f'{x}', x.asked] for x in comparisons]
    table = ('What is compared', ['figure', 'median (quartiles)', 'asked'], rows)
    return experiment.Outcome(
        tables=[*(x for part in found.values() for x in part.tables), table],
        numbers={
            'parts': {name: part.numbers for name, part in found.items()},
            'comparisons': [
                dataclasses.asdict(x) | {'quartiles': x.quartiles} for x in comparisons
            ],
        },
        claims=judge(comparisons, setting.quick),
        figure=draw(comparisons),
    )


def judge(comparisons, quick):
    """A verdict on each comparison that has a bound; of --quick none is decided."""
    return [
        experiment.Claim(
            source='bound',
            text=comparison.what,
            theirs=comparison.asked,
            ours=f'{comparison}',
            verdict='not decided' if quick else comparison.verdict,
        )
        for comparison in comparisons
        if comparison.bound is not None
    ]


@styled
def draw(comparisons):
    """Each median with its quartiles, green where the bound is reached, and the bound as a line."""
    figure = Figure(figsize=(10, 0.8 + 0.36 * max(1, len(comparisons))))
    plot = figure.subplots()
    colours = {'holds': PALETTE[2], 'does not hold': PALETTE[1], None: PALETTE[-1]}
    for row, comparison in enumerate(comparisons):
        low, median, high = comparison.quartiles
        colour = colours[comparison.verdict]
        plot.plot([low, high], [row, row], color=colour)
        plot.plot(median, row, 'o', color=colour)
        if comparison.bound is not None:
            plot.plot([comparison.bound] * 2, [row - 0.4, row + 0.4], color=PALETTE[-2])
            plot.annotate(
                comparison.asked, (comparison.bound, row - 0.4), (2, -1), fontsize=7, va='top',
                textcoords='offset points',
            )  # fmt: skip
    plot.set_yticks(range(len(comparisons)), [comparison.what for comparison in comparisons])
    plot.invert_yaxis()
    plot.axvline(1, color=PALETTE[-1], linestyle=':', linewidth=1)
    plot.set_xscale('log')
    plot.xaxis.set_major_formatter(StrMethodFormatter('{x:g}'))
    plot.xaxis.set_minor_formatter(NullFormatter())
    plot.set_xlabel('ratio, or seconds where it says so')
    return figure


def options():
    """Parts that were asked for, and the other library: each choice has files of its own."""
    chosen = {} if _PARTS.value == list(DEFAULT_PARTS) else {'part': '+'.join(_PARTS.value)}
    return chosen | ({'vs': _VS.value} if _VS.value else {})


if __name__ == '__main__':
    experiment.run_command(__file__, measure, options)
