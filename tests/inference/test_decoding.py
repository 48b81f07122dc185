"""Cached sampling against the full forward pass, and the choice of the next token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.inference.decoding import continue_text, generate, next_token_logits
from minigpt_jax.model.positions import POSITIONS
from minigpt_jax.model.transformer import MiniGPT
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config

V = 13


@functools.cache
def build(**values):
    values = {'num_layers': 2} | values
    config = resolve(tiny_config(**{f'model.{name}': value for name, value in values.items()}))
    model, params = nnx.split(MiniGPT(config.model, V, rngs=nnx.Rngs(params=0)))
    # Wild instead of freshly initialised, so that greedy choices change from token to token.
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.7, x.shape), x.dtype), params)


@functools.cache
def full_forward(model):
    return jax.jit(lambda params, tokens_BT: nnx.merge(model, params)(tokens_BT))


def naive_greedy(model, params, prompt, num_tokens, T):
    """The whole window in one pass for every token; the window drops its older half when full."""
    window, new = list(prompt[-T:]), []
    for _ in range(num_tokens):
        padded = np.zeros((1, T), int)
        padded[0, : len(window)] = window
        logits = full_forward(model)(params, padded)[0, len(window) - 1]
        token = int(logits.argmax())
        new.append(token)
        if len(window) == T:
            window = window[-max(1, T // 2) :] if T > 1 else []
        window.append(token)
    return new


def greedy(model, params, prompts, num_tokens, T, **settings):
    window_BT = np.zeros((len(prompts), T), np.int32)
    length = min(T, len(prompts[0]))
    window_BT[:, :length] = [p[-T:] for p in prompts]
    settings = dict(temperature=0.0, top_k=0, top_p=1.0) | settings
    key = jax.random.key(settings.pop('seed', 0))
    return np.asarray(
        generate(model, params, window_BT, length, key, num_tokens=num_tokens, **settings)
    )


# That a cache changes no logits, for all placements and positions: tests/model/test_variants.py.
VARIANTS = [
    *({'positions': positions} for positions in POSITIONS),
    {'norm_placement': 'post', 'attention_form': 'per_head', 'positions': 'alibi'},
    {'qk_norm': True, 'scan_layers': True, 'positions': 'relative'},
]


@pytest.mark.parametrize('variant', VARIANTS, ids=str)
def test_cached_greedy_decoding_equals_the_full_forward_pass(variant):
    model, params = build(**variant)
    seen = set()
    for prompt in ([3], [1, 5, 2, 7, 4], list(range(8)), list(range(12))):
        tokens = greedy(model, params, [prompt], 20, T=8)[0]
        assert tokens.tolist() == naive_greedy(model, params, prompt, 20, T=8)
        seen |= set(tokens.tolist())
    assert len(seen) > 2  # not one symbol for ever, which many an error would give too


@pytest.mark.parametrize('T', [1, 2, 3])
def test_the_window_slides_at_the_smallest_contexts(T):
    model, params = build(context_length=T)
    tokens = greedy(model, params, [[3, 1, 4]], 9, T=T)[0]
    assert tokens.tolist() == naive_greedy(model, params, [3, 1, 4], 9, T=T)


def test_cached_logits_equal_the_full_ones_at_every_position():
    model, params = build()
    module = nnx.merge(model, params)
    tokens_BT = np.random.default_rng(0).integers(0, V, (2, 8))
    full_BTV = module(tokens_BT)
    x_BTD, caches = module.hidden(tokens_BT[:, :3], caches=module.init_caches(2))
    pieces = [module.logits(x_BTD)]
    for t in range(3, 8):
        x_BTD, caches = module.hidden(tokens_BT[:, t : t + 1], caches=caches, position=t)
        pieces.append(module.logits(x_BTD))
    np.testing.assert_allclose(np.concatenate(pieces, 1), full_BTV, atol=2e-5)


def test_a_window_may_be_longer_than_in_training_where_positions_reach():
    model, params = build(positions='sinusoidal')
    prompt = [5, 12, 3, 7, 1, 0, 9, 4, 2, 8, 11, 6]
    tokens = greedy(model, params, [prompt], 20, T=12)[0]
    assert tokens.tolist() == naive_greedy(model, params, prompt, 20, T=12)
    assert tokens.tolist() != naive_greedy(model, params, prompt, 20, T=8)
    with pytest.raises(ValueError, match='learned positions end at context_length=8'):
        greedy(*build(), [[12, 0, 5]], 4, T=12)


def test_the_text_of_a_sample_does_not_depend_on_how_many_are_drawn():
    model, params = build()
    three = greedy(model, params, [[1, 2]] * 3, 12, T=8, temperature=1.0)
    one = greedy(model, params, [[1, 2]], 12, T=8, temperature=1.0)
    np.testing.assert_array_equal(three[0], one[0])
    assert len({tuple(row) for row in three}) == 3
    other_seed = greedy(model, params, [[1, 2]], 12, T=8, temperature=1.0, seed=1)
    assert (other_seed != one).any()


def test_top_k_of_one_and_a_tiny_top_p_are_greedy():
    model, params = build()
    expected = greedy(model, params, [[1, 2]], 12, T=8)
    for settings in (dict(top_k=1), dict(top_p=0.0)):
        np.testing.assert_array_equal(
            greedy(model, params, [[1, 2]], 12, T=8, temperature=1.0, **settings), expected
        )


def naive_next_token(logits, temperature, top_k, top_p):
    """Probabilities of the next token, by sorting in NumPy."""
    p = np.exp(np.float64(logits) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: top_k or len(p)]
    mass = np.cumsum(p[kept]) / p[kept].sum()
    kept = kept[: np.searchsorted(mass, top_p) + 1] if top_p < 1 else kept
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


@pytest.mark.parametrize(
    ('temperature', 'top_k', 'top_p'),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 5, 1.0), (1.0, 0, 0.6), (0.7, 6, 0.5), (1.0, 99, 0.99)],
)
def test_next_token_distribution_against_numpy(temperature, top_k, top_p):
    logits_BV = np.random.default_rng(5).standard_normal((4, V)).astype(np.float32) * 2
    ours = jax.nn.softmax(next_token_logits(logits_BV, temperature, top_k, top_p))
    for row, logits in zip(ours, logits_BV, strict=True):
        np.testing.assert_allclose(
            row, naive_next_token(logits, temperature, top_k, top_p), atol=1e-6
        )


def test_draws_follow_the_distribution():
    model, params = build()
    logits = full_forward(model)(params, np.array([[4, 0, 0, 0, 0, 0, 0, 0]]))[0, 0]
    draws = greedy(model, params, [[4]] * 4000, 1, T=8, temperature=1.0)[:, 0]
    share = np.bincount(draws, minlength=V) / 4000
    np.testing.assert_allclose(share, jax.nn.softmax(logits), atol=4 * np.sqrt(0.25 / 4000))
    assert jnp.std(share) > 0.01


class Letters:
    """A tokenizer of thirteen letters."""

    def encode(self, text):
        return np.array(['abcdefghijklm'.index(c) for c in text], np.int32)

    def decode(self, ids):
        return ''.join('abcdefghijklm'[i] for i in ids)

    def unknown_symbols(self, text):
        return [c for c in text if c not in 'abcdefghijklm']


def test_continue_text_keeps_the_prompt_and_names_unknown_symbols():
    model, params = build()
    texts = continue_text(model, params, Letters(), 8, 'abc' * 5, num_tokens=7, num_samples=2)
    assert [len(text) for text in texts] == [22, 22]
    assert all(text.startswith('abc' * 5) for text in texts)
    with pytest.raises(ValueError, match="'z' '!'"):
        continue_text(model, params, Letters(), 8, 'az!', num_tokens=1)
    with pytest.raises(ValueError, match='empty'):
        continue_text(model, params, Letters(), 8, '', num_tokens=1)
