import csv
import math

import pytest

from minigpt_jax.report import tables

# As in the contract, written out again: the order is an interface.
HEADER = (
    'point,seed,num_heads,d_head,d_model,num_layers,norm_placement,positions,num_params,steps,'
    'tokens_seen,train_loss,val_loss,val_perplexity,bits_per_byte,tokens_per_second,step_ms,'
    'flops_per_token,peak_memory_mb,compile_s,train_s,status,error,encoder_layers,exact_match,bleu'
)


def row(point='a', seed=0, loss=1.5, status='ok', **further):
    return {'point': point, 'seed': seed, 'val_loss': loss, 'status': status, **further}


def test_columns_stand_in_the_order_of_the_contract(tmp_path):
    path = tmp_path / 'results.csv'
    tables.write_results_csv([row(zebra=1, axes={'model.num_heads': 4}), row(ant=2)], path)
    assert path.read_text().splitlines()[0] == HEADER + ',zebra,ant'


def test_csv_comes_back_as_it_was(tmp_path):
    rows = [
        row(point='4', seed=1, loss=0.1 + 0.2, num_params=802_944, error=None),
        row(point='b', loss=float('nan'), status='failed', error='out of "memory",\nline 2'),
    ]
    tables.write_results_csv(rows, tmp_path / 'results.csv')
    first, second = tables.read_results_csv(tmp_path / 'results.csv')
    assert (first['point'], first['seed'], first['num_params']) == ('4', 1, 802_944)
    assert first['val_loss'] == 0.1 + 0.2
    assert first['bleu'] is None
    assert second['error'] == 'out of "memory",\nline 2'
    assert math.isnan(second['val_loss'])


def test_missing_and_none_are_empty_cells(tmp_path):
    tables.write_results_csv([row(train_loss=None)], tmp_path / 'results.csv')
    with open(tmp_path / 'results.csv', newline='') as file:
        (cells,) = csv.DictReader(file)
    assert (cells['train_loss'], cells['exact_match'], cells['val_loss']) == ('', '', '1.5')


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path):
    path = tmp_path / 'results.csv'
    path.write_text('old')
    with pytest.raises(UnicodeEncodeError):
        tables.write_atomically(path, '\ud800')
    path_is_folder = tmp_path / 'folder'
    (path_is_folder / 'inside').mkdir(parents=True)
    with pytest.raises(OSError):  # noqa: PT011  which one depends on the system
        tables.write_atomically(path_is_folder, 'new')
    assert path.read_text() == 'old'
    assert sorted(p.name for p in tmp_path.iterdir()) == ['folder', 'results.csv']


def test_points_hold_only_finite_results_of_runs_that_ended_well():
    rows = [
        row(seed=0, axes={'k': 1}),
        row(seed=1, loss=float('nan'), axes={'k': 1}),
        row(seed=2, loss=9.0, status='diverged', axes={'k': 1}),
        row(point='b', axes={'k': 2}),
    ]
    first, second = tables.group_points([('k',)], rows)
    assert first.by_seed('val_loss') == {0: 1.5}
    assert (first.values, second.values) == (((1,),), ((2,),))
    assert len(first.rows) == 3


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        (802944, '802,944'),
        (18902.34, '18,902'),
        (41.404, '41.40'),
        (0.012348, '0.01235'),
        (1.5e-7, '1.500e-07'),
        (0.0, '0.0'),
        (None, '–'),
        (float('inf'), 'inf'),
    ],
)
def test_numbers_for_people(value, text):
    assert tables.number(value) == text


def test_p_values_claim_no_more_than_they_can():
    assert [tables.p_text(p) for p in (1e-9, 0.0123, 0.5, None)] == ['< 0.001', '0.012', '0.5', '–']
    assert tables.p_text(0.0123, '= ') == '= 0.012'


def test_keys_are_short_unless_ambiguous():
    axes = [('model.num_heads', 'optim.name'), ('data.name',)]
    assert [tables.axis_name(axes, i) for i in (0, 1)] == ['num_heads, optim.name', 'data.name']
    point = tables.Point('slug', ((4, 'adamw'), (None,)), ())
    assert tables.point_title(axes, point) == 'num_heads = 4, optim.name = adamw, data.name = none'


def test_point_table_says_who_is_best_and_by_how_much():
    rows = [
        row(point, seed, base + 0.01 * seed, step_ms=40.0, axes={'model.num_heads': heads})
        for point, base, heads in (('h1', 2.0, 1), ('h4', 1.5, 4))
        for seed in range(3)
    ]
    rows[0]['val_loss'] += 0.003
    axes = [('model.num_heads',)]
    headers, cells = tables.point_table(
        axes, tables.group_points(axes, rows), {'step_ms': 'step ms'}
    )
    assert headers == ['num_heads', 'runs', 'val loss', 'vs best', 'p (Holm)', 'step ms']
    # Differences .503, .5, .5: mean .501, half width 4.3027 · .0017321 / √3 = .0043.
    assert cells[0] == ['1', '3', '2.011 ± 0.021', '+0.501 [+0.497, +0.505]', '< 0.001', '40']
    assert cells[1] == ['4', '3', '1.510 ± 0.025', 'best', '–', '40']


def test_parameter_table_adds_up():
    text = tables.parameter_table(
        [
            ('blocks.0.w_DHK', (128, 4, 32), 16384, ''),
            ('blocks.0.bias', (128,), 128, ''),
            ('scale', (), 1, ''),
        ]
    )
    lines = text.splitlines()
    assert lines[2].split() == ['blocks.0.w_DHK', '128', '×', '4', '×', '32', '16,384']
    assert lines[4].split() == ['scale', 'scalar', '1']
    assert lines[-1].split() == ['total', '16,513']


def test_parameter_table_says_what_a_device_holds_of_what_is_split():
    text = tables.parameter_table([('w_DF', (8, 4), 16, '– × tensor'), ('scale', (8,), 8, '')])
    lines = text.splitlines()
    assert lines[0].split() == ['parameter', 'shape', 'count', 'on', 'a', 'device', 'split']
    assert lines[2].split() == ['w_DF', '8', '×', '4', '32', '16', '–', '×', 'tensor']
    assert lines[-1].split() == ['total', '40', '24']


def test_cells_are_shown_as_they_are():
    assert '| 1.10 |' in tables.markdown_table(['x'], [['1.10']])
    assert '1.10' in tables.terminal_table(['x'], [['1.10'], ['1,000']])
