"""Many runs: the points of a sweep, one after the other, and their report."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math

import filelock
import jax
from ml_collections import ConfigDict

from minigpt_jax.data import DataError
from minigpt_jax.report.tables import parameter_table
from minigpt_jax.training import planning, preemption, processes, sharding, steps
from minigpt_jax.training.config import (
    ConfigError,
    DamagedError,
    ImpossibleError,
    RunError,
    describe_environment,
    differences,
    read_config,
    read_json,
    resolve,
    train_command,
    with_values,
    write_config,
    write_json,
)
from minigpt_jax.training.loop import Program, model_columns, seed_mode, train
from minigpt_jax.training.optim import check_rules_match, parameter_name
from minigpt_jax.training.tasks import SHARED_BY, TASKS

FINISHED = ('ok', 'diverged')


@dataclasses.dataclass(frozen=True)
class Point:
    """A combination of a sweep's axes other than seed.

    Attributes:
      slug: its directory below `points/`; None where there is no sweep.
      values: {'model.num_heads': 4, …}.
      config: resolved, but for the seed; None if impossible.
      error: why it is impossible.
    """

    slug: str | None
    values: dict
    seeds: tuple
    config: ConfigDict | None
    error: str | None = None

    def run_dir(self, workdir, seed):
        if self.slug is None:
            return workdir
        return workdir / 'points' / self.slug / f'seed-{seed}'


_OTHER_TASKS = (
    'model.family',
    'data.corpus',
    'data.path',
    'data.source_language',
    'data.target_language',
)


def read_axes(sweep):
    """The axes of `config.sweep`, checked: a list of (keys, rows), each row a value for each key.

    Raises:
      ConfigError: naming the axis whose structure is wrong.
    """
    example = "(('model.num_heads', (1, 2, 4)), ('seed', (0, 1, 2)))"
    axes = []
    for axis in sweep:
        if not (isinstance(axis, tuple | list) and len(axis) == 2):
            raise ConfigError(
                f'sweep: {axis!r} is not an axis; an axis is (key, values): {example}'
            )
        keys, rows = axis
        joint = not isinstance(keys, str)
        if joint and not (isinstance(keys, tuple | list) and all(isinstance(k, str) for k in keys)):
            raise ConfigError(f'sweep: {keys!r} is neither a key nor several: {example}')
        if not isinstance(rows, tuple | list) or not rows:
            raise ConfigError(f'sweep: the values of {keys!r} must be a tuple such as (1, 2, 4)')
        keys = tuple(keys) if joint else (keys,)
        rows = [row if joint else (row,) for row in rows]
        for row in rows:
            if not isinstance(row, tuple | list) or len(row) != len(keys):
                raise ConfigError(f'sweep: {row!r} must have a value for each of {keys}')
        if len(set(map(repr, rows))) < len(rows):
            raise ConfigError(f'sweep: a value of {" and ".join(keys)} stands twice')
        axes.append((keys, rows))
    names = [key for keys, _ in axes for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'sweep: {name} is on two axes')
        if name == 'sweep' or name.startswith('mesh.') or name == 'train.seeds':
            raise ConfigError(f'sweep: {name} cannot be an axis: it is not part of an experiment')
        if name in _OTHER_TASKS:
            raise ConfigError(
                f'sweep: {name} cannot be an axis: losses of different tasks or texts do not '
                'compare; train each with a --workdir of its own'
            )
    if any('seed' in keys and len(keys) > 1 for keys, _ in axes):
        raise ConfigError('sweep: seed must be an axis of its own')
    return axes


def expand(config):
    """The points of a configuration, in the order of its axes; one point without a sweep.

    A point whose values contradict each other is there, with its error.

    Raises:
      ConfigError: for a wrong key, type or choice, or a sweep of the wrong structure.
    """
    axes = read_axes(config.sweep)
    seeds = next((tuple(row[0] for row in rows) for keys, rows in axes if keys == ('seed',)), None)
    for seed in seeds or ():
        with_values(config, {'seed': seed})
    axes = [axis for axis in axes if axis[0] != ('seed',)]
    points = []
    for rows in itertools.product(*(rows for _, rows in axes)):
        values = {
            key: value
            for (keys, _), row in zip(axes, rows, strict=True)
            for key, value in zip(keys, row, strict=True)
        }
        swept = with_values(config, values)
        names = [f'{key.split(".")[-1]}-{_safe(value)}' for key, value in values.items()]
        slug = ('_'.join(names) or 'base') if config.sweep else None
        try:
            resolved, error = resolve(swept), None
        except ImpossibleError as e:
            resolved, error = None, str(e)
        points.append(Point(slug, values, seeds or (config.seed,), resolved, error))
    slugs = [point.slug for point in points]
    if len(set(slugs)) < len(slugs):
        raise ConfigError(
            'sweep: two points would share a directory; give their values other names'
        )
    return points


def _safe(value):
    """A value as part of a directory's name; of a long one its start and a digest."""
    text = ''.join(c if c.isalnum() or c in '.+-' else '_' for c in str(value))
    if len(text.encode()) <= 40:
        return text
    return f'{text[:20]}-{hashlib.sha256(str(value).encode()).hexdigest()[:8]}'


