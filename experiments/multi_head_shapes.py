"""Multi-head attention by its shapes: what the number of heads changes, and what it leaves alone.

    python -m experiments.multi_head_shapes [--quick]      two minutes on two cores

Heads are a way of cutting the width D into h pieces of D/h. Printed are the shapes from q to the
output; the parameters and multiply-adds at every number of heads; how much slower heads one by
one are than all in one product (`attention_form`); and what is lost if the heads are joined but
not mixed: W_O against the identity, in a small MiniGPT.

Expected: parameters (4 D²) and multiply-adds (2 T² D for scores and weighted sums) do not depend on
h, the scores (B h T² numbers) do. concat(heads) W_O is the sum over heads of headᵢ W_O⁽ⁱ⁾. Both
forms give the same output, and the fused one is the faster the more heads there are.

The setting: shapes of an input (2, 10, 512) with 8 heads. Times are of forward and backward of one
layer of width 128 on 16 × 64 tokens, turn by turn, medians after two warm-ups. W_O and identity:
`configs/heads_sweep.py` (2 layers of width 128, 4 heads, 660 steps), same seeds, same batches; the
identity is never trained, and has no parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from configs import heads_sweep, minigpt
from minigpt_jax import experiment
from minigpt_jax.analysis.programs import multiply_adds
from minigpt_jax.data.batches import load_tokenized
from minigpt_jax.model.attention import (
    FusedMultiHeadAttention,
    MultiHeadAttention,
    dot_product_attention,
    fuse_heads,
)
from minigpt_jax.model.layers import Tap
from minigpt_jax.report.figures import MARKERS, PALETTE, styled
from minigpt_jax.report.statistics import mean_interval
from minigpt_jax.training import steps, tasks
from minigpt_jax.training.config import resolve
from minigpt_jax.training.optim import parameter_name

SHAPE_BTD, NUM_HEADS = (2, 10, 512), 8
TIMED_BTD = (16, 64, 128)
HEADS = (1, 2, 4, 8, 16, 32)
SEEDS = (0, 1, 2)
PROJECTIONS = ('W_O', 'identity')


def attention_config(d_model, num_heads):
    c = minigpt.get_config()
    c.model.d_model, c.model.num_heads, c.model.init = d_model, num_heads, 'torch'
    return resolve(c).model


def make_attention(form, d_model, num_heads, seed=0):
    return form(attention_config(d_model, num_heads), rngs=nnx.Rngs(params=seed))


# Shapes and counts.


def stages(attention, x_BTD):
    """{stage: array} from an input to the output of a fused attention layer."""
    tap = Tap(('attention_weights', 'head_outputs'))
    q_BTHK = attention.qkv(x_BTD)[:, :, 0]
    y_BTD, _ = attention(x_BTD, tap=tap)
    heads_BTHK = tap.values['head_outputs']
    return {
        'x': x_BTD,
        'q (k and v alike)': q_BTHK,
        'weights': tap.values['attention_weights'],
        'heads': heads_BTHK,
        'concat': heads_BTHK.reshape(x_BTD.shape),
        'output': y_BTD,
    }


def textbook_shape(stage, shape):
    """The order of axes of a textbook: heads before tokens."""
    heads_inside = len(shape) == 4 and stage != 'weights'
    return (shape[0], shape[2], shape[1], shape[3]) if heads_inside else shape


def sum_over_heads(attention, heads_BTHK):
    """Σᵢ headᵢ W_O⁽ⁱ⁾, with W_O⁽ⁱ⁾ the K rows of W_O that stand at head i."""
    H, K = heads_BTHK.shape[2:]
    w_HKD = attention.out.kernel[...].reshape(H, K, -1)
    return sum(heads_BTHK[:, :, h] @ w_HKD[h] for h in range(H))


def num_parameters(form, d_model, num_heads):
    attention = nnx.eval_shape(lambda: make_attention(form, d_model, num_heads))
    return sum(x.size for x in jax.tree.leaves(nnx.state(attention)))


def attention_multiply_adds(num_heads, length, d_model):
    """Multiply-adds of scores and weighted sums of one text, read off the program."""
    shape_BTHK = (1, length, num_heads, d_model // num_heads)
    qkv = [jax.ShapeDtypeStruct(shape_BTHK, jnp.float32)] * 3
    return multiply_adds(dot_product_attention, *qkv)


# The two forms.


def both_forms(d_model, num_heads):
    """{form: (model, params)} with the same weights, as `nnx.split` gives them."""

    def split(form):
        return nnx.split(make_attention(form, d_model, num_heads))

    per_head, _ = nnx.eval_shape(lambda: split(MultiHeadAttention))
    params = jax.jit(lambda: split(MultiHeadAttention)[1])()
    fused, converted = nnx.eval_shape(lambda: split(FusedMultiHeadAttention))
    nnx.replace_by_pure_dict(converted, fuse_heads(nnx.to_pure_dict(params)))
    return {'per_head': (per_head, params), 'fused': (fused, converted)}


def make_step(model):
    """(params, x_BTD) -> (gradients of both of Σ y², y_BTD), compiled."""

    def loss(params, x_BTD):
        y_BTD, _ = nnx.merge(model, params)(x_BTD)
        return (y_BTD**2).sum(), y_BTD

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def compare_forms(shape_BTD, num_heads, rounds):
    """Both forms at one number of heads: differences, times in seconds, memory of a step in MiB."""
    x_BTD = jax.random.normal(jax.random.key(0), shape_BTD)
    forms = both_forms(shape_BTD[-1], num_heads)
    calls = {
        name: make_step(model).lower(params, x_BTD).compile()
        for name, (model, params) in forms.items()
    }
    outputs = {name: calls[name](params, x_BTD)[1] for name, (_, params) in forms.items()}
    seconds = experiment.interleaved_times(
        {name: lambda name=name: calls[name](forms[name][1], x_BTD) for name in forms}, rounds
    )
    return {
        'heads': num_heads,
        'difference': float(jnp.abs(outputs['fused'] - outputs['per_head']).max()),
        'largest_output': float(jnp.abs(outputs['fused']).max()),
        'seconds': seconds,
        'ratio': seconds['per_head'] / seconds['fused'],
        'temporary_mib': calls['fused'].memory_analysis().temp_size_in_bytes / 2**20,
    }


# W_O against the identity.


def with_identity(params):
    """The parameters with the identity for every W_O: heads are joined and nothing more."""

    def replace(path, x):
        return jnp.eye(len(x)) if parameter_name(path).endswith('attention.out.kernel') else x

    return jax.tree_util.tree_map_with_path(replace, params)


def identity_losses(params, batch, key, *, model, smoothing=0.0):
    return steps.token_losses(with_identity(params), batch, key, model=model, smoothing=smoothing)


def train(config, corpus, projection, seed):
    """The validation loss after training, in nats a token."""
    losses = {'W_O': steps.token_losses, 'identity': identity_losses}[projection]
    task = tasks.TASKS[config.model.family](config, corpus)
    model = steps.build_model(config, corpus.tokenizer.vocab_size)
    state = steps.make_init(config, corpus.tokenizer.vocab_size)(seed)
    call = jax.jit(steps.make_train_call(config, model, losses=losses), donate_argnums=0)
    batches = task.batches(seed, 0)
    for _ in range(config.train.steps // config.train.steps_per_call):
        state, _ = call(state, next(batches))
    evaluate = jax.jit(steps.make_evaluate(model, losses=losses))
    parts = [evaluate(state.params, batch) for batch in task.validation()]
    total, count = np.asarray(parts).sum(axis=0)
    return total / count


def compare_projections(config, seeds):
    """{projection: losses by seed}."""
    corpus = load_tokenized(config.data)
    jobs = [(config, corpus, projection, seed) for seed in seeds for projection in PROJECTIONS]
    losses = experiment.on_all_devices(train, jobs)
    return {name: np.array(losses[i :: len(PROJECTIONS)]) for i, name in enumerate(PROJECTIONS)}


# The experiment.


def measure(setting):
    heads, rounds = ((1, 8), 5) if setting.quick else (HEADS, 60)
    attention = make_attention(FusedMultiHeadAttention, SHAPE_BTD[-1], NUM_HEADS)
    x_BTD = jax.random.normal(jax.random.key(1), SHAPE_BTD)
    arrays = stages(attention, x_BTD)
    summed_BTD = sum_over_heads(attention, arrays['heads'])
    difference = float(jnp.abs(summed_BTD - arrays['output']).max())
    largest = float(jnp.abs(arrays['output']).max())

    B, T, D = TIMED_BTD
    counts = [
        {
            'heads': h,
            'd_head': D // h,
            'parameters': num_parameters(FusedMultiHeadAttention, D, h),
            'parameters_per_head': num_parameters(MultiHeadAttention, D, h),
            'multiply_adds': attention_multiply_adds(h, T, D),
            'scores_mib': 4 * B * h * T**2 / 2**20,
        }
        for h in heads
    ]
    forms = [compare_forms(TIMED_BTD, h, rounds) for h in heads]
    config = resolve(heads_sweep.get_config('quick' if setting.quick else ''))
    if setting.quick:
        config.train.steps = 60
    projections = compare_projections(config, SEEDS)

    shapes = {stage: x.shape for stage, x in arrays.items()}
    tables = [
        (
            f'Shapes, d_model {SHAPE_BTD[-1]}, {NUM_HEADS} heads',
            ['stage', 'here (BTHK)', 'in the textbook (BHTK)'],
            [[stage, f'{x}', f'{textbook_shape(stage, x)}'] for stage, x in shapes.items()],
        ),
        (
            f'What the number of heads changes: width {D}, {B} × {T} tokens; forward and backward, '
            f'median of {rounds}',
            ['heads', 'd_head', 'parameters', 'multiply-adds', 'scores MiB', 'temporaries MiB']
            + ['fused ms', 'heads one by one ms', 'ratio (quartiles)'],
            [
                [f'{own["heads"]}', f'{own["d_head"]}', f'{own["parameters"]:,}']
                + [f'{own["multiply_adds"]:,}', f'{own["scores_mib"]:.2f}']
                + [f'{form["temporary_mib"]:.1f}']
                + [f'{1e3 * np.median(form["seconds"][name]):.2f}' for name in form['seconds']][
                    ::-1
                ]
                + [ratio_text(form['ratio'])]
                for own, form in zip(counts, forms, strict=True)
            ],
        ),
        (
            f'Validation loss, nats per token, {config.train.steps} steps',
            ['seed', *PROJECTIONS, 'difference'],
            [
                [f'{seed}', *(f'{x:.4f}' for x in pair), f'{pair[1] - pair[0]:+.4f}']
                for seed, *pair in zip(SEEDS, *projections.values(), strict=True)
            ],
        ),
    ]
    return experiment.Outcome(
        tables=tables,
        numbers={
            'shapes': shapes,
            'sum_over_heads': {'difference': difference, 'largest_output': largest},
            'counts': counts,
            'forms': forms,
            'projections': projections,
        },
        claims=judge(shapes, difference, largest, counts, forms, projections),
        figure=draw(counts, forms, projections),
    )


def ratio_text(ratios):
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return f'{middle:.2f} ({low:.2f} to {high:.2f})'


def judge(shapes, difference, largest, counts, forms, projections):
    textbook = {stage: textbook_shape(stage, shape) for stage, shape in shapes.items()}
    expected = {'q (k and v alike)': (2, 8, 10, 64), 'weights': (2, 8, 10, 10)}
    expected |= {'concat': (2, 10, 512)}
    wide = [num_parameters(FusedMultiHeadAttention, 512, h) for h in (1, 8, 64, 512)]
    farthest = max(form['difference'] / form['largest_output'] for form in forms)
    # The logarithm, so that twice and half as long are as far from 1.
    ratios = {x['heads']: mean_interval(np.log(x['ratio'])) for x in forms}
    faster = [h for h, (mean, half) in ratios.items() if mean - half > 0]
    slower = [h for h, (mean, half) in ratios.items() if mean + half < 0]
    temporaries = [form['temporary_mib'] for form in forms]
    scores = [own['scores_mib'] for own in counts]
    same = len({own['multiply_adds'] for own in counts}) == 1
    _, T, D = TIMED_BTD
    worse, half = mean_interval(projections['identity'] - projections['W_O'])
    mean_losses = {name: losses.mean() for name, losses in projections.items()}
    return [
        experiment.Claim(
            source='B3',
            text='Shapes of an input (2, 10, 512) with 8 heads',
            theirs=', '.join(f'{stage} {shape}' for stage, shape in expected.items()),
            ours=', '.join(f'{stage} {shapes[stage]}' for stage in expected)
            + ': the same but for the order of axes, tokens before heads (BTHK)',
            verdict='holds' if expected.items() <= textbook.items() else 'does not hold',
        ),
        experiment.Claim(
            source='B3',
            text='4 · 512² parameters, whatever the number of heads',
            theirs='1,048,576',
            ours=', '.join(f'{x:,}' for x in wide) + ' with 1, 8, 64, 512 heads',
            verdict='holds' if set(wide) == {4 * 512**2} else 'does not hold',
        ),
        experiment.Claim(
            source='B3',
            text='concat(heads) W_O = Σ headᵢ W_O⁽ⁱ⁾',
            theirs='',
            ours=f'the largest difference is {difference:.1e}, of outputs up to {largest:.2f}',
            verdict='holds' if difference < 1e-5 * max(largest, 1) else 'does not hold',
        ),
        experiment.Claim(
            source='A',
            text='Heads one by one and one fused projection agree, and the fused form is faster',
            theirs='',
            ours=f'the same outputs within {farthest:.0e} of the largest; heads one by one take '
            + ', '.join(f'{np.median(x["ratio"]):.2f} (h = {x["heads"]})' for x in forms)
            + ' times as long, forward and backward; '
            + (f'clearly longer at h = {faster}' if faster else 'clearly longer at no h')
            + (f', clearly shorter at h = {slower}' if slower else ''),
            verdict='does not hold' if farthest > 1e-5 or len(slower) == len(forms)
            else 'holds' if len(faster) == len(forms)
            else 'holds under a condition' if faster
            else 'not decided',
        ),
        experiment.Claim(
            source='A',
            text='More heads cost memory, B h T² scores, and no multiply-adds, 2 T² C',
            theirs='',
            ours=f'{counts[0]["multiply_adds"]:,} multiply-adds a text at every number of heads; '
            f'scores would be {scores[0]:.2f} to {scores[-1]:.2f} MiB; the compiler reserves '
            f'{temporaries[0]:.1f} to {temporaries[-1]:.1f} MiB for a step',
            verdict='holds' if same and counts[0]['multiply_adds'] == 2 * T**2 * D
            and temporaries[-1] - temporaries[0] >= scores[-1] - scores[0]
            else 'does not hold',
        ),
        experiment.Claim(
            source='beyond the articles',
            text='W_O is needed: heads that are joined but not mixed learn less',
            theirs='',
            ours=f'validation loss {mean_losses["W_O"]:.3f} with W_O, '
            f'{mean_losses["identity"]:.3f} with the identity (fewer parameters, the same rate): '
            f'{worse:+.3f} ± {half:.3f} in pairs of {len(SEEDS)} seeds',
            verdict='holds'
            if worse - half > 0
            else 'does not hold'
            if worse + half < 0
            else 'not decided',
        ),
    ]  # fmt: skip


@styled
def draw(counts, forms, projections):
    figure = Figure(figsize=(12, 3.8))
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1, 0.9))
    heads = [own['heads'] for own in counts]
    series = {
        'scores, B h T²': [own['scores_mib'] for own in counts],
        "a step's temporary memory": [form['temporary_mib'] for form in forms],
        'parameters, 4 D²': [own['parameters'] for own in counts],
        'multiply-adds, 2 T² D': [own['multiply_adds'] for own in counts],
    }
    for (name, values), colour, marker in zip(series.items(), PALETTE, MARKERS, strict=False):
        relative = np.array(values) / values[0]
        hollow = name.startswith('multiply')
        left.plot(
            heads, relative, marker=marker, color=colour, label=name,
            linestyle=':' if hollow else '-', markersize=9 if name.startswith('param') else 5,
        )  # fmt: skip
    left.set_yscale('log', base=2)
    left.yaxis.set_major_formatter('{x:g}')
    left.set_ylabel('relative to one head')
    left.set_title('What grows with the number of heads')
    left.legend()

    middle.plot(heads, [np.median(form['ratio']) for form in forms], marker='o', color=PALETTE[0])
    low, high = np.transpose([np.percentile(form['ratio'], (25, 75)) for form in forms])
    middle.fill_between(heads, low, high, color=PALETTE[0], alpha=0.2)
    middle.axhline(1, color='black', linewidth=0.8)
    middle.set_ylim(bottom=0)
    middle.set_ylabel('time of heads one by one / time fused')
    middle.set_title('Heads one by one against one product (band: quartiles)')
    for plot in (left, middle):
        plot.set_xscale('log', base=2)
        plot.set_xticks(heads, [f'{h}' for h in heads])
        plot.set_xlabel('heads')

    for pair, seed, colour in zip(
        np.transpose(list(projections.values())), SEEDS, PALETTE, strict=False
    ):
        right.plot(PROJECTIONS, pair, marker='o', color=colour, label=f'seed {seed}')
    right.set_xlim(-0.4, 1.4)
    right.set_ylabel('validation loss (nats per token)')
    right.set_title('W_O or identity: the same seeds')
    right.legend()
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
