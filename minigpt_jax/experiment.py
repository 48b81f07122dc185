"""What an experiment is: a question, its measurement, verdicts on what is claimed, and its files.

    python -m experiments.NAME [--out=DIR] [--quick]

A script below `experiments/` has a function `measure(setting)`, which returns an `Outcome`, and
hands it to `run_command`: tables and verdicts are printed, `NAME.json` and `NAME.png` written.
"""

import ast
import concurrent.futures
import dataclasses
import datetime
import functools
import hashlib
import json
import pathlib
import queue
import shlex
import sys
import time
from typing import Any

import jax
import numpy as np
from absl import flags
from matplotlib.figure import Figure
from tabulate import tabulate

from minigpt_jax import cli
from minigpt_jax.report.figures import png
from minigpt_jax.report.tables import write_atomically
from minigpt_jax.training.config import describe_machine, write_json

flags.disclaim_key_flags()  # a flag that is defined here stands in --help of the script

VERDICTS = ('holds', 'holds under a condition', 'does not hold', 'not decided', 'open')


@dataclasses.dataclass(frozen=True)
class Claim:
    """What somebody says, beside what was measured.

    Attributes:
      source: which part of the articles, or which paper.
      text: the claim in a sentence.
      theirs: the figure that is given there; empty if it is asserted without one.
      ours: our figure, with its interval where it is a statistic.
      verdict: one of `VERDICTS`; a condition stands in `ours`.
    """

    source: str
    text: str
    theirs: str
    ours: str
    verdict: str

    def __post_init__(self):
        if self.verdict not in VERDICTS:
            raise ValueError(f'verdict={self.verdict!r}: choose from {VERDICTS}')


