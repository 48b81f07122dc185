"""How far apart two tokens are: a step in attention, n steps in an LSTM.

    python -m experiments.path_length [--quick]      15 seconds on two cores

The last of n outputs depends on the first input: through every cell between them in an LSTM, and
directly in attention. Measured is the Frobenius norm of ∂y_n/∂x_1, against n, and in one sequence
of the longest n that of ∂y_n/∂x_s for every input s. Counted are the matrix products that have to
wait for each other, read off the traced programs.

Expected: in an LSTM the norm falls exponentially, its matrix products in sequence are n. In
attention they are the same few at every n, and the norm does not depend on the distance; it does
depend on n, as 1/n, since n tokens share a weight of 1. A forget gate that starts open (bias 2)
stretches the exponential and does not end it.

The setting: width 64, inputs from N(0, 1), nothing trained, PyTorch's initialisation of attention
(4 heads, no mask) and Flax's of the LSTM cell, 8 seeds in one program.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from configs import minigpt
from minigpt_jax import experiment
from minigpt_jax.analysis.programs import products_in_sequence
from minigpt_jax.model.attention import FusedMultiHeadAttention
from minigpt_jax.report.figures import MARKERS, PALETTE, styled
from minigpt_jax.report.statistics import mean_interval
from minigpt_jax.training.config import resolve
from minigpt_jax.training.steps import seed_keys

WIDTH = 64
SEEDS = tuple(range(8))
LENGTHS = (2, 4, 8, 16, 32, 64, 128, 256)
OPEN_BIAS = 2.0  # σ(2) = 0.88 of a cell's state stay at each step


class Recurrent(nnx.Module):
    """An LSTM over a text, from x_TD to y_TD; the cell is Flax's.

    Source: Hochreiter and Schmidhuber 1997; bias of the forget gate: Gers et al. 2000.
    """

    def __init__(self, forget_bias=0.0, *, rngs):
        self.cell = nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs)
        bias_4D = self.cell.dense_h.bias  # of the gates i, f, g, o
        bias_4D[...] = bias_4D[...].at[WIDTH : 2 * WIDTH].add(forget_bias)

    def __call__(self, x_TD):
        start = (jnp.zeros(WIDTH), jnp.zeros(WIDTH))
        return jax.lax.scan(self.cell, start, x_TD)[1]


class Attention(nnx.Module):
    """One layer of attention without a mask, from x_TD to y_TD."""

    def __init__(self, *, rngs):
        c = minigpt.get_config()
        c.model.d_model, c.model.init = WIDTH, 'torch'
        self.attention = FusedMultiHeadAttention(resolve(c).model, causal=False, rngs=rngs)

    def __call__(self, x_TD):
        return self.attention(x_TD[None])[0][0]


LAYERS = {
    'attention': Attention,
    'LSTM': Recurrent,
    'LSTM, open forget gate': lambda rngs: Recurrent(OPEN_BIAS, rngs=rngs),
}


def gradient_norms(layer, x_TD):
    """norms_T: of ∂y_n/∂x_s for every input s, where y_n is the last output."""
    _, backward = jax.vjp(lambda x_TD: layer(x_TD)[-1], x_TD)
    # A few rows of the Jacobian at once: for all of them attention would need D times its scores.
    rows_DTD = jax.lax.map(lambda dy_D: backward(dy_D)[0], jnp.eye(WIDTH), batch_size=8)
    # Scaled first, or squares would underflow long before the norms do.
    largest_T = jnp.abs(rows_DTD).max((0, 2))
    scaled_DTD = rows_DTD / jnp.where(largest_T > 0, largest_T, 1)[:, None]
    return largest_T * jnp.sqrt(jnp.square(scaled_DTD).sum((0, 2)))


def measure_layer(make, length, seeds):
    """norms_ET of new layers and inputs, all seeds in one program."""

    def of_seed(seed):
        params_key, input_key = seed_keys(seed)
        layer = make(rngs=nnx.Rngs(params=params_key))
        return gradient_norms(layer, jax.random.normal(input_key, (length, WIDTH)))

    return np.asarray(jax.jit(jax.vmap(of_seed))(jnp.array(seeds)), np.float64)


def sequential_products(make, length):
    layer = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(params=0)))
    model, params = nnx.split(layer)

    def apply(params, x_TD):
        return nnx.merge(model, params)(x_TD)

    return products_in_sequence(apply, params, jax.ShapeDtypeStruct((length, WIDTH), jnp.float32))


def slopes(norms_by_length, logarithmic):
    """Per seed: of log norm by log n, or by n; norms that are 0 in float32 have no logarithm."""
    lengths = np.array(list(norms_by_length))
    by_seed = np.array(list(norms_by_length.values())).T
    x = np.log(lengths) if logarithmic else lengths
    return np.array([np.polyfit(x[own > 0], np.log(own[own > 0]), 1)[0] for own in by_seed])


def measure(setting):
    lengths, seeds = ((4, 16), SEEDS[:3]) if setting.quick else (LENGTHS, SEEDS)
    norms = {
        name: {n: measure_layer(make, n, seeds) for n in lengths} for name, make in LAYERS.items()
    }
    first = {
        name: {n: norms_ET[:, 0] for n, norms_ET in own.items()} for name, own in norms.items()
    }
    products = {
        name: [sequential_products(make, n) for n in lengths] for name, make in LAYERS.items()
    }
    by_distance = {name: own[lengths[-1]][:, ::-1] for name, own in norms.items()}
    return experiment.Outcome(
        tables=[
            (
                f'Norm of ∂y_n/∂x_1, {len(seeds)} seeds',
                ['n', *LAYERS],
                [[f'{n}', *(interval(first[name][n]) for name in LAYERS)] for n in lengths],
            ),
            (
                'Matrix products that wait for each other',
                ['n', *LAYERS],
                [
                    [f'{n}', *(f'{products[name][i]}' for name in LAYERS)]
                    for i, n in enumerate(lengths)
                ],
            ),
        ],
        numbers={
            'seeds': list(seeds),
            'lengths': list(lengths),
            'norms_of_the_first': {name: list(own.values()) for name, own in first.items()},
            'norms_by_distance': by_distance,
            'products_in_sequence': products,
        },
        claims=judge(first, by_distance, products, lengths),
        figure=draw(first, by_distance),
    )


def interval(values):
    if not all(values):
        return 'below float32'
    mean, half = mean_interval(values)
    return f'{mean:.2g} ± {half:.1g}'


def judge(first, by_distance, products, lengths):
    longest = lengths[-1]
    power, power_half = mean_interval(slopes(first['attention'], logarithmic=True))
    decay, decay_half = mean_interval(np.exp(slopes(first['LSTM'], logarithmic=False)))
    opened, opened_half = mean_interval(
        np.exp(slopes(first['LSTM, open forget gate'], logarithmic=False))
    )
    half = longest // 2
    # Of attention the far half of the inputs against the near one, the last input itself left out.
    ratio, ratio_half = mean_interval(
        by_distance['attention'][:, half:].mean(1) / by_distance['attention'][:, 1:half].mean(1)
    )
    counted = products['LSTM'] == list(lengths) and len(set(products['attention'])) == 1
    return [
        experiment.Claim(
            source='B9; Vaswani et al. 2017, table 1',
            text='Sequential operations: n in a recurrent layer, 1 in attention',
            theirs='O(n) and O(1)',
            ours=f'products in sequence: {products["LSTM"]} in the LSTM at n = {list(lengths)}; '
            f'in attention {products["attention"][0]} at every n (q, k and v; scores; weighted '
            'sum; W_O), one layer',
            verdict='holds' if counted else 'does not hold',
        ),
        experiment.Claim(
            source='B9; Vaswani et al. 2017, table 1',
            text='The path between tokens is n steps long in a recurrent layer: its gradient fades',
            theirs='O(n)',
            ours=f'the norm of ∂y_n/∂x_1 is multiplied by {decay:.2f} ± {decay_half:.2f} with each '
            f'token between; by {opened:.2f} ± {opened_half:.2f} with a forget gate that starts '
            f'open (bias {OPEN_BIAS:g})',
            verdict='holds' if max(decay + decay_half, opened + opened_half) < 1 else 'not decided',
        ),
        experiment.Claim(
            source='B9; Vaswani et al. 2017, table 1',
            text='In attention the path is one step long, whatever the distance',
            theirs='O(1)',
            ours=f'at n = {longest} the norm for the far half of the inputs is '
            f'{ratio:.2f} ± {ratio_half:.2f} of that for the near half: distance does not matter; '
            f'length does, with n to the power {power:.2f} ± {power_half:.2f}, while all weights '
            'are alike',
            verdict='holds under a condition' if abs(ratio - 1) + ratio_half < 0.1
            else 'not decided' if abs(ratio - 1) < ratio_half
            else 'does not hold',
        ),
    ]  # fmt: skip


@styled
def draw(first, by_distance):
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    for (name, own), colour, marker in zip(first.items(), PALETTE, MARKERS, strict=False):
        lengths, norms_NE = list(own), np.array(list(own.values()))
        left.plot(lengths, norms_NE, '.', color=colour, markersize=3)
        left.plot(lengths, gmean(norms_NE), marker=marker, color=colour, label=name)
        distances = np.arange(by_distance[name].shape[1])
        right.plot(distances, gmean(by_distance[name].T), color=colour, label=name)
    lengths = np.array(list(first['attention']))
    start = gmean(first['attention'][lengths[0]][None])
    left.plot(lengths, start * lengths[0] / lengths, ':', color='black', label='1/n')
    left.set_xscale('log', base=2)
    left.set_xticks(lengths, [f'{n}' for n in lengths])
    left.set_xlabel('n, tokens of the sequence')
    left.set_ylabel('norm of ∂y_n/∂x_1')
    left.set_title('From the last output back to the first input')
    figure.legend(*left.get_legend_handles_labels(), loc='outside lower center', ncols=4)
    right.set_xlabel('distance n − s (tokens)')
    right.set_ylabel('norm of ∂y_n/∂x_s')
    right.set_title(f'Within one sequence of {lengths[-1]}: the LSTM forgets')
    for plot in (left, right):
        plot.set_yscale('log')
        plot.set_ylim(1e-9, 10)
        plot.set_yticks([1e-8, 1e-6, 1e-4, 1e-2, 1], ['1e-8', '1e-6', '1e-4', '0.01', '1'])
        plot.minorticks_off()
    return figure


def gmean(norms_NE):
    """Geometric means over the last axis, as a logarithmic axis shows them; 0 where one is 0."""
    with np.errstate(divide='ignore'):
        return np.exp(np.log(norms_NE).mean(axis=-1))


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
