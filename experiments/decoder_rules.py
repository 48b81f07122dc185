"""The rules of a decoder: what it may see, what it is given once, and why training is one pass.

    python -m experiments.decoder_rules [--quick]      a minute on two cores; --quick: half

An encoder-decoder reads a source and a target. Held against the model are five rules: a masked
weight is exactly 0; no output depends on a later token; all layers attend to one memory, the
encoder's output, computed once; with a memory of zeros the source is gone; one pass over a known
target (teacher forcing) gives what decoding token by token with a cache gives. Timed is what that
is worth.

Expected: the first two and the fourth to the bit, the others but for rounding. With biases a
memory of zeros says nothing of the source either: every key and value is a bias then. One pass is
a few times faster than a cache, and a cache than reading all anew for each token.

The setting: the model of `configs/translate_dates.py` (width 128, 4 heads, 2 + 2 layers) with
Glorot's initialisation, not trained: rules hold at any parameters. Random tokens of 60 symbols.
Times are forward alone, 16 texts, turn by turn, medians after two warm-ups.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from configs import translate_dates
from minigpt_jax import experiment
from minigpt_jax.report.figures import MARKERS, PALETTE, styled
from minigpt_jax.training import steps
from minigpt_jax.training.config import resolve

SYMBOLS, LENGTH = 60, 24
LENGTHS = (16, 32, 64)
WAYS = {
    'one pass': 'teacher forcing, one pass',
    'cache': 'token by token, with a cache',
    'anew': 'token by token, all read anew',
}


def make_model(use_bias=False):
    """(model, params), not trained."""
    c = translate_dates.get_config()
    # PyTorch's initialisation is the one in which biases are not 0.
    c.model.use_bias, c.model.init = use_bias, 'torch' if use_bias else 'xavier'
    config = resolve(c)
    sizes = (SYMBOLS, SYMBOLS)
    return steps.build_model(config, sizes), steps.make_init(config, sizes)(0).params


def texts(seed, batch_size, length):
    """(source_BS, lengths_B, target_BT): random tokens, none of them padding."""
    keys = jax.random.split(jax.random.key(seed))
    source_BS, target_BT = (
        jax.random.randint(key, (batch_size, length), 0, SYMBOLS) for key in keys
    )
    return source_BS, jnp.full(batch_size, length), target_BT


def one_pass(module, source_BS, lengths_B, target_BT):
    """logits_BTV of all positions at once: teacher forcing."""
    return module(source_BS, lengths_B, target_BT)


def with_cache(module, source_BS, lengths_B, target_BT, *, encode_again=False):
    """logits_BTV, token by token; the source is encoded once, or again for every token."""
    B, T = target_BT.shape

    def start():
        memory_BSD = module.encoder(source_BS, lengths_B)
        return module.decoder.init_caches(B, T, memory_BSD=memory_BSD)

    def step(caches, t):
        if encode_again:
            caches = [
                own | {'cross': new['cross']} for own, new in zip(caches, start(), strict=True)
            ]
        token_B1 = jax.lax.dynamic_slice_in_dim(target_BT, t, 1, axis=1)
        x_B1D, caches = module.decoder.hidden(
            token_B1, caches=caches, position=t, memory_lengths_B=lengths_B
        )
        return caches, module.decoder.logits(x_B1D)[:, 0]

    _, logits_TBV = jax.lax.scan(step, start(), jnp.arange(T))
    return logits_TBV.swapaxes(0, 1)


def read_anew(module, source_BS, lengths_B, target_BT):
    """logits_BTV, token by token without a cache: the whole target is read for each of them."""
    T = target_BT.shape[1]
    memory_BSD = module.encoder(source_BS, lengths_B)

    def step(_, t):
        known_BT = jnp.where(jnp.arange(T) <= t, target_BT, 0)
        logits_BTV = module.decoder(known_BT, memory_BSD=memory_BSD, memory_lengths_B=lengths_B)
        return None, jax.lax.dynamic_index_in_dim(logits_BTV, t, axis=1, keepdims=False)

    _, logits_TBV = jax.lax.scan(step, None, jnp.arange(T))
    return logits_TBV.swapaxes(0, 1)


def compiled(function, model, **options):
    return jax.jit(lambda params, *arrays: function(nnx.merge(model, params), *arrays, **options))


# The rules.


def masked_weights(model, params):
    """The weights from each token to all later ones, in self-attention of all layers and heads."""
    capture = ('attention_weights',)
    call = jax.jit(lambda params, *arrays: nnx.merge(model, params)(*arrays, capture=capture)[1])
    layers = call(params, *texts(0, 4, LENGTH))['decoder'].values()
    later = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
    return np.concatenate([np.asarray(own['attention_weights'])[..., later] for own in layers])


def changes_by_later_tokens(model, params):
    """changes_TU: the largest change of logits at u when every token after t is replaced."""
    source_1S, _, target_1T = texts(0, 1, LENGTH)
    after_TU = jnp.arange(LENGTH) > jnp.arange(LENGTH)[:, None]
    targets = target_1T, (target_1T + 1) % SYMBOLS
    source_TS, lengths_T = jnp.tile(source_1S, (LENGTH, 1)), jnp.full(LENGTH, LENGTH)
    call = compiled(one_pass, model)
    before, after = (
        call(params, source_TS, lengths_T, jnp.where(after_TU, other, target_1T))
        for other in targets
    )
    return np.abs(np.asarray(after) - np.asarray(before)).max(axis=-1)


def keys_of_layers(model, params):
    """keys_NBSHK of the memory in each layer of the decoder."""
    source_BS, lengths_B, _ = texts(0, 4, LENGTH)

    @jax.jit
    def caches(params):
        module = nnx.merge(model, params)
        return module.decoder.init_caches(4, memory_BSD=module.encoder(source_BS, lengths_B))

    return np.stack([own['cross']['k_BSHK'] for own in caches(params)])


def change_by_source(model, params, memory_factor):
    """The largest change of the first token's logits when the source is another."""

    @jax.jit
    def first_logits(params, source_BS, lengths_B, target_BT):
        module = nnx.merge(model, params)
        memory_BSD = memory_factor * module.encoder(source_BS, lengths_B)
        return module.decoder(target_BT[:, :1], memory_BSD=memory_BSD, memory_lengths_B=lengths_B)

    source_BS, lengths_B, target_BT = texts(0, 4, LENGTH)
    logits = [
        np.asarray(first_logits(params, source, lengths_B, target_BT))
        for source in (source_BS, (source_BS + 1) % SYMBOLS)
    ]
    return np.abs(logits[0] - logits[1]).max()


