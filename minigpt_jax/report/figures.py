"""Figures of a sweep: loss against its axes, learning curves, speed and memory.

The palette is Okabe and Ito's, which colour-blind readers can tell apart; series differ in their
markers as well. Nothing here touches pyplot, so no window and no global figure is ever made.
"""

import importlib.util
import io
import math
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes as Plot
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from minigpt_jax.report import statistics, tables
from minigpt_jax.report.tables import Axes, Point

DPI = 150
PALETTE = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000', '#8C8C8C')
MARKERS = 'osD^vPX*'
_LONGEST_LABEL = 28  # characters; longer ones, such as paths, lose their middle


def _font_families() -> list[str]:
    """DejaVu Sans, then Noto Sans KR for Hangul where the package that carries it is installed.

    Many machines, Colab's among them, have no Korean font at all. `pylopdf-fonts-ko` is nothing but
    the font (SIL Open Font License) in a wheel. Without it figures are drawn all the same.
    """
    families = ['DejaVu Sans']
    package = importlib.util.find_spec('pylopdf_fonts_ko')
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / 'NotoSansKR-Regular.otf'
        if path.exists():
            font_manager.fontManager.addfont(path)
            families.append(font_manager.FontProperties(fname=path).get_name())
    return families


STYLE = {
    'font.family': _font_families(),
    'font.size': 9,
    'axes.titlesize': 10,
    'axes.titlelocation': 'left',
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.color': '#E5E5E5',
    'axes.axisbelow': True,
    'legend.frameon': False,
    'figure.constrained_layout.use': True,
    'text.parse_math': False,  # a value of a configuration may hold dollar signs
}
styled = matplotlib.rc_context(STYLE)


@styled
def png(figure: Figure) -> bytes:
    """The figure as PNG. It holds no date, so the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=DPI)
    return buffer.getvalue()


@styled
def loss_figure(
    axes: Axes,
    points: Sequence[Point],
    metric: str = 'val_loss',
    unit: str = 'nats per token',
) -> Figure:
    """The metric against the first axis: a dot a run, the mean, its 95 % interval as a bar."""
    figure = Figure(figsize=(7, 4.2))
    plot = figure.subplots()
    positions = _against_axis(plot, axes, points, metric)
    _mark_diverged(plot, positions, points)
    plot.set_ylabel(f'{tables.METRICS[metric].name} ({unit})')
    several = any(len(point.by_seed(metric)) > 1 for point in points)
    means = ', the marker their mean, the bar its 95 % interval' if several else ''
    plot.set_title(f'A dot is a run{means}')
    legend_below(figure, plot, _names(axes[1:]))
    return figure


@styled
def cost_figure(axes: Axes, points: Sequence[Point]) -> Figure:
    """Tokens per second and the compiler's memory figure against the first axis."""
    figure = Figure(figsize=(9, 4.2))
    speed, memory = figure.subplots(1, 2)
    _against_axis(speed, axes, points, 'tokens_per_second')
    speed.set_title('Training speed')
    speed.set_ylabel('tokens per second')
    _against_axis(memory, axes, points, 'peak_memory_mb')
    memory.set_title('Memory of a training step')
    memory.set_ylabel("MB per device (compiler's figure)")
    for plot in (speed, memory):
        top = 1.02 * plot.get_ylim()[1]
        plot.set_ylim(0, top)
        plot.yaxis.set_major_formatter('{x:,.0f}' if top > 10 else '{x:g}')
    legend_below(figure, speed, _names(axes[1:]))
    return figure


@styled
def attention_figure(
    weights: np.ndarray, keys: Sequence[str], queries: Sequence[str], title: str
) -> Figure:
    """Attention weights, 0 white: a row for each query, a column for each key."""
    size = 0.2 * np.array([len(keys), len(queries)]) + (2.2, 1.3)
    figure = Figure(figsize=np.clip(size, (4.5, 2.5), (24, 24)))
    plot = figure.subplots()
    image = plot.imshow(weights, cmap='Blues', vmin=0, aspect='auto')
    plot.set_xticks(range(len(keys)), map(_visible, keys))
    for label in plot.get_xticklabels():
        label.set_rotation(90 if len(label.get_text()) > 2 else 0)
    plot.set_yticks(range(len(queries)), map(_visible, queries))
    plot.set_xlabel('attended to (source)')
    plot.set_ylabel('chosen (target)')
    plot.set_title(title, fontsize=8)
    plot.grid(False)
    figure.colorbar(image, ax=plot, label='attention weight')
    return figure


def _visible(token: str) -> str:
    """A token as a label: a space and a line's end would not be seen."""
    return token.replace(' ', '␣').replace('\n', '⏎')


Curve = Sequence[tuple[int, float]]  # (step, loss)
# (point, seed): {'train_loss': curve, 'val_loss': curve}
Curves = Mapping[tuple[str, int], Mapping[str, Curve]]


