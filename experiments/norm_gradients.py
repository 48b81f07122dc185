"""Where the norm stands decides where the gradient is: every layer's, before the first step.

    python -m experiments.norm_gradients [--quick]      80 seconds on two cores

In a stack that has learned nothing yet, how large is the gradient of the last block against that of
the first? With the norm behind each sum (Post-LN) every norm rescales what flows back, and the
deeper the stack the more often; with the norm inside the branch (Pre-LN) the sums stay free.

Expected: of the projection to queries, keys and values, the last gradient over the first is 1.5,
2.2 and 3.0 for 6, 12 and 24 layers of Post-LN, and stays near 1.4 with Pre-LN. At 6 layers the two
overlap from seed to seed. It is a matter of the parameter: of the second feed-forward weight the
ratio is below 1 under both, and of whole blocks it is Post-LN that is even. DeepNorm always is.

The setting is the article's: width 64, 4 heads, ReLU, 8 × 32 vectors from N(0, 1) in the place of
embeddings, random targets among 50, no mask, no biases in attention (all other layers have them),
PyTorch's initialisation, a last norm only where the sums are free. Twelve seeds, where the article
has one. "No residual" is Pre-LN without the sums.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from configs import minigpt
from minigpt_jax import experiment
from minigpt_jax.model.transformer import Vocabulary
from minigpt_jax.report.figures import MARKERS, PALETTE, styled
from minigpt_jax.report.statistics import mean_interval
from minigpt_jax.report.tables import with_interval
from minigpt_jax.training import steps
from minigpt_jax.training.config import resolve
from minigpt_jax.training.loop import seed_mode
from minigpt_jax.training.losses import next_token_loss
from minigpt_jax.training.optim import parameter_name

WIDTH, VOCABULARY, BATCH, LENGTH = 64, 50, 8, 32
SEEDS = tuple(range(12))
DEPTHS = (2, 6, 12, 24)
# What is compared: (norm_placement, residual).
PLACEMENTS = {
    'Post-LN': ('post', True),
    'Pre-LN': ('pre', True),
    'sandwich': ('sandwich', True),
    'DeepNorm': ('deepnorm', True),
    'no norm': ('none', True),
    'no residual': ('pre', False),
}
QKV, FEED_FORWARD = 'attention.qkv.kernel', 'feed_forward.out.kernel'
WHOLE = 'whole block'
ARTICLE = {'Post-LN': {6: 1.8, 12: 2.5, 24: 3.8}, 'Pre-LN': {6: 1.5, 12: 1.7, 24: 1.5}}


def make_config(placement, num_layers):
    c = minigpt.get_config()
    c.model.d_model, c.model.num_heads, c.model.num_layers = WIDTH, 4, num_layers
    c.model.norm_placement, c.model.residual = PLACEMENTS[placement]
    c.model.positions, c.model.activation, c.model.tie_embeddings = 'none', 'relu', False
    c.model.init, c.model.use_bias = 'torch', True
    c.model.scan_layers = True  # a program of the size of one layer, compiled for every depth
    return resolve(c)


def make_model(config, key):
    """(graph, params) of a stack from vectors to logits, its attention without biases."""
    model = Vocabulary(
        config.model, VOCABULARY, causal=False, embed=lambda x: x, rngs=nnx.Rngs(params=key)
    )
    attention = model.blocks.attention
    attention.qkv.bias = attention.out.bias = None
    return nnx.split(model)


def gradient_norms(config, seed):
    """{parameter: norm_N}: the gradient's norm in each layer, and over all of its parameters."""
    model_key, data_key = steps.seed_keys(seed)
    model, params = make_model(config, model_key)
    x_key, target_key = jax.random.split(data_key)
    x_BTD = jax.random.normal(x_key, (BATCH, LENGTH, WIDTH))
    targets_BT = jax.random.randint(target_key, (BATCH, LENGTH), 0, VOCABULARY)

    def mean_loss(params):
        total, count = next_token_loss(nnx.merge(model, params)(x_BTD), targets_BT)
        return total / count

    blocks = jax.grad(mean_loss)(params)['blocks']
    squares = {
        parameter_name(path): (grad**2).reshape(len(grad), -1).sum(axis=1)
        for path, grad in jax.tree_util.tree_leaves_with_path(blocks)
    }
    squares[WHOLE] = sum(squares.values())
    return {name: jnp.sqrt(square_N) for name, square_N in squares.items()}


def measure_norms(placement, num_layers, seeds):
    """{parameter: norms_EN} of all seeds, by one program."""
    config = make_config(placement, num_layers)
    run = steps.over_seeds(lambda seed: gradient_norms(config, seed), seed_mode(config))
    # It runs once: on a CPU to compile it well takes ten times as long as that.
    options = {'xla_backend_optimization_level': 0} if jax.default_backend() == 'cpu' else None
    return jax.tree.map(np.asarray, jax.jit(run, compiler_options=options)(jnp.array(seeds)))


