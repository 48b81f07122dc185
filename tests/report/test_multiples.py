"""Maps and panels: what stands in which cell."""

import itertools

import numpy as np
import pytest

from minigpt_jax.report import figures, multiples
from minigpt_jax.report.tables import Point

AXES = [('model.num_heads',), ('optim.learning_rate',), ('model.positions',), ('optim.name',)]
VALUES = [(1, 2, 4), (1e-3, 3e-3), ('none', 'rotary'), ('adamw', 'muon')]


def grid(number, lost=None):
    """Points over the first axes, in order, three seeds each: the point's place is its loss."""
    return [
        Point(
            f'p{i}',
            tuple((value,) for value in values),
            tuple(
                {'seed': seed, 'status': (lost or {}).get((i, seed), 'ok'), 'val_loss': float(i)}
                for seed in range(3)
            ),
        )
        for i, values in enumerate(itertools.product(*VALUES[:number]))
    ]


def panels(figure):
    return [plot for plot in figure.axes if plot.images]


def written(plot):
    return {tuple(text.get_position()): text.get_text() for text in plot.texts}


def test_first_axis_is_across_and_second_down():
    (plot,) = panels(multiples.loss_map(AXES[:2], grid(2)))
    np.testing.assert_array_equal(plot.images[0].get_array(), [[0, 2, 4], [1, 3, 5]])
    assert [t.get_text() for t in plot.get_xticklabels()] == ['1', '2', '4']
    assert [t.get_text() for t in plot.get_yticklabels()] == ['0.001', '0.003']
    assert written(plot)[2, 1] == '5.000'


def test_third_axis_is_the_columns_and_the_fourth_the_rows_of_panels():
    first, second, third, fourth = panels(multiples.loss_map(AXES, grid(4)))
    assert [plot.images[0].get_array()[0, 0] for plot in (first, second, third, fourth)] == [
        0, 2, 1, 3,
    ]  # fmt: skip
    assert (first.get_title('left'), second.get_title('left')) == (
        'positions none', 'positions rotary',
    )  # fmt: skip
    assert first.get_ylabel() == 'name adamw\nlearning_rate'
    assert third.get_ylabel() == 'name muon\nlearning_rate'


def test_runs_that_did_not_end_well_are_counted_and_not_averaged():
    lost = {(0, 0): 'diverged', **{(3, seed): 'diverged' for seed in range(3)}, (4, 1): 'failed'}
    (plot,) = panels(multiples.loss_map(AXES[:2], grid(2, lost)))
    cells = written(plot)
    assert cells[0, 0] == '0.000\n1 of 3 diverged'
    assert cells[1, 1] == 'diverged'
    assert cells[2, 0] == '4.000\n1 of 3 failed'
    assert np.isnan(plot.images[0].get_array().filled(np.nan)[1, 1])


def test_one_point_far_off_does_not_bleach_the_others():
    points = grid(2)
    for row in points[-1].rows:
        row['val_loss'] = 1e6
    (plot,) = panels(multiples.loss_map(AXES[:2], points))
    assert plot.images[0].get_clim() == (0, 7.5)


def test_equal_losses_and_a_single_point_are_drawn():
    points = grid(2)
    for point in points:
        for row in point.rows:
            row['val_loss'] = 2.5
    assert figures.png(multiples.loss_map(AXES[:2], points))
    assert figures.png(multiples.loss_map(AXES[:2], points[:1]))


def test_a_point_without_runs_leaves_its_cell_empty():
    (plot,) = panels(multiples.loss_map(AXES[:2], grid(2)[:-1]))
    assert (2, 1) not in written(plot)


@pytest.mark.parametrize('count', [40, 200])
def test_a_large_map_stays_a_picture_of_bearable_size(count):
    points = [
        Point(f'p{i}', ((i // count,), (i % count,)), ({'seed': 0, 'status': 'ok', 'val_loss': i},))
        for i in range(3 * count)
    ]
    figure = multiples.loss_map(AXES[:2], points)
    assert max(figure.get_size_inches()) <= 24
    (plot,) = panels(figure)
    assert bool(plot.texts) == (count == 40)


def test_many_curves_are_left_to_a_colour_bar():
    points = [
        Point(f'p{i}', ((i,), (0,), (0,)), ({'seed': 0, 'status': 'ok', 'val_loss': 1.0},))
        for i in range(13)
    ]
    assert multiples.fits_panels(points[:12])
    assert not multiples.fits_panels(points)


def test_values_that_read_alike_have_cells_of_their_own():
    points = [
        Point(f'p{i}', ((heads,), (rate,)), ({'seed': 0, 'status': 'ok', 'val_loss': float(i)},))
        for i, (heads, rate) in enumerate(itertools.product((1, 2), (1e-3, 1.0000001e-3)))
    ]
    (plot,) = panels(multiples.loss_map(AXES[:2], points))
    np.testing.assert_array_equal(plot.images[0].get_array(), [[0, 2], [1, 3]])


def test_curves_stand_in_the_panel_of_their_point_in_the_colour_of_the_first_two_axes():
    points = grid(3)
    curves = {
        (point.name, seed): {'val_loss': [(1, 9.0), (10, 1.0 + i + 0.1 * seed)]}
        for i, point in enumerate(points)
        for seed in range(3)
    }
    figure = multiples.curve_panels(AXES[:3], points, curves)
    left, right = figure.axes
    means = {line.get_color(): line.get_ydata()[-1] for line in right.lines if line.get_lw() > 1}
    assert [means[colour] for colour in figures.PALETTE[:6]] == pytest.approx(
        [2.1, 4.1, 6.1, 8.1, 10.1, 12.1]
    )
    assert left.get_title('left') == 'positions none'
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ['1, 0.001', '1, 0.003']