def compare_ways(model, params):
    """(differences of other ways to decode from one pass, largest logit, once against again)."""
    arrays = texts(0, 4, LENGTH)
    ways = {'one pass': one_pass, 'cache': with_cache, 'anew': read_anew}
    logits = {name: np.asarray(compiled(f, model)(params, *arrays)) for name, f in ways.items()}
    again = np.asarray(compiled(with_cache, model, encode_again=True)(params, *arrays))
    differences = {name: np.abs(x - logits['one pass']).max() for name, x in logits.items()}
    largest = np.abs(logits['one pass']).max()
    return differences, largest, np.abs(again - logits['cache']).max()


def times(model, params, length, rounds, batch_size=16):
    """{way: seconds per target token of every round}."""
    arrays = texts(0, batch_size, length)
    calls = {
        name: compiled(function, model)
        for name, function in zip(WAYS, (one_pass, with_cache, read_anew), strict=True)
    }
    seconds = experiment.interleaved_times(
        {name: lambda call=call: call(params, *arrays) for name, call in calls.items()}, rounds
    )
    return {name: own / (batch_size * length) for name, own in seconds.items()}


def measure(setting):
    lengths, rounds = (LENGTHS[:1], 3) if setting.quick else (LENGTHS, 30)
    model, params = make_model()
    masked, changes_TU = masked_weights(model, params), changes_by_later_tokens(model, params)
    keys = keys_of_layers(model, params)
    differences, largest, again = compare_ways(model, params)
    sources = {
        'memory of the source': change_by_source(model, params, 1.0),
        'memory of zeros': change_by_source(model, params, 0.0),
        'memory of zeros, with biases': change_by_source(*make_model(use_bias=True), 0.0),
    }
    seconds = {n: times(model, params, n, rounds) for n in lengths}
    before = np.tril(np.ones((LENGTH, LENGTH), bool))
    rules = [
        ['masked weights that are not 0', f'{(masked != 0).sum()} of {masked.size:,}'],
        ['logits up to t, all later tokens replaced', f'{changes_TU[before].max():.1e}'],
        ['logits behind t, the same', f'{changes_TU[~before].max():.2f}'],
        ['encoding once against for every token', f'{again:.1e}'],
        ['one pass against a cache', f'{differences["cache"]:.1e}'],
        *([f'another source, {name}', f'{x:.1e}'] for name, x in sources.items()),
    ]
    return experiment.Outcome(
        tables=[
            (f'Largest differences, of logits up to {largest:.2f}', ['rule', 'measured'], rules),
            (
                f'Microseconds per target token, median of {rounds}',
                ['tokens', *WAYS.values(), 'cache / one pass'],
                [
                    [f'{n}', *(f'{1e6 * np.median(own[name]):.1f}' for name in WAYS)]
                    + [f'{np.median(own["cache"] / own["one pass"]):.1f}']
                    for n, own in seconds.items()
                ],
            ),
        ],
        numbers={
            'masked_weights': {'count': masked.size, 'not_zero': (masked != 0).sum()},
            'changes_by_later_tokens': changes_TU,
            'encoded_once_or_again': again,
            'key_difference_of_layers': key_difference(keys),
            'ways': differences,
            'largest_logit': largest,
            'change_by_source': sources,
            'seconds_per_token': seconds,
        },
        claims=judge(masked, changes_TU, keys, differences, largest, again, sources, seconds),
        figure=draw(changes_TU, seconds),
    )


