"""Does attention know the order of its tokens? Only from positions, or from a causal mask.

    python -m experiments.permutation [--quick]      under a minute; --quick: fewer draws

Six tokens are put into another order, before attention or after it. Without positions and mask the
result is the same: expected a difference of 1e-7, the rounding of float32. With the sinusoidal
encoding added first it is not: expected 0.5570538, the article's figure. A causal mask alone, with
no positions, breaks it as well, of which the articles say nothing: a token's result is of those
before it, so it depends on which those are. It is why a decoder can learn order without positions.

How far does that go? A stack of blocks without positions, with random weights, reads a text twice,
the second time with all tokens but the last in another order. Expected of its output at the last
token: without a mask the same at any depth, and with a causal mask the same in one layer, where the
last token sees all of the others as they are, in no order. From two layers on it differs, since
what it sees then has itself seen only what came before.

The setting: 6 tokens of 16 dimensions, one head, from the article's generator and in its order.
The stack: width 64, 4 heads, 12 tokens of a vocabulary of 50, random weights with the variance of
PyTorch's default, 8 draws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from configs import minigpt
from minigpt_jax import experiment
from minigpt_jax.model.attention import dot_product_attention
from minigpt_jax.model.positions import sinusoidal_encoding
from minigpt_jax.model.transformer import Stack
from minigpt_jax.report.figures import MARKERS, PALETTE, styled
from minigpt_jax.training.config import resolve

SEED, TOKENS, WIDTH = 7, 6, 16
ORDER = np.array([3, 0, 5, 1, 4, 2])
PRINTED = 0.5570538  # with positions; float32 differs in the 7th digit
ROUNDING = 1e-6

VOCABULARY, LENGTH = 50, 12
LAYERS = 3


def article_input():
    """(x_TD, w_3DK): the tokens, and the projections to queries, keys and values."""
    rng = np.random.default_rng(SEED)
    x_TD = rng.standard_normal((TOKENS, WIDTH))
    w_3DK = [rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH) for _ in range(3)]
    return jnp.asarray(x_TD, jnp.float32), jnp.asarray(np.stack(w_3DK), jnp.float32)


def attend(x_TD, w_3DK, *, causal=False):
    """One head of self-attention, x_TD -> y_TK."""
    q_BTHK, k_BSHK, v_BSHK = (x[None, :, None] for x in jnp.einsum('TD,IDK->ITK', x_TD, w_3DK))
    return dot_product_attention(q_BTHK, k_BSHK, v_BSHK, causal=causal)[0, :, 0]


def difference(function, x_TD):
    """function of the tokens in another order, minus its result in that order."""
    return np.asarray(function(x_TD[ORDER]) - function(x_TD)[ORDER])


def differences():
    """{case: difference_TK}: all zero where attention does not know the order."""
    x_TD, w_3DK = article_input()
    positions_TD = sinusoidal_encoding(jnp.arange(TOKENS), WIDTH)
    cases = {
        'no positions, no mask': lambda x: attend(x, w_3DK),
        'sinusoidal positions': lambda x: attend(x + positions_TD, w_3DK),
        'causal mask, no positions': lambda x: attend(x, w_3DK, causal=True),
    }
    return {name: difference(function, x_TD) for name, function in cases.items()}


def make_config():
    c = minigpt.get_config()
    c.model.d_model, c.model.positions, c.model.init = 64, 'none', 'torch'
    return resolve(c).model


@functools.partial(jax.jit, static_argnames='causal')
def last_changes(seed, *, causal):
    """change_N: what comes of the last token when those before it change places, after each layer.

    The largest difference, relative to the root mean square of the layer's output.
    """
    init_key, token_key, order_key = jax.random.split(jax.random.key(seed), 3)
    rngs = nnx.Rngs(params=init_key)
    stack = Stack(make_config(), VOCABULARY, num_layers=LAYERS, causal=causal, rngs=rngs)
    tokens_T = jax.random.permutation(token_key, VOCABULARY)[:LENGTH]
    moved_T = jnp.append(jax.random.permutation(order_key, tokens_T[:-1]), tokens_T[-1])
    *_, captured = stack.hidden(jnp.stack([tokens_T, moved_T]), capture=('block_outputs',))
    last_NBD = jnp.stack([captured[n]['block_outputs'][:, -1] for n in range(LAYERS)])
    before_ND, after_ND = last_NBD.swapaxes(0, 1)
    return jnp.abs(after_ND - before_ND).max(axis=1) / jnp.sqrt(jnp.mean(before_ND**2, axis=1))


def measure(setting):
    found = differences()
    seeds = range(2 if setting.quick else 8)
    changes = {  # of shape EN: seeds, layers
        mask: np.array([last_changes(seed, causal=causal) for seed in seeds])
        for mask, causal in (('no mask', False), ('causal mask', True))
    }
    return experiment.Outcome(
        tables=[
            (
                'Largest difference between reordering before and after attention',
                ['attention with', 'largest difference'],
                [[name, show(np.abs(x).max())] for name, x in found.items()],
            ),
            (
                'Change at the last token when those before it change places, without positions: '
                f'smallest and largest of {len(seeds)} draws',
                ['layers', *changes],
                [
                    [
                        n + 1,
                        *(f'{x[:, n].min():.1e} … {x[:, n].max():.1e}' for x in changes.values()),
                    ]
                    for n in range(LAYERS)
                ],
            ),
        ],
        numbers={
            'differences': found,
            'last_changes': changes,
        },
        claims=judge(found, changes),
        figure=draw(found, changes),
    )


def show(x):
    return f'{x:.1e}' if x < 1e-3 else f'{x:.7f}'


def judge(found, changes):
    plain, positions, causal = (float(np.abs(x).max()) for x in found.values())
    shallow, deep = changes['causal mask'][:, 0].max(), changes['causal mask'][:, 1:].min()
    unmasked = changes['no mask'].max()

    def claim(text, theirs, ours, holds):
        return experiment.Claim('B4', text, theirs, ours, 'holds' if holds else 'does not hold')

    return [
        claim(
            'Self-attention without positions and mask does not know the order of its tokens',
            'about 1e-7 in float32',
            f'{show(plain)}',
            plain < ROUNDING,
        ),
        claim(
            'Sinusoidal positions tell it',
            f'{PRINTED}',
            f'{show(positions)}; float32 is exact to about 1e-7',
            abs(positions - PRINTED) < ROUNDING,
        ),
        claim(
            'A causal mask tells it by itself, without positions (the articles do not say so)',
            '',
            f'{show(causal)}',
            causal > 0.01,
        ),
        claim(
            'A decoder can read order without any position encoding, and needs two layers for it',
            '',
            f'change at the last token: up to {show(shallow)} with one causal layer, at least '
            f'{deep:.2f} with more; without a mask up to {show(unmasked)} at any depth',
            shallow < 1e-4 and unmasked < 1e-4 and deep > 1e-2,
        ),
    ]


@styled
def draw(found, changes):
    figure = Figure(figsize=(10, 5.6))
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    top.suptitle('Reordering before attention minus reordering after it', fontsize=10)
    limit = max(np.abs(x).max() for x in found.values())
    plots = top.subplots(1, len(found), sharey=True)
    for plot, (name, x_TK) in zip(plots, found.items(), strict=True):
        image = plot.imshow(x_TK, cmap='RdBu', vmin=-limit, vmax=limit, aspect='auto')
        plot.set_title(f'{name}: up to {np.abs(x_TK).max():.2g}', fontsize=9)
        plot.set_xlabel('dimension')
        plot.set_xticks(range(0, WIDTH, 5))
        plot.set_yticks(range(TOKENS), [str(t + 1) for t in range(TOKENS)])
        plot.grid(False)
    plots[0].set_ylabel('token')
    top.colorbar(image, ax=plots, label='difference')

    plot = bottom.subplots()
    layers_N = np.arange(1, LAYERS + 1)
    for (mask, x_EN), colour, marker in zip(changes.items(), PALETTE, MARKERS, strict=False):
        plot.plot(layers_N, np.median(x_EN, axis=0), color=colour, marker=marker, label=mask)
        plot.plot(layers_N, x_EN.T, '.', color=colour, markersize=3)
    plot.set_yscale('log')
    plot.yaxis.set_major_formatter('{x:g}')
    plot.set_xticks(layers_N)
    plot.set_xlabel('layers (no position encoding)')
    plot.set_ylabel('change at the last token\n(relative; 1e-06 is rounding)')
    plot.set_title(
        'Reorder the tokens before the last: it notices with a mask and a second layer only'
    )
    plot.legend(loc='center right')
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
