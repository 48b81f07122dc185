"""Every claim of the two articles, beside what this code measures.

    python -m experiments.claims [--out=DIR] [--quick]

Reads what the other experiments left in DIR where it is of this very code and runs the others, so
that a second call takes seconds. Prints one table: who claims what, the figure there and the one
here, a verdict, and how old it is; claims.md has it for a page. About two hours on two cores;
--quick, which shows that all of it runs and finds nothing, takes minutes.
"""

import dataclasses
import datetime
import importlib
import pathlib
import textwrap

from matplotlib.figure import Figure

from minigpt_jax import experiment
from minigpt_jax.report.figures import styled
from minigpt_jax.report.markup import literal
from minigpt_jax.report.tables import markdown_table, write_atomically

HERE = pathlib.Path(__file__).parent
# In the order of the articles.
EXPERIMENTS = (
    'lookups',
    'worked_example',
    'sqrt_dk',
    'multi_head_shapes',
    'head_rules',
    'permutation',
    'positional_encoding',
    'block_anatomy',
    'norm_gradients',
    'norm_training',
    'positions_training',
    'decoder_rules',
    'path_length',
    'cost_curve',
    'head_sweep',
)
# What waits for the analysis of heads.
OPEN = (
    experiment.Claim(
        'B10, Michel', 'Many heads can be removed', '20 to 40 % free of charge', '', 'open'
    ),
    experiment.Claim(
        'A', 'Heads attend to reference, action, neighbourhood and place in 민지는 책을 다 읽고 '
        '그것을 가방에 넣었다.', '', '', 'open',
    ),
)  # fmt: skip
COLOURS = {
    'holds': '#009E73',
    'holds under a condition': '#E69F00',
    'does not hold': '#D55E00',
    'not decided': '#8C8C8C',
    'open': '#8C8C8C',
}


def measure(setting):
    rows, numbers, claims = [], [], []
    for name in EXPERIMENTS:
        module = importlib.import_module(f'experiments.{name}')
        file = pathlib.Path(module.__file__)
        record = experiment.read(file, setting.out, quick=setting.quick)
        if record is None:
            print(f'\n==== {name}', flush=True)
            record = experiment.run(file, module.measure, setting.out, quick=setting.quick)
        for claim in record['claims']:
            claims.append(experiment.Claim(**claim))
            rows.append([*_cells(claims[-1]), name, *_age(record)])
            numbers.append({**claim, 'experiment': name, 'finished': record['finished']})
    for claim in OPEN:
        claims.append(claim)
        rows.append([*_cells(claim), '', '', ''])
        numbers.append({**dataclasses.asdict(claim), 'experiment': None, 'finished': None})
    headers = ['source', 'claim', 'there', 'here', 'verdict', 'experiment', 'age', 'commit']
    name = experiment.file_name(__file__, setting.quick)
    write_atomically(setting.out / f'{name}.md', as_markdown(headers, rows))
    return experiment.Outcome(
        tables=[
            (f'Every claim{", smaller than it counts" if setting.quick else ""}', headers, rows)
        ],
        numbers={'claims': numbers},
        claims=[],
        figure=draw(claims),
    )


def as_markdown(headers, rows):
    """The table for a page, without ages, which the page does not keep."""
    shown = [headers.index(name) for name in headers if name != 'age']
    cells = [[literal(row[i]) for i in shown] for row in rows]
    return markdown_table([headers[i] for i in shown], cells, text_columns=len(shown)) + '\n'


def _cells(claim):
    wrapped = (textwrap.fill(text, width) for text, width in ((claim.text, 30), (claim.theirs, 20)))
    return [claim.source, *wrapped, textwrap.fill(claim.ours, 44), claim.verdict]


def _age(record):
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(record['finished'])
    commit = (record['environment']['git_commit'] or '')[:8]
    changed = '' if record['environment']['git_clean'] in (True, None) else '+'
    return [f'{age.days} d' if age.days else f'{age.seconds // 60} min', commit + changed]


@styled
def draw(claims):
    """The claims as a list, the colour of each its verdict."""
    texts = [
        textwrap.wrap(f'{claim.text}: {claim.ours}' if claim.ours else claim.text, 112)
        for claim in claims
    ]
    heights = [
        max(len(lines), len(textwrap.wrap(claim.source, 14))) + 0.7
        for claim, lines in zip(claims, texts, strict=True)
    ]
    figure = Figure(figsize=(11, 0.17 * sum(heights) + 0.5))
    plot = figure.subplots()
    plot.set_axis_off()
    plot.set_xlim(0, 100)
    plot.set_ylim(sum(heights), 0)
    top = 0
    for claim, lines, height in zip(claims, texts, heights, strict=True):
        source = textwrap.fill(claim.source, 14)
        plot.text(0, top, source, va='top', weight='bold', family='DejaVu Sans')
        plot.text(
            12, top, claim.verdict, va='top', color=COLOURS[claim.verdict], weight='bold',
            family='DejaVu Sans',  # the Korean font has no bold, and matplotlib would say so
        )  # fmt: skip
        plot.text(33, top, '\n'.join(lines), va='top')
        top += height
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
