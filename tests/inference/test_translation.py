"""Beam search and greedy translation, against the full forward pass and brute force."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.data import tokenizers
from minigpt_jax.inference.decoding import (
    beam_search,
    length_penalty_of,
    longest_translation,
    top_k,
    translate,
)
from minigpt_jax.model.transformer import EncoderDecoder
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config

BOS, EOS = 1, 2
SIZES = (9, 5)
SOURCE_BS = np.random.default_rng(0).integers(3, SIZES[0], (4, 6)).astype(np.int32)
LENGTHS_B = np.array([6, 2, 1, 4], np.int32)


@functools.cache
def build(sizes=SIZES, seed=0, **values):
    values = {'num_layers': 2, 'positions': 'sinusoidal'} | values
    values = {f'model.{name}': value for name, value in values.items()}
    config = resolve(
        tiny_config(**{'model.family': 'encoder_decoder', 'data.corpus': 'dates'} | values)
    )
    like = nnx.eval_shape(lambda: EncoderDecoder(config.model, sizes, rngs=nnx.Rngs(params=0)))
    model, params = nnx.split(like)
    # Wilder than freshly initialised, so that choices change from token to token.
    rng = np.random.default_rng(seed)
    return model, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), params)


def search(model, params, *, beam_size=1, max_length=8, max_lengths=None, penalty=0.0, rows=None):
    rows = np.arange(4) if rows is None else rows
    limits = np.full(4, max_length) if max_lengths is None else np.array(max_lengths)
    return jax.device_get(
        beam_search(
            model,
            params,
            SOURCE_BS[rows],
            LENGTHS_B[rows],
            limits[rows].astype(np.int32),
            max_length=max_length,
            beam_size=beam_size,
            length_penalty=penalty,
            bos_id=BOS,
            eos_id=EOS,
        )
    )


def texts(found, row):
    """[(tokens, score)] of a row."""
    return [
        (tuple(tokens[:length].tolist()), float(score))
        for tokens, length, score in zip(*(x[row] for x in found), strict=True)
        if length
    ]


@functools.cache
def log_p(model):
    @jax.jit
    def function(params, source_BS, lengths_B, tokens_BT):
        module = nnx.merge(model, params)
        return jax.nn.log_softmax(module(source_BS, lengths_B, tokens_BT))

    return function


def next_log_p(model, params, row, prefix, width=9):
    """log p of each next token, by a full forward pass over one source without padding."""
    tokens_1T = np.zeros((1, width), np.int32)
    tokens_1T[0, : 1 + len(prefix)] = (BOS, *prefix)
    source_1S = SOURCE_BS[row : row + 1, : LENGTHS_B[row]]
    scores = log_p(model)(params, source_1S, LENGTHS_B[row : row + 1], tokens_1T)
    return np.asarray(scores[0, len(prefix)])


def naive_greedy(model, params, row, max_length):
    tokens, total = (), 0.0
    while not tokens or tokens[-1] != EOS:
        scores = next_log_p(model, params, row, tokens)
        token = EOS if len(tokens) + 1 == max_length else int(scores.argmax())
        tokens, total = (*tokens, token), total + scores[token]
    return tokens, total


VARIANTS = [
    {},
    {'positions': 'relative', 'attention_form': 'per_head', 'norm_placement': 'post'},
    {'positions': 'rotary', 'scan_layers': True, 'encoder_layers': 1},
]


@pytest.mark.parametrize('variant', VARIANTS, ids=str)
def test_one_beam_is_greedy_and_equals_the_full_forward_pass_on_ragged_sources(variant):
    seen = set()
    for seed in (0, 3, 4):
        model, params = build(seed=seed, **variant)
        found = search(model, params)
        for row in range(4):
            ((tokens, score),) = texts(found, row)
            expected, total = naive_greedy(model, params, row, 8)
            assert tokens == expected
            np.testing.assert_allclose(score, total, atol=1e-4)
            seen.add(tokens)
    assert len(seen) > 3
    if not variant:
        assert len({len(tokens) for tokens in seen}) > 3  # some end by themselves


def every_translation(model, params, row, max_length, penalty):
    """{tokens: score} of all of at most `max_length` tokens, EOS included."""
    found = {}
    others = [token for token in range(SIZES[1]) if token != EOS]
    for length in range(max_length):
        for prefix in itertools.product(others, repeat=length):
            tokens = (*prefix, EOS)
            total = sum(
                next_log_p(model, params, row, tokens[:t])[token] for t, token in enumerate(tokens)
            )
            found[tokens] = total / ((5 + length + 1) / 6) ** penalty
    return found


@pytest.mark.parametrize('N', [12, 200, 1024, 1025])
def test_top_k_by_blocks_is_that_of_jax_also_where_values_are_equal(N):
    x_BN = np.random.default_rng(N).integers(0, 40, (16, N)).astype(np.float32)
    x_BN[3:6, 5:] = -np.inf
    assert not all(len(set(row[row > 37])) == (row > 37).sum() for row in x_BN)  # there are ties
    for k in (1, 4, 10):
        ours, expected = top_k(x_BN, k, block=8), jax.lax.top_k(x_BN, k)
        for a, b in zip(ours, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('penalty', [0.0, 1.0])
def test_a_beam_that_holds_everything_finds_what_brute_force_finds(penalty):
    model, params = build()
    # 1 + 4 + 16 translations of at most three tokens.
    found = search(model, params, beam_size=21, max_length=3, penalty=penalty)
    for row in (0, 2):
        expected = every_translation(model, params, row, 3, penalty)
        assert len(expected) == 21
        ours = texts(found, row)
        assert {tokens for tokens, _ in ours} == set(expected)
        assert [score for _, score in ours] == sorted((s for _, s in ours), reverse=True)
        for tokens, score in ours:
            np.testing.assert_allclose(score, expected[tokens], atol=1e-4)
    orders = [
        [
            tokens
            for tokens, _ in texts(search(model, params, beam_size=21, max_length=3, penalty=p), 0)
        ]
        for p in (0.0, 1.0)
    ]
    assert orders[0] != orders[1]  # the penalty matters


def naive_beam_search(model, params, row, beam_size, max_length, penalty):
    alive, ended = [((), 0.0)], []
    for t in range(max_length):
        options = []
        for tokens, total in alive:
            for token, score in enumerate(next_log_p(model, params, row, tokens)):
                if t + 1 < max_length or token == EOS:
                    options.append(((*tokens, token), total + score))
        options.sort(key=lambda option: -option[1])
        options = options[: 2 * beam_size]
        ended += [
            (tokens, total / length_penalty_of(t + 1, penalty))
            for tokens, total in options[:beam_size]
            if tokens[-1] == EOS
        ]
        alive = [option for option in options if option[0][-1] != EOS][:beam_size]
        if len(ended) >= beam_size:
            break
    return sorted(ended, key=lambda option: -option[1])[:beam_size]


@pytest.mark.parametrize('beam_size', [2, 4])
def test_narrow_beams_equal_a_plain_beam_search(beam_size):
    differs = False
    for seed in (0, 3):
        model, params = build(seed=seed)
        found = search(model, params, beam_size=beam_size, penalty=0.6)
        for row in range(4):
            ours = texts(found, row)
            expected = naive_beam_search(model, params, row, beam_size, 8, 0.6)
            assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in expected]
            np.testing.assert_allclose(
                [score for _, score in ours], [score for _, score in expected], atol=1e-4
            )
            differs |= ours[0][0] != naive_greedy(model, params, row, 8)[0]
    assert differs  # a beam finds other translations than greedy does


def test_a_row_does_not_depend_on_those_beside_it():
    model, params = build()
    together = search(model, params, beam_size=3)
    for row in range(4):
        alone = search(model, params, beam_size=3, rows=np.array([row]))
        ours, expected = texts(alone, 0), texts(together, row)
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in expected]


def test_each_row_has_its_own_maximum_length():
    model, params = build()
    found = search(model, params, beam_size=2, max_lengths=[1, 2, 5, 8])
    for row, limit in enumerate([1, 2, 5, 8]):
        for tokens, _ in texts(found, row):
            assert len(tokens) <= limit
            assert tokens.index(EOS) == len(tokens) - 1
    assert texts(found, 0)[0][0] == (EOS,)
    assert len(texts(found, 0)) == 1  # there is no second translation of one token


def test_the_length_penalty_is_that_of_gnmt():
    np.testing.assert_allclose(length_penalty_of(np.array([1, 7]), 0.6), [1, 2**0.6])
    assert longest_translation(20, 64) == 50
    assert longest_translation(40, 64) == 64


def test_translate_keeps_order_empty_lines_and_names_what_is_too_long():
    letters = tokenizers.CharTokenizer('abcdef')
    tokenizer = tokenizers.PairTokenizer(letters, letters)
    model, params = build((10, 10), context_length=8)
    sources = ['abc', '', 'f', 'abcdefa', 'abcdefab', 'ba']  # 7 letters and EOS fit, 8 do not
    found = translate(model, params, tokenizer, 8, sources, beam_size=2, batch_size=2)
    assert found[1] == []
    assert found[4] is None
    for i in (0, 2, 3, 5):
        (alone,) = translate(model, params, tokenizer, 8, [sources[i]], beam_size=2)
        assert [x.text for x in alone] == [x.text for x in found[i]]
        assert 1 <= len(found[i]) <= 2
    one = translate(model, params, tokenizer, 8, sources)
    assert [len(x) for x in one if x] == [1] * 4
