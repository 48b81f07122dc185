"""How many heads, at which width, context and learning rate, and what do they cost?

    python -m experiments.head_sweep [--quick]      87 runs, 25 minutes on two cores; --quick: 6

The article says that at a fixed width more heads help, then stop helping, then hurt, and that they
cost memory; it measures none of it. Here are the sweeps of configs/heads_sweep.py along more axes,
three seeds each, differences paired by seed:

- rate: head counts at a width of 128, also at half and double the learning rate, since the best
  rate may depend on the heads;
- width: head counts at a width of 64;
- context: at half and double the context length;
- d_head: heads of a fixed size, so that the width grows with them.

Each of the four sweeps leaves a report below DIR/head_sweep-…, with a sample of every point.

Expected: at this size and after so few steps four heads do not help over one, whatever the rate,
and sixteen hurt or change nothing that three seeds could show; each head adds the same to the
memory that scores take, B·h·T² numbers a layer.
"""

import itertools

from matplotlib.figure import Figure

from configs import heads_sweep
from minigpt_jax import experiment
from minigpt_jax.report.figures import MARKERS, PALETTE, styled
from minigpt_jax.report.statistics import mean_interval, paired_differences
from minigpt_jax.report.tables import difference_text, read_results_csv, with_interval
from minigpt_jax.training import sweep
from minigpt_jax.training.config import RunError

HEADS, SEEDS = ('model.num_heads', (1, 2, 4, 8, 16)), ('seed', (0, 1, 2))
SWEEPS = {
    'rate': (('optim.learning_rate', (2e-3, 4e-3, 8e-3)), HEADS, SEEDS),
    'width': (('model.d_model', (64,)), HEADS, SEEDS),
    'context': (('model.context_length', (32, 128)), ('model.num_heads', (1, 4, 16)), SEEDS),
    'd_head': ((('model.num_heads', 'model.d_model'), ((2, 32), (4, 64), (8, 128))), SEEDS),
}
QUICK_SWEEPS = {'rate': (('optim.learning_rate', (4e-3,)), ('model.num_heads', (1, 4)), SEEDS)}
COLUMNS = (
    'val_loss', 'tokens_per_second', 'step_ms', 'peak_memory_mb', 'num_params', 'status', 'sample',
)  # fmt: skip


def measure(setting):
    series = {}
    for name, axes in (QUICK_SWEEPS if setting.quick else SWEEPS).items():
        config = heads_sweep.get_config('quick' if setting.quick else '')
        config.sweep = axes
        if sweep.run(config, setting.workdir / name) != 0:
            raise RunError(f'{setting.workdir / name}: a run failed; its report says why')
        rows = read_results_csv(setting.workdir / name / 'results.csv')
        run_dirs = [
            point.run_dir(setting.workdir / name, seed)
            for point in sweep.expand(config)
            for seed in point.seeds
        ]
        for row, run_dir in zip(rows, run_dirs, strict=True):
            row['sample'] = (run_dir / 'samples.txt').read_text() if row['status'] == 'ok' else ''
            title = title_of(name, row)
            series.setdefault(title, {}).setdefault(row['num_heads'], []).append(row)
    return experiment.Outcome(
        tables=[tabulate(series), tabulate_samples(series)],
        numbers={
            title: {heads: [{'seed': r['seed'], **{c: r[c] for c in COLUMNS}} for r in rows]
                    for heads, rows in by_heads.items()}
            for title, by_heads in series.items()
        },
        claims=judge(series),
        figure=draw(series),
    )  # fmt: skip


def title_of(name, row):
    """What a series of head counts has in common."""
    if name == 'd_head':
        return f'd_head {row["d_head"]}, the width grows'
    column = {'rate': 'learning_rate', 'width': 'd_model', 'context': 'context_length'}[name]
    return f'{column} {row[column]:g}'


def losses(by_heads):
    """{heads: {seed: loss}} of a series, of the runs that did not diverge, where there are any."""
    found = {
        heads: {r['seed']: r['val_loss'] for r in rows if r['status'] == 'ok'}
        for heads, rows in by_heads.items()
    }
    return {heads: values for heads, values in found.items() if values}


def tabulate(series):
    rows = []
    for title, by_heads in series.items():
        values = losses(by_heads)
        differences = {c.point: c for c in paired_differences(values)}
        for heads, runs in by_heads.items():
            compared = differences.get(heads)
            rows.append(
                [
                    title,
                    heads,
                    interval(values[heads].values()) if heads in values else 'diverged',
                    '–' if heads not in values
                    else 'best' if compared is None
                    else difference_text(compared, 3),
                    f'{mean_interval([r["step_ms"] for r in runs])[0]:.1f}',
                    f'{runs[0]["peak_memory_mb"]:.1f}',
                ]
            )  # fmt: skip
    headers = ['series', 'heads', 'val loss', 'vs best', 'step ms', 'memory MB']
    return f'Validation loss in nats a token, {len(SEEDS[1])} seeds', headers, rows


