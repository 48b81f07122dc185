"""What every head keeps to: its size, the causal mask, dropout.

    python -m experiments.head_rules [--quick]      seconds

Asked of one layer, with nothing trained: how large is a head, d_head = C/h, and what is said of a
number of heads that the width C cannot be divided by? Does every head obey the causal mask? Is
there dropout on the weights and on the output?

Expected: 256/4 = 64, 256/8 = 32, 128/4 = 32, 128/16 = 8; all else is an error that names the counts
that do divide. No weight of a later token, of any head, differs from 0. Dropout with rate p puts 0
in a share p of the places, and leaves the mean what it is, since the rest grow by 1/(1 − p).

The setting: 4 texts of 64 standard normal vectors of width 128, 1 to 32 heads, p = 0.2. The dropped
weights are seen by giving attention the identity for its values.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from configs import minigpt
from minigpt_jax import experiment
from minigpt_jax.model.attention import ATTENTION_FORMS, dot_product_attention
from minigpt_jax.model.layers import Tap
from minigpt_jax.report.figures import styled
from minigpt_jax.training.config import ImpossibleError, resolve

SIZES = {(256, 4): 64, (256, 8): 32, (128, 4): 32, (128, 16): 8}  # the article's
SHAPE_BTD, HEADS, RATE = (4, 64, 128), (1, 2, 4, 8, 16, 32), 0.2
PICTURED = 4


def make_config(d_model, num_heads):
    c = minigpt.get_config()
    c.model.d_model, c.model.num_heads, c.model.init = d_model, num_heads, 'torch'
    c.model.dropout_rate = RATE
    return resolve(c).model


def make_layer(num_heads, form='fused'):
    return ATTENTION_FORMS[form](make_config(SHAPE_BTD[-1], num_heads), rngs=nnx.Rngs(params=0))


def size_of_a_head(d_model, num_heads):
    layer = nnx.eval_shape(
        lambda: ATTENTION_FORMS['fused'](make_config(d_model, num_heads), rngs=nnx.Rngs(params=0))
    )
    x_1TD = jax.ShapeDtypeStruct((1, 2, d_model), np.float32)
    return nnx.eval_shape(lambda layer, x: layer.qkv(x), layer, x_1TD).shape[-1]


def refusal(d_model, num_heads):
    try:
        make_config(d_model, num_heads)
    except ImpossibleError as error:
        return str(error)
    return None


def inputs():
    return jax.random.normal(jax.random.key(0), SHAPE_BTD)


def weights_of(layer, x_BTD):
    """weights_BHTS, before dropout."""
    tap = Tap(('attention_weights',))
    layer(x_BTD, tap=tap)
    return np.asarray(tap.values['attention_weights'])


def dropped_weights(layer, x_BTD, key):
    """weights_BHTS as they meet the values: these are the identity, so weights are the output."""
    q_BTHK, k_BTHK, _ = jnp.moveaxis(layer.qkv(x_BTD), 2, 0)
    B, T, H, _ = q_BTHK.shape
    identity_BSHS = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, H, T))
    y_BTHS = dot_product_attention(
        q_BTHK, k_BTHK, identity_BSHS, causal=True, dropout_rate=RATE, dropout_key=key
    )
    return np.asarray(y_BTHS.swapaxes(1, 2))


def measure_dropout(layer, x_BTD):
    """{where: (share of zeros that dropout made, mean after by mean before)}."""
    weights_BHTS = weights_of(layer, x_BTD)
    dropped_BHTS = dropped_weights(layer, x_BTD, jax.random.key(1))
    seen = weights_BHTS > 0
    # All dropped weights move the output, so its own dropout is seen by its zeros alone.
    y_BTD = np.asarray(layer(x_BTD, dropout_key=jax.random.key(2))[0])
    return {
        'weights': (
            (dropped_BHTS[seen] == 0).mean(),
            dropped_BHTS[seen].mean() / weights_BHTS[seen].mean(),
        ),
        'output': ((y_BTD == 0).mean(), None),
    }


def later_weights(form, num_heads, x_BTD):
    """All weights from a token to a later one."""
    T = x_BTD.shape[1]
    return weights_of(make_layer(num_heads, form), x_BTD)[..., np.triu(np.ones((T, T), bool), 1)]


def measure(setting):
    heads = HEADS[:3] if setting.quick else HEADS
    sizes = {pair: size_of_a_head(*pair) for pair in SIZES}
    error = refusal(128, 3)
    x_BTD = inputs()
    later = {h: {form: later_weights(form, h, x_BTD) for form in ATTENTION_FORMS} for h in heads}
    layer = make_layer(PICTURED)
    dropout = measure_dropout(layer, x_BTD)
    return experiment.Outcome(
        tables=[
            (
                'The size of a head',
                ['C', 'h', 'd_head'],
                [[f'{c}', f'{h}', f'{size}'] for (c, h), size in sizes.items()],
            ),
            (
                f'Weights of later tokens that are not 0, width {SHAPE_BTD[-1]}',
                ['heads', *ATTENTION_FORMS],
                [
                    [f'{h}', *(f'{(x != 0).sum()} of {x.size:,}' for x in by_form.values())]
                    for h, by_form in later.items()
                ],
            ),
            (
                f'Dropout of {RATE}, {PICTURED} heads',
                ['on', 'share of zeros', 'mean, after / before'],
                [
                    [where, f'{share:.3f}', '–' if mean is None else f'{mean:.3f}']
                    for where, (share, mean) in dropout.items()
                ],
            ),
        ],
        numbers={
            'sizes': [{'C': c, 'h': h, 'd_head': size} for (c, h), size in sizes.items()],
            'refusal': error,
            'later_weights': [
                {'heads': h, 'form': form, 'count': x.size, 'not_zero': (x != 0).sum()}
                for h, by_form in later.items()
                for form, x in by_form.items()
            ],
            'dropout': dropout,
        },
        claims=judge(sizes, error, later, dropout),
        figure=draw(weights_of(layer, x_BTD), dropped_weights(layer, x_BTD, jax.random.key(1))),
    )


def judge(sizes, error, later, dropout):
    weights = [x for by_form in later.values() for x in by_form.values()]
    shares = [share for share, _ in dropout.values()]
    return [
        experiment.Claim(
            source='A',
            text='d_head = C/h, and a width that the heads do not divide is an error',
            theirs=', '.join(f'{c}/{h} = {size}' for (c, h), size in SIZES.items()),
            ours=', '.join(f'{c}/{h} = {size}' for (c, h), size in sizes.items())
            + (f'; 128/3: "{error}"' if error else '; 128/3 is accepted'),
            verdict='holds' if sizes == SIZES and error else 'does not hold',
        ),
        experiment.Claim(
            source='A',
            text='Every head obeys the causal mask',
            theirs='',
            ours=f'{sum((x != 0).sum() for x in weights)} of {sum(x.size for x in weights):,} '
            f'weights of later tokens are not 0, in {min(later)} to {max(later)} heads, fused and '
            'one by one',
            verdict='holds' if all((x == 0).all() for x in weights) else 'does not hold',
        ),
        experiment.Claim(
            source='A',
            text='There is dropout on the weights and on the output',
            theirs='',
            ours=f'of the weights {shares[0]:.3f} become 0 at a rate of {RATE}, of the output '
            f'{shares[1]:.3f}; the mean weight is {dropout["weights"][1]:.3f} of that before',
            verdict='holds' if np.allclose(shares, RATE, atol=0.02) else 'does not hold',
        ),
    ]


@styled
def draw(weights_BHTS, dropped_BHTS, tokens=24):
    """The first tokens of the first text: heads side by side, below them what dropout leaves."""
    H = weights_BHTS.shape[1]
    figure = Figure(figsize=(2.4 * H + 0.8, 5))
    plots = figure.subplots(2, H, sharex=True, sharey=True)
    top = 0.5
    for row, (array, what) in zip(
        plots, ((weights_BHTS, 'weights'), (dropped_BHTS, f'dropout of {RATE}')), strict=True
    ):
        for h, plot in enumerate(row):
            shown_TS = np.ma.masked_equal(array[0, h, :tokens, :tokens], 0)
            image = plot.imshow(shown_TS, cmap='Blues', vmin=0, vmax=top)
            plot.set_facecolor('#F3E9D9')
            plot.grid(False)
            plot.set_title(f'head {h + 1}: {what}')
    for plot in plots[-1]:
        plot.set_xlabel('key')
    for plot in plots[:, 0]:
        plot.set_ylabel('query')
    figure.colorbar(
        image, ax=plots, label='attention weight (sand: exactly 0)', extend='max', shrink=0.8
    )
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