def run(config, workdir, only_point=None, profile=None):
    """Trains every run of a configuration that is not finished, then writes the report.

    A point that is impossible or fails is recorded with its reason, and the others go on; run
    again, only those and the unfinished are tried.

    Args:
      config: as read from its file, with overrides.
      workdir: where the run, or the sweep, is kept.
      only_point: index of the only point to train, for job arrays.
      profile: (first, last) step to trace with jax.profiler, in every run that is trained.

    Returns:
      The exit status: see DESIGN.md, Commands.

    Raises:
      ConfigError, DataError, RunError: before anything is trained or written.
    """
    points = expand(config)
    _check_point(only_point, points)
    if profile and not 1 <= profile[0] <= profile[1] <= config.train.steps:
        raise ConfigError(
            f'--profile={profile[0]}:{profile[1]}: START and STOP are steps from 1 to '
            f'{config.train.steps}, START first'
        )
    if points[0].slug is None and points[0].error:
        raise ImpossibleError(points[0].error)
    _check_workdir(workdir, config if config.sweep else points[0].config)
    loaded = {}  # points mostly share a corpus
    prepared = [_prepare(point, loaded) for point in points]
    points, corpora = [point for point, _ in prepared], [corpus for _, corpus in prepared]
    _check_rules(points, corpora)
    if processes.is_leader():
        _print_parameters(points, corpora)
    for point, corpus in zip(points, corpora, strict=True):
        for seed in point.seeds if corpus else ():
            check_corpus(point.run_dir(workdir, seed), corpus)
    trained = points if only_point is None else [points[only_point]]
    pending = any(
        _status(point.run_dir(workdir, seed)) not in FINISHED
        for point in trained
        for seed in point.seeds
    )
    if pending:
        workdir.mkdir(parents=True, exist_ok=True)  # before anything is compiled
    leads = processes.is_leader()
    # A finished sweep keeps the record of the machine and the commit that made it.
    if leads and config.sweep and (pending or not (workdir / 'config.json').exists()):
        known = [corpus for corpus in corpora if corpus is not None]
        write_config(workdir, config, describe_environment(known[0]) if known else {})

    for index, (point, corpus) in enumerate(zip(points, corpora, strict=True)):
        if only_point in (None, index):
            name = f'[{index + 1}/{len(points)}] {point.slug}' if point.slug else workdir.name
            _run_point(point, corpus, workdir, name, profile)

    if leads:
        # Imported here since matplotlib takes longer to import than a finished sweep to read.
        from minigpt_jax.report.pages import write_report

        axes = [keys for keys, _ in read_axes(config.sweep) if keys != ('seed',)]
        run_dirs = [point.run_dir(workdir, seed) for point in points for seed in point.seeds]
        print('\n' + write_report(workdir, axes, run_dirs))
    statuses = {_status(point.run_dir(workdir, seed)) for point in trained for seed in point.seeds}
    good = {'ok'} if points[0].slug is None else set(FINISHED)
    return processes.agree(0 if statuses <= good else 1)


