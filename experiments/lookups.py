"""Why one head is not enough, and why 64 heads of one dimension are too many.

    python -m experiments.lookups [--quick]      11 minutes on two cores; --quick: one

A query names m of 16 keys, and the answer is the m values that stand beside them, in order. One
attention layer of width 64 has to look all of them up at once. A head is one weighted mean over the
keys, so it can look up one value well, or several values mixed: the answer to "which was first?" is
gone. With h heads of 64/h dimensions there are more looks, each with fewer dimensions to tell 16
keys apart by.

Expected: with one head m = 1 is always right and m = 2 hardly ever; m heads are enough, or nearly;
64 heads of one dimension fail again at m = 4, and often at m = 1 where there are 64 keys.

The model: each key is a token, key + value; the query is the sum of the names of its keys, with an
embedding table for each place; embeddings are drawn from N(0, 1), projections have the variance
1/64; no mask, no feed-forward, no residual; the m values are read from the layer's output. Adam,
3e-3, warm-up of 100, cosine, 1500 steps of 128 queries. An answer is right if all m values are.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from configs import minigpt
from minigpt_jax import experiment
from minigpt_jax.model.attention import ATTENTION_FORMS
from minigpt_jax.model.layers import NO_TAP, Tap, dense
from minigpt_jax.report.figures import MARKERS, PALETTE, styled
from minigpt_jax.report.statistics import mean_interval
from minigpt_jax.training import steps
from minigpt_jax.training.config import resolve
from minigpt_jax.training.loop import seed_mode
from minigpt_jax.training.losses import next_token_loss

WIDTH, VALUES, BATCH = 64, 16, 128
SEEDS = (0, 1, 2, 3, 4)
HEADS = (1, 2, 4, 8, 16, 32, 64)
# (keys, look-ups): head counts.
CELLS = {
    (16, 1): (1, 8, 64),
    (16, 2): (1, 2, 4, 8),
    (16, 3): (1, 2, 4, 8),
    (16, 4): HEADS,
    (64, 1): (1, 4, 16, 32, 64),
}
QUICK_CELLS = {(16, 2): (1, 2), (16, 4): (4, 64)}
PICTURED = (16, 2), (1, 2)  # a cell, and the head counts whose attention is drawn
PICTURED_QUERIES = 8
TEST_QUERIES = 4096
_TEST = 2**31  # a step that training never comes to


class LookUp(nnx.Module):
    """One attention layer, from a query and the tokens it looks into to logits_BMV of M values."""

    def __init__(self, config, num_keys, num_lookups, *, rngs):
        def table(size):
            return nnx.Param(jax.random.normal(rngs.params(), (size, WIDTH)))

        self.keys, self.values = table(num_keys), table(VALUES)
        self.names = nnx.List([table(num_keys) for _ in range(num_lookups)])
        self.attention = ATTENTION_FORMS['fused'](config, cross=True, rngs=rngs)
        self.read = dense(config, WIDTH, (num_lookups, VALUES), rngs=rngs)

    def __call__(self, values_BS, named_BM, tap=NO_TAP):
        tokens_BSD = self.keys[...] + self.values[...][values_BS]
        query_BD = sum(name[...][named_BM[:, m]] for m, name in enumerate(self.names))
        y_B1D, _ = self.attention(query_BD[:, None], memory_BSD=tokens_BSD, tap=tap)
        return self.read(y_B1D[:, 0])


def lookup_losses(params, batch, key, *, model, smoothing=0.0):
    """(sum of losses in nats, number of values) of a batch of `queries`."""
    del key, smoothing
    logits_BMV = nnx.merge(model, params)(batch['values_BS'], batch['named_BM'])
    return next_token_loss(logits_BMV, answers(batch))


def answers(batch):
    """answers_BM: the values beside the named keys."""
    return jnp.take_along_axis(batch['values_BS'], batch['named_BM'], axis=1)


def queries(seed, step, num_keys, num_lookups, count=BATCH):
    """A batch: the value beside every key, and the m different keys that are named."""
    key = jax.random.fold_in(steps.seed_keys(seed)[1], step)
    value_key, name_key = jax.random.split(key)
    ranks_BS = jnp.argsort(jax.random.uniform(name_key, (count, num_keys)), axis=1)
    return {
        'values_BS': jax.random.randint(value_key, (count, num_keys), 0, VALUES),
        'named_BM': ranks_BS[:, :num_lookups],
    }


def make_config(num_heads, num_steps, steps_per_call):
    c = minigpt.get_config()
    c.model.d_model, c.model.num_heads, c.model.init = WIDTH, num_heads, 'xavier'
    c.optim.name, c.optim.learning_rate, c.optim.final_learning_rate = 'adam', 3e-3, 0.0
    c.optim.b2, c.optim.weight_decay, c.optim.clip_norm = 0.999, 0.0, 0.0
    c.train.steps, c.train.steps_per_call = num_steps, steps_per_call
    c.train.log_every = c.train.checkpoint_every = c.eval.every = num_steps
    return resolve(c)


def train(num_keys, num_lookups, num_heads, seeds, num_steps, steps_per_call=100):
    """(model, params_E, accuracy_E): the share of new queries of which every value is right."""
    config = make_config(num_heads, num_steps, steps_per_call)
    shape = dict(num_keys=num_keys, num_lookups=num_lookups)
    start = nnx.eval_shape(lambda: LookUp(config.model, **shape, rngs=nnx.Rngs(params=0)))
    model = nnx.split(start)[0]

    def init(seed):
        module = LookUp(config.model, **shape, rngs=nnx.Rngs(params=steps.seed_keys(seed)[0]))
        return steps.start_state(config, nnx.split(module)[1], seed)

    call = steps.make_train_call(config, model, losses=lookup_losses)

    def run(seed):
        def several(state, first):
            batches = jax.vmap(lambda k: queries(seed, first + k, **shape))(
                jnp.arange(steps_per_call)
            )
            return call(state, batches)[0], None

        params = jax.lax.scan(several, init(seed), jnp.arange(0, num_steps, steps_per_call))[
            0
        ].params
        test = queries(seed, _TEST, **shape, count=TEST_QUERIES)
        logits_BMV = nnx.merge(model, params)(test['values_BS'], test['named_BM'])
        return params, (logits_BMV.argmax(-1) == answers(test)).all(axis=1).mean()

    # Seeds follow each other in one program on a CPU, and train at once elsewhere.
    params_E, accuracy_E = jax.jit(steps.over_seeds(run, seed_mode(config)))(jnp.array(seeds))
    return model, params_E, np.asarray(accuracy_E)


def look(model, params, num_keys, num_lookups, count=PICTURED_QUERIES):
    """(weights_HBS, named_BM): what every head attends to, for some new queries."""
    test = queries(0, _TEST, num_keys, num_lookups, count)
    tap = Tap(('attention_weights',))
    nnx.merge(model, params)(test['values_BS'], test['named_BM'], tap)
    weights_BHTS = tap.values['attention_weights']
    return np.asarray(weights_BHTS[:, :, 0].swapaxes(0, 1)), np.asarray(test['named_BM'])


def measure(setting):
    size = (QUICK_CELLS, SEEDS[:3], 600) if setting.quick else (CELLS, SEEDS, 1500)
    cells, seeds, num_steps = size
    jobs = [(*cell, heads) for cell, counts in cells.items() for heads in counts]
    pictures = {}

    def run(num_keys, num_lookups, num_heads):
        model, params_E, accuracy_E = train(num_keys, num_lookups, num_heads, seeds, num_steps)
        if (num_keys, num_lookups) == PICTURED[0] and num_heads in PICTURED[1]:
            first = jax.tree.map(lambda x: x[0], params_E)
            pictures[num_heads] = look(model, first, num_keys, num_lookups)
        print(
            f'{num_keys} keys, {count(num_lookups, "look-up")}, {count(num_heads, "head")}: '
            f'{accuracy_E.mean():.3f}',
            flush=True,
        )
        return accuracy_E

    accuracy = dict(zip(jobs, experiment.on_all_devices(run, jobs), strict=True))
    shown = [heads for heads in HEADS if any(heads in counts for counts in cells.values())]
    rows = [
        [f'{num_keys}', f'{num_lookups}']
        + [
            interval(accuracy[num_keys, num_lookups, heads]) if heads in counts else ''
            for heads in shown
        ]
        for (num_keys, num_lookups), counts in cells.items()
    ]
    headers = ['keys', 'look-ups', *(f'h = {heads}' for heads in shown)]
    return experiment.Outcome(
        tables=[
            (f'Share of queries of which every value is right, {len(seeds)} seeds', headers, rows)
        ],
        numbers={
            'seeds': list(seeds),
            'steps': num_steps,
            'cells': [
                {'keys': k, 'lookups': m, 'heads': h, 'accuracy': values}
                for (k, m, h), values in accuracy.items()
            ],
            'pictures': {h: {'weights': w, 'named': n} for h, (w, n) in pictures.items()},
        },
        claims=judge(accuracy),
        figure=draw(accuracy, pictures),
    )


def interval(values):
    mean, half = mean_interval(values)
    return f'{mean:.2f}' if half is None or half < 0.005 else f'{mean:.2f} ± {half:.2f}'


# {(keys, look-ups, heads): share} of an earlier measurement with two seeds, in the same setting.
THEIRS = {(16, 2, 1): 0.07, (16, 2, 2): 1.00, (16, 3, 2): 0.94, (16, 3, 4): 1.00, (16, 4, 2): 0.28,
          (16, 4, 4): 1.00, (16, 4, 8): 1.00, (16, 4, 64): 0.07, (64, 1, 1): 1.00,
          (64, 1, 64): 0.38}  # fmt: skip


def judge(accuracy):
    """Differences of more than half of all queries, by their intervals over seeds."""

    def claim(text, keys, lookups, enough, wrong):
        better, worse = ((keys, lookups, heads) for heads in (enough, wrong))
        if not {better, worse} <= accuracy.keys():
            return []
        mean, half = mean_interval(accuracy[better] - accuracy[worse])
        return [
            experiment.Claim(
                source='A',
                text=f'{text} ({count(lookups, "look-up")} in {keys} keys)',
                theirs=', '.join(f'{THEIRS[cell]:.2f} with {cell[2]}' for cell in (better, worse)
                                 if cell in THEIRS),
                ours=f'{count(enough, "head")} {interval(accuracy[better])}, '
                f'{count(wrong, "head")} {interval(accuracy[worse])} of the queries right; the '
                f'difference is {mean:.2f} ± {half:.2f} ({len(accuracy[better])} seeds)',
                verdict='holds' if mean - half > 0.5
                else 'does not hold' if mean + half < 0.5
                else 'not decided',
            )
        ]  # fmt: skip

    return [
        *claim('One head is not enough', 16, 2, enough=2, wrong=1),
        *claim('One head is not enough', 16, 3, enough=4, wrong=1),
        *claim('Two heads are not enough', 16, 4, enough=4, wrong=2),
        *claim('64 heads of one dimension are too many', 16, 4, enough=8, wrong=64),
        *claim('64 heads of one dimension are too many', 64, 1, enough=1, wrong=64),
    ]


def count(number, noun):
    return f'{number} {noun}' + ('' if number == 1 else 's')


@styled
def draw(accuracy, pictures):
    figure = Figure(figsize=(10, 4.2))
    left, right = figure.subfigures(1, 2, width_ratios=(1.05, 1))
    plot = left.subplots()
    cells = list(dict.fromkeys((k, m) for k, m, _ in accuracy))
    for (num_keys, num_lookups), colour, marker in zip(cells, PALETTE, MARKERS, strict=False):
        heads = [h for k, m, h in accuracy if (k, m) == (num_keys, num_lookups)]
        values = [accuracy[num_keys, num_lookups, h] for h in heads]
        things = 'value' if num_lookups == 1 else 'values'
        plot.plot(
            heads,
            [x.mean() for x in values],
            marker=marker,
            color=colour,
            linestyle='-' if num_keys == 16 else '--',
            label=f'{num_lookups} {things} from {num_keys} keys',
        )
        for h, x in zip(heads, values, strict=True):
            plot.plot([h] * len(x), x, '.', color=colour, markersize=3)
    plot.set_xscale('log', base=2)
    shown = sorted({h for *_, h in accuracy})
    plot.set_xticks(shown, [f'{h}\n{WIDTH // h}' for h in shown])
    plot.set_xlabel('heads (below: dimensions of each)')
    plot.set_ylim(-0.03, 1.05)
    plot.set_title('Share of queries answered right')
    plot.legend(loc='center', bbox_to_anchor=(0.6, 0.36))

    panels = [
        (
            count(heads, 'head') + (f': head {h + 1}' if heads > 1 else ''),
            x,
            n,
        )
        for heads, (weights_HBS, n) in sorted(pictures.items())
        for h, x in enumerate(weights_HBS)
    ]
    for panel, (title, weights_BS, named_BM) in zip(
        right.subplots(1, len(panels), sharey=True), panels, strict=True
    ):
        panel.imshow(weights_BS, cmap='Blues', vmin=0, vmax=1, aspect='auto')
        for b, named_M in enumerate(named_BM):
            for m, key in enumerate(named_M):
                dark = weights_BS[b, key] > 0.6
                panel.text(
                    key, b, m + 1, ha='center', va='center', fontsize=7,
                    color='white' if dark else 'black',
                )  # fmt: skip
        panel.set_title(title)
        panel.set_xlabel('key')
        panel.set_xticks([])
        panel.set_yticks([])
        panel.grid(False)
    right.suptitle('Where a head looks; 1 and 2 are the keys that a query names', fontsize=9)
    right.supylabel('queries', fontsize=9)
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
