import io
import itertools
import warnings

import matplotlib
import numpy as np
import pytest
from PIL import Image

from minigpt_jax.report import figures
from minigpt_jax.report.tables import Point

KOREAN = '/책/읽기 가방.txt'


def points(*values, status='ok', seeds=3, **columns):
    """One point for each tuple of axis values, its loss growing with its place."""
    return [
        Point(
            f'p{i}',
            tuple(value if isinstance(value, tuple) else (value,) for value in by_axis),
            tuple(
                {
                    'seed': seed,
                    'status': status,
                    'val_loss': 2 + 0.1 * i + 0.01 * seed,
                    'tokens_per_second': 1000.0,
                    'peak_memory_mb': 50.0 + i,
                    **columns,
                }
                for seed in range(seeds)
            ),
        )
        for i, by_axis in enumerate(values)
    ]


def ticks(figure):
    plot = figure.axes[0]
    return dict(zip((t.get_text() for t in plot.get_xticklabels()), plot.get_xticks(), strict=True))


def drawn(figure):
    return Image.open(io.BytesIO(figures.png(figure)))


AXIS = [('model.num_heads',)]


def test_powers_of_two_stand_at_their_logarithm():
    places = ticks(figures.loss_figure(AXIS, points((1,), (2,), (4,), (16,))))
    assert places == {'1': 0, '2': 1, '4': 2, '16': 4}
    assert ticks(figures.loss_figure(AXIS, points((8,), (2,)))) == {'8': 3, '2': 1}


def test_a_wide_range_is_logarithmic_and_a_narrow_one_is_not():
    wide = ticks(figures.loss_figure(AXIS, points((0.001,), (0.003,), (0.1,))))
    assert wide['0.1'] - wide['0.001'] == pytest.approx(np.log2(100))
    narrow = ticks(figures.loss_figure(AXIS, points((10,), (20,), (60,))))
    assert narrow == {'10': 10, '20': 20, '60': 60}


@pytest.mark.parametrize('values', [('pre', 'post'), (True, False), (None, 4), ((2, 64), (4, 128))])
def test_what_is_not_a_number_stands_in_the_order_of_the_sweep(values):
    places = ticks(figures.loss_figure([('a', 'b')], points(*((value,) for value in values))))
    assert list(places.values()) == [0, 1]


def test_every_run_is_a_dot_and_every_point_has_its_interval():
    plot = figures.loss_figure(AXIS, points((1,), (2,))).axes[0]
    dots = [y for line in plot.lines if line.get_marker() == '.' for y in line.get_ydata()]
    assert sorted(dots) == pytest.approx([2.0, 2.01, 2.02, 2.1, 2.11, 2.12])
    (bars,) = plot.containers
    (segments,) = (collection.get_segments() for collection in bars.lines[2])
    # t(0.975, 2) · s / √3 with s = 0.01, by hand.
    assert segments[0][:, 1] == pytest.approx([2.01 - 0.024841, 2.01 + 0.024841], abs=1e-5)


def test_two_seeds_have_no_bar():
    (bars,) = figures.loss_figure(AXIS, points((1,), seeds=2)).axes[0].containers
    assert np.ptp(bars.lines[2][0].get_segments()[0][:, 1]) == 0


def test_further_axes_are_named_series():
    axes = [('model.num_heads',), ('model.positions',), ('model.norm_placement',)]
    figure = figures.loss_figure(
        axes, points((1, 'rotary', 'pre'), (2, 'rotary', 'pre'), (1, 'alibi', 'post'))
    )
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ['rotary, pre', 'alibi, post']
    assert legend.get_title().get_text() == 'positions, norm_placement'


def test_diverged_runs_are_marked_and_not_averaged():
    good, bad = points((1,), (2,))
    bad = points((2,), status='diverged', val_loss=99.0)[0]
    figure = figures.loss_figure(AXIS, [good, Point('bad', bad.values, bad.rows)])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ['run diverged']
    assert figure.axes[0].get_ylim()[1] < 3


CURVE = {'train_loss': [(1, 9.0), (50, 2.5), (100, 2.0)], 'val_loss': [(100, 2.2)]}


def test_curves_show_mean_and_runs_and_name_the_points():
    sweep = points((1,), (2,), seeds=2)
    curves = {(p.name, seed): CURVE for p in sweep for seed in (0, 1)}
    curves['p0', 1] = {**CURVE, 'train_loss': [(1, 9.0), (50, 3.5), (100, 3.0)]}
    figure = figures.learning_curves(AXIS, sweep, curves)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ['1', '2']
    thick = [line for line in figure.axes[0].lines if line.get_linewidth() > 1]
    assert list(thick[0].get_ydata()) == [9.0, 3.0, 2.5]
    assert figure.axes[0].get_ylim()[1] < 9  # the start is cut off


