"""Rows of runs, points of rows, and tables for the terminal and for Markdown.

A row is the `summary.json` of a run: a flat dict with the columns of `results.csv` and, beside
them, `axes`, the values that the sweep's axes have at its point.
"""

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from minigpt_jax.report import statistics

COLUMNS = (
    'point',
    'seed',
    'num_heads',
    'd_head',
    'd_model',
    'num_layers',
    'norm_placement',
    'positions',
    'num_params',
    'steps',
    'tokens_seen',
    'train_loss',
    'val_loss',
    'val_perplexity',
    'bits_per_byte',
    'tokens_per_second',
    'step_ms',
    'flops_per_token',
    'peak_memory_mb',
    'compile_s',
    'train_s',
    'status',
    'error',
    'encoder_layers',
    'exact_match',
    'bleu',
)
# A slug may look like a number, and stays text.
_TEXT_COLUMNS = ('point', 'norm_placement', 'positions', 'status', 'error')


@dataclass(frozen=True)
class Metric:
    """What a column of losses is called, and its unit."""

    name: str
    unit: str
    header: str


METRICS = {
    'val_loss': Metric('validation loss', 'nats per token', 'val loss'),
    'bits_per_byte': Metric('validation loss', 'bits per byte', 'bits/byte'),
}

Axes = Sequence[tuple[str, ...]]
Table = tuple[list[str], list[list[str]]]  # headers, rows


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}.')
    try:
        with os.fdopen(descriptor, 'wb') as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp's files are private, a report is not
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_results_csv(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """One line a run: `COLUMNS`, then further keys as they come; missing or None is empty.

    What the axes of a sweep say of a row stands under the last part of their keys.
    """
    rows = [_axis_columns(row) | row for row in rows]
    further = {key: None for row in rows for key in row if key not in (*COLUMNS, 'axes')}
    columns = [*COLUMNS, *further]
    text = io.StringIO(newline='')
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(columns)
    writer.writerows([row.get(column) for column in columns] for row in rows)
    write_atomically(path, text.getvalue())


def _axis_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    axes = row.get('axes') or {}
    names = short_names([tuple(axes)])
    return {names[key]: value for key, value in axes.items()}


def read_results_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a `results.csv`: numbers as int or float, empty cells as None."""
    with open(path, newline='', encoding='utf-8') as file:
        return [
            {key: _parse(key, text) for key, text in row.items()} for row in csv.DictReader(file)
        ]


def _parse(column: str, text: str) -> Any:
    if text == '':
        return None
    if column not in _TEXT_COLUMNS:
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    return text


@dataclass(frozen=True)
class Point:
    """A combination of the axes other than seed, with the rows of its runs."""

    name: str  # the slug: its value in the column `point`
    values: tuple[tuple[Any, ...], ...]  # an entry an axis, in it one a configuration key
    rows: tuple[Mapping[str, Any], ...]

    def by_seed(self, column: str) -> dict[int, float]:
        """The finite numbers of its runs that ended well, `{seed: value}`."""
        return {
            row.get('seed'): float(row[column])
            for row in self.rows
            if row.get('status') == 'ok' and is_finite(row.get(column))
        }

    def mean(self, column: str) -> float | None:
        """Mean over its runs that ended well, None without any."""
        values = self.by_seed(column).values()
        return float(np.mean(list(values))) if values else None


def group_points(axes: Axes, rows: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Rows grouped by `point`, in order of first appearance."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get('point'), []).append(row)
    return [
        Point(
            name,
            tuple(tuple((group[0].get('axes') or {}).get(key) for key in axis) for axis in axes),
            tuple(group),
        )
        for name, group in groups.items()
    ]


def is_finite(value: Any) -> bool:
    """Whether a cell holds a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def short_names(axes: Axes) -> dict[str, str]:
    """The last part of each configuration key, or the whole key where that is ambiguous."""
    keys = [key for axis in axes for key in axis]
    short = [key.rsplit('.', 1)[-1] for key in keys]
    return {
        key: name if short.count(name) == 1 else key for key, name in zip(keys, short, strict=True)
    }


def value_text(value: Any) -> str:
    """A configuration value as people write it: 0.001, none, 128, [1, 2]."""
    if value is None:
        return 'none'
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f'{value:g}'
    return json.dumps(value, ensure_ascii=False)


def axis_name(axes: Axes, index: int) -> str:
    """The keys of an axis, `num_heads` or `num_heads, d_model`."""
    names = short_names(axes)
    return ', '.join(names[key] for key in axes[index])


def axis_value(point: Point, index: int) -> str:
    """What a point has on an axis, `4` or `4, 128`."""
    return ', '.join(value_text(value) for value in point.values[index])


def point_title(axes: Axes, point: Point) -> str:
    """A point in words, `num_heads = 4, positions = rotary`; its slug where nothing is swept."""
    names = short_names(axes)
    return ', '.join(
        f'{names[key]} = {value_text(value)}'
        for axis, values in zip(axes, point.values, strict=True)
        for key, value in zip(axis, values, strict=True)
    ) or str(point.name)


def number(value: Any, digits: int = 4) -> str:
    """For people: `digits` significant digits, thousands separated, `–` for nothing."""
    if value is None:
        return '–'
    if not is_finite(value):
        return str(value)
    if value == 0 or isinstance(value, int):
        return f'{value:,}'
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4 or magnitude >= 15:
        return f'{value:.{digits - 1}e}'
    return f'{value:,.{max(0, digits - 1 - magnitude)}f}'


def p_text(p_value: float | None, equals: str = '') -> str:
    """A p value with two significant digits, and no more than it can bear: `< 0.001`."""
    if p_value is None:
        return '–'
    return '< 0.001' if p_value < 0.001 else f'{equals}{p_value:.2g}'


def loss_decimals(points: Sequence[Point], metric: str) -> int:
    """Decimals that show two digits of the median half width, so that a column lines up."""
    half_widths = [statistics.mean_interval(point.by_seed(metric).values())[1] for point in points]
    half_widths = [half_width for half_width in half_widths if half_width]
    if not half_widths:
        return 3
    return min(5, max(2, 1 - math.floor(math.log10(np.median(half_widths)))))


def with_interval(mean: float | None, half_width: float | None, decimals: int) -> str:
    """`1.934 ± 0.021`, or the mean alone under three seeds."""
    if mean is None or math.isnan(mean):
        return '–'
    return f'{mean:.{decimals}f}' + ('' if half_width is None else f' ± {half_width:.{decimals}f}')


def point_table(
    axes: Axes,
    points: Sequence[Point],
    columns: Mapping[str, str],
    metric: str = 'val_loss',
    digits: int = 3,
) -> Table:
    """A row a point: axis values, runs, the metric's mean ± half width, the paired difference.

    `columns` gives further columns, `{column of results.csv: header}`, as means over the runs
    with `digits` significant digits.
    """
    by_seed = {point.name: point.by_seed(metric) for point in points}
    comparisons = {c.point: c for c in statistics.paired_differences(by_seed)}
    best = statistics.best_point(by_seed)
    decimals = loss_decimals(points, metric)
    headers = [axis_name(axes, i) for i in range(len(axes))]
    headers += ['runs', METRICS[metric].header]
    compared = len(points) > 1
    if compared:
        headers += ['vs best', 'p (Holm)']
    headers += columns.values()
    rows = []
    for point in points:
        mean, half_width = statistics.mean_interval(by_seed[point.name].values())
        row = [axis_value(point, i) for i in range(len(axes))]
        row += [str(len(by_seed[point.name])), with_interval(mean, half_width, decimals)]
        if compared:
            row += _difference_cells(comparisons.get(point.name), point.name == best, decimals)
        row += [mean_text(point, column, digits) for column in columns]
        rows.append(row)
    return headers, rows


def mean_text(point: Point, column: str, digits: int = 3) -> str:
    """The mean of a column over a point's runs; a count that all runs share stays exact."""
    values = set(point.by_seed(column).values())
    if len(values) == 1 and (value := values.pop()).is_integer():
        return f'{value:,.0f}'
    return number(point.mean(column), digits)


def _difference_cells(
    comparison: statistics.Comparison | None, is_best: bool, decimals: int
) -> list[str]:
    if comparison is None:
        return ['best' if is_best else '–', '–']
    return [difference_text(comparison, decimals), p_text(comparison.p_holm)]


def difference_text(comparison: statistics.Comparison, decimals: int) -> str:
    """`+0.031 [+0.012, +0.050]`: the mean difference and its interval."""
    text = f'{comparison.difference:+.{decimals}f}'
    if comparison.half_width is not None:
        low = comparison.difference - comparison.half_width
        high = comparison.difference + comparison.half_width
        text += f' [{low:+.{decimals}f}, {high:+.{decimals}f}]'
    return text


def parameter_table(parameters: Iterable[tuple[str, Sequence[int], int, str]]) -> str:
    """For the start of training: a line a parameter, and the totals.

    Args:
        parameters: name, shape, how many of its numbers a device holds, and how it is split. Where
            none is split, the last two are left out.
    """
    parameters = list(parameters)
    rows = [
        [name, ' × '.join(map(str, shape)) or 'scalar', f'{math.prod(shape):,}', f'{held:,}', split]
        for name, shape, held, split in parameters
    ]
    total = sum(math.prod(shape) for _, shape, _, _ in parameters)
    rows.append(['total', '', f'{total:,}', f'{sum(held for _, _, held, _ in parameters):,}', ''])
    headers = ['parameter', 'shape', 'count', 'on a device', 'split']
    shown = 5 if any(split for *_, split in parameters) else 3
    return terminal_table(headers[:shown], [row[:shown] for row in rows], text_columns=2)


def terminal_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 0
) -> str:
    """A table of ready cells for a terminal, numbers to the right."""
    return _tabulate(headers, rows, 'simple', text_columns)


def markdown_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 0
) -> str:
    """A table of ready cells for Markdown; text from outside is made literal by the caller."""
    return _tabulate(headers, rows, 'pipe', text_columns)


def _tabulate(headers, rows, style: str, text_columns: int) -> str:
    # The cells are formatted already: tabulate must not parse "1,234" or "0.10" again.
    align = ['left'] * text_columns + ['right'] * (len(headers) - text_columns)
    return tabulate(
        rows, headers, tablefmt=style, disable_numparse=True, colalign=align if rows else None
    )
