"""Text out of a trained model: one compiled loop with a key-value cache.

Tensor names: B batch (samples of one prompt, or sources), T context length, or the most tokens of a
translation, S length of a source, D width, V vocabulary, N new tokens, R beams.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
    fold_in = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
    keys_NB = fold_in(row_keys, jnp.arange(num_tokens))

    # What is added to logits so that their argmax is a draw from softmax(logits). For all tokens in
    # one go where that is a few MB: a third of the time that a token of a small model takes.
    V = module.embed.num_embeddings
    draw_noise = jax.vmap(lambda key: jax.random.gumbel(key, (V,)))
    at_once = keys_NB.size * V <= 2**22
    noise_NBV = jax.vmap(draw_noise)(keys_NB) if at_once else None

    def read_window(text):
        x_BTD, caches = module.hidden(text.window_BT, caches=module.init_caches(B, T))
        last_B1D = jax.lax.dynamic_slice_in_dim(x_BTD, text.length - 1, 1, axis=1)
        return write(text, module.logits(last_B1D)[:, 0]), caches

    def read_token(text, caches):
        last = text.length - 1
        token_B1 = jax.lax.dynamic_slice_in_dim(text.window_BT, last, 1, axis=1)
        x_B1D, caches = module.hidden(token_B1, caches=caches, position=last)
        return write(text, module.logits(x_B1D)[:, 0]), caches

    def write(text, logits_BV):
        """With the next token; where the window was full, behind its younger half."""
        logits_BV = next_token_logits(logits_BV, temperature, top_k, top_p)
        noise_BV = noise_NBV[text.n] if at_once else draw_noise(keys_NB[text.n])
        token_B = (logits_BV + jnp.where(temperature == 0, 0, noise_BV)).argmax(-1)
        full = text.length == T
        window_BT = jnp.where(full, jnp.roll(text.window_BT, kept - T, axis=1), text.window_BT)
        length = jnp.where(full, kept, text.length)
        # With T = 1 the kept token is the one that the new token replaces.
        length = jnp.minimum(length, T - 1)
        return _Text(
            window_BT=window_BT.at[:, length].set(token_B),
            length=length + 1,
            moved=full,
            tokens_NB=text.tokens_NB.at[text.n].set(token_B),
            n=text.n + 1,
        )

    # A loop in a loop, since a branch within one would copy the caches for every token.
    def read_until_full(text):
        return jax.lax.while_loop(
            lambda loop: ~loop[0].moved & (loop[0].n < num_tokens),
            lambda loop: read_token(*loop),
            read_window(text),
        )[0]

    text = _Text(
        window_BT=prompt_BT,
        length=jnp.int32(length),
        moved=jnp.bool_(False),
        tokens_NB=jnp.zeros((num_tokens, B), jnp.int32),
        n=jnp.int32(0),
    )
    text = jax.lax.while_loop(lambda text: text.n < num_tokens, read_until_full, text)
    return text.tokens_NB.T


class _Text(NamedTuple):
    """What `generate` has written, and the window that it reads."""

    window_BT: jax.Array
    length: jax.Array  # of the tokens in the window
    moved: jax.Array  # whether the last token moved the window, so that caches are of the old one
    tokens_NB: jax.Array
    n: jax.Array


def next_token_logits(logits_BV, temperature, top_k, top_p):
    """logits / temperature, with -inf for every token that `top_k` or `top_p` rules out.

    top_k: keep the k most probable tokens (0: all). top_p: then keep the fewest tokens, most
    probable first, whose probabilities sum to at least p (1: all). The most probable token always
    stays. A temperature of 0 (greedy) scales nothing: its argmax is what is wanted.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p, "nucleus").
    """
    logits_BV = logits_BV / jnp.where(temperature == 0, 1, temperature)
    # Where all tokens stay nothing is sorted, which takes longer than a small model's token.
    keeps_all = (top_k == 0) & (top_p >= 1)
    return jax.lax.cond(keeps_all, lambda x, *_: x, _most_probable, logits_BV, top_k, top_p)


def _most_probable(logits_BV, top_k, top_p):
    V = logits_BV.shape[-1]
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


# Translation.


class Hypotheses(NamedTuple):
    """What beam search found, best first.

    Attributes:
      tokens_BRT: the tokens, EOS included; what stands behind `lengths_BR` means nothing.
      lengths_BR: their number; 0 where fewer than R hypotheses ended.
      scores_BR: log p / lp; -inf where fewer ended.
    """

    tokens_BRT: jax.Array
    lengths_BR: jax.Array
    scores_BR: jax.Array


class _Search(NamedTuple):
    t: jax.Array  # tokens of each hypothesis that goes on
    tokens_BRT: jax.Array
    log_p_BR: jax.Array  # -inf where there is no hypothesis
    caches: Any
    ended: Hypotheses


def length_penalty_of(length, alpha):
    """lp = ((5 + length) / 6)^α. Source: Wu et al. 2016 (GNMT), equation 14."""
    return ((5 + length) / 6) ** alpha


@functools.partial(
    jax.jit, static_argnames=('model', 'max_length', 'beam_size', 'bos_id', 'eos_id')
)
def beam_search(
    model,
    params,
    source_BS,
    source_lengths_B,
    max_lengths_B,
    *,
    max_length,
    beam_size,
    length_penalty,
    bos_id,
    eos_id,
):
    """The likeliest translations; with one beam, greedy.

    The source is encoded once, and its keys and values are computed once for each layer. In every
    step the 2R likeliest continuations of a row's R hypotheses are looked at: those among the first
    R that are EOS have ended, the R likeliest others go on. A row stops when R have ended. At its
    maximum length a hypothesis ends: EOS is all it may continue with. Those that ended are ordered
    by log p / lp (see `length_penalty_of`), where lengths count EOS.

    Args:
      model, params: the two halves of an `EncoderDecoder` (`nnx.split`); the model is static.
      source_BS, source_lengths_B: the sources, with EOS; what stands behind the lengths is ignored.
      max_lengths_B: the most tokens of a translation, EOS included, from 1 to max_length.
      max_length: T, the size of caches and results.
      beam_size: R.
      length_penalty: α; 0 prefers short translations, which have fewer factors.

    Returns:
      `Hypotheses`.

    Source: Sutskever et al. 2014, section 3.2; Wu et al. 2016, section 7.
    """
    module = nnx.merge(model, params)
    B, R, T = len(source_BS), beam_size, max_length

    memory_BSD = module.encoder(source_BS, source_lengths_B)
    memory_lengths = jnp.repeat(source_lengths_B, R)
    # As wide as the memory, then repeated for its beams, which have it in common.
    caches = _rows(module.decoder.init_caches(B, T, memory_BSD=memory_BSD), jnp.arange(B * R) // R)

    def step(search):
        t, ended = search.t, search.ended
        last_BR = jnp.where(t == 0, bos_id, search.tokens_BRT[:, :, t - 1])
        x_BR1D, caches = module.decoder.hidden(
            last_BR.reshape(B * R, 1),
            caches=search.caches,
            position=t,
            memory_lengths_B=memory_lengths,
        )
        logits_BRV = module.decoder.logits(x_BR1D).reshape(B, R, -1)
        V = logits_BRV.shape[-1]
        log_p_BRV = search.log_p_BR[..., None] + jax.nn.log_softmax(logits_BRV)
        must_end_B = t + 1 >= max_lengths_B
        allowed_BRV = (jnp.arange(V) == eos_id) | ~must_end_B[:, None, None]
        log_p_BRV = jnp.where(allowed_BRV, log_p_BRV, -jnp.inf)
        # Of 2R continuations at most R are EOS, one a hypothesis: R others are among them.
        log_p_BC, choice_BC = top_k(log_p_BRV.reshape(B, R * V), 2 * R)
        beam_BC, token_BC = choice_BC // V, choice_BC % V
        tokens_BCT = jnp.take_along_axis(search.tokens_BRT, beam_BC[..., None], axis=1)
        tokens_BCT = tokens_BCT.at[:, :, t].set(token_BC)

        ends_BC = token_BC == eos_id
        scores_BR = log_p_BC[:, :R] / length_penalty_of(t + 1, length_penalty)
        new = ends_BC[:, :R] & ~_stopped(search, max_lengths_B)[:, None]
        scores_BR = jnp.where(new, scores_BR, -jnp.inf)
        lengths_BR = jnp.where(scores_BR > -jnp.inf, t + 1, 0)
        ended = _best(ended, Hypotheses(tokens_BCT[:, :R], lengths_BR, scores_BR))

        kept_BR = jnp.argsort(ends_BC, axis=1, stable=True)[:, :R]
        beam_BR = jnp.take_along_axis(beam_BC, kept_BR, axis=1)
        return _Search(
            t=t + 1,
            tokens_BRT=jnp.take_along_axis(tokens_BCT, kept_BR[..., None], axis=1),
            log_p_BR=jnp.take_along_axis(log_p_BC, kept_BR, axis=1),
            caches=_reordered(caches, (jnp.arange(B)[:, None] * R + beam_BR).reshape(-1)),
            ended=ended,
        )

    tokens_BRT = jnp.zeros((B, R, T), jnp.int32)
    nothing_BR = jnp.full((B, R), -jnp.inf)
    start = _Search(
        t=jnp.int32(0),
        tokens_BRT=tokens_BRT,
        log_p_BR=nothing_BR.at[:, 0].set(0.0),
        caches=caches,
        ended=Hypotheses(tokens_BRT, jnp.zeros((B, R), jnp.int32), nothing_BR),
    )
    return jax.lax.while_loop(
        lambda search: ~_stopped(search, max_lengths_B).all(), step, start
    ).ended


def top_k(x_BN, k, *, block=128):
    """`jax.lax.top_k`, which in a loop on a CPU is a sort of all N, thirty times slower than this.

    The k largest lie in the k blocks of the largest maxima. Equal values keep their order, since
    the chosen blocks do.
    """
    B, N = x_BN.shape
    if k >= N // block:
        return jax.lax.top_k(x_BN, k)
    x_BN = jnp.pad(x_BN, ((0, 0), (0, -N % block)), constant_values=-jnp.inf)
    blocks = x_BN.reshape(B, -1, block)
    chosen_Bk = jnp.sort(jax.lax.top_k(blocks.max(axis=-1), k)[1], axis=-1)
    values_BM = jnp.take_along_axis(blocks, chosen_Bk[..., None], axis=1).reshape(B, -1)
    largest_Bk, place_Bk = jax.lax.top_k(values_BM, k)
    block_Bk = jnp.take_along_axis(chosen_Bk, place_Bk // block, axis=1)
    return largest_Bk, block_Bk * block + place_Bk % block


def _stopped(search, max_lengths_B):
    """Rows in which R hypotheses have ended, or all there were."""
    all_ended_B = (search.ended.scores_BR > -jnp.inf).all(axis=1)
    return all_ended_B | (search.t >= max_lengths_B)


def _best(one, other):
    """The R best of two times R hypotheses."""
    both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), one, other)
    scores_BR, order_BR = jax.lax.top_k(both.scores_BR, one.scores_BR.shape[1])
    return Hypotheses(
        tokens_BRT=jnp.take_along_axis(both.tokens_BRT, order_BR[..., None], axis=1),
        lengths_BR=jnp.take_along_axis(both.lengths_BR, order_BR, axis=1),
        scores_BR=scores_BR,
    )


def _reordered(caches, rows):
    """Caches whose row i continues what was row rows[i]; of the same source, as is its memory."""
    if isinstance(caches, list):
        return [cache | {'self': _rows([cache['self']], rows)[0]} for cache in caches]
    return caches | {'self': _rows(caches['self'], rows)}


def _rows(caches, rows):
    """Rows of all arrays of caches: a list of one a layer, or with `scan_layers` one for all."""
    in_list = isinstance(caches, list)
    return jax.tree.map(lambda x: x[rows] if in_list else x[:, rows], caches)


def longest_translation(source_length, context_length):
    """The most tokens of a translation, EOS included: twice the source and ten, in the context."""
    return np.minimum(2 * source_length + 10, context_length)


def translate_batch(model, params, batch, context_length, tokenizer):
    """Greedy translations of a batch (see `data.pairs`): (tokens_BT, lengths_B), EOS included.

    They are compared with the targets of the batch, so none needs to be longer than those by more
    than a token.
    """
    most = min(batch['target_BT1'].shape[1], context_length)
    found = beam_search(
        model,
        params,
        batch['source_BS'],
        batch['source_lengths_B'],
        jnp.minimum(longest_translation(batch['source_lengths_B'], context_length), most),
        max_length=most,
        beam_size=1,
        length_penalty=0.0,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
    )
    tokens_BRT, lengths_BR, _ = jax.device_get(found)
    return tokens_BRT[:, 0], lengths_BR[:, 0]


_MOST_BEAMS = 1024  # of all rows of a batch


class Translation(NamedTuple):
    """A text, its score log p / lp, and the ids of source and text, EOS included."""

    text: str
    score: float
    source_ids: np.ndarray
    ids: np.ndarray


def translate(
    model,
    params,
    tokenizer,
    context_length,
    sources,
    *,
    beam_size=1,
    length_penalty=0.6,
    batch_size=32,
):
    """For each text its translations, best first, up to `beam_size` of them.

    For an empty text there is none, []. For a text of more than `context_length` tokens,
    EOS included, it is None. Texts of like length are decoded together, in few shapes.
    """
    encoded = [np.append(tokenizer.source.encode(x), tokenizer.eos_id) for x in sources]
    results = [[] if len(ids) == 1 else None for ids in encoded]
    batch_size = max(1, min(batch_size, _MOST_BEAMS // beam_size))  # caches are of every beam
    rows = [i for i, ids in enumerate(encoded) if 1 < len(ids) <= context_length]
    rows.sort(key=lambda i: len(encoded[i]))
    for start in range(0, len(rows), batch_size):
        own = rows[start : start + batch_size]
        width = min(-(-len(encoded[own[-1]]) // 16) * 16, context_length)
        num_rows = 1 << (len(own) - 1).bit_length()  # few shapes, and few rows that are for nothing
        source_BS = np.full((num_rows, width), tokenizer.pad_id, np.int32)
        lengths_B = np.ones(num_rows, np.int32)  # of the rows that fill up: EOS alone
        for b, i in enumerate(own):
            lengths_B[b] = len(encoded[i])
            source_BS[b, : lengths_B[b]] = encoded[i]
        source_BS[len(own) :, 0] = tokenizer.eos_id
        max_lengths_B = longest_translation(lengths_B, context_length).astype(np.int32)
        max_lengths_B[len(own) :] = 1
        found = jax.device_get(
            beam_search(
                model,
                params,
                source_BS,
                lengths_B,
                max_lengths_B,
                max_length=int(longest_translation(width, context_length)),
                beam_size=beam_size,
                length_penalty=length_penalty,
                bos_id=tokenizer.bos_id,
                eos_id=tokenizer.eos_id,
            )
        )
        for b, i in enumerate(own):
            results[i] = [
                Translation(
                    tokenizer.target.decode(tokens[: length - 1]),
                    float(score),
                    encoded[i],
                    tokens[:length],
                )
                for tokens, length, score in zip(*(x[b] for x in found), strict=True)
                if length
            ]
    return results
