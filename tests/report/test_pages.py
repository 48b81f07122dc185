import csv
import html
import json
import os
import re
from html.parser import HTMLParser

import pytest

from minigpt_jax.report import figures, markup, pages, statistics

HEADS = (('model.num_heads',), ((1,), (4,), (16,)))
POSITIONS = (('model.positions',), (('learned',), ('rotary',)))
NAN = float('nan')


@pytest.fixture(autouse=True)
def quick_figures(request, monkeypatch):
    """Figures are made and not drawn, which is slow, but where a test asks for `real_figures`."""
    if 'real_figures' not in request.fixturenames:
        monkeypatch.setattr(figures, 'png', lambda figure: b'\x89PNG no pixels')


@pytest.fixture
def real_figures():
    """Asks for pixels."""


class Page(HTMLParser):
    """What a browser would see: elements, and the text inside <pre>."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.pre, self._in_pre = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == 'pre':
            self._in_pre = True
            self.pre.append('')

    def handle_endtag(self, tag):
        self._in_pre = self._in_pre and tag != 'pre'

    def handle_data(self, data):
        if self._in_pre:
            self.pre[-1] += data


def build(arguments):
    text = pages.write_report(*arguments)
    workdir = arguments[0]
    return text, (workdir / 'report.md').read_text(), (workdir / 'report.html').read_text()


def csv_rows(workdir):
    with open(workdir / 'results.csv', newline='') as file:
        return list(csv.DictReader(file))


def test_report_of_one_axis(make_sweep, real_figures):
    arguments = make_sweep(axes=(HEADS,))
    text, page, _ = build(arguments)
    rows = csv_rows(arguments[0])
    assert [(row['num_heads'], row['seed']) for row in rows] == [
        (heads, seed) for heads in ('1', '4', '16') for seed in '012'
    ]
    by_seed = {}
    for row in rows:
        by_seed.setdefault(row['num_heads'], {})[int(row['seed'])] = float(row['val_loss'])
    best = min(by_seed, key=lambda heads: sum(by_seed[heads].values()))
    mean, half = statistics.mean_interval(by_seed[best].values())
    start = f'num_heads = {best} has the lowest validation loss ({mean:.3f} ± {half:.3f}'
    assert start in text
    assert start in page.splitlines()[2]
    assert 'exceed seed noise (F test, p' in page.splitlines()[2]
    assert text.endswith(str(arguments[0] / 'report.html'))
    assert page.startswith('# heads_sweep\n')
    for name in ('loss', 'curves', 'cost'):
        assert f'](figures/{name}.png)' in page
        assert (arguments[0] / f'figures/{name}.png').read_bytes().startswith(b'\x89PNG')


def test_the_setting_and_the_environment_are_reported(make_sweep):
    _, page, _ = build(make_sweep(axes=(HEADS,)))
    assert 'corpus python_docs' in page
    assert 'c0ffeec0ffee' in page
    assert 'share of unknown symbols 0.012 %' in page
    assert 'steps 2,000, tokens seen 1,536,000' in page
    assert 'same learning rate (0.001)' in page
    assert 'packages: jax 0.10.2, flax 0.12.8' in page
    assert '```\npython -m minigpt_jax.train --config=configs/heads_sweep.py\n```' in page


def test_no_difference_is_called_none(make_sweep):
    same = {(i, seed): {'val_loss': 1.9 + 0.1 * seed} for i in range(3) for seed in range(3)}
    text, _, _ = build(make_sweep(axes=(HEADS,), changes=same))
    assert 'differences between points do not exceed seed noise (F test, p = 1)' in text


def test_points_that_may_be_as_good_as_the_best_are_named(make_sweep):
    noise = (0.0, 0.03, -0.01)
    losses = {0: 3.0, 1: 1.9, 2: 1.901}
    changes = {
        (i, s): {'val_loss': loss + 0.1 * s + noise[(i + s) % 3]}
        for i, loss in losses.items()
        for s in range(3)
    }
    text, _, _ = build(make_sweep(axes=(HEADS,), changes=changes))
    assert 'points exceed seed noise' in text
    assert 'Pair by pair, these may be as good: num_heads = 16.' in text


@pytest.mark.parametrize('seeds', [(0,), (0, 1)])
def test_too_few_seeds_give_no_interval_and_no_test(make_sweep, seeds):
    text, page, _ = build(make_sweep(axes=(HEADS,), seeds=seeds))
    assert 'too few seeds for an interval' in text
    assert 'Too few seeds for an interval or a test.' in page
    assert not re.search(r'±\s*\d|F\(|\+0\.\d+ \[', text + page)


def test_only_seeds(make_sweep):
    arguments = make_sweep(axes=(), seeds=(0, 1, 2))
    text, page, _ = build(arguments)
    assert re.search(r'The validation loss is 1\.\d+ ± 0\.\d+ nats per token \(3 seeds\)', text)
    assert 'Differences' not in page
    assert len(csv_rows(arguments[0])) == 3


def test_two_axes_and_a_joint_one(make_sweep):
    joint = (('model.num_heads', 'model.d_model'), ((2, 64), (4, 128)))
    _, page, _ = build(make_sweep(axes=(joint, POSITIONS)))
    assert '| num_heads, d_model   | positions   |' in page
    assert '| 4, 128               | rotary      |' in page
    assert 'num_heads = 2, d_model = 64, positions = rotary' in page


def test_runs_without_a_result_are_named_and_left_out(make_sweep):
    changes = {
        (0, 0): {'status': 'diverged', 'val_loss': NAN, 'train_loss': NAN, 'error': 'step 600'},
        (1, 1): {'status': 'failed', 'val_loss': None, 'error': 'RESOURCE_EXHAUSTED: no memory'},
        (2, 2): None,
    }
    arguments = make_sweep(axes=(HEADS,), seeds=(0, 1, 2, 3), changes=changes)
    _, page, _ = build(arguments)
    rows = csv_rows(arguments[0])
    assert len(rows) == 11
    assert {row['status'] for row in rows} == {'ok', 'diverged', 'failed'}
    assert '1 of 12 runs is unfinished' in page
    assert '2 runs did not end well' in page
    assert '- num_heads = 1, seed 0: **diverged**, step 600' in page
    assert '- num_heads = 4, seed 1: **failed**, RESOURCE_EXHAUSTED: no memory' in page
    assert re.search(r'^- p2-16/seed-2: unfinished$', page, re.M)
    runs = [line.split('|')[2].strip() for line in page.splitlines() if re.match(r'\| \d', line)]
    assert runs[:3] == ['3', '3', '3']


def test_an_invalid_point_has_rows_and_no_figures_of_its_own(make_sweep):
    changes = {
        (0, seed): {key: None for key in ('num_heads', 'd_head', 'num_params', 'val_loss', 'steps')}
        | {'status': 'invalid', 'error': 'width 128 needs heads that divide it'}
        for seed in range(3)
    }
    arguments = make_sweep(axes=(HEADS,), changes=changes)
    text, page, _ = build(arguments)
    assert [row['status'] for row in csv_rows(arguments[0])] == ['invalid'] * 3 + ['ok'] * 6
    assert 'seed 0: **invalid**, width 128 needs heads that divide it' in page
    assert 'leaves out points with too few seeds: num_heads = 1.' in page
    assert 'differences between points exceed' in text


def test_nothing_finished_is_still_a_report(make_sweep):
    arguments = make_sweep(axes=(HEADS,), seeds=(0,), changes={(i, 0): None for i in range(3)})
    text, page, _ = build(arguments)
    assert 'No run has ended well, so there is no answer (3 unfinished).' in text
    assert '3 of 3 runs are unfinished' in page
    assert csv_rows(arguments[0]) == []


def test_all_failed_is_still_a_report(make_sweep):
    lost = {'status': 'failed', 'val_loss': None, 'tokens_per_second': None}
    text, _, _ = build(
        make_sweep(
            axes=(HEADS,), seeds=(0,), changes=dict.fromkeys(((i, 0) for i in range(3)), lost)
        )
    )
    assert 'no answer (3 failed)' in text


def test_a_run_killed_while_writing_is_read_as_far_as_it_got(make_sweep):
    workdir, axes, run_dirs = make_sweep(axes=(HEADS,))
    (run_dirs[0] / 'summary.json').write_text('{"point": "p0-')
    with open(run_dirs[1] / 'metrics.jsonl', 'ab') as file:
        file.write('{"step": 2050, "train_loss": "가'.encode()[:-1])
    (workdir / 'config.json').unlink()
    _, page, _ = build((workdir, axes, run_dirs))
    assert '1 of 9 runs is unfinished' in page
    assert len(csv_rows(workdir)) == 8


def test_points_of_different_size_and_length_are_called_so(make_sweep):
    changes = {(1, seed): {'num_params': 900_000, 'tokens_seen': 2_000_000} for seed in range(3)}
    _, page, _ = build(make_sweep(axes=(HEADS,), changes=changes))
    assert 'differ in size, from 802,944 to 900,000 parameters' in page
    assert 'amounts of text, 1,536,000 to 2,000,000 tokens' in page
    _, page, _ = build(make_sweep('same', axes=(HEADS,)))
    assert 'differ in size' not in page
    assert 'amounts of text' not in page


def test_a_learning_rate_that_is_swept_is_no_common_choice(make_sweep):
    axis = (('optim.learning_rate', 'model.num_heads'), ((1e-3, 1), (3e-3, 4)))
    _, page, _ = build(make_sweep(axes=(axis,)))
    assert 'same learning rate' not in page
    assert 'learning_rate 0.001' not in page


def test_tokenizers_are_compared_by_bits_per_byte(make_sweep):
    axis = (('data.tokenizer',), (('char',), ('byte',)))
    bits = {(0, seed): {'val_loss': 1.0, 'bits_per_byte': 3.0 + 0.01**seed} for seed in range(3)}
    bits |= {
        (1, seed): {'val_loss': 2.0 + 0.01**seed, 'bits_per_byte': 2.0 + 0.01 * seed}
        for seed in range(3)
    }
    text, _, _ = build(make_sweep(axes=(axis,), changes=bits))
    assert 'tokenizer = byte has the lowest validation loss (2.0' in text
    for seed in range(3):
        bits[0, seed]['bits_per_byte'] = None
    text, page, _ = build(make_sweep('unknown', axes=(axis,), changes=bits))
    assert 'tokenizer = byte is 2.0' in text
    assert 'unknown to the tokenizer of tokenizer = char' in page
    for seed in range(3):
        bits[1, seed]['bits_per_byte'] = None
    text, page, _ = build(make_sweep('all unknown', axes=(axis,), changes=bits))
    assert 'nothing is ranked' in text
    assert 'lowest' not in text
    assert 'their losses per token do not compare' in page


EVIL = (
    '<script>alert(1)</script> <img src="http://evil.example/x.png"> & &amp;\n'
    '```\n````` \n~~~\n# not a title\n| a | b |\n|---|---|\n'
    '![x](http://evil.example/y.png) [z]: http://evil.example\n'
    '</code></pre><b>bold</b>\n    indented\n<!-- open\n민지는 책을 읽고.'
)


def test_samples_are_shown_literally(make_sweep):
    _, page, text = build(make_sweep(axes=(HEADS,), samples={0: EVIL, 1: '`' * 7, 2: '\x02x\x03'}))
    seen = Page(text)
    assert seen.pre[0].rstrip('\n') == EVIL
    assert seen.pre[1].rstrip('\n') == '`' * 7
    assert seen.pre[2].rstrip('\n') == '␂x␃'
    tags = {tag for tag, _ in seen.elements}
    assert not tags & {'script', 'b', 'a', 'iframe', 'link', 'object'}
    assert '## Environment' in page
    assert any(tag == 'h2' for tag, _ in seen.elements)
    assert len([tag for tag, _ in seen.elements if tag == 'h1']) == 1


def test_the_sample_is_of_the_first_run_that_ended_well(make_sweep):
    changes = {(0, 0): {'status': 'diverged'}}
    workdir, axes, run_dirs = make_sweep(axes=(HEADS,), changes=changes)
    for run_dir in run_dirs:
        (run_dir / 'samples.txt').write_text('/'.join(run_dir.parts[-2:]))
    _, _, text = build((workdir, axes, run_dirs))
    assert [sample.strip() for sample in Page(text).pre[:3]] == [
        'p0-1/seed-1',
        'p1-4/seed-0',
        'p2-16/seed-0',
    ]


@pytest.mark.parametrize(
    'evil',
    [
        'a | b',
        '`x` ``y``',
        '<b>x</b> <i',
        '*a* **b** _c_ __d__ snake_case',
        '[x](http://evil.example) ![y](z)',
        '&lt; &#60; \\| \\\\',
        '~~gone~~ $x$',
        '한글 <가방>',
    ],
)
def test_foreign_text_in_lines_and_cells_is_literal(evil):
    table = f'| h |\n|---|\n| {markup.literal(evil)} |'
    for source in (f'- x {markup.literal(evil)}', table, f'# {markup.literal(evil)}'):
        body = markup.html_page('t', source, {}).split('<body>')[1].split('</body>')[0]
        tags = set(re.findall(r'<(\w+)', body))
        assert tags <= {'ul', 'li', 'table', 'thead', 'tbody', 'tr', 'th', 'td', 'h1'}
        assert evil in html.unescape(re.sub(r'<[^>]+>', '', body))


def test_errors_and_axis_values_cannot_break_the_page(make_sweep):
    axis = (('data.path',), (('a|b`c<d>.txt',), ('*책*.txt',)))
    changes = {(0, 0): {'status': 'failed', 'error': 'no\nmemory </li> | `x`'}}
    _, page, text = build(make_sweep(axes=(axis,), changes=changes))
    widths = {
        len(re.findall(r'(?<!\\)\|', line))
        for line in page.split('## ')[1].splitlines()
        if line.startswith('|')
    }
    assert len(widths) == 1
    assert 'a|b`c<d>.txt' in html.unescape(text)
    assert 'no memory </li> | `x`' in html.unescape(text)


def test_pictures_adapt_to_the_number_of_axes(make_sweep):
    rates = (('optim.learning_rate',), ((1e-3,), (3e-3,)))
    drawn = {
        count: re.findall(r'figures/(\w+)', build(make_sweep(axes=axes))[1])
        for count, axes in enumerate(
            ((HEADS,), (HEADS, POSITIONS), (HEADS, POSITIONS, rates)), start=1
        )
    }
    assert drawn == {
        1: ['loss', 'curves', 'cost'],
        2: ['map', 'loss', 'curves', 'cost'],
        3: ['map', 'curves', 'cost'],  # 12 points: no colours for so many lines
    }


def test_html_needs_nothing_from_elsewhere(make_sweep):
    _, page, text = build(make_sweep(axes=(HEADS, POSITIONS), samples={0: EVIL}))
    images = [attrs for tag, attrs in Page(text).elements if tag == 'img']
    assert len(images) == len(re.findall(r'^!\[', page, re.M)) - 1 == 4  # one ![ is a sample's
    assert all(image['src'].startswith('data:image/png;base64,') for image in images)
    assert all(image['alt'] for image in images)
    for tag, attrs in Page(text).elements:
        for key, value in attrs.items():
            if key in ('src', 'href', 'action', 'data', 'srcset'):
                assert value.startswith('data:'), (tag, key, value)
    style = text.split('<style>')[1].split('</style>')[0]
    assert 'url(' not in style
    assert '@import' not in style
    assert "default-src 'none'" in text


def test_a_rebuild_gives_the_same_bytes(make_sweep, real_figures):
    arguments = make_sweep(axes=(HEADS,))
    names = ('results.csv', 'report.md', 'report.html', 'figures/loss.png')
    build(arguments)
    first = {name: (arguments[0] / name).read_bytes() for name in names}
    build(arguments)
    assert {name: (arguments[0] / name).read_bytes() for name in names} == first
    run_files = {'config.json', 'points', 'results.csv', 'report.md', 'report.html', 'figures'}
    assert set(os.listdir(arguments[0])) == run_files


def test_a_sweep_that_grew_shows_its_new_runs(make_sweep):
    workdir, axes, run_dirs = make_sweep(axes=(HEADS,), changes={(2, 0): None})
    _, before, _ = build((workdir, axes, run_dirs))
    row = json.loads((run_dirs[7] / 'summary.json').read_text())
    (run_dirs[6] / 'summary.json').write_text(json.dumps({**row, 'seed': 0}))
    _, after, _ = build((workdir, axes, run_dirs))
    assert '1 of 9 runs is unfinished' in before
    assert 'unfinished' not in after


def test_a_single_run_in_its_own_directory_has_a_report(make_sweep):
    _, _, run_dirs = make_sweep(axes=(), seeds=(0,))
    text, _, _ = build((run_dirs[0], (), [run_dirs[0]]))
    assert '(1 seed; too few seeds for an interval)' in text