def key_difference(keys_NBSHK):
    """How far the keys of the first two layers are apart, in multiples of the first's norm."""
    first, second = keys_NBSHK[:2]
    return np.linalg.norm(first - second) / np.linalg.norm(first)


def judge(masked, changes_TU, keys, differences, largest, again, sources, seconds):
    before = np.tril(np.ones(changes_TU.shape, bool))
    close = 1e-5 * largest
    longest, own = list(seconds.items())[-1]
    ratios = own['cache'] / own['one pass']

    def verdict(condition):
        return 'holds' if condition else 'does not hold'

    return [
        experiment.Claim(
            source='B8',
            text='Masked weights are exactly 0',
            theirs='0',
            ours=f'{(masked != 0).sum()} of {masked.size:,} are not',
            verdict=verdict((masked == 0).all()),
        ),
        experiment.Claim(
            source='B8',
            text='No output depends on a later token',
            theirs='',
            ours=f'with every token after t replaced, logits up to t change by '
            f'{changes_TU[before].max():.1e}, those behind it by up to '
            f'{changes_TU[~before].max():.2f}',
            verdict=verdict(changes_TU[before].max() < close < changes_TU[~before].min()),
        ),
        experiment.Claim(
            source='B8',
            text='All layers of the decoder receive the same keys and values of the encoder',
            theirs='',
            ours='they receive the same memory, encoded once (again for every token: a difference '
            f'of {again:.1e}); keys are of each layer: those of the first two differ by '
            f'{key_difference(keys):.2f} of their norm',
            verdict='holds under a condition' if again < close else 'does not hold',
        ),
        experiment.Claim(
            source='B8',
            text='With a memory of zeros the first token does not depend on the source',
            theirs='0',
            ours='another source changes its logits by '
            + ', '.join(f'{x:.1e} ({name})' for name, x in sources.items()),
            verdict=verdict(
                sources['memory of zeros'] == 0 and sources['memory of the source'] > close
            ),
        ),
        experiment.Claim(
            source='B8',
            text='One pass of teacher forcing equals decoding token by token with a cache',
            theirs='',
            ours=f'a difference of {differences["cache"]:.1e}, of logits up to {largest:.2f}; at '
            f'{longest} tokens the cache takes {np.median(ratios):.1f} times as long per token as '
            f'one pass (quartiles {np.percentile(ratios, 25):.1f} to '
            f'{np.percentile(ratios, 75):.1f}), reading all anew '
            f'{np.median(own["anew"] / own["one pass"]):.0f} times',
            verdict=verdict(differences['cache'] < close),
        ),
    ]


@styled
def draw(changes_TU, seconds):
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    T = len(changes_TU)
    image = left.imshow(
        np.ma.masked_equal(changes_TU, 0), cmap='Blues', vmin=0, extent=(0.5, T + 0.5, T + 0.5, 0.5)
    )
    left.grid(False)
    left.set_xlabel('output at position u')
    left.set_ylabel('all tokens after t are replaced')
    left.set_title('Outputs up to t do not change (white: exactly 0)')
    figure.colorbar(image, ax=left, label='largest change of a logit', shrink=0.8)

    lengths = list(seconds)
    for (name, label), colour, marker in zip(WAYS.items(), PALETTE, MARKERS, strict=False):
        parts = 1e6 * np.array([np.percentile(own[name], (25, 50, 75)) for own in seconds.values()])
        right.plot(lengths, parts[:, 1], marker=marker, color=colour, label=label)
        right.fill_between(lengths, parts[:, 0], parts[:, 2], color=colour, alpha=0.2)
    right.set_xscale('log', base=2)
    right.set_yscale('log')
    right.yaxis.set_major_formatter('{x:g}')
    right.yaxis.set_minor_formatter('')
    right.set_xticks(lengths, [f'{n}' for n in lengths])
    right.set_xlabel('tokens of source and of target')
    right.set_ylabel('microseconds per target token')
    right.set_title('The same logits in three ways (band: quartiles)')
    figure.legend(*right.get_legend_handles_labels(), loc='outside lower right', ncols=3)
    return figure


if __name__ == '__main__':
    experiment.run_command(__file__, measure)