@styled
def learning_curves(
    axes: Axes,
    points: Sequence[Point],
    curves: Curves,
    metric: str = 'val_loss',
    unit: str = 'nats per token',
) -> Figure:
    """Training and validation loss against the step: a thin line a run, a thick one their mean.

    With a metric other than the loss of a token, tokens differ between points, and the figure says
    so. `unit` is that of losses.
    """
    figure = Figure(figsize=(9, 4.4))
    plots = figure.subplots(1, 2, sharex=True, sharey=True)
    points = [point for point in points if any(name == point.name for name, _ in curves)]
    colours = series_colours(len(points))
    for plot, column in zip(plots, ('train_loss', 'val_loss'), strict=True):
        for point, colour in zip(points, colours, strict=True):
            plot_curves(plot, point, curves, column, colour)
        plot.set_xlabel('step')
        plot.xaxis.set_major_formatter('{x:,.0f}')
    plots[0].set_title('Training (batches as logged)')
    plots[1].set_title('Validation')
    differ = ', which differ' if metric != 'val_loss' else ''
    plots[0].set_ylabel(f'loss ({unit}{differ})')
    cut_the_start(plots[0], points, curves, ('train_loss', 'val_loss'))
    _name_colours(figure, plots, axes, points, colours)
    return figure


def plot_curves(plot: Plot, point: Point, curves: Curves, column: str, colour: Any) -> None:
    """The runs of a point; the mean is over those that ended well, as in the tables."""
    runs = [(curves.get((point.name, row.get('seed')), {}).get(column), row) for row in point.rows]
    for run, _ in runs:
        finite = [(step, loss) for step, loss in run or () if math.isfinite(loss)]
        if finite:
            plot.plot(*zip(*finite, strict=True), color=colour, linewidth=0.6, alpha=0.4)
        if finite and len(finite) < len(run):
            plot.plot(*finite[-1], 'x', color=colour, markersize=7)
    complete = [dict(run) for run, row in runs if run and row.get('status') == 'ok']
    if complete:
        steps = sorted(set.intersection(*map(set, complete)))
        means = [np.mean([run[step] for run in complete]) for step in steps]
        marker = 'o' if len(steps) <= 30 else None
        plot.plot(steps, means, color=colour, linewidth=1.4, marker=marker, markersize=2.5)


def cut_the_start(
    plot: Plot, points: Sequence[Point], curves: Curves, columns: Sequence[str]
) -> None:
    """Ends the loss axis where the first quarter of training leaves it, to show what differs.

    A run on its way to infinity does not set the scale.
    """
    logged = [
        pair
        for point in points
        for row in point.rows
        if row.get('status') == 'ok'
        for column in columns
        for pair in curves.get((point.name, row.get('seed')), {}).get(column, ())
    ]
    last = max((step for step, _ in logged), default=0)
    late = [loss for step, loss in logged if step >= last / 4 and math.isfinite(loss)]
    if late:
        margin = 0.05 * (max(late) - min(late)) or 0.1
        plot.set_ylim(min(late) - margin, max(late) + margin)


def _name_colours(figure, plots, axes: Axes, points: Sequence[Point], colours) -> None:
    labels = [_values(point, 0) or 'mean of seeds' for point in points]
    if len(points) <= len(PALETTE):
        for label, colour in zip(labels, colours, strict=True):
            plots[0].plot([], [], color=colour, linewidth=1.4, label=label)
        legend_below(figure, plots[0], _names(axes))
    else:
        bounds = np.arange(len(points) + 1) - 0.5
        mappable = ScalarMappable(BoundaryNorm(bounds, len(points)), ListedColormap(colours))
        bar = figure.colorbar(mappable, ax=plots, ticks=range(len(points)), pad=0.01)
        bar.ax.set_yticklabels(labels, fontsize=7 if len(points) <= 30 else 5)
        bar.set_label(_names(axes))
        bar.ax.minorticks_off()


def _against_axis(plot: Plot, axes: Axes, points: Sequence[Point], column: str) -> dict[Any, float]:
    """Every run a dot, a marker for the mean, a bar for the interval; further axes as series.

    Returns where the values of the first axis stand.
    """
    positions, spacing = _place_axis(plot, axes, points)
    series: dict[str, list[Point]] = {}
    for point in points:
        series.setdefault(_values(point, 1), []).append(point)
    colours = series_colours(len(series))
    ordered = bool(axes) and _is_numeric(points)
    step = spacing * min(0.14, 0.6 / len(series))
    for index, (label, members) in enumerate(series.items()):
        shift = (index - (len(series) - 1) / 2) * step
        drawn = []
        for point in members:
            values = list(point.by_seed(column).values())
            if not values:
                continue
            x = positions[_first_value(point)] + shift
            plot.plot([x] * len(values), values, '.', color=colours[index], alpha=0.45)
            mean, half_width = statistics.mean_interval(values)
            drawn.append((x + step * 0.35, mean, half_width or 0.0))
        if not drawn:
            continue
        x, means, half_widths = zip(*sorted(drawn), strict=True)
        plot.errorbar(
            x,
            means,
            half_widths,
            fmt=MARKERS[index % len(MARKERS)] + ('-' if ordered else ''),
            color=colours[index],
            linewidth=0.8,
            elinewidth=1.4,
            capsize=3,
            markersize=5,
            label=label or None,
        )
    return positions


