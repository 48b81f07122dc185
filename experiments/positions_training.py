"""Which position encoding learns best, and which still works beyond the training length?

    python -m experiments.positions_training [--quick]      about 10 minutes on two cores

Six encodings × causal (a decoder, next characters) and bidirectional (an encoder, hidden
characters), three seeds each, trained with a context of 32 and then evaluated on the same text in
windows of 1, 2 and 4 times that length. Learned positions have no vector beyond the table. Whether
a causal model knows order is asked of its last prediction in each window: what does it lose when
the characters before the last one are shuffled?

Expected: causally all six learn, and even `none` knows order, by the mask alone. Relative and
rotary positions learn fastest. Learned ones are ahead of sinusoidal ones, which in a longer
training end alike (Vaswani et al. 2017, table 3, row E: 25.7 and 25.8 BLEU). Bidirectionally `none`
is a bag of characters, and learned and sinusoidal positions are no better yet after so few steps.
Beyond the training length ALiBi and relative positions keep their loss; rotary and sinusoidal ones
do not.
"""

import jax
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from configs import masked_lm, minigpt
from minigpt_jax import experiment
from minigpt_jax.model.positions import POSITIONS
from minigpt_jax.report.figures import MARKERS, PALETTE, styled
from minigpt_jax.report.statistics import mean_interval
from minigpt_jax.report.tables import with_interval
from minigpt_jax.training import steps, sweep
from minigpt_jax.training.checkpoint import load_run
from minigpt_jax.training.config import RunError, with_values
from minigpt_jax.training.losses import next_token_loss
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
    shuffled = {}  # by positions: what a causal model loses by shuffling, one a seed
    for family in FAMILIES:
        config, workdir = make_config(family, setting.quick), setting.workdir / family
        if sweep.run(config, workdir) != 0:
            raise RunError(f'{workdir}: a run failed; its report says why')
        for point in sweep.expand(config):
            runs = [load_run(point.run_dir(workdir, seed)) for seed in point.seeds]
            positions = point.values['model.positions']
            for factor in FACTORS:
                evaluated = evaluate(point.config, factor * LENGTH)
                if evaluated is not None:
                    losses[family, positions, factor] = [evaluated(run.params) for run in runs]
            if family == 'causal':
                lost = loss_by_shuffling(point.config)
                shuffled[positions] = [lost(run.params) for run in runs]
    families = list(FAMILIES)
    return experiment.Outcome(
        tables=[
            *(tabulate(family, losses) for family in families),
            (
                'causal: what the last prediction loses when all before the last character is '
                'shuffled, nats',
                ['positions', 'loss'],
                [[positions, interval(values)] for positions, values in shuffled.items()],
            ),
        ],
        numbers={
            'training_length': LENGTH,
            'losses': [
                {'family': f, 'positions': p, 'length': LENGTH * k, 'val_loss': values}
                for (f, p, k), values in losses.items()
            ],
            'lost_by_shuffling': shuffled,
        },
        claims=judge(losses, shuffled),
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


def loss_by_shuffling(config, seed=0):
    """params -> how much more the last token of a window costs when those before are shuffled.

    All but the last two tokens of each validation window: what is predicted, and what it follows.
    """
    task_class = TASKS[config.model.family]
    corpus = task_class.load(config.data)
    (validation,) = task_class(config, corpus).validation()
    complete = validation['mask_BT'].all(axis=-1)
    tokens_BT1 = validation['tokens_BT1'][complete]
    shuffled_BT1 = tokens_BT1.copy()
    np.random.default_rng(seed).permuted(tokens_BT1[:, :-2], axis=1, out=shuffled_BT1[:, :-2])
    model = steps.build_model(config, corpus.tokenizer.vocab_size)

    @jax.jit
    def last_loss(params, tokens_BT1):
        logits_BTV = nnx.merge(model, params)(tokens_BT1[:, :-1])
        total, count = next_token_loss(logits_BTV[:, -1:], tokens_BT1[:, -1:])
        return total / count

    return lambda params: float(last_loss(params, shuffled_BT1) - last_loss(params, tokens_BT1))


def interval(values):
    return with_interval(*mean_interval(values), 3)


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


def judge(losses, shuffled):
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
            'does not hold' if abs(mean) > half
            else 'holds' if abs(mean) + half < 0.05 else 'not decided',
        )  # fmt: skip
    if 'none' in found:
        mean, half = paired(losses['causal', 'none', 1], losses['causal', 'learned', 1])
        lost, lost_half = mean_interval(shuffled['none'])
        other, other_half = paired(
            losses['bidirectional', 'none', 1], losses['bidirectional', 'rotary', 1]
        )
        claim(
            'B4',
            'Without positions a model knows no order',
            'asserted',
            f'bidirectionally none − rotary is {other:+.3f} ± {other_half:.3f}; causally none − '
            f'learned is {mean:+.3f} ± {half:.3f}, yet to shuffle what came before costs none '
            f'{lost:+.3f} ± {lost_half:.3f}: a causal mask alone tells of order',
            'not decided' if other - other_half <= 0
            else 'holds under a condition' if lost - lost_half > 0 else 'holds',
        )  # fmt: skip
    if ('causal', 'sinusoidal', 4) in losses:
        own, far = losses['causal', 'sinusoidal', 1], losses['causal', 'sinusoidal', 4]
        mean, half = paired(far, own)
        claim(
            'B5',
            'A model that was trained on short texts reads longer ones by the sinusoidal encoding',
            'asserted',
            f'the loss at four times the training length is {mean:+.3f} ± {half:.3f} '
            'nats a token from that at the length itself',
            'does not hold' if mean - half > 0
            else 'holds' if mean + half < 0.05 else 'not decided',
        )  # fmt: skip
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
