"""The report of a sweep: results.csv, report.md, report.html and figures, read from disk alone.

The page is written as Markdown and the HTML is made from it, so that both say the same. Nothing in
a page depends on the clock, so a rebuild gives the same bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minigpt_jax.report import figures, multiples, statistics, tables
from minigpt_jax.report.markup import fenced, html_page, literal
from minigpt_jax.report.records import TOKEN_KEYS, Sweep, read_sweep
from minigpt_jax.report.tables import METRICS, Axes

_STATUSES = ('ok', 'diverged', 'failed', 'invalid')
_ALPHA = 0.05
_MOST_NAMED = 3  # points in a sentence
_MODEL_COLUMNS = (
    'num_layers',
    'encoder_layers',
    'd_model',
    'num_heads',
    'norm_placement',
    'positions',
)
_OPTIMIZER_KEYS = ('learning_rate', 'schedule', 'warmup_steps', 'weight_decay', 'clip_norm')
_JUDGED = {'exact_match': 'exact match', 'bleu': 'BLEU', 'accuracy': 'accuracy'}
_TERMINAL_COLUMNS = {
    'tokens_per_second': 'tokens/s',
    'step_ms': 'step ms',
    'peak_memory_mb': 'memory MB',
    'num_params': 'parameters',
}


def write_report(workdir: Path, axes: Axes, run_dirs: Sequence[Path]) -> str:
    """Writes results.csv, report.md, report.html and figures/*.png of a sweep into `workdir`.

    Args:
        workdir: The sweep's root, with its config.json.
        axes: The axes other than seed, in order, each the tuple of keys that vary together.
        run_dirs: The directories of the runs, in the sweep's order. One without a summary.json is
            unfinished: it has no row, and the report says how many there are.

    Returns:
        What ends the terminal's output: the table of points, the conclusion, where the report is.
    """
    workdir = Path(workdir)
    sweep = read_sweep(workdir, axes, run_dirs)
    tables.write_results_csv(sweep.rows, workdir / 'results.csv')
    pictures = _draw(sweep)
    for name, data in pictures.items():
        tables.write_atomically(workdir / name, data)
    text = markdown_page(sweep, pictures)
    tables.write_atomically(workdir / 'report.md', text)
    tables.write_atomically(workdir / 'report.html', html_page(sweep.title, text, pictures))
    columns = _measured(sweep, _JUDGED) | _TERMINAL_COLUMNS
    headers, rows = tables.point_table(axes, sweep.points, columns, sweep.metric)
    parts = [tables.terminal_table(headers, rows, text_columns=len(axes))] if rows else []
    return '\n\n'.join([*parts, conclusion(sweep), f'report: {workdir / "report.html"}'])


def _draw(sweep: Sweep) -> dict[str, bytes]:
    """The figures that there are data for, by path below the working directory."""
    drawn = {}
    crowded = len(sweep.points) > len(figures.PALETTE)
    if any(sweep.by_seed().values()):
        if len(sweep.axes) > 1:
            drawn['figures/map.png'] = multiples.loss_map(
                sweep.axes, sweep.points, sweep.metric, sweep.unit
            )
        if len(sweep.axes) <= 2 or not crowded:
            drawn['figures/loss.png'] = figures.loss_figure(
                sweep.axes, sweep.points, sweep.metric, sweep.unit
            )
    if any(curve for run in sweep.curves.values() for curve in run.values()):
        if len(sweep.axes) > 2 and crowded and multiples.fits_panels(sweep.points):
            drawn['figures/curves.png'] = multiples.curve_panels(
                sweep.axes, sweep.points, sweep.curves, sweep.loss_unit
            )
        else:
            drawn['figures/curves.png'] = figures.learning_curves(
                sweep.axes, sweep.points, sweep.curves, sweep.metric, sweep.loss_unit
            )
    if any(point.by_seed('tokens_per_second') for point in sweep.points):
        drawn['figures/cost.png'] = figures.cost_figure(sweep.axes, sweep.points)
    return {name: figures.png(figure) for name, figure in drawn.items()}


def conclusion(sweep: Sweep) -> str:
    """One answer in words: the best point, and whether the differences exceed seed noise."""
    by_seed = sweep.by_seed()
    best = statistics.best_point(by_seed)
    if best is None:
        counts = _status_counts(sweep)
        return f'No run has ended well, so there is no answer ({counts or "nothing finished"}).'
    if _tokens_differ(sweep) and sweep.metric == 'val_loss':
        return (
            'The points differ in tokens, so their losses per token do not compare, and none has '
            'bits per byte: nothing is ranked.'
        )
    metric = METRICS[sweep.metric]
    mean, half_width = statistics.mean_interval(by_seed[best].values())
    value = tables.with_interval(mean, half_width, tables.loss_decimals(sweep.points, sweep.metric))
    seeds = _count(len(by_seed[best]), 'seed')
    measured = [name for name, values in by_seed.items() if values]
    if len(measured) == 1:
        title = f' of {_title(sweep, best)}' if sweep.axes else ''
        noise = '' if half_width is not None else '; too few seeds for an interval'
        return f'The {metric.name}{title} is {value} {sweep.unit} ({seeds}{noise}).'
    first = f'{_title(sweep, best)} has the lowest {metric.name} ({value} {sweep.unit}, {seeds}); '
    test = statistics.seed_noise_test(by_seed)
    if test is None:
        return first + 'too few seeds for an interval, so whether the points differ stays open.'
    verdict = 'exceed' if test.p_value < _ALPHA else 'do not exceed'
    points = 'points' if len(test.points) == len(measured) else f'{len(test.points)} of the points'
    text = f'{first}the differences between {points} {verdict} seed noise (F test, {_p(test)}).'
    comparisons = statistics.paired_differences(by_seed)
    tied = [_title(sweep, c.point) for c in comparisons if c.p_holm and c.p_holm >= _ALPHA]
    if test.p_value < _ALPHA and len(tied) > _MOST_NAMED:
        text += f' Pair by pair, {len(tied)} of the {len(comparisons)} others may be as good.'
    elif test.p_value < _ALPHA and tied:
        text += f' Pair by pair, these may be as good: {"; ".join(tied)}.'
    return text


def _p(test: statistics.FTest) -> str:
    return 'p ' + tables.p_text(test.p_value, '= ')


def _title(sweep: Sweep, name: str) -> str:
    point = next(point for point in sweep.points if point.name == name)
    return tables.point_title(sweep.axes, point)


def _count(number: int, noun: str) -> str:
    return f'{number:,} {noun}' + ('' if number == 1 else 's')


def _status_counts(sweep: Sweep) -> str:
    counts = [
        (sum(row.get('status') == status for row in sweep.rows), status) for status in _STATUSES
    ]
    counts.append((len(sweep.unfinished), 'unfinished'))
    return ', '.join(f'{count} {status}' for count, status in counts if count)


def markdown_page(sweep: Sweep, pictures: Iterable[str]) -> str:
    """The whole report as Markdown, its pictures by relative path."""
    sections = [
        f'# {literal(sweep.title)}',
        f'**{literal(conclusion(sweep))}**',
        _caveats(sweep),
        _results(sweep),
        _picture(pictures, 'figures/map.png', f'{METRICS[sweep.metric].name}: a map of all points'),
        _picture(pictures, 'figures/loss.png', f'{METRICS[sweep.metric].name} at every point'),
        _picture(pictures, 'figures/curves.png', 'learning curves of every point'),
        _differences(sweep),
        _costs(sweep),
        _picture(pictures, 'figures/cost.png', 'training speed and memory at every point'),
        _setting(sweep),
        _samples(sweep),
        _casualties(sweep),
        _environment(sweep),
    ]
    return '\n\n'.join(section for section in sections if section) + '\n'


def _caveats(sweep: Sweep) -> str:
    """What a reader must know before believing the answer."""
    notes = []
    if sweep.unfinished:
        total = len(sweep.rows) + len(sweep.unfinished)
        unfinished = len(sweep.unfinished)
        notes.append(
            f'{unfinished} of {_count(total, "run")} {_are(unfinished)} unfinished: this report is '
            'preliminary.'
        )
    lost = sum(row.get('status') != 'ok' for row in sweep.rows)
    if lost:
        notes.append(
            f'{_count(lost, "run")} did not end well and {_are(lost)} left out of every mean and '
            'test; they are named below.'
        )
    seeds = {len(values) for values in sweep.by_seed().values() if values}
    if seeds and min(seeds) < statistics.MINIMUM_SEEDS:
        notes.append(
            f'Under {statistics.MINIMUM_SEEDS} seeds there is no interval and no test: '
            'a difference may be luck.'
        )
    elif seeds and min(seeds) < 6:
        notes.append(
            f'{min(seeds)} seeds give wide intervals: a small difference can hide in them.'
        )
    test = statistics.seed_noise_test(sweep.by_seed())
    left_out = [p.name for p in sweep.points if test and p.name not in test.points]
    if left_out:
        titles = '; '.join(literal(_title(sweep, name)) for name in left_out)
        notes.append(f'The F test leaves out points with too few seeds: {titles}.')
    if test and len(test.seeds) < max(seeds):
        notes.append(f'The F test uses the {len(test.seeds)} seeds that all its points have.')
    sizes = _spread(sweep, 'num_params')
    if len(sizes) > 1:
        notes.append(
            f'The points differ in size, from {min(sizes):,.0f} to {max(sizes):,.0f} parameters: '
            'a difference in loss is not the axis alone.'
        )
    tokens = _spread(sweep, 'tokens_seen')
    if len(tokens) > 1:
        notes.append(
            f'The points saw different amounts of text, {min(tokens):,.0f} to {max(tokens):,.0f} '
            'tokens.'
        )
    if any(_is_axis(sweep, key) for key in ('data.corpus', 'data.path')):
        notes.append('The points read different texts: losses compare the texts, not only models.')
    if _tokens_differ(sweep) and sweep.metric == 'val_loss':
        notes.append('The points differ in tokens, so their losses per token do not compare.')
    elif _tokens_differ(sweep) and (unmeasured := _without(sweep, sweep.metric)):
        titles = '; '.join(literal(_title(sweep, name)) for name in unmeasured)
        notes.append(
            f'The validation text has symbols unknown to the tokenizer of {titles}: without bits '
            'per byte, left out of every comparison.'
        )
    if not _is_axis(sweep, 'optim.learning_rate') and len(sweep.points) > 1:
        rate = _config(sweep, 'optim.learning_rate')
        notes.append(
            f'Every point trained with the same learning rate{_known(rate)}. One rate for all arms '
            'is a choice: the order may change when each gets its own best rate.'
        )
    return '\n'.join(f'- {note}' for note in notes)


def _tokens_differ(sweep: Sweep) -> bool:
    return len(sweep.points) > 1 and any(_is_axis(sweep, key) for key in TOKEN_KEYS)


def _without(sweep: Sweep, column: str) -> list[str]:
    """Points with runs that ended well, none of which has the column."""
    return [p.name for p in sweep.points if p.by_seed('val_loss') and not p.by_seed(column)]


def _are(count: int) -> str:
    return 'is' if count == 1 else 'are'


def _known(value: Any) -> str:
    return '' if value is None else f' ({literal(tables.value_text(value))})'


def _spread(sweep: Sweep, column: str) -> set[float]:
    return {value for point in sweep.points for value in point.by_seed(column).values()}


def _is_axis(sweep: Sweep, key: str) -> bool:
    return any(key in axis for axis in sweep.axes)


def _measured(sweep: Sweep, columns: Mapping[str, str]) -> dict[str, str]:
    """Those of some columns that a point has, beside the metric."""
    return {
        key: header
        for key, header in columns.items()
        if key != sweep.metric and any(point.by_seed(key) for point in sweep.points)
    }


def _results(sweep: Sweep) -> str:
    if not sweep.points:
        return ''
    further = {
        'train_loss': 'train loss',
        'val_loss': 'val loss',
        'val_perplexity': 'perplexity',
        'bits_per_byte': 'bits/byte',
        **_JUDGED,
    }
    columns = _measured(sweep, further)
    table = tables.point_table(sweep.axes, sweep.points, columns, sweep.metric, digits=4)
    text = (
        f'## Results\n\n{_table(table, len(sweep.axes))}\n\n'
        f'Mean over seeds; losses in {sweep.unit}, lower is better; ± is half of the 95 % t '
        'interval.'
    )
    if len(sweep.points) > 1:
        text += (
            ' "vs best" is the difference to the best point, paired by seed, with its 95 % '
            'interval. A lucky seed moves every point the same way, so bars of two points may '
            'overlap although their paired difference is clear of zero.'
        )
    return text


def _table(table: tables.Table, text_columns: int) -> str:
    headers, rows = table
    return tables.markdown_table(
        [literal(header) for header in headers],
        [[literal(cell) for cell in row] for row in rows],
        text_columns,
    )


def _picture(pictures: Iterable[str], path: str, description: str) -> str:
    return f'![{description}]({path})' if path in pictures else ''


def _differences(sweep: Sweep) -> str:
    by_seed = sweep.by_seed()
    comparisons = statistics.paired_differences(by_seed)
    if not comparisons:
        return ''
    decimals = tables.loss_decimals(sweep.points, sweep.metric)
    rows = [
        [
            _title(sweep, c.point),
            str(c.num_seeds),
            tables.difference_text(c, decimals),
            tables.p_text(c.p_value),
            tables.p_text(c.p_holm),
        ]
        for c in comparisons
    ]
    headers = ['point', 'seeds', 'difference [95 % interval]', 'p', 'p (Holm)']
    best = literal(_title(sweep, comparisons[0].best))
    text = (
        f'## Differences to {best}\n\n'
        'The same seed sees the same batches at every point, so runs are compared seed by seed '
        f'(point − best, {sweep.unit}).\n\n{_table((headers, rows), 1)}\n\n'
    )
    if all(c.p_value is None for c in comparisons):
        return text + 'Too few seeds for an interval or a test.'
    text += (
        'p is of a two-sided paired t-test; p (Holm) is corrected for the number of comparisons, '
        'the intervals are not. The best point was picked from these same runs, which flatters it.'
    )
    test = statistics.seed_noise_test(by_seed)
    if test is not None:
        text += (
            f' Over all points at once: repeated-measures F({test.df_points}, {test.df_residual}) '
            f'= {test.statistic:.3g}, {literal(_p(test))}, with seeds as blocks. It assumes noise '
            'of the same size at every point; where that is not so, a p just below 0.05 means '
            '"perhaps".'
        )
    return text


def _costs(sweep: Sweep) -> str:
    columns = {
        'num_params': 'parameters',
        'd_head': 'd_head',
        'tokens_per_second': 'tokens/s',
        'step_ms': 'step (ms)',
        'flops_per_token': 'FLOPs/token',
        'peak_memory_mb': 'memory (MB)',
        'compile_s': 'compile (s)',
        'train_s': 'train (s)',
    }
    columns = {
        key: header
        for key, header in columns.items()
        if any(point.by_seed(key) for point in sweep.points)
    }
    if not columns:
        return ''
    headers = [tables.axis_name(sweep.axes, i) for i in range(len(sweep.axes))]
    rows = [
        [tables.axis_value(point, i) for i in range(len(sweep.axes))]
        + [tables.mean_text(point, column) for column in columns]
        for point in sweep.points
    ]
    table = _table(([*headers, *columns.values()], rows), len(sweep.axes))
    return (
        f'## Costs\n\n{table}\n\n'
        "Means over seeds. Memory is the compiler's figure for a training step, per device and "
        'seed. FLOPs are a formula, forward and backward. Where the seeds of a point train as one '
        "program, tokens/s is the whole program's and the times are divided by the seeds."
    )


def _setting(sweep: Sweep) -> str:
    """The configuration in a list; what an axis varies stands in the tables instead."""
    share = sweep.environment.get('unknown_share')
    groups = {
        'Text': {
            'corpus': _config(sweep, 'data.corpus'),
            'path': _config(sweep, 'data.path'),
            'tokenizer': _config(sweep, 'data.tokenizer'),
            'share of unknown symbols': f'{100 * share:.2g} %' if tables.is_finite(share) else None,
            'sha256': sweep.environment.get('corpus_sha256'),
        },
        'Model': {
            'family': _config(sweep, 'model.family'),
            **{column: _common(sweep, column) for column in _MODEL_COLUMNS},
            'context_length': _config(sweep, 'model.context_length'),
            'parameters': _range(sweep, 'num_params'),
        },
        'Training': {
            'steps': _range(sweep, 'steps'),
            'tokens seen': _range(sweep, 'tokens_seen'),
            'batch_size': _config(sweep, 'data.batch_size'),
            'tokens_per_batch': _config(sweep, 'data.tokens_per_batch'),
            'optimizer': _config(sweep, 'optim.name'),
            **{key: _config(sweep, f'optim.{key}') for key in _OPTIMIZER_KEYS},
        },
    }
    lines = []
    for title, values in groups.items():
        known = [
            f'{name} {literal(tables.value_text(value))}'
            for name, value in values.items()
            if value not in (None, '')
        ]
        lines += [f'- {title}: {", ".join(known)}'] if known else []
    return '## Setting\n\n' + '\n'.join(lines) if lines else ''


def _config(sweep: Sweep, key: str) -> Any:
    """A value of the configuration, None where it has none or an axis varies it."""
    value: Any = None if _is_axis(sweep, key) else sweep.config
    for part in key.split('.'):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _range(sweep: Sweep, column: str) -> str | None:
    values = _spread(sweep, column)
    if not values:
        return None
    low, high = min(values), max(values)
    return f'{low:,.0f}' if low == high else f'{low:,.0f} to {high:,.0f}'


def _common(sweep: Sweep, column: str) -> Any:
    """What all runs share in a column, None where they do not."""
    values = {row.get(column) for row in sweep.rows if row.get('status') == 'ok'}
    return values.pop() if len(values) == 1 else None


def _samples(sweep: Sweep) -> str:
    if not sweep.samples:
        return ''
    prompted = (sweep.config.get('model') or {}).get('family', 'decoder') == 'decoder'
    same = ': same prompt, same key' if prompted else ''
    parts = ['## Samples', f'One for each point, from its first seed{same}.']
    for point in sweep.points:
        if point.name in sweep.samples:
            parts.append(f'### {literal(tables.point_title(sweep.axes, point))}')
            parts.append(fenced(sweep.samples[point.name]))
    return '\n\n'.join(parts)


def _casualties(sweep: Sweep) -> str:
    """Runs that diverged, failed, were invalid or are unfinished, with reasons."""
    lines = [
        f'- {literal(_title(sweep, row.get("point")))}, seed {row.get("seed")}: '
        f'**{literal(row.get("status"))}**'
        + (f', {literal(row["error"])}' if row.get('error') else '')
        for row in sweep.rows
        if row.get('status') != 'ok'
    ]
    lines += [f'- {literal(name)}: unfinished' for name in sweep.unfinished]
    return '## Runs without a result\n\n' + '\n'.join(lines) if lines else ''


def _environment(sweep: Sweep) -> str:
    environment = dict(sweep.environment)
    command = environment.pop('command', None)
    packages = environment.pop('packages', None) or {}
    for shown_above in ('corpus_sha256', 'unknown_share'):
        environment.pop(shown_above, None)
    lines = [
        f'- {literal(key.replace("_", " "))}: {literal(tables.value_text(value))}'
        for key, value in environment.items()
        if value is not None
    ]
    if packages:
        versions = ', '.join(f'{name} {version}' for name, version in packages.items())
        lines.append(f'- packages: {literal(versions)}')
    parts = ['\n'.join(lines)] if lines else []
    if command:
        text = command if isinstance(command, str) else ' '.join(map(str, command))
        parts += ['The command that made it:', fenced(text)]
    return '\n\n'.join(['## Environment', *parts]) if parts else ''
