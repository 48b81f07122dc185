"""Who needs warm-up? Post-LN and Pre-LN at three depths, with and without it, at two rates.

    python -m experiments.norm_training [--quick]      20 minutes on two cores; --quick: one

Runs the sweep of configs/ln_sweep.py, 72 small models, and continues it where it was interrupted.
A run has failed if its loss became infinite, or if it learned nothing but how frequent each
character is: its validation loss is within 0.1 nats of what those frequencies alone give. In
differences a run that became infinite counts as that loss.

Expected: Pre-LN learns everywhere; warm-up lowers its loss by up to 0.1 nats at the higher rate,
and hardly at the lower one. Post-LN without warm-up fails at the higher rate from 4 layers on, and
mostly with 6 at the lower one. With warm-up it fails only with 6 layers at the higher rate. No loss
becomes infinite: norms see to that.
"""

import numpy as np
from matplotlib.figure import Figure

from configs import ln_sweep
from minigpt_jax import experiment
from minigpt_jax.data.batches import load_tokenized
from minigpt_jax.report.figures import styled
from minigpt_jax.report.statistics import mean_interval
from minigpt_jax.report.tables import read_results_csv, with_interval
from minigpt_jax.training import sweep
from minigpt_jax.training.config import RunError

AXES = ('norm_placement', 'num_layers', 'warmup_steps', 'learning_rate')
NAMES = {'post': 'Post-LN', 'pre': 'Pre-LN'}
FAILED_WITHIN = 0.1  # nats above which a run knows more than frequencies
NO_WORSE = 0.05  # nats that count as no difference
XIONG = 'Xiong et al. 2020'


def measure(setting):
    config = ln_sweep.get_config('quick' if setting.quick else '')
    if sweep.run(config, setting.workdir) != 0:
        raise RunError(f'{setting.workdir}: a run failed; its report says why')
    rows = read_results_csv(setting.workdir / 'results.csv')
    frequencies = frequency_loss(load_tokenized(config.data))
    losses = losses_by_point(rows, frequencies)
    return experiment.Outcome(
        tables=[tabulate(losses, frequencies)],
        numbers={
            'frequency_loss': frequencies,
            'steps': config.train.steps,
            'runs': [
                {name: row[name] for name in (*AXES, 'seed', 'status', 'val_loss')} for row in rows
            ],
        },
        claims=[] if setting.quick else judge(losses, frequencies),
        figure=draw(losses, frequencies, config.train.steps),
    )


def frequency_loss(corpus):
    """Nats a token on the validation text, given how often each token is in the training text."""
    counts = np.bincount(corpus.train_tokens, minlength=corpus.tokenizer.vocab_size) + 1
    return float(-np.log(counts / counts.sum())[corpus.validation_tokens].mean())


def losses_by_point(rows, frequencies):
    """{(placement, layers, warm-up, rate): losses_E}, in the order of the seeds."""
    losses = {}
    for row in sorted(rows, key=lambda row: row['seed']):
        loss = row['val_loss'] if row['status'] == 'ok' else frequencies
        losses.setdefault(tuple(row[name] for name in AXES), []).append(loss)
    return {point: np.array(values) for point, values in losses.items()}


def failed(losses_E, frequencies):
    return losses_E > frequencies - FAILED_WITHIN


def tabulate(losses, frequencies):
    rows = [
        [
            NAMES[placement],
            depth,
            warmup or 'none',
            f'{rate:g}',
            interval(values),
            f'{failed(values, frequencies).sum()} of {len(values)}',
        ]
        for (placement, depth, warmup, rate), values in sorted(losses.items())
    ]
    title = f'Validation loss in nats a token; {frequencies:.2f} is that of frequencies alone'
    return title, ['placement', 'layers', 'warm-up', 'rate', 'val loss', 'failed'], rows


def interval(values_E):
    return with_interval(*mean_interval(values_E), 2)


def judge(losses, frequencies):
    depths, warmups, rates = (sorted({point[i] for point in losses}) for i in (1, 2, 3))

    def choose(placement, warmup, rate):
        return {depth: losses[placement, depth, warmup, rate] for depth in depths}

    low, high = rates
    none, some = warmups
    claims = [
        judge_need(
            f'{name} needs warm-up, at the {which} rate of {rate:g}',
            choose(placement, none, rate),
            choose(placement, some, rate),
            frequencies,
            needed=placement == 'post',
        )
        for placement, name in NAMES.items()
        for which, rate in (('lower', low), ('higher', high))
    ]
    # Each placement at the rate that suits it, as one would train it.
    best = {
        placement: {
            depth: min((losses[placement, depth, some, rate] for rate in rates), key=np.mean)
            for depth in depths
        }
        for placement in NAMES
    }
    differences = {depth: best['post'][depth] - best['pre'][depth] for depth in depths}
    intervals = {depth: mean_interval(x) for depth, x in differences.items()}
    worse = [depth for depth, (mean, half) in intervals.items() if mean - half > 0]
    no_worse = [depth for depth, (mean, half) in intervals.items() if mean + half < NO_WORSE]
    claims.append(
        experiment.Claim(
            source=XIONG,
            text='With warm-up, and each at its better rate, Post-LN ends no worse than Pre-LN',
            theirs='',
            ours=f'Post-LN − Pre-LN: {by_depth(differences, interval)} layers, paired by seed',
            verdict='holds' if len(no_worse) == len(depths)
            else 'holds under a condition' if no_worse
            else 'does not hold' if len(worse) == len(depths)
            else 'not decided',
        )
    )  # fmt: skip
    return claims


