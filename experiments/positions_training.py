"""Which position encoding learns best, and which still works beyond the training length?

    python -m experiments.positions_training [--quick]      about 10 minutes on two cores

Six encodings × causal (a decoder, next characters) and bidirectional (an encoder, hidden
characters), three seeds each, trained with a context of 32 and then evaluated on the same text in
windows of 1, 2 and 4 times that length. Learned positions have no vector beyond the table.

Expected: causally all six learn, even `none`, since the mask alone tells the order; learned and
sinusoidal positions end within each other's interval (Vaswani et al. 2017, table 3, row E: 25.7 and
25.8 BLEU). Bidirectionally `none` is a bag of characters. Beyond the training length ALiBi, rotary
and relative positions keep their loss or nearly, sinusoidal ones do not.
"""

import jax
from matplotlib.figure import Figure

from configs import masked_lm, minigpt
from minigpt_jax import experiment
from minigpt_jax.model.positions import POSITIONS
from minigpt_jax.report.figures import MARKERS, PALETTE, styled
from minigpt_jax.report.statistics import mean_interval
from minigpt_jax.training import steps, sweep
from minigpt_jax.training.checkpoint import load_run
from minigpt_jax.training.config import RunError, with_values
from minigpt_jax.training.tasks import TASKS

FAMILIES = {'causal': minigpt, 'bidirectional': masked_lm}
LENGTH, FACTORS = 32, (1, 2, 4)


def make_config(family, quick):
    c = FAMILIES[family].get_config()
    c.data.validation_fraction = 0.02
    c.model.context_length, c.model.d_model, c.model.num_layers = LENGTH, 64, 2
    c.optim.learning_rate, c.optim.final_learning_rate = 4e-3, 4e-4
    c.optim.warmup_steps = 20 if quick else 100
    c.train.steps = c.train.checkpoint_every = c.eval.every = 40 if quick else 1200
    c.eval.sample_tokens = 100
    c.sweep = (('model.positions', tuple(POSITIONS)), ('seed', (0, 1, 2)))
    if quick:
        c.sweep = (('model.positions', ('learned', 'alibi')), ('seed', (0, 1, 2)))
    return c


def measure(setting):
    losses = {}  # by family, positions, factor: one a seed
    for family in FAMILIES:
        config, workdir = make_config(family, setting.quick), setting.workdir / family
        if sweep.run(config, workdir) != 0:
            raise RunError(f'{workdir}: a run failed; its report says why')
        for point in sweep.expand(config):
            runs = [load_run(point.run_dir(workdir, seed)) for seed in point.seeds]
            for factor in FACTORS:
                evaluated = evaluate(point.config, factor * LENGTH)
                if evaluated is not None:
                    positions = point.values['model.positions']
                    losses[family, positions, factor] = [evaluated(run.params) for run in runs]
    families = list(FAMILIES)
    return experiment.Outcome(
        tables=[tabulate(family, losses) for family in families],
        numbers={
            'training_length': LENGTH,
            'losses': [
                {'family': f, 'positions': p, 'length': LENGTH * k, 'val_loss': values}
                for (f, p, k), values in losses.items()
            ],
        },
        claims=judge(losses),
        figure=draw(losses),
    )


def evaluate(config, length):
    """params -> mean loss over the validation text in windows of a length; None if it has none."""
    if length != config.model.context_length and config.model.positions == 'learned':
        return None
    config = with_values(config, {'model.context_length': length})
    task_class = TASKS[config.model.family]
    corpus = task_class.load(config.data)
    task = task_class(config, corpus)
    model = steps.build_model(config, corpus.tokenizer.vocab_size)
    total = jax.jit(steps.make_evaluate(model, losses=task.losses))
    (validation,) = task.validation()

    def mean(params):
        losses, count = total(params, validation)
        return float(losses / count)

    return mean


def interval(values):
    mean, half = mean_interval(values)
    return f'{mean:.3f} ± {half:.3f}'


def tabulate(family, losses):
    found = list(dict.fromkeys(p for f, p, _ in losses if f == family))
    rows = [
        [positions]
        + [
            interval(losses[family, positions, k]) if (family, positions, k) in losses else '–'
            for k in FACTORS
        ]
        for positions in found
    ]
    headers = ['positions', *(f'length {k * LENGTH}' for k in FACTORS)]
    title = f'{family}: validation loss, nats a token, trained at length {LENGTH}, three seeds'
    return title, headers, rows


def paired(a, b):
    """Mean and half width of the interval of a − b, seed by seed."""
    return mean_interval(x - y for x, y in zip(a, b, strict=True))


def judge(losses):
    claims = []

    def claim(source, text, theirs, ours, verdict):
        claims.append(experiment.Claim(source, text, theirs, ours, verdict))

    found = {p for _, p, _ in losses}
    if {'learned', 'sinusoidal'} <= found:
        mean, half = paired(losses['causal', 'learned', 1], losses['causal', 'sinusoidal', 1])
        claim(
            'B10, Vaswani',
            'Learned positions are as good as sinusoidal ones',
            '25.7 and 25.8 BLEU',
            f'learned − sinusoidal: {mean:+.3f} ± {half:.3f} nats a token, causal, from scratch in '
            'a short training',
            'holds' if abs(mean) <= half else 'does not hold',
        )
    if 'none' in found:
        mean, half = paired(losses['causal', 'none', 1], losses['causal', 'learned', 1])
        other, other_half = paired(
            losses['bidirectional', 'none', 1], losses['bidirectional', 'rotary', 1]
        )
        claim(
            'B4',
            'Without positions a model knows no order',
            'asserted',
            f'under a causal mask none − learned is {mean:+.3f} ± {half:.3f}: it learns order '
            f'without any; bidirectionally none − rotary is {other:+.3f} ± {other_half:.3f}',
            'holds under a condition' if mean - half < 0.05 and other - other_half > 0.05
            else 'holds' if mean - half > 0.05 else 'not decided',
        )  # fmt: skip
    if ('causal', 'sinusoidal', 4) in losses:
        own, far = losses['causal', 'sinusoidal', 1], losses['causal', 'sinusoidal', 4]
        mean, half = paired(far, own)
        claim(
            'B5',
            'The sinusoidal encoding extends to any length',
            'asserted',
            f'defined there, but the loss at four times the length is {mean:+.3f} ± {half:.3f} '
            'nats a token from that at the training length',
            'does not hold' if mean - half > 0.05 else 'holds',
        )
    return claims


@styled
def draw(losses):
    figure = Figure(figsize=(10, 4))
    plots = figure.subplots(1, 2)
    for plot, family in zip(plots, FAMILIES, strict=True):
        for positions, colour, marker in zip(POSITIONS, PALETTE, MARKERS, strict=False):
            factors = [k for k in FACTORS if (family, positions, k) in losses]
            if not factors:
                continue
            intervals = [mean_interval(losses[family, positions, k]) for k in factors]
            plot.errorbar(
                [k * LENGTH for k in factors],
                [mean for mean, _ in intervals],
                [half for _, half in intervals],
                color=colour, marker=marker, capsize=3,
                label=positions if plot is plots[0] else None,
            )  # fmt: skip
        plot.set_xscale('log', base=2)
        lengths = [k * LENGTH for k in FACTORS]
        plot.set_xticks(lengths, [str(x) for x in lengths])
        plot.set_xlabel(f'tokens that are read at once (trained with {LENGTH})')
        plot.set_title(f'{family.capitalize()}: validation loss, nats per token')
    figure.legend(loc='outside right center')
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
