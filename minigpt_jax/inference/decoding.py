"""Text out of a trained decoder: one compiled loop with a key-value cache.

Tensor names: B batch (samples of one prompt), T context length, D width,
V vocabulary, N new tokens.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx


class PromptError(ValueError):
    """A prompt that cannot be continued."""


@functools.partial(jax.jit, static_argnames=('model', 'num_tokens'))
def generate(model, params, prompt_BT, length, key, *, num_tokens, temperature, top_k, top_p):
    """Continues prompts token by token, each drawn from the model's distribution given the last.

    While the text fits the context, each new token costs one position: the keys and values of the
    earlier ones are cached. Past the context length the window slides: when it is full, its older
    half is dropped, and the younger half, now at positions 0, 1, …, is read again in one pass. So
    every token is drawn given at least the last T // 2 tokens, and its distribution is exactly the
    full forward pass over the window.

    Args:
      model, params: the two halves of a `MiniGPT` (`nnx.split`); the model is static.
      prompt_BT: the last (up to) T tokens of the prompts, from the left; what stands behind
        `length` is ignored.
      length: number of prompt tokens, from 1 to T, the same in each row.
      key: a PRNG key; row b draws from fold_in(key, b), so its text does not depend on B.
      temperature, top_k, top_p: see `next_token_logits`; arrays, so that any values share one
        compiled program.

    Returns:
      tokens_BN, N = `num_tokens` new tokens.
    """
    B, T = prompt_BT.shape
    module = nnx.merge(model, params)
    kept = max(1, T // 2)
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(B))

    def read_window(window_BT, length, _):
        x_BTD, caches = module.hidden(window_BT, caches=module.init_caches(B, T))
        last_B1D = jax.lax.dynamic_slice_in_dim(x_BTD, length - 1, 1, axis=1)
        return module.logits(last_B1D)[:, 0], caches

    def read_token(window_BT, length, caches):
        token_B1 = jax.lax.dynamic_slice_in_dim(window_BT, length - 1, 1, axis=1)
        x_B1D, caches = module.hidden(token_B1, caches=caches, position=length - 1)
        return module.logits(x_B1D)[:, 0], caches

    def next_token(carry, n):
        window_BT, length, caches, reread = carry
        logits_BV, caches = jax.lax.cond(reread, read_window, read_token, window_BT, length, caches)
        logits_BV = next_token_logits(logits_BV, temperature, top_k, top_p)
        keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, n)
        drawn_B = jax.vmap(jax.random.categorical)(keys, logits_BV)
        token_B = jnp.where(temperature == 0, logits_BV.argmax(-1), drawn_B).astype(jnp.int32)

        full = length == T
        window_BT = jnp.where(full, jnp.roll(window_BT, kept - T, axis=1), window_BT)
        length = jnp.where(full, kept, length)
        # With T = 1 the kept token is the one that the new token replaces.
        length = jnp.minimum(length, T - 1)
        window_BT = window_BT.at[:, length].set(token_B)
        return (window_BT, length + 1, caches, full), token_B

    start = (prompt_BT, jnp.int32(length), module.init_caches(B, T), jnp.bool_(True))
    _, tokens_NB = jax.lax.scan(next_token, start, jnp.arange(num_tokens))
    return tokens_NB.T


def next_token_logits(logits_BV, temperature, top_k, top_p):
    """logits / temperature, with -inf for every token that `top_k` or `top_p` rules out.

    top_k: keep the k most probable tokens (0: all). top_p: then keep the fewest tokens, most
    probable first, whose probabilities sum to at least p (1: all). The most probable token always
    stays. A temperature of 0 (greedy) scales nothing: its argmax is what is wanted.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p, "nucleus").
    """
    V = logits_BV.shape[-1]
    logits_BV = logits_BV / jnp.where(temperature == 0, 1, temperature)
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    in_top_k = jnp.arange(V) < jnp.where(top_k == 0, V, top_k)
    sorted_BV = jnp.where(in_top_k, sorted_BV, -jnp.inf)
    probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
    mass_before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    # A p of 1 keeps all, also where rounding makes the sum reach 1 early.
    in_top_p = (mass_before_BV < top_p) | (top_p >= 1) | (jnp.arange(V) == 0)
    sorted_BV = jnp.where(in_top_p, sorted_BV, -jnp.inf)
    rank_BV = jnp.argsort(order_BV, axis=-1)
    return jnp.take_along_axis(sorted_BV, rank_BV, axis=-1)


def continue_text(
    model,
    params,
    tokenizer,
    context_length,
    prompt,
    *,
    num_tokens,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    seed=0,
    num_samples=1,
):
    """`num_samples` continuations of the text `prompt`, each with the prompt in front.

    Raises:
      PromptError: for an empty prompt, or one with symbols that the tokenizer does not know.
    """
    if not prompt:
        raise PromptError('the prompt is empty: give at least one symbol')
    if unknown := tokenizer.unknown_symbols(prompt):
        raise PromptError(
            f'prompt: unknown to the tokenizer of this run: {" ".join(map(repr, unknown))}'
        )
    tokens = tokenizer.encode(prompt)[-context_length:]
    window_T = jnp.zeros(context_length, jnp.int32).at[: len(tokens)].set(tokens)
    tokens_BN = generate(
        model,
        params,
        jnp.tile(window_T, (num_samples, 1)),
        len(tokens),
        jax.random.key(seed),
        num_tokens=num_tokens,
        temperature=jnp.float32(temperature),
        top_k=jnp.int32(top_k),
        top_p=jnp.float32(top_p),
    )
    return [prompt + tokenizer.decode(row) for row in jax.device_get(tokens_BN)]