def test_a_run_on_its_way_to_infinity_does_not_set_the_scale():
    sweep = points((1,)) + points((1,), (2,), status='diverged', seeds=1)[1:]
    wild = {'train_loss': [(50, 1e6), (100, float('nan'))], 'val_loss': []}
    curves = {**{('p0', seed): CURVE for seed in range(3)}, ('p1', 0): wild}
    figure = figures.learning_curves(AXIS, sweep, curves)
    assert figure.axes[0].get_ylim()[1] < 10
    assert any(line.get_marker() == 'x' for line in figure.axes[0].lines)


def test_the_mean_curve_is_of_the_runs_that_ended_well():
    (point,) = points((1,), seeds=1)
    lost = {**point.rows[0], 'seed': 1, 'status': 'failed'}
    half = {'train_loss': [(1, 8.0), (50, 7.0)], 'val_loss': []}
    sweep = [Point('p0', point.values, (*point.rows, lost))]
    figure = figures.learning_curves(AXIS, sweep, {('p0', 0): CURVE, ('p0', 1): half})
    thin = [line for line in figure.axes[0].lines if line.get_linewidth() < 1]
    (thick,) = (line for line in figure.axes[0].lines if line.get_marker() == 'o')
    assert list(thick.get_ydata()) == [9.0, 2.5, 2.0]
    assert len(thin) == 2


def test_many_points_get_a_colour_bar():
    sweep = points(*((2**i,) for i in range(9)))
    figure = figures.learning_curves(AXIS, sweep, {(p.name, 0): CURVE for p in sweep})
    assert not figure.legends
    labels = [label.get_text() for label in figure.axes[-1].get_yticklabels()]
    assert labels == [str(2**i) for i in range(9)]


def test_costs_start_at_zero_and_memory_says_whose_figure_it_is():
    speed, memory = figures.cost_figure(AXIS, points((1,), (2,))).axes
    assert (speed.get_ylim()[0], memory.get_ylim()[0]) == (0, 0)
    assert "compiler's figure" in memory.get_ylabel()


def test_no_axis_is_one_place():
    assert ticks(figures.loss_figure([], points(()))) == {'all seeds': 0}


@pytest.mark.parametrize(
    ('count', 'label'),
    [(4, 'learned {}'), (2, '/a/long/path/{}/text.txt'), (9, '/한글/{}.txt'), (14, 'number-{}')],
)
def test_tick_labels_do_not_overlap(count, label):
    figure = figures.cost_figure(
        [('data.path',)], points(*((label.format(i),) for i in range(count)))
    )
    drawn(figure)
    renderer = figure._get_renderer()
    for plot in figure.axes:
        labels = plot.get_xticklabels()
        boxes = [label.get_window_extent(renderer) for label in labels]
        if labels[0].get_rotation():  # slanted texts are parallel: what counts is their distance
            gap = min(np.diff([box.x1 for box in boxes]))
            height = labels[0].get_fontsize() * figure.dpi / 72
            assert gap * np.sin(np.radians(labels[0].get_rotation())) > height
        else:
            assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_dollars_and_underscores_are_text_and_not_formulas():
    figure = figures.loss_figure([('data.path',)], points(('$\\frac{$',), ('a_b^c',)))
    assert drawn(figure).size[0] > 500


def missing_glyphs():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        figures.png(figures.loss_figure([('data.path',)], points((KOREAN,), ('b',))))
    return [str(w.message) for w in caught if 'missing from' in str(w.message)]


def test_korean_has_glyphs():
    assert missing_glyphs() == []


def test_without_the_korean_font_the_figure_is_drawn_and_the_check_would_notice(monkeypatch):
    monkeypatch.setattr(figures.importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setitem(figures.STYLE, 'font.family', figures._font_families())
    assert figures.STYLE['font.family'] == ['DejaVu Sans']
    assert missing_glyphs()


def test_figures_are_the_same_bytes_and_leave_the_settings_alone():
    before = dict(matplotlib.rcParams)
    first, second = (figures.png(figures.loss_figure(AXIS, points((1,), (2,)))) for _ in range(2))
    assert first == second
    assert dict(matplotlib.rcParams) == before


def test_no_two_ticks_of_a_small_memory_read_the_same():
    figure = figures.cost_figure(AXIS, points((1,), (4,), peak_memory_mb=2.75))
    drawn(figure)
    labels = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert len(labels) > 2
    assert len(set(labels)) == len(labels)


def test_only_several_runs_have_a_mean_and_an_interval():
    titles = [
        figures.loss_figure(AXIS, points((1,), (4,), seeds=seeds)).axes[0].get_title('left')
        for seeds in (1, 3)
    ]
    assert titles[0] == 'A dot is a run'
    assert 'interval' in titles[1]
