"""Figures of a sweep over two axes and more: a map of the loss, and a panel for each further value.

In a panel are the first two axes. The third gives the columns of panels, what follows their rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes as Plot
from matplotlib.figure import Figure

from minigpt_jax.report import figures, tables
from minigpt_jax.report.figures import Curves, styled
from minigpt_jax.report.tables import Axes, Point

_INSIDE = 2  # how many axes a panel holds
_WIDEST = 24  # inches
_FLIPS = 0.55  # of the colour scale: behind it text is white


@styled
def loss_map(
    axes: Axes, points: Sequence[Point], metric: str = 'val_loss', unit: str = 'nats per token'
) -> Figure:
    """The mean loss at every point as a colour: first axis across, second down.

    A cell says how many of its runs did not end well. The scale ends at three times the median's
    distance from the best, so that one point far off does not bleach the others.
    """
    columns, rows, panels = _panels(points)
    across, down = _labels(points, 0), _labels(points, 1)
    cell = np.array([0.3 + 0.07 * max(5, *map(len, across)), 0.42])
    panel = np.maximum(cell * (len(across), len(down)), (1.9, 1.2))
    size = panel * (len(columns), len(rows)) + (2.2, 1.2)
    figure = Figure(figsize=np.minimum(size, _WIDEST))
    plots = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    means = [mean for point in points if (mean := point.mean(metric)) is not None]
    low, high = min(means), min(max(means), min(means) + 3 * (np.median(means) - min(means)))
    high = high if high > low else max(means)
    decimals = min(3, tables.loss_decimals(points, metric))
    for key, members in panels.items():
        plot = plots[rows.index(key[1]), columns.index(key[0])]
        image = _draw_map(plot, members, across, down, metric, (low, high))
        if size.max() <= _WIDEST:
            _write_cells(plot, members, across, down, metric, (low, high), decimals)
    for plot in plots[-1]:
        plot.set_xticks(range(len(across)), across)
        plot.set_xlabel(tables.axis_name(axes, 0))
    for plot in plots[:, 0]:
        plot.set_yticks(range(len(down)), down)
        plot.set_ylabel(tables.axis_name(axes, 1))
    _name_panels(plots, axes, columns, rows)
    figure.colorbar(
        image,
        ax=plots,
        label=f'{tables.METRICS[metric].name}, mean of seeds ({unit})',
        extend='max' if high < max(means) else 'neither',
    )
    return figure


def _draw_map(plot: Plot, members, across, down, metric, limits):
    loss_RC = np.full((len(down), len(across)), np.nan)
    for point in members:
        mean = point.mean(metric)
        loss_RC[_cell(point, across, down)] = np.nan if mean is None else mean
    plot.set_facecolor('#DDDDDD')  # where no run ended well
    plot.grid(False)
    return plot.imshow(loss_RC, cmap='Oranges', vmin=limits[0], vmax=limits[1], aspect='auto')


def _write_cells(plot: Plot, members, across, down, metric, limits, decimals):
    low, high = limits
    for point in members:
        row, column = _cell(point, across, down)
        mean = point.mean(metric)
        lost = [r['status'] for r in point.rows if r['status'] != 'ok']
        lines = [] if mean is None else [f'{mean:.{decimals}f}']
        if lost:
            word = lost[0] if len(set(lost)) == 1 else 'lost'
            lines.append(word if mean is None else f'{len(lost)} of {len(point.rows)} {word}')
        dark = mean is not None and mean > low + _FLIPS * (high - low)
        plot.text(
            column, row, '\n'.join(lines), ha='center', va='center', fontsize=8 if not lost else 6,
            color='white' if dark else 'black',
        )  # fmt: skip


@styled
def curve_panels(
    axes: Axes,
    points: Sequence[Point],
    curves: Curves,
    unit: str = 'nats per token',
) -> Figure:
    """Validation loss against the step, a panel for each value of the third axis and of the rest.

    Thin lines are runs, thick ones their mean.
    """
    columns, rows, panels = _panels(points)
    inside = list(dict.fromkeys(_label(point, 0, _INSIDE) for point in points))
    colours = dict(zip(inside, figures.series_colours(len(inside)), strict=True))
    figure = Figure(figsize=(min(_WIDEST, 2 + 3 * len(columns)), min(_WIDEST, 1 + 2.3 * len(rows))))
    plots = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    for key, members in panels.items():
        plot = plots[rows.index(key[1]), columns.index(key[0])]
        for point in members:
            colour = colours[_label(point, 0, _INSIDE)]
            figures.plot_curves(plot, point, curves, 'val_loss', colour)
    figures.cut_the_start(plots[0, 0], points, curves, ('val_loss',))
    for plot in plots[-1]:
        plot.set_xlabel('step')
    for plot in plots[:, 0]:
        plot.set_ylabel(f'val loss ({unit})')
    _name_panels(plots, axes, columns, rows)
    for label, colour in colours.items():
        plots[0, 0].plot([], [], color=colour, linewidth=1.4, label=label)
    figures.legend_below(figure, plots[0, 0], _names(axes, 0, _INSIDE))
    return figure


def _panels(points):
    """(values of the columns, values of the rows, {(column, row): points}), values as text."""
    panels: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        key = _label(point, _INSIDE, _INSIDE + 1), _label(point, _INSIDE + 1, None)
        panels.setdefault(key, []).append(point)
    columns, rows = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
    return columns, rows, panels


def _name_panels(plots, axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    """What the further axes are stands above the columns and before the label of the rows."""
    third, further = _names(axes, _INSIDE, _INSIDE + 1), _names(axes, _INSIDE + 1, None)
    if third:
        for plot, column in zip(plots[0], columns, strict=True):
            plot.set_title(f'{third} {column}', fontsize=8)
    if further:
        for plot, row in zip(plots[:, 0], rows, strict=True):
            plot.set_ylabel(f'{further} {row}\n{plot.get_ylabel()}')


def _cell(point: Point, across: Sequence[str], down: Sequence[str]) -> tuple[int, int]:
    return down.index(tables.axis_value(point, 1)), across.index(tables.axis_value(point, 0))


def _labels(points: Sequence[Point], index: int) -> list[str]:
    return list(dict.fromkeys(tables.axis_value(point, index) for point in points))


def _label(point: Point, start: int, stop: Any) -> str:
    indices = range(len(point.values))[start:stop]
    return ', '.join(figures.shorten(tables.axis_value(point, i)) for i in indices)


def _names(axes: Axes, start: int, stop: Any) -> str:
    return ', '.join(tables.axis_name(axes, i) for i in range(len(axes))[start:stop])
