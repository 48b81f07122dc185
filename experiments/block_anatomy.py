"""What a block is made of: where its parameters are, and which part lets tokens see each other.

    python -m experiments.block_anatomy [--quick]      about ten seconds on two cores

A block is attention, a feed-forward of hidden width 4 · d_model at each token alone, and norms.
Counted are the parameters of an encoder's block and of a decoder's with encoder-decoder attention.
Measured is the Jacobian ∂y_t/∂x_s of output t by input s, through either part.

Expected: the feed-forward has two thirds of an encoder's block and half of a decoder's. It equals a
convolution whose kernel is one token wide, and its Jacobian is exactly 0 between different tokens;
that of attention is nowhere 0.

The setting: widths 512 and 64, biases in the feed-forward and the norms. The Jacobian is that of
12 tokens from N(0, 1) at width 64 with 4 heads, no mask, initialised as PyTorch does.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from configs import minigpt
from minigpt_jax import experiment
from minigpt_jax.model.transformer import Block
from minigpt_jax.report.figures import PALETTE, styled
from minigpt_jax.training.config import resolve
from minigpt_jax.training.optim import parameter_name

WIDTHS = (512, 64)
BLOCKS = {'encoder': False, 'decoder': True}  # whether there is encoder-decoder attention
PARTS = ('self-attention', 'encoder-decoder attention', 'feed-forward', 'norms', 'attention biases')
TOKENS = 12
# What article B counts: no biases in attention.
THEIRS = {('encoder', 512): 0.6665, ('encoder', 64): 0.6654, ('decoder', 512): 0.4999}


def model_config(d_model, activation='gelu'):
    c = minigpt.get_config()
    c.model.d_model, c.model.use_bias, c.model.init = d_model, True, 'torch'
    c.model.activation = activation
    return resolve(c).model


def parameters(d_model, cross, activation='gelu'):
    """{part: number of parameters} of a block; allocates nothing."""
    config = model_config(d_model, activation)
    block = nnx.eval_shape(lambda: Block(config, cross=cross, rngs=nnx.Rngs(params=0)))
    counts = dict.fromkeys(PARTS, 0)
    for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(block)):
        counts[part_of(parameter_name(path))] += x.size
    return counts


def part_of(name):
    if 'norm' in name:
        return 'norms'
    if name.startswith('feed_forward'):
        return 'feed-forward'
    if name.endswith('bias'):
        return 'attention biases'
    return 'encoder-decoder attention' if name.startswith('cross') else 'self-attention'


def share(counts, part='feed-forward', *, attention_biases=False):
    """A part's share of a block, without or with the biases of attention."""
    total = sum(counts.values()) - (0 if attention_biases else counts['attention biases'])
    return counts[part] / total


def as_convolutions(feed_forward, x_BTD):
    """The same function as `feed_forward`, as two convolutions over tokens of kernel size 1."""

    def convolve(dense, x_BTI):
        w_1IO = dense.kernel[...][None]
        layout = ('NWC', 'WIO', 'NWC')
        y_BTO = jax.lax.conv_general_dilated(x_BTI, w_1IO, (1,), 'VALID', dimension_numbers=layout)
        return y_BTO + dense.bias[...]

    h_BTF = feed_forward.activation(convolve(feed_forward.hidden, x_BTD))
    return convolve(feed_forward.out, h_BTF)


def jacobian_norms(function, x_TD):
    """norms_TS: the Frobenius norm of ∂y_t/∂x_s, where y_BTD = function(x_BTD)."""
    jacobian_TDSD = jax.jacrev(lambda x: function(x[None])[0])(x_TD)
    return jnp.sqrt(jnp.square(jacobian_TDSD).sum((1, 3)))


@jax.jit
def measure_block():
    """(norms_TS through each part, largest difference to convolutions, largest output)."""
    block = Block(model_config(64), causal=False, rngs=nnx.Rngs(params=0))
    x_BTD = jax.random.normal(jax.random.key(1), (1, TOKENS, 64))
    functions = {
        'feed-forward': block.feed_forward,
        'attention': lambda x_BTD: block.attention(x_BTD)[0],
    }
    norms = {name: jacobian_norms(function, x_BTD[0]) for name, function in functions.items()}
    y_BTD = block.feed_forward(x_BTD)
    difference = jnp.abs(y_BTD - as_convolutions(block.feed_forward, x_BTD)).max()
    return norms, difference, jnp.abs(y_BTD).max()


def between_tokens(norms_TS):
    """The entries of different tokens."""
    return norms_TS[~np.eye(len(norms_TS), dtype=bool)]