def _place_axis(plot: Plot, axes: Axes, points: Sequence[Point]) -> tuple[dict[Any, float], float]:
    """Where each value of the first axis stands, and the least distance; sets ticks and label.

    Numbers stand by value, or by its log2 when they are powers of two or span more than a factor
    of 8; anything else stands in the order of the sweep. The ticks are the values themselves.
    """
    values = list(dict.fromkeys(_first_value(point) for point in points))
    labels = {_first_value(p): tables.axis_value(p, 0) if axes else 'all seeds' for p in points}
    if axes and _is_numeric(points):
        numbers = [value[0] for value in values]
        logarithmic = min(numbers) > 0 and (
            max(numbers) > 8 * min(numbers) or all(math.log2(n).is_integer() for n in numbers)
        )
        positions = {v: math.log2(v[0]) if logarithmic else float(v[0]) for v in values}
    else:
        positions = {value: float(i) for i, value in enumerate(values)}
    places = np.sort(list(positions.values()))
    spacing = float(np.diff(places).min()) if len(places) > 1 else 1.0
    shown = [shorten(labels[value]) for value in values]
    plot.set_xticks([positions[value] for value in values], shown)
    inches = plot.get_position().width * plot.figure.get_figwidth()
    if max(map(_width, shown), default=0) * len(shown) > 13 * inches:  # letters an inch
        # Slanted lines need twice their height of the axis each, upright ones just their height.
        angle = 30 if inches / len(shown) > 0.35 else 90
        for label in plot.get_xticklabels():
            label.set(rotation=angle, ha='right', va='center' if angle == 90 else 'top')
            label.set_rotation_mode('anchor')
    if len(places):
        plot.set_xlim(places[0] - 0.6 * spacing, places[-1] + 0.6 * spacing)
    plot.set_xlabel(tables.axis_name(axes, 0) if axes else '')
    plot.grid(axis='x', visible=False)
    return positions, spacing


def _first_value(point: Point) -> Any:
    """A hashable form of the first axis's value."""
    values = point.values[0] if point.values else ()
    return tuple(v if isinstance(v, int | float) else tables.value_text(v) for v in values)


def _names(axes: Axes) -> str:
    return ', '.join(tables.axis_name(axes, i) for i in range(len(axes)))


def _values(point: Point, start: int) -> str:
    """What a point has on the axes from `start` on, as an entry of a legend."""
    return ', '.join(shorten(tables.axis_value(point, i)) for i in range(start, len(point.values)))


def _is_numeric(points: Sequence[Point]) -> bool:
    """Whether the first axis is one key with numbers; True and False are names."""
    return all(
        len(point.values[0]) == 1
        and tables.is_finite(point.values[0][0])
        and not isinstance(point.values[0][0], bool)
        for point in points
    )


def _mark_diverged(plot: Plot, positions: Mapping[Any, float], points: Sequence[Point]) -> None:
    """A cross above every value of the first axis with diverged runs."""
    diverged = {
        positions[_first_value(point)]
        for point in points
        if any(row.get('status') == 'diverged' for row in point.rows)
    }
    if diverged:
        low, high = plot.get_ylim()
        plot.set_ylim(low, high + 0.1 * (high - low))
        style = {'color': '#B00020', 'markersize': 8, 'markeredgewidth': 2, 'label': 'run diverged'}
        height = [0.96] * len(diverged)
        plot.plot(sorted(diverged), height, 'x', transform=plot.get_xaxis_transform(), **style)


def series_colours(count: int) -> list[Any]:
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    return list(matplotlib.colormaps['viridis'](np.linspace(0, 0.92, count)))


def legend_below(figure: Figure, plot: Plot, title: str) -> None:
    handles, labels = plot.get_legend_handles_labels()
    if not labels:
        return
    width = figure.get_figwidth()
    columns = int(width * 14 / (max(map(_width, labels)) + 8))
    columns = max(1, min(len(labels), columns))
    rows = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * rows)
    figure.legend(handles, labels, loc='outside lower center', ncols=columns, title=title or None)


def _width(text: str) -> int:
    """Columns that a text takes; Hangul takes two a letter."""
    return sum(2 if unicodedata.east_asian_width(letter) in 'WF' else 1 for letter in text)


def shorten(text: str, length: int = _LONGEST_LABEL) -> str:
    if len(text) <= length:
        return text
    head = (length - 1) // 3
    return text[:head] + '…' + text[head + 1 - length :]