def last_over_first(norms_EN):
    return norms_EN[:, -1] / norms_EN[:, 0]


def measure(setting):
    placements, depths = (
        (('Post-LN', 'Pre-LN'), (6,)) if setting.quick else (tuple(PLACEMENTS), DEPTHS)
    )
    jobs = [(placement, depth) for depth in depths for placement in placements]

    def run(placement, depth):
        norms = measure_norms(placement, depth, SEEDS)
        print(f'{placement}, {depth} layers: {spread(last_over_first(norms[QKV]))}', flush=True)
        return norms

    norms = dict(zip(jobs, experiment.on_all_devices(run, jobs), strict=True))
    ratios = {job: {name: last_over_first(x) for name, x in norms[job].items()} for job in jobs}
    return experiment.Outcome(
        tables=[
            ratio_table(ratios, placements, depths, QKV),
            ratio_table(ratios, placements, depths, FEED_FORWARD),
            parameter_table(ratios, placements, max(depths)),
        ],
        numbers={
            'seeds': list(SEEDS),
            'runs': [
                {
                    'placement': placement,
                    'layers': depth,
                    'parameter': name,
                    'ratio_by_seed': last_over_first(norms_EN),
                    'mean_norm_by_layer': norms_EN.mean(axis=0),
                    'lowest_norm_by_layer': norms_EN.min(axis=0),
                    'highest_norm_by_layer': norms_EN.max(axis=0),
                }
                for (placement, depth), by_parameter in norms.items()
                for name, norms_EN in by_parameter.items()
            ],
        },
        claims=judge(ratios, depths),
        figure=draw(norms, ratios, placements, depths),
    )


def spread(values_E):
    """Mean ± standard deviation over seeds: how far a single seed may lie off."""
    return f'{significant(values_E.mean())} ± {significant(values_E.std(ddof=1))}'


def significant(x):
    return f'{x:.2f}' if 0.01 <= x < 100 else f'{x:.1g}'


def ratio_table(ratios, placements, depths, parameter):
    there = ARTICLE if parameter == QKV else {}
    rows = [
        [placement]
        + [spread(ratios[placement, depth][parameter]) for depth in depths]
        + [', '.join(f'{x}' for L, x in there.get(placement, {}).items() if L in depths)]
        for placement in placements
    ]
    return (
        f'Gradient of {parameter}, last block over first: mean ± standard deviation, '
        f'{len(SEEDS)} seeds',
        ['placement', *(f'L = {depth}' for depth in depths), 'article, one seed, L ≥ 6'],
        rows,
    )


def parameter_table(ratios, placements, depth):
    names = sorted({name for placement in placements for name in ratios[placement, depth]})
    rows = [
        [name]
        + [
            spread(ratios[placement, depth][name]) if name in ratios[placement, depth] else ''
            for placement in placements
        ]
        for name in names
    ]
    title = f'Every parameter of a block at L = {depth}: gradient of the last block over the first'
    return title, ['parameter', *placements], rows


def judge(ratios, depths):
    post, pre = (
        {depth: ratios[name, depth][QKV] for depth in depths if depth in ARTICLE[name]}
        for name in ('Post-LN', 'Pre-LN')
    )
    whole = {name: ratios[name, max(depths)][WHOLE] for name in ('Post-LN', 'Pre-LN')}
    claims = [judge_order(post, pre, whole)]
    if len(post) > 1:
        other = {
            name: {depth: ratios[name, depth][FEED_FORWARD] for depth in pre}
            for name in ('Post-LN', 'Pre-LN')
        }
        claims += [judge_post(post, other['Post-LN']), judge_pre(pre, other['Pre-LN'])]
    return claims


def by_depth(values, show):
    return ', '.join(f'{show(x)} at L = {depth}' for depth, x in values.items())


def interval(values_E):
    return with_interval(*mean_interval(values_E), 2)


def theirs(name):
    return by_depth(ARTICLE[name], str) + ', one seed'


def judge_order(post, pre, whole):
    wins = {L: (post[L][:, None] > pre[L]).mean() for L in post}
    differences = {L: mean_interval(post[L] - pre[L]) for L in post}
    clear = [L for L, (mean, half) in differences.items() if mean - half > 0]
    by_one_seed = [L for L, share in wins.items() if share >= 0.95]
    ours = (
        'Post-LN − Pre-LN, 95 % interval: '
        + by_depth({L: post[L] - pre[L] for L in post}, interval)
        + '; a seed of Post-LN is above a seed of Pre-LN in '
        + by_depth(wins, lambda share: f'{share:.0%}')
    )
    if by_one_seed and len(by_one_seed) < len(post):
        ours += f'; so one seed of each can tell it from L = {min(by_one_seed)} on'
    ours += (
        f'. That is of queries, keys and values; of a whole block at L = {max(post)} the ratio is '
        f'{spread(whole["Post-LN"])} with Post-LN and {spread(whole["Pre-LN"])} with Pre-LN'
    )
    uneven = {name: abs(np.log(ratio_E).mean()) for name, ratio_E in whole.items()}
    everywhere = len(clear) == len(post) and uneven['Post-LN'] > uneven['Pre-LN']
    verdict = 'holds' if everywhere else 'holds under a condition'
    return experiment.Claim(
        source='B7',
        text='Gradients are more uneven over the layers with Post-LN than with Pre-LN',
        theirs=f'Post-LN {theirs("Post-LN")}; Pre-LN {theirs("Pre-LN")}',
        ours=ours,
        verdict=verdict if clear else 'not decided',
    )


