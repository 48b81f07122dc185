"""Why scores are divided by √d_k, and whether a model learns without it.

    python -m experiments.sqrt_dk [--quick]      four minutes on two cores; --quick: half of one

First the article's table: a query and 8 keys with standard normal entries, 20,000 times at each
d_k, from the article's generator and in its order. Expected: its digits. Their products grow as
√d_k, so the raw softmax comes close to choosing one key, and its gradient vanishes: the indicator
Σ p(1 − p) falls, in the end as 1.42/√d_k (see `asymptote`). After the division nothing depends on
d_k any more, so that no d_k is safer than another.

Then what the article asserts without a measurement: that a model hardly learns without the
division. The same small GPT with and without it, at every head dimension and so with 128/d_k heads,
in two kinds. With QK-norm queries and keys have the variance 1 that the article assumes, and scores
start at about √d_k. As GPT-2 draws its weights, from N(0, 0.02²), the variance is 0.05 at first,
and so are scores small. Expected: the loss is worse without the division, the more so the larger
d_k is, clearly so as GPT-2 is drawn and within wide intervals with QK-norm; but the model learns:
"hardly" is seen, if at all, with a single wide head.

The model: 2 layers, width 128, context 32, characters of the default corpus; 400 steps of AdamW on
8 windows, with a rate of 4e-3 after a sixth of them, then cosine. Three seeds, in pairs: the same
start and the same batches.
"""

import itertools

import jax
import numpy as np
import scipy
from matplotlib.figure import Figure

from configs import heads_sweep
from minigpt_jax import experiment
from minigpt_jax.report.figures import MARKERS, PALETTE, styled
from minigpt_jax.report.statistics import mean_interval
from minigpt_jax.training import steps
from minigpt_jax.training.config import resolve
from minigpt_jax.training.tasks import ContinueText

SEED, TRIALS, NUM_KEYS = 20260830, 20_000, 8
# What the article prints at each d_k: standard deviation of the scores, largest probability raw and
# scaled, Σp(1 − p) raw and scaled.
PRINTED = {
    4: ('1.70', '0.529', '0.345', '0.6014', '0.7727'),
    16: ('3.55', '0.748', '0.357', '0.3480', '0.7688'),
    64: ('7.20', '0.875', '0.361', '0.1766', '0.7674'),
    256: ('14.41', '0.937', '0.360', '0.0891', '0.7683'),
    1024: ('28.93', '0.970', '0.364', '0.0433', '0.7657'),
}
COLUMNS = {
    'std': '.2f',
    'raw_max': '.3f',
    'scaled_max': '.3f',
    'raw_gradient': '.4f',
    'scaled_gradient': '.4f',
}
UNIFORM = {'max': 1 / NUM_KEYS, 'gradient': 1 - 1 / NUM_KEYS}

WIDTH = 128
SEEDS = (0, 1, 2)
# Kind of queries and keys: (its name in print, `model.qk_norm`, the head dimensions).
KINDS = {
    'normed': ('variance 1 by QK-norm', True, (8, 16, 32, 64, 128)),
    'gpt2': ('as GPT-2 is drawn', False, (8, 32, 128)),
}
HARDLY = 0.5  # of what the divided model learns: less than that is "hardly learns"