def by_depth(values, show):
    return ', '.join(f'{show(x)} with {depth}' for depth, x in values.items())


def judge_need(text, without, with_warmup, frequencies, *, needed):
    """Does it fail without warm-up, at which depths, and by how much does warm-up lower the loss?

    Xiong et al. say yes of Post-LN and no of Pre-LN: `needed`. A depth needs warm-up where most
    seeds fail without it, most learn with it, and the loss is lower with it by more than its
    interval. It does without where none fails, and as well where the loss is not clearly lower.
    """

    def count(values):
        return by_depth(values, lambda x: f'{failed(x, frequencies).sum()} of {len(x)}')

    gains = {depth: without[depth] - with_warmup[depth] for depth in without}
    lost, helpless = (
        {depth for depth, x in values.items() if failed(x, frequencies).mean() > 0.5}
        for values in (without, with_warmup)
    )
    lower = {depth for depth, x in gains.items() if mean_interval(x)[0] > mean_interval(x)[1]}
    if needed:
        agree = (lost - helpless) & lower
        whole = len(agree) == len(without)
    else:
        agree = {depth for depth, x in without.items() if not failed(x, frequencies).any()}
        whole = len(agree) == len(without) and not lower
    ours = (
        f'failed without it: {count(without)} layers; with it: {count(with_warmup)} layers; loss '
        f'without − with it: {by_depth(gains, interval)} layers, paired by seed'
    )
    if needed and agree:
        ours += f'; so it is needed with {", ".join(map(str, sorted(agree)))} layers'
    if helpless:
        ours += f'; with {", ".join(map(str, sorted(helpless)))} layers this much is not enough'
    return experiment.Claim(
        source=XIONG,
        text=text if needed else text.replace('needs warm-up', 'does without warm-up'),
        theirs='asserted of translation and BERT',
        ours=ours,
        verdict='holds' if whole
        else 'holds under a condition' if agree
        else 'not decided' if needed and lost - helpless
        else 'does not hold',
    )  # fmt: skip


@styled
def draw(losses, frequencies, steps):
    """Placements side by side, warm-up below none; in each a map of depth and rate."""
    placements = [name for name in NAMES if any(point[0] == name for point in losses)]
    depths, warmups, rates = (sorted({point[i] for point in losses}) for i in (1, 2, 3))
    means = [values.mean() for values in losses.values()]
    lowest, highest = min(means), max(*means, frequencies)
    figure = Figure(figsize=(4.2 * len(placements), 0.8 + 2.5 * len(warmups)))
    plots = figure.subplots(len(warmups), len(placements), squeeze=False, sharex=True, sharey=True)
    for row, warmup in zip(plots, warmups, strict=True):
        for plot, placement in zip(row, placements, strict=True):
            loss_LR = np.array(
                [[losses[placement, L, warmup, rate].mean() for rate in rates] for L in depths]
            )
            image = plot.imshow(loss_LR, cmap='Oranges', vmin=lowest, vmax=highest, aspect='auto')
            for i, depth in enumerate(depths):
                for j, rate in enumerate(rates):
                    values = losses[placement, depth, warmup, rate]
                    count = failed(values, frequencies).sum()
                    dark = loss_LR[i, j] > (lowest + highest) / 2
                    text = f'{loss_LR[i, j]:.2f}' + (
                        f'\n{count} of {len(values)} failed' if count else ''
                    )
                    plot.text(
                        j, i, text, ha='center', va='center',
                        color='white' if dark else 'black', weight='bold' if count else None,
                    )  # fmt: skip
            plot.set_title(
                f'{NAMES[placement]}, ' + (f'warm-up of {warmup} steps' if warmup else 'no warm-up')
            )
            plot.set_xticks(range(len(rates)), [f'{rate:g}' for rate in rates])
            plot.set_yticks(range(len(depths)), [str(depth) for depth in depths])
            plot.grid(False)
    for plot in plots[-1]:
        plot.set_xlabel('learning rate')
    for plot in plots[:, 0]:
        plot.set_ylabel('layers')
    figure.colorbar(
        image,
        ax=plots,
        label=f'validation loss after {steps} steps (nats; {frequencies:.2f}: frequencies alone)',
    )
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