def judge_post(post, feed_forward):
    mean, half = mean_interval(post[max(post)] - post[min(post)])
    other, other_half = mean_interval(feed_forward[max(post)] - feed_forward[min(post)])
    holds = 'holds' if other - other_half > 0 else 'holds under a condition'
    return experiment.Claim(
        source='B7',
        text='With Post-LN the last gradients outgrow the first, and the more the deeper',
        theirs=theirs('Post-LN'),
        ours=both_weights(post, feed_forward),
        verdict=holds if mean - half > 0 else 'not decided' if mean + half > 0 else 'does not hold',
    )


def judge_pre(pre, feed_forward):
    mean, half = mean_interval(pre[max(pre)] - pre[min(pre)])
    other, other_half = mean_interval(feed_forward[max(pre)] - feed_forward[min(pre)])
    holds = 'holds under a condition' if other + other_half < 0 else 'holds'
    margin = 0.2 * pre[min(pre)].mean()  # what counts as no change
    return experiment.Claim(
        source='B7',
        text='With Pre-LN the ratio does not change with the depth',
        theirs=theirs('Pre-LN'),
        ours=both_weights(pre, feed_forward),
        verdict=holds if abs(mean) + half < margin
        else 'does not hold' if abs(mean) - half > margin
        else 'not decided',
    )  # fmt: skip


def both_weights(qkv, feed_forward):
    return (
        f'{by_depth(qkv, spread)}, of queries, keys and values; of the second feed-forward weight '
        f'{by_depth(feed_forward, spread)} (mean ± standard deviation of seeds)'
    )


@styled
def draw(norms, ratios, placements, depths):
    figure = Figure(figsize=(13, 4.4))
    by_layer, of_qkv, of_feed_forward = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    deepest = max(depths)
    for placement, colour in zip(placements, PALETTE, strict=False):
        norms_EN = norms[placement, deepest][QKV]
        place_N = np.arange(1, deepest + 1)
        by_layer.plot(place_N, norms_EN.mean(axis=0), color=colour, label=placement)
        by_layer.fill_between(
            place_N, norms_EN.min(axis=0), norms_EN.max(axis=0), color=colour, alpha=0.15
        )
    by_layer.set_yscale('log')
    by_layer.yaxis.set_major_formatter('{x:g}')
    by_layer.yaxis.set_minor_formatter('')
    by_layer.set_xticks([1, *range(deepest // 4, deepest + 1, deepest // 4)])
    by_layer.set_xlabel(f'block (1: next to the input, {deepest}: to the output)')
    by_layer.set_ylabel('gradient norm of the q, k, v weight')
    by_layer.set_title(f'{deepest} layers: mean and range of {len(SEEDS)} seeds')
    # Between DeepNorm, whose blocks start small, and all others.
    by_layer.legend(ncols=2, loc='lower center', bbox_to_anchor=(0.5, 0.14))

    pair = dict(zip(('Post-LN', 'Pre-LN'), PALETTE, strict=False))
    for plot, parameter in ((of_qkv, QKV), (of_feed_forward, FEED_FORWARD)):
        for shift, (placement, colour) in zip((0.97, 1.03), pair.items(), strict=True):
            values_LE = np.stack([ratios[placement, depth][parameter] for depth in depths])
            plot.errorbar(
                np.array(depths) * shift,
                values_LE.mean(axis=1),
                values_LE.std(axis=1, ddof=1),
                fmt=f'{MARKERS[0]}-',
                color=colour,
                capsize=3,
                label=f'{placement}, mean ± deviation',
            )
            if parameter == QKV:
                there = {L: x for L, x in ARTICLE[placement].items() if L in depths}
                plot.plot(
                    list(there),
                    list(there.values()),
                    '*',
                    markersize=11,
                    markerfacecolor='none',
                    color=colour,
                    label=f'{placement}, article, one seed',
                )
        plot.axhline(1, color='black', linewidth=0.8, linestyle=':')
        plot.set_xscale('log', base=2)
        plot.set_xticks(depths, [str(depth) for depth in depths])
        plot.minorticks_off()
        plot.set_xlabel('layers of the stack')
        plot.set_ylim(0, 1.1 * max(4, ratios['Post-LN', deepest][QKV].mean()))
    of_qkv.set_ylabel('gradient norm, last block over first')
    of_qkv.set_title('q, k, v weight: Post-LN tilts with depth')
    of_qkv.legend(loc='upper left')
    of_feed_forward.set_title('second feed-forward weight: it does not')
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