def measure(setting):
    del setting  # it takes seconds
    counts = {(kind, d): parameters(d, cross) for kind, cross in BLOCKS.items() for d in WIDTHS}
    gated = parameters(512, False, 'swiglu')
    norms, difference, largest = jax.tree.map(np.asarray, measure_block())
    count_rows = [
        [kind, f'{d}', *(f'{own[part]:,}' for part in PARTS)]
        + [f'{share(own):.4f}', f'{share(own, attention_biases=True):.4f}']
        for (kind, d), own in counts.items()
    ]
    gradient_rows = [
        [name, f'{np.diag(x).mean():.3f}', f'{between_tokens(x).min():.3g}']
        + [f'{between_tokens(x).max():.3g}', f'{(between_tokens(x) == 0).sum()}']
        for name, x in norms.items()
    ]
    pairs = TOKENS * (TOKENS - 1)
    return experiment.Outcome(
        tables=[
            (
                'Parameters of a block, and the share of its feed-forward',
                ['block', 'd_model', *PARTS, 'share', 'share with attention biases'],
                count_rows,
            ),
            (
                f'Norm of ∂y_t/∂x_s, {TOKENS} tokens',
                ['through', 't = s, mean', 't ≠ s, least', 'largest', f'exactly 0, of {pairs}'],
                gradient_rows,
            ),
        ],
        numbers={
            'blocks': [
                {'block': kind, 'd_model': d, 'parameters': own, 'share': share(own)}
                | {'share_with_attention_biases': share(own, attention_biases=True)}
                for (kind, d), own in counts.items()
            ],
            'gated_share': share(gated),
            'jacobian_norms': norms,
            'convolution_difference': difference,
            'largest_output': largest,
        },
        claims=judge(counts, share(gated), norms, difference, largest),
        figure=draw(counts, norms),
        whole=True,
    )


def judge(counts, gated_share, norms, difference, largest):
    ours = {key: share(counts[key]) for key in THEIRS}
    agree = all(round(ours[key], 4) == figure for key, figure in THEIRS.items())
    through, around = (between_tokens(norms[name]) for name in ('attention', 'feed-forward'))
    return [
        experiment.Claim(
            source='B6',
            text='The feed-forward has 2/3 of the parameters of an encoder block, and 1/2 of a '
            "decoder block's",
            theirs=', '.join(f'{x:.4f} ({kind}, {d})' for (kind, d), x in THEIRS.items()),
            ours=', '.join(f'{x:.4f} ({kind}, {d})' for (kind, d), x in ours.items())
            + '; for two matrices with d_ff = 4 · d_model: with r times the width it is r/(r + 2), '
            f'and {gated_share:.4f} with the three matrices of SwiGLU at the same d_ff',
            verdict='holds under a condition' if agree else 'does not hold',
        ),
        experiment.Claim(
            source='B6',
            text='The position-wise feed-forward is a convolution of kernel size 1',
            theirs='',
            ours=f'the largest difference is {difference:.1e}, of outputs up to {largest:.2f}',
            verdict='holds' if difference < 1e-5 * max(largest, 1) else 'does not hold',
        ),
        experiment.Claim(
            source='B6',
            text='Attention mixes tokens; the feed-forward works on each token alone',
            theirs='',
            ours=f'of {through.size} pairs of different tokens the Jacobian is exactly 0 in '
            f'{(around == 0).sum()} through the feed-forward, in {(through == 0).sum()} through '
            f'attention (where its norm is at least {through.min():.2g})',
            verdict='holds' if (around == 0).all() and (through > 0).all() else 'does not hold',
        ),
    ]


@styled
def draw(counts, norms):
    figure = Figure(figsize=(10, 3.8))
    left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))
    plot = left.subplots()
    colours = dict(zip(PARTS[:3], (PALETTE[5], PALETTE[3], PALETTE[4]), strict=True))
    names = [f'{kind}\nd_model {d}' for kind, d in counts]
    starts = np.zeros(len(counts))
    for part, colour in colours.items():
        shares = np.array([100 * share(own, part) for own in counts.values()])
        plot.barh(names, shares, left=starts, color=colour, label=part)
        for row, (start, width) in enumerate(zip(starts, shares, strict=True)):
            if width:
                plot.text(start + width / 2, row, f'{width:.1f} %', ha='center', va='center')
        starts += shares
    plot.invert_yaxis()
    plot.grid(False)
    plot.set_xlim(0, 100)
    plot.set_xlabel("share of the block's parameters (%); the rest, norms, is under 1 %")
    plot.set_title('Feed-forward: 2/3 of an encoder block, 1/2 of a decoder block')
    left.legend(*plot.get_legend_handles_labels(), loc='outside lower center', ncols=3)

    plots = right.subplots(1, 2, sharey=True)
    titles = {
        'feed-forward': 'The feed-forward sees\none token alone',
        'attention': 'Attention sees\nevery token',
    }
    for panel, (name, title) in zip(plots, titles.items(), strict=True):
        norms_TS = norms[name]
        panel.imshow(np.ma.masked_equal(norms_TS, 0), cmap='Blues', vmin=0, vmax=norms_TS.max())
        panel.set_title(title)
        panel.set_xlabel('input token s')
        panel.grid(False)
        panel.set_xticks(range(0, TOKENS, 2), range(1, TOKENS + 1, 2))
        panel.set_yticks(range(0, TOKENS, 2), range(1, TOKENS + 1, 2))
    plots[0].set_ylabel('output token t')
    right.supxlabel(
        'Colour: norm of ∂y_t/∂x_s, of each map its own scale; white: exactly 0', fontsize=9
    )
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