def sample_softmax(widths):
    """{d_k: {column: one number a trial}}, by the article's generator in the article's order.

    Each trial draws q of (d) and then K of (8, d): 9·d numbers in a row.
    """
    rng = np.random.default_rng(SEED)
    samples = {}
    for d in widths:
        parts = [sample_trials(rng, d, TRIALS // 20) for _ in range(20)]  # to save memory
        samples[d] = {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}
    return samples


def sample_trials(rng, d, trials):
    drawn = rng.standard_normal((trials, 1 + NUM_KEYS, d))
    scores = np.einsum('nd,nsd->ns', drawn[:, 0], drawn[:, 1:])
    raw, scaled = (scipy.special.softmax(x, axis=1) for x in (scores, scores / np.sqrt(d)))
    return {
        'std': scores.std(axis=1),
        'square': np.mean(scores**2, axis=1),
        'raw_max': raw.max(axis=1),
        'scaled_max': scaled.max(axis=1),
        'raw_gradient': np.sum(raw * (1 - raw), axis=1),
        'scaled_gradient': np.sum(scaled * (1 - scaled), axis=1),
    }


def asymptote():
    """c, where the raw Σ p(1 − p) comes to c/√d_k: the mean of the largest of 8 standard normals.

    Large scores leave a gradient only where the two largest are nearly equal. With a gap g their
    probabilities are p = 1/(1 + e^-g) and 1 − p, and Σ p(1 − p) = 2p(1 − p), whose integral over
    g > 0 is 1. So c/√d_k is the density of the gap at 0: for n normals of standard deviation √d_k
    it is n(n − 1) ∫ φ² Φ^(n−2) / √d_k, which by parts is the mean of their largest over √d_k.
    """
    x = np.linspace(-10, 10, 4001)
    normal = scipy.stats.norm
    density = NUM_KEYS * normal.pdf(x) * normal.cdf(x) ** (NUM_KEYS - 1)
    return float(np.trapezoid(x * density, x))


def slope(samples, start, end):
    """d log Σp(1 − p) / d log d_k of the raw softmax between two d_k, and its 95 % half width."""
    means, errors = zip(
        *(
            (x.mean(), scipy.stats.sem(x))
            for x in (samples[d]['raw_gradient'] for d in (start, end))
        ),
        strict=True,
    )
    span = np.log(end / start)
    half = 1.96 * np.hypot(errors[0] / means[0], errors[1] / means[1]) / span
    return float(np.log(means[1] / means[0]) / span), float(half)


def make_config(kind, d_head, scale_scores, num_steps):
    c = heads_sweep.get_config()
    c.sweep = ()
    c.model.d_model, c.model.num_heads, c.model.context_length = WIDTH, WIDTH // d_head, 32
    c.model.qk_norm, c.model.scale_scores = KINDS[kind][1], scale_scores
    c.optim.warmup_steps = num_steps // 6
    c.train.steps = c.train.checkpoint_every = c.eval.every = num_steps
    return resolve(c)


def train(config, corpus, seeds):
    """The validation loss of each seed, in nats a character."""
    task = ContinueText(config, corpus)
    vocab_size = corpus.tokenizer.vocab_size
    model, init = steps.build_model(config, vocab_size), steps.make_init(config, vocab_size)
    call = jax.jit(steps.make_train_call(config, model, losses=task.losses), donate_argnums=0)
    evaluate = jax.jit(steps.make_evaluate(model, losses=task.losses))
    losses = []
    for seed in seeds:
        state = init(seed)
        num_calls = config.train.steps // config.train.steps_per_call
        for batches in itertools.islice(task.batches(seed, 0), num_calls):
            state, _ = call(state, batches)
        total, count = evaluate(state.params, *task.validation())
        losses.append(float(total / count))
    return np.array(losses)


def counted_losses(corpus):
    """Validation losses that counting gives: of characters alone, and given the one before."""
    size = corpus.tokenizer.vocab_size
    train, validation = (
        np.asarray(x, np.int64) for x in (corpus.train_tokens, corpus.validation_tokens)
    )
    pairs = np.bincount(train[:-1] * size + train[1:], minlength=size**2) + 1.0
    pairs_VV = pairs.reshape(size, size)
    singles_V = pairs_VV.sum(axis=0)
    before, after = validation[:-1], validation[1:]
    return {
        'frequencies': -np.log(singles_V / singles_V.sum())[after].mean(),
        'pairs': -np.log(pairs_VV / pairs_VV.sum(axis=1, keepdims=True))[before, after].mean(),
    }


def measure(setting):
    samples = sample_softmax((4, 16, 64) if setting.quick else PRINTED)
    cells = {'normed': (16, 128)} if setting.quick else {kind: x[2] for kind, x in KINDS.items()}
    num_steps = 60 if setting.quick else 400
    corpus = ContinueText.load(make_config('normed', 8, True, num_steps).data)
    jobs = [(kind, d, on) for kind, heads in cells.items() for d in heads for on in (True, False)]

    def run(kind, d_head, scale_scores):
        losses = train(make_config(kind, d_head, scale_scores, num_steps), corpus, SEEDS)
        divided = 'divided' if scale_scores else 'not divided'
        print(f'{KINDS[kind][0]}, d_k = {d_head}, {divided}: {losses.mean():.3f}', flush=True)
        return losses

    losses = dict(zip(jobs, experiment.on_all_devices(run, jobs), strict=True))
    counted = counted_losses(corpus)
    pairs = list(itertools.pairwise(samples))
    slopes = {pair: slope(samples, *pair) for pair in pairs}
    return experiment.Outcome(
        tables=[
            table_of_softmax(samples),
            table_of_slopes(samples, slopes),
            table_of_losses(losses, counted, num_steps),
        ],
        numbers={
            'softmax': {
                d: {name: (x.mean(), scipy.stats.sem(x)) for name, x in columns.items()}
                for d, columns in samples.items()
            },
            'asymptote': asymptote(),
            'slopes': [[*pair, *estimate] for pair, estimate in slopes.items()],
            'seeds': list(SEEDS),
            'steps': num_steps,
            'counted_losses': counted,
            'losses': [
                {'kind': kind, 'd_head': d, 'scale_scores': scale, 'val_loss': values}
                for (kind, d, scale), values in losses.items()
            ],
        },
        claims=judge_softmax(samples, slopes) + judge_training(losses, counted),
        figure=draw(samples, losses, counted),
    )


def digits(samples, d):
    """The row of the article's table at d, as text of as many digits."""
    return tuple(f'{samples[d][name].mean():{form}}' for name, form in COLUMNS.items())


def table_of_softmax(samples):
    rows = []
    for d, columns in samples.items():
        std, raw_max, scaled_max, raw, scaled = digits(samples, d)
        every = f'{np.sqrt(columns["square"].mean()):.2f}'
        rows.append([d, std, every, f'{raw_max} → {scaled_max}', f'{raw} → {scaled}'])
    headers = [
        'd_k',
        'std of the scores of a query',
        'of all scores',
        'largest probability, raw → scaled',
        'Σp(1−p), raw → scaled',
    ]
    return f'Softmax over {NUM_KEYS} keys, means of {TRIALS:,} queries', headers, rows


def table_of_slopes(samples, slopes):
    rows = [
        [
            f'{start} → {end}',
            f'{value:.3f} ± {half:.3f}',
            f'{samples[end]["raw_gradient"].mean() * np.sqrt(end):.2f}',
        ]
        for (start, end), (value, half) in slopes.items()
    ]
    headers = ['d_k', 'slope of log Σp(1−p) in log d_k', '√d_k · Σp(1−p) at its end']
    return (
        f'The raw indicator falls as d_k^slope, in the end as {asymptote():.3f}/√d_k',
        headers,
        rows,
    )


def table_of_losses(losses, counted, num_steps):
    rows = []
    for kind, d, scale in losses:
        if scale:
            divided, raw = losses[kind, d, True], losses[kind, d, False]
            share, half = share_learnt(divided, raw, counted)
            rows.append(
                [KINDS[kind][0], d, WIDTH // d, interval(divided), interval(raw)]
                + [interval(raw - divided, '+.3f'), f'{share:.0%} ± {half:.0%}']
            )
    title = (
        f'Validation loss after {num_steps} steps, nats a character, {len(SEEDS)} seeds. Counting '
        f'characters gives {counted["frequencies"]:.3f}, counting pairs {counted["pairs"]:.3f}'
    )
    headers = [
        'queries and keys',
        'd_k',
        'heads',
        'divided',
        'not divided',
        'difference',
        'share learnt',
    ]
    return title, headers, rows


def share_learnt(divided, raw, counted):
    """(mean, half width): how far below mere frequencies the model comes, of the divided one."""
    return mean_interval((counted['frequencies'] - raw) / (counted['frequencies'] - divided))


def interval(values, form='.3f'):
    mean, half = mean_interval(values)
    return f'{mean:{form}} ± {half:.3f}'


def judge_softmax(samples, slopes):
    same = sum(
        ours == theirs
        for d in samples
        for ours, theirs in zip(digits(samples, d), PRINTED[d], strict=True)
    )
    count = len(samples) * len(COLUMNS)
    # The smallest d_k from which on every slope may be -1/2.
    missed = [end for (_, end), (value, half) in slopes.items() if abs(value + 0.5) > half]
    condition = f'from d_k = {max(missed)} on' if missed else 'at every d_k here'
    listed = ', '.join(
        f'{value:.2f} ± {half:.2f} from {start} to {end}'
        for (start, end), (value, half) in slopes.items()
    )
    scaled, raw = (
        [samples[d][name].mean() for d in samples] for name in ('scaled_gradient', 'raw_gradient')
    )
    spread = max(scaled) / min(scaled) - 1
    start, end = list(samples)[-3], list(samples)[-1]
    overall = np.log(raw[-1] / raw[-3]) / np.log(end / start)
    return [
        experiment.Claim(
            source='B2',
            text='The table of standard deviations, largest probabilities and indicators',
            theirs='; '.join(f'{d}: {" ".join(PRINTED[d])}' for d in samples),
            ours=f'{same} of {count} numbers agree in every printed digit',
            verdict='holds' if same == count else 'does not hold',
        ),
        experiment.Claim(
            source='B2',
            text='Without the division Σp(1−p) falls as d_k^-1/2',
            theirs='d_k^-1/2',
            ours=f'{condition}: the slope is {listed}, and {overall:.3f} from {start} to {end} as '
            f'a whole; in the end it is {asymptote():.2f}/√d_k',
            verdict='does not hold'
            if missed and max(missed) == max(samples)
            else 'holds under a condition'
            if missed
            else 'holds',
        ),
        experiment.Claim(
            source='B2',
            text='A small d_k such as 64 is a second guard against a softmax that chooses one key',
            theirs='',
            ours=f'after the division Σp(1−p) is {min(scaled):.3f} to {max(scaled):.3f} at every '
            f'd_k, within {spread:.1%}, and so is the article’s own column; without it the '
            f'factor is {max(raw) / min(raw):.1f}',
            verdict='does not hold' if spread < 0.02 else 'not decided',
        ),
    ]


def judge_training(losses, counted):
    claims = []
    for kind in dict.fromkeys(kind for kind, *_ in losses):
        name = KINDS[kind][0]
        found = {
            d: (mean_interval(raw - losses[kind, d, True]), share)
            for (own, d, scale), raw in losses.items()
            if own == kind and not scale
            for share in [share_learnt(losses[kind, d, True], raw, counted)]
        }
        hardly = [d for d, (_, (share, half)) in found.items() if share + half < HARDLY]
        perhaps = [d for d, (_, (share, half)) in found.items() if share - half < HARDLY]
        listed = '; '.join(
            f'd_k = {d}: {difference:+.3f} ± {half:.3f} nats, {share:.0%} ± {share_half:.0%} learnt'
            for d, ((difference, half), (share, share_half)) in found.items()
        )
        if len(hardly) == len(found):
            verdict = 'holds'
        elif hardly:
            verdict = 'holds under a condition'
        else:
            verdict = 'not decided' if perhaps else 'does not hold'
        claims.append(
            experiment.Claim(
                source='B2',
                text=f'Without the division a model hardly learns (queries and keys: {name})',
                theirs='asserted without a measurement',
                ours=f'{listed}. "Learnt" is the way below the loss of mere frequencies, in parts '
                f'of the way of the divided model; "hardly" is under {HARDLY:.0%}'
                + (f': at d_k = {", ".join(map(str, hardly))}' if hardly else ''),
                verdict=verdict,
            )
        )
    return claims


@styled
def draw(samples, losses, counted):
    figure = Figure(figsize=(9, 7.2))
    top, bottom = figure.subfigures(2, 1)
    draw_softmax(top.subplots(1, 2), samples)
    kinds = list(dict.fromkeys(kind for kind, *_ in losses))
    plots = bottom.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for plot, kind in zip(plots, kinds, strict=True):
        draw_losses(plot, kind, losses, counted)
    plots[0].set_ylabel('validation loss (nats a character)')
    plots[-1].legend(loc='upper left', bbox_to_anchor=(0, 0.9))
    return figure


NAMES = {'raw': 'not divided', 'scaled': 'divided by √d_k'}
COLOURS = {'raw': PALETTE[1], 'scaled': PALETTE[0]}
SHAPES = {'raw': MARKERS[1], 'scaled': MARKERS[0]}


def draw_softmax(plots, samples):
    for plot, name in zip(plots, UNIFORM, strict=True):
        for kind, label in NAMES.items():
            means = [columns[f'{kind}_{name}'].mean() for columns in samples.values()]
            plot.plot(list(samples), means, color=COLOURS[kind], marker=SHAPES[kind], label=label)
        plot.axhline(UNIFORM[name], color=PALETTE[-1], linestyle=':', label='all keys alike')
        show_powers(plot, samples, 'd_k')
    left, right = plots
    left.set_ylim(0, 1.03)
    left.set_title('Not divided, the softmax comes to choose one key of 8')
    left.set_ylabel('largest probability (mean)')
    left.legend(loc='center right')
    right.set_yscale('log', base=2)
    right.yaxis.set_major_formatter(lambda y, _: f'{y:.3g}')
    ends = np.array([min(samples), max(samples)])
    right.plot(
        ends, asymptote() / np.sqrt(ends), '--', color='black', linewidth=0.8,
        label=f'{asymptote():.2f}/√d_k',
    )  # fmt: skip
    right.set_title('… and its gradient vanishes as 1/√d_k')
    right.set_ylabel('gradient indicator Σp(1−p) (mean)')
    right.legend(*([x[-1]] for x in right.get_legend_handles_labels()), loc='lower left')


def draw_losses(plot, kind, losses, counted):
    dimensions = [d for own, d, scale in losses if own == kind and scale]
    for division, label in NAMES.items():
        values = [losses[kind, d, division == 'scaled'] for d in dimensions]
        colour = COLOURS[division]
        means = [x.mean() for x in values]
        plot.plot(dimensions, means, color=colour, marker=SHAPES[division], label=label)
        for d, x in zip(dimensions, values, strict=True):
            plot.plot([d] * len(x), x, '.', color=colour, markersize=3)
    for name, line in (('frequencies', ':'), ('pairs', '--')):
        label = f'counting {name} of characters'
        plot.axhline(counted[name], color=PALETTE[-1], linestyle=line, label=label)
    show_powers(plot, dimensions, 'd_k (dimensions of a head)')
    plot.set_title(f'A trained GPT, queries and keys: {KINDS[kind][0]}')


def show_powers(plot, values, label):
    plot.set_xscale('log', base=2)
    plot.set_xticks(list(values), [str(x) for x in values])
    plot.set_xlabel(label)


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