def tabulate_samples(series):
    """The end of what each head count wrote, first seed, in the first series."""
    title, by_heads = next(iter(series.items()))
    rows = [[heads, ' '.join(runs[0]['sample'].split())[-90:]] for heads, runs in by_heads.items()]
    return f'Generated after training, the end of it ({title}, first seed)', ['heads', 'text'], rows


def interval(values):
    return with_interval(*mean_interval(values), 3)


def judge(series):
    claims = []
    for title, by_heads in series.items():
        values = losses(by_heads)
        few, some, many = 1, 4, max(values, default=0)
        if title.startswith('d_head') or not {few, some} < values.keys():
            continue
        claims += [
            judge_difference(f'More heads help at first ({title})', values, few, some),
            judge_difference(f'Too many heads hurt ({title})', values, many, some),
        ]
    return [*claims, judge_memory(next(iter(series.values())))]


def judge_difference(text, values, worse, better):
    """Is the loss with one number of heads above that with another, seed by seed?"""
    seeds = sorted(values[worse].keys() & values[better].keys())
    differences = [values[worse][seed] - values[better][seed] for seed in seeds]
    mean, half = mean_interval(differences)
    decided = half is not None and abs(mean) > half
    shown = f'{mean:+.3f}' if half is None else f'{mean:+.3f} ± {half:.3f}'
    return experiment.Claim(
        source='A',
        text=text,
        theirs='asserted',
        ours=f'loss with {worse} − with {better}: {shown} nats a token, paired by {len(seeds)} '
        f'seeds; {interval(values[worse].values())} and {interval(values[better].values())}',
        verdict='not decided' if not decided else 'holds' if mean > 0 else 'does not hold',
    )


def judge_memory(by_heads):
    """The memory of the scores is B·h·T² numbers: it grows with every head."""
    memory = {heads: rows[0]['peak_memory_mb'] for heads, rows in by_heads.items()}
    step = {h: mean_interval([r['step_ms'] for r in rows])[0] for h, rows in by_heads.items()}
    few, many = min(by_heads), max(by_heads)
    listed = list(memory.values())
    grows = all(after > before for before, after in itertools.pairwise(listed))
    per_head = (memory[many] - memory[few]) / (many - few)
    return experiment.Claim(
        source='A',
        text='More heads cost memory, and training time',
        theirs='scores are B·h·T² numbers',
        ours=f'{memory[few]:.1f} MB with {few}, {memory[many]:.1f} with {many}: {per_head:.2f} MB '
        f'a head; {step[few]:.1f} ms a step, then {step[many]:.1f}',
        verdict='holds' if grows and per_head > 0.01 else 'does not hold',
    )


PANELS = {
    'Learning rate (width 128, context 64)': 'learning_rate',
    'Width (and d_head 16)': 'd_',
    'Context length': 'context_length',
}
BASE = 'learning_rate 0.004'  # with a width of 128 and a context of 64: in every panel


@styled
def draw(series):
    """A panel of losses for each further axis, the base sweep in all of them; and memory."""
    figure = Figure(figsize=(10, 7))
    plots = figure.subplots(2, 2)
    styles = dict(zip(series, zip(PALETTE, MARKERS, strict=False), strict=False))
    for plot, (title, start) in zip(plots.flat, PANELS.items(), strict=False):
        shown = [name for name in series if name == BASE or name.startswith(start)]
        for place, name in enumerate(shown):
            values = losses(series[name])
            intervals = [mean_interval(own.values()) for own in values.values()]
            apart = 2 ** (0.06 * (place - (len(shown) - 1) / 2))  # bars beside each other
            plot.errorbar(
                [apart * heads for heads in values],
                [mean for mean, _ in intervals],
                [half or 0 for _, half in intervals],
                color=styles[name][0], marker=styles[name][1], capsize=3,
            )  # fmt: skip
        plot.set_title(title)
        plot.set_ylabel('validation loss (nats a token)')
    memory = plots[1, 1]
    for name, by_heads in series.items():
        values = [rows[0]['peak_memory_mb'] for rows in by_heads.values()]
        memory.plot(list(by_heads), values, color=styles[name][0], marker=styles[name][1],
                    label=f'{name} (width 128, context 64)' if name == BASE else name)  # fmt: skip
    memory.set_title('Memory of a train step')
    memory.set_ylabel("MB (compiler's figure)")
    memory.set_ylim(bottom=0)
    counts = sorted({heads for by_heads in series.values() for heads in by_heads})
    limits = [plot.get_ylim() for plot in plots.flat[:3]]
    for plot in plots.flat:
        plot.set_xscale('log', base=2)
        plot.set_xticks(counts, [f'{x}' for x in counts])
        plot.set_xlabel('heads')
    for plot in plots.flat[:3]:
        plot.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    figure.legend(*memory.get_legend_handles_labels(), loc='outside lower center', ncols=4)
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