@dataclasses.dataclass(frozen=True)
class Setting:
    """How an experiment is run.

    Attributes:
      quick: much smaller: whether it runs, not what it finds.
      out: where the files of experiments are.
      workdir: a directory for trained runs of this package alone, so that what is found there may
        be continued; it need not exist. It outlives changes of the script: a sweep refuses runs of
        another configuration.
    """

    quick: bool
    out: pathlib.Path
    workdir: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an experiment measured.

    Attributes:
      tables: (title, headers, rows of text or numbers): what is printed.
      numbers: every number of the tables and of the figure, as JSON holds it or as NumPy arrays.
      claims: verdicts.
      figure: the one picture.
      whole: whether all was measured, so that the verdicts count; None: unless `quick`.
    """

    tables: list[tuple[str, list[str], list[list]]]
    numbers: dict[str, Any]
    claims: list[Claim]
    figure: Figure
    whole: bool | None = None


def run_command(file, measure, options=dict):
    """Runs the script `file` as a command: see the top of this module.

    `options()` are the values of flags of its own, as far as they were given: what is measured with
    them has files of its own name.
    """
    out = flags.DEFINE_string('out', 'runs/experiments', 'Directory for the JSON and the figure.')
    quick = flags.DEFINE_bool('quick', False, 'Much smaller: whether it runs, not what it finds.')

    def main():
        cli.use_compilation_cache()
        cli.use_cpu_devices(cli.cpu_cores())
        directory = cli.directory('out', out.value)
        directory.mkdir(parents=True, exist_ok=True)
        record = run(pathlib.Path(file), measure, directory, quick=quick.value, options=options())
        print(describe(record))
        path = directory / file_name(file, quick.value, options())
        print(f'\nfigure: {path}.png\nnumbers: {path}.json')
        return 0

    cli.run_command(main)


def file_name(file, quick, options=None):
    """`NAME`, `NAME-quick` or `NAME-batch-1`: what is smaller does not replace the whole."""
    parts = [f'{name}-{value}' for name, value in (options or {}).items()]
    return '-'.join([pathlib.Path(file).stem, *(['quick'] if quick else []), *parts])


def run(file, measure, directory, *, quick, options=None):
    """Measures, writes a JSON file and a PNG, and returns the record that the JSON holds."""
    started = time.monotonic()
    name, identity = file_name(file, quick, options), _identity(file, quick, options)
    probe = directory / f'.{name}'
    write_atomically(probe, '')  # before hours of work: a place that cannot be written to
    probe.unlink()
    workdir = directory / f'{file_name(file, quick)}-{_digest(_package())[:8]}'
    outcome = measure(Setting(quick, directory, workdir))
    whole = outcome.whole if outcome.whole is not None else not quick
    claims = [dataclasses.asdict(claim) for claim in outcome.claims]
    record = {
        **identity,
        'seconds': round(time.monotonic() - started, 1),
        'finished': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'environment': {'command': shlex.join(['python', *sys.argv])} | describe_machine(),
        'claims': claims if whole else [own | {'verdict': 'not decided'} for own in claims],
        'tables': [list(table) for table in outcome.tables],
        'numbers': outcome.numbers,
    }
    record = json.loads(json.dumps(record, default=_as_json))
    write_atomically(directory / f'{name}.png', png(outcome.figure))
    write_json(directory / f'{name}.json', record)  # last: whoever finds it has both
    return record


def on_all_devices(function, jobs):
    """[function(*job) for job in jobs], as many at once as jax has devices: a CPU's are its cores.

    The function must wait for its result, by making it NumPy's for instance.
    """
    free = queue.SimpleQueue()
    for device in jax.devices():
        free.put(device)

    def run_one(job):
        device = free.get()
        try:
            with jax.default_device(device):
                return function(*job)
        finally:
            free.put(device)

    with concurrent.futures.ThreadPoolExecutor(len(jax.devices())) as pool:
        return list(pool.map(run_one, jobs))


def interleaved_times(functions, rounds, warm_ups=2):
    """Seconds of each round of each function, {name: array}, from {name: function}.

    The functions, which take nothing, have turns: whatever else slows the machine down slows all of
    them alike. Before each there is a pause, since the threads of the one before look for more work
    for some milliseconds, on cores that the next one needs. Results are waited for. The warm-ups,
    in which programs compile, are not counted.
    """
    seconds = {name: [] for name in functions}
    for _ in range(warm_ups + rounds):
        for name, function in functions.items():
            time.sleep(0.05)
            started = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - started)
    return {name: np.array(own[warm_ups:]) for name, own in seconds.items()}


def read(file, directory, *, quick):
    """The record of an earlier run of the same code, or None; None also for a damaged one."""
    path = directory / file_name(file, quick)
    try:
        record = json.loads(path.with_name(f'{path.name}.json').read_text(encoding='utf-8'))
        for claim in record['claims']:
            Claim(**claim)
        datetime.datetime.fromisoformat(record['finished'])
        record['environment']['git_commit'], record['environment']['git_clean']
        picture = path.with_name(f'{path.name}.png').read_bytes()
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    same = _identity(file, quick).items() <= record.items()
    return record if same and picture.startswith(b'\x89PNG') else None


def _identity(file, quick, options=None):
    return {
        'experiment': file.stem,
        'quick': quick,
        'options': options or {},
        'code_sha256': code_hash(file),
    }


def code_hash(file):
    """A digest of the script, its configurations, the package and the statistics of reports.

    That is all that it computes with. Comments, docstrings and layout do not count: a sentence that
    was put right makes no measurement old.
    """
    package = pathlib.Path(__file__).parent
    own = [file, *sorted(configurations(file, package.parent / 'configs'))]
    judging = [pathlib.Path(__file__), package / 'report' / 'statistics.py']
    return _digest([*own, *judging, *_package()])


def _package():
    package = pathlib.Path(__file__).parent
    rooms = ('model', 'data', 'training', 'inference', 'analysis')
    return sorted(path for room in rooms for path in (package / room).rglob('*.py'))


def _digest(files):
    return hashlib.sha256('\0'.join(_code(f.read_bytes()) for f in files).encode()).hexdigest()


@functools.cache
def _code(source):
    """What Python understands of a file, without docstrings, as text."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return ast.dump(tree)


def configurations(file, directory):
    """The files of `from configs import …` in a script, and of those in them."""
    found = {
        directory / f'{alias.name}.py'
        for node in ast.parse(file.read_bytes()).body
        if isinstance(node, ast.ImportFrom) and node.module == 'configs'
        for alias in node.names
    }
    return found.union(*(configurations(path, directory) for path in found))


def describe(record):
    """The tables and verdicts of a record, for a terminal."""
    parts = [
        f'{title}\n\n{tabulate(rows, headers=headers, disable_numparse=True)}'
        for title, headers, rows in record['tables']
    ]
    for claim in record['claims']:
        theirs = f'   there: {claim["theirs"]}\n' if claim['theirs'] else ''
        parts.append(
            f'{claim["source"]}: {claim["text"]}\n{theirs}   here:  {claim["ours"]}\n'
            f'   → {claim["verdict"]}'
        )
    return '\n\n'.join(parts)


def _as_json(value):
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f'{value!r} does not go into JSON')
