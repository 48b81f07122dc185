"""Figures of a sweep over two axes and more: a map of the loss, and a panel for each further value.

In a panel are the first two axes. The third gives the columns of panels, what follows their rows.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes as Plot
from matplotlib.figure import Figure

from minigpt_jax.report import figures, tables
from minigpt_jax.report.figures import Curves, styled
from minigpt_jax.report.tables import Axes, Point

_INSIDE = 2  # how many axes a panel holds
_WIDEST = 24  # inches
_MOST_SERIES = 12
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
    across, down = _values(points, 0), _values(points, 1)
    labels = [[figures.shorten(text) for text in values.values()] for values in (across, down)]
    cell = np.array([0.3 + 0.07 * max(5, *map(len, labels[0])), 0.42])
    panel = np.maximum(cell * (len(across), len(down)), (1.9, 1.2))
    size = panel * (len(columns), len(rows)) + (2.2, 1.2)
    size = np.clip(size, (0, 3.4), _WIDEST)  # of height as the label of the colours takes
    figure = Figure(figsize=size)
    plots = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    means = [mean for point in points if (mean := point.mean(metric)) is not None]
    low, high = min(means), min(max(means), min(means) + 3 * (np.median(means) - min(means)))
    high = high if high > low else max(means)
    decimals = min(3, tables.loss_decimals(points, metric))
    drawn_cell = (size - (2.2, 1.2)) / (len(columns) * len(across), len(rows) * len(down))
    legible = drawn_cell[0] > 0.35 and drawn_cell[1] > 0.2
    for key, members in panels.items():
        plot = plots[rows.index(key[1]), columns.index(key[0])]
        places = [
            (list(down).index(point.values[1]), list(across).index(point.values[0]))
            for point in members
        ]
        image = _draw_map(plot, members, places, (len(down), len(across)), metric, (low, high))
        if legible:
            _write_cells(plot, members, places, metric, (low, high), decimals)
    for plot in plots[-1]:
        plot.set_xticks(range(len(across)), labels[0], rotation=0 if drawn_cell[0] > 0.3 else 90)
        plot.set_xlabel(tables.axis_name(axes, 0))
    for plot in plots[:, 0]:
        plot.set_yticks(range(len(down)), labels[1])
        plot.set_ylabel(tables.axis_name(axes, 1))
    _name_panels(plots, axes, columns, rows)
    figure.colorbar(
        image,
        ax=plots,
        label=f'{tables.METRICS[metric].name}, mean of seeds ({unit})',
        extend='max' if high < max(means) else 'neither',
    )
    return figure


def _draw_map(plot: Plot, members, places, shape, metric, limits):
    loss_RC = np.full(shape, np.nan)
    for point, place in zip(members, places, strict=True):
        mean = point.mean(metric)
        loss_RC[place] = np.nan if mean is None else mean
    plot.set_facecolor('#DDDDDD')  # where no run ended well
    plot.grid(False)
    return plot.imshow(loss_RC, cmap='Oranges', vmin=limits[0], vmax=limits[1], aspect='auto')


def _write_cells(plot: Plot, members, places, metric, limits, decimals):
    low, high = limits
    for point, (row, column) in zip(members, places, strict=True):
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
    inside = list(dict.fromkeys(point.values[:_INSIDE] for point in points))
    colours = dict(zip(inside, figures.series_colours(len(inside)), strict=True))
    figure = Figure(figsize=(min(_WIDEST, 2 + 3 * len(columns)), min(_WIDEST, 1 + 2.3 * len(rows))))
    plots = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    for key, members in panels.items():
        plot = plots[rows.index(key[1]), columns.index(key[0])]
        for point in members:
            figures.plot_curves(plot, point, curves, 'val_loss', colours[point.values[:_INSIDE]])
    figures.cut_the_start(plots[0, 0], points, curves, ('val_loss',))
    for plot in plots[-1]:
        plot.set_xlabel('step')
    for plot in plots[:, 0]:
        plot.set_ylabel(f'val loss ({unit})')
    _name_panels(plots, axes, columns, rows)
    for values, colour in colours.items():
        label = ', '.join(figures.shorten(_text(own)) for own in values)
        plots[0, 0].plot([], [], color=colour, linewidth=1.4, label=label)
    title = ', '.join(tables.axis_name(axes, i) for i in range(_INSIDE))
    figures.legend_below(figure, plots[0, 0], title)
    return figure


def fits_panels(points: Sequence[Point]) -> bool:
    """Whether the curves within a panel are few enough to be told apart by a legend."""
    return len({point.values[:_INSIDE] for point in points}) <= _MOST_SERIES


def _panels(points):
    """(values of the columns, values of the rows, {(column, row): points})."""
    panels: dict[tuple, list[Point]] = {}
    for point in points:
        third = point.values[_INSIDE : _INSIDE + 1]
        panels.setdefault((third, point.values[_INSIDE + 1 :]), []).append(point)
    columns, rows = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
    return columns, rows, panels


def _name_panels(plots, axes, columns, rows) -> None:
    """What the further axes are stands above the columns and before the label of the rows."""
    for plot, values in zip(plots[0], columns, strict=True):
        plot.set_title(', '.join(_named(axes, _INSIDE, values)), fontsize=8)
    for plot, values in zip(plots[:, 0], rows, strict=True):
        plot.set_ylabel('\n'.join([*_named(axes, _INSIDE + 1, values), plot.get_ylabel()]))


def _named(axes: Axes, start: int, values) -> list[str]:
    """`name value` of the axes from `start` on."""
    return [
        f'{tables.axis_name(axes, start + i)} {figures.shorten(_text(own))}'
        for i, own in enumerate(values)
    ]


def _text(values) -> str:
    return ', '.join(map(tables.value_text, values))


def _values(points: Sequence[Point], index: int) -> dict[tuple, str]:
    """{value: its text} of an axis, in the order of the sweep."""
    return {point.values[index]: _text(point.values[index]) for point in points}