def plan(config, only_point=None, num_bytes=None):
    """Prints what a configuration, or each point of a sweep, would take: see `planning`.

    Args:
      num_bytes: the memory of a device; None where it is not known.

    Returns:
      The exit status: 1 where a point is impossible.

    Raises:
      ConfigError, DataError: of what is asked for.
    """
    points = expand(config)
    _check_point(only_point, points)
    chosen = points if only_point is None else [points[only_point]]
    impossible = 0
    for point in chosen:
        if len(chosen) > 1:
            print(f'\n== {point.slug}')
        try:
            if point.error:
                raise ImpossibleError(point.error)
            together = seed_mode(point.config) != 'separate'
            program = planning.plan(point.config, len(point.seeds) if together else 1)
        except ConfigError as error:
            if len(chosen) == 1:
                raise
            print(f'impossible: {error}')
            impossible += 1
            continue
        print(planning.describe(program, num_bytes))
    return 1 if impossible else 0


def _check_point(only_point, points):
    if only_point is not None and not 0 <= only_point < len(points):
        raise ConfigError(f'--point={only_point}: points go from 0 to {len(points) - 1}')


def cpu_devices(config, cores):
    """How many devices a CPU of so many cores should be for every point of a configuration."""
    rest = [axis for axis in sharding.AXES if config.mesh[axis] == -1]
    if not set(rest) <= set(sharding.ROWS) or not rest:
        return cores  # of which the mesh takes as many as it names, or all
    others = math.prod(config.mesh[axis] for axis in sharding.AXES if axis not in rest)
    rows_too = math.prod(config.mesh[axis] for axis in sharding.ROWS if axis not in rest)
    batch_sizes = {
        rows
        for point in expand(config)
        if point.config
        for rows in (
            point.config.data.batch_size // point.config.train.accumulation_steps
            if point.config.data.tokens_per_batch is None
            else SHARED_BY,
            point.config.eval.batch_size,
        )
    }
    if others > cores or any(rows % rows_too for rows in batch_sizes):
        return cores  # too few, or not fit for it: as is said where the mesh is made
    batch_sizes = {rows // rows_too for rows in batch_sizes}
    return others * sharding.devices_for_cores(cores // others, batch_sizes)


def _check_workdir(workdir, config):
    """Refuses a workdir of another configuration, naming the keys that differ."""
    if workdir.exists() and not workdir.is_dir():
        raise RunError(f'{workdir}: a file; --workdir takes a directory')
    old = read_config(workdir)
    if old is not None and bool(old.get('sweep')) != bool(config.sweep):
        kinds = ('a sweep', 'a single run')
        holds, asked = kinds if old.get('sweep') else reversed(kinds)
        raise RunError(
            f'{workdir}: holds {holds}, and this is {asked}; '
            f'for a fresh one: {train_command(f"{workdir}-2")}'
        )
    if old is None or not (changed := differences(old, config)):
        return
    what = '; '.join(f'{key} was {was!r}, is {now!r}' for key, (was, now) in changed.items())
    raise RunError(
        f'{workdir}: holds another configuration: {what}; '
        f'for a fresh one: {train_command(f"{workdir}-2")}'
    )


def check_corpus(run_dir, corpus):
    """Refuses to go on with a run on another text than the one that it began with."""
    path = run_dir / 'config.json'
    if not path.exists():
        return
    old = read_json(path, 'environment').get('corpus_sha256')
    if old not in (None, corpus.sha256):
        where = read_json(path, 'config')['data'].get('path')
        raise RunError(
            f'{run_dir}: began on a corpus of sha256 {old[:12]}…, which is now '
            f'{corpus.sha256[:12]}…; restore the text{f" in {where}" if where else ""}, or train '
            'in a fresh --workdir'
        )


def _prepare(point, loaded):
    """Loads the corpus of a point and checks what depends on it: (point, corpus)."""
    if point.config is None:
        return point, None
    try:
        key = json.dumps(point.config.data.to_dict())
        family = TASKS[point.config.model.family]
        corpus = loaded.get(key) or loaded.setdefault(key, family.load(point.config.data))
        mesh = sharding.make_mesh(point.config.mesh, num_seeds=len(point.seeds))
        family(point.config, corpus).check(mesh)
        _check_layout(point.config, corpus, mesh)
        return point, corpus
    except (ConfigError, DataError) as error:
        # Where no axis can be the cause, every point has this fault: say so before any training.
        causes = ('data.', 'eval.', 'model.context', 'train.accumulation')
        if not any(key.startswith(causes) for key in point.values):
            raise
        return dataclasses.replace(point, config=None, error=str(error)), None


def _check_rules(points, corpora):
    """Refuses a rule that matches a parameter of no point.

    One about biases or norms may stay where no point has any: the recipes have such a rule.
    """
    names = {}
    for point, corpus in zip(points, corpora, strict=True):
        if corpus is not None:
            if not names:
                full = {'model.use_bias': True, 'model.norm_placement': 'pre'}
                names |= _parameters(with_values(point.config, full), corpus)
            names |= _parameters(point.config, corpus)
    for point in points if names else ():
        rules = point.config.optim.rules if point.config else ()
        if complaint := check_rules_match(rules, list(names)):
            raise ConfigError(f'optim.rules: {complaint}')


def _parameters(config, corpus):
    """{name: shape and dtype} of every parameter."""
    params = steps.abstract_params(config, corpus.tokenizer.vocab_size)
    return {parameter_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}


def _check_layout(config, corpus, mesh):
    """With `mesh.uneven` refuse: raises ConfigError for a parameter that the mesh cannot split."""
    for name, x in _parameters(config, corpus).items() if config.mesh.uneven == 'refuse' else ():
        if complaints := sharding.layout(name, x.shape, mesh)[1]:
            shape = ' × '.join(map(str, x.shape))
            raise ConfigError(
                f'mesh.uneven=refuse: {name}, {shape}, is not divided evenly: {complaints[0]}; '
                'choose other sizes, or mesh.uneven=replicate'
            )


def _print_parameters(points, corpora):
    """Prints the parameters of the first possible point, and what each device holds of them."""
    for point, corpus in zip(points, corpora, strict=True):
        if corpus is not None:
            mesh = sharding.make_mesh(point.config.mesh, num_seeds=len(point.seeds))
            rows = [
                (name, x.shape, *sharding.describe_split(name, x.shape, mesh))
                for name, x in _parameters(point.config, corpus).items()
            ]
            init = steps.make_init(point.config, corpus.tokenizer.vocab_size)
            print(f'parameters of {point.slug or "the model"}:\n{parameter_table(rows)}')
            print(sharding.describe_mesh(mesh, jax.eval_shape(init, 0)) + '\n')
            return


def _status(run_dir):
    path = run_dir / 'summary.json'
    try:
        return read_json(path, 'status', str) if path.exists() else 'unfinished'
    except RunError:  # its run is asked again, and writes it anew
        return 'unfinished'


def _run_point(point, corpus, workdir, name, profile):
    """Trains the unfinished seeds of a point, together or one by one, and records failures."""
    pending = [s for s in point.seeds if _status(point.run_dir(workdir, s)) not in FINISHED]
    pending = processes.agree(pending)  # before any of them writes there
    if not pending and not processes.is_leader():
        return
    if not pending:
        print(f'{name}: finished')
        for run_dir in (point.run_dir(workdir, seed) for seed in point.seeds):
            if _status(run_dir) == 'diverged':
                error = read_json(run_dir / 'summary.json', 'error', str)
                print(f'{name} {run_dir.name}: diverged, a result, not tried again: {error}')
        return
    if point.config is None:
        _record(point, workdir, pending, 'invalid', point.error)
        return
    preemption.check()  # before anything is compiled
    groups = processes.agree(_groups(point, workdir, pending))
    sizes = [len(group) for group in groups]
    programs = {}  # by number of seeds
    for group, size in zip(groups, sizes, strict=True):
        try:
            if size not in programs:
                programs[size] = Program(point.config, corpus, size)
                programs[size].compile_s /= sizes.count(size)  # each group pays its share
            _train_group(point, programs[size], workdir, group, name, profile)
        except Exception as error:
            if jax.process_count() > 1:
                raise  # the others may be anywhere
            # A full disk, or another process at work here, will not get better by going on.
            if isinstance(error, OSError | RunError) and not isinstance(error, DamagedError):
                raise
            if point.slug is None and isinstance(error, DamagedError):
                raise
            left = [s for s in group if _status(point.run_dir(workdir, s)) not in FINISHED]
            _record(point, workdir, left, 'failed', f'{type(error).__name__}: {error}')


def _groups(point, workdir, pending):
    """The seeds that train as one program: those that began, then those that are new.

    A new seed begins at step 0, and would take the others back to it.
    """
    if seed_mode(point.config) == 'separate':
        return [[seed] for seed in pending]
    began = [seed for seed in pending if (point.run_dir(workdir, seed) / 'config.json').exists()]
    new = [seed for seed in pending if seed not in began]
    return [group for group in (began, new) if group]


def _train_group(point, program, workdir, seeds, name, profile):
    run_dirs = [point.run_dir(workdir, seed) for seed in seeds]
    with contextlib.ExitStack() as locks:
        for run_dir in run_dirs if processes.is_leader() else ():
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(run_dir / '.lock', blocking=False)
            try:
                locks.enter_context(lock)
            except filelock.Timeout:
                raise RunError(
                    f'{run_dir}: another process is training here; wait for it, or choose another '
                    '--workdir'
                ) from None
        _train_locked(point, program, run_dirs, seeds, name, profile)


def _train_locked(point, program, run_dirs, seeds, name, profile):
    if processes.is_leader():
        environment = describe_environment(program.corpus)
        for seed, run_dir in zip(seeds, run_dirs, strict=True):
            config = with_values(point.config, {'seed': seed, 'sweep': ()})
            _check_workdir(run_dir, config)
            write_config(run_dir, config, environment)
        print(
            f'{name}: seeds {", ".join(map(str, seeds))}; compiled in {program.compile_s:.1f} s, '
            f'{program.peak_memory_mb:,.0f} MiB a seed',
            flush=True,
        )
        if description := program.task.describe():
            print(description, flush=True)
    for summary in train(program, seeds, run_dirs, _identity(point), name, profile):
        if summary['error']:
            print(f'{name} seed {summary["seed"]}: {summary["status"]}: {summary["error"]}')


def _identity(point):
    return {'point': point.slug or 'base', 'axes': point.values}


def _record(point, workdir, seeds, status, error):
    """Leaves a summary of runs that came to nothing, with the reason in one line."""
    if not processes.is_leader():
        return
    error = error.splitlines()[0]
    print(f'{point.slug or "base"}: {status}: {error}', flush=True)
    for seed in seeds:
        known = model_columns(point.config) if point.config else {}
        summary = {**_identity(point), **known, 'seed': seed, 'status': status, 'error': error}
        write_json(point.run_dir(workdir, seed) / 'summary.json', summary)
