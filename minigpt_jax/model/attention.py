"""Attention: one function that computes it, a head, and many heads in two equivalent forms.

Tensor names end in their dimensions: B batch, T query length, S key/value length, D model width,
H heads, K head dimension.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from minigpt_jax.model import flash
from minigpt_jax.model.kernels import blockwise_attention, may_attend, product
from minigpt_jax.model.layers import (
    NO_TAP,
    Tap,
    branch_gain,
    dense,
    dropout,
    make_norm,
    residual_output,
    split_key,
)
from minigpt_jax.model.positions import ATTENTION_POSITIONS

# Those that hold no T × S weights. They take the structured arguments, the mask and the bias.
WITHOUT_WEIGHTS = {
    'blockwise': blockwise_attention,
    'cudnn': flash.cudnn_attention,
    'pallas': flash.pallas_attention,
}
IMPLEMENTATIONS = ('auto', 'plain', *WITHOUT_WEIGHTS)
DEVICE_OBSTACLES = {'cudnn': flash.cudnn_obstacle, 'pallas': flash.pallas_obstacle}

# What 'auto' tries in turn on a platform, before 'plain': an implementation, and from how many
# scores on, as the side of a square of T × S. That of the CPU is measured: at T = S = 64 blocks
# made a step of a small model 5 % longer, at 256 they take half the time. The others are guesses.
AUTO = {
    'cpu': (('blockwise', 128),),
    'cuda': (('cudnn', 128), ('blockwise', 1024)),
    'rocm': (('blockwise', 1024),),
    'tpu': (('pallas', 512), ('blockwise', 1024)),
}


def obstacle(implementation, demand):
    """Why an implementation cannot do what a `flash.Demand` asks here, or None if it can."""
    if implementation in WITHOUT_WEIGHTS and demand.needs_weights:
        return "has no weights to return or to drop: choose implementation='plain'"
    own = DEVICE_OBSTACLES.get(implementation)
    return own and own(demand)


def choose_implementation(demand):
    """What 'auto' is for a `flash.Demand`, by platform, number of scores, and type (see `AUTO`)."""
    platform = flash.device().platform
    T, S = demand.lengths
    for implementation, side in AUTO.get(platform, AUTO['rocm']):
        # Kernels turn what they have no argument for into a bias of every row and head.
        grows = demand.has_scores and implementation in DEVICE_OBSTACLES and T * S >= 1024**2
        if side**2 <= T * S and not grows and not obstacle(implementation, demand):
            break
    else:
        implementation = 'plain'
    _log_choice(implementation, platform)
    return implementation


@functools.cache
def _log_choice(implementation, platform):
    """Once in a process for each choice."""
    logging.info('attention on %s: auto takes %s', platform, implementation)


def dot_product_attention(
    q_BTHK,
    k_BSHK,
    v_BSHK,
    *,
    causal=False,
    q_offset=0,
    kv_lengths_B=None,
    segment_ids=None,
    mask=None,
    bias=None,
    dropout_rate=0.0,
    dropout_key=None,
    implementation='auto',
    return_weights=False,
):
    """Scaled dot-product attention, softmax(q kᵀ / √K + bias) v, for every model of this project.

    A query may attend to a key when *every* given condition allows it. A query that may attend to
    nothing gives zeros. Masked weights are exactly 0. Operands of products are of the type of
    q, k and v; their results and the softmax are float32.

    Args:
      q_BTHK, k_BSHK, v_BSHK: queries, keys and values.
      causal: query t (at position q_offset + t) attends to keys s <= q_offset + t.
      q_offset: position of the first query among the keys, for queries behind a cache.
      kv_lengths_B: number of valid keys in each row; the keys behind them are padding.
      segment_ids: ids of packed documents, `ids_BT` where T == S or a pair `(ids_BT, ids_BS)`;
        attention stays within equal ids.
      mask: boolean, True means *may attend*; broadcasts to BHTS.
      bias: added to the scaled scores (ALiBi, relative positions); broadcasts to BHTS.
      dropout_rate, dropout_key: dropout on the weights; off without a key.
      implementation: one of `IMPLEMENTATIONS`. 'plain' holds all T × S weights; the others have
        none to drop or to return. 'blockwise' runs everywhere, 'cudnn' on NVIDIA GPUs and 'pallas'
        on TPUs (see `model.flash`); 'auto' is what is best of those that can run (see `AUTO`).
      return_weights: also return the weights (after softmax, before dropout).

    Returns:
      y_BTHK, or (y_BTHK, weights_BHTS) with `return_weights`.

    Raises:
      ValueError: for an unknown implementation, and for one that cannot do here what is asked.

    Source: Vaswani et al. 2017, section 3.2.1.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f'implementation={implementation!r}: choose from {IMPLEMENTATIONS}')
    demand = flash.Demand(
        dtype=str(k_BSHK.dtype),
        d_head=k_BSHK.shape[-1],
        lengths=(q_BTHK.shape[1], k_BSHK.shape[1]),
        needs_weights=return_weights or bool(dropout_rate and dropout_key is not None),
        has_offset=causal and not (isinstance(q_offset, int) and q_offset == 0),
        has_scores=any(x is not None for x in (segment_ids, mask, bias)),
    )
    if implementation == 'auto':
        implementation = choose_implementation(demand._replace(num_devices=jax.device_count()))
    elif why := obstacle(implementation, demand):
        raise ValueError(f'{implementation} attention {why}')
    if implementation in WITHOUT_WEIGHTS:
        return WITHOUT_WEIGHTS[implementation](
            q_BTHK,
            k_BSHK,
            v_BSHK,
            causal=causal,
            q_offset=q_offset,
            kv_lengths_B=kv_lengths_B,
            segment_ids=segment_ids,
            mask=mask,
            bias=bias,
        )
    scaled_q_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
    scores_BHTS = product('BTHK,BSHK->BHTS', scaled_q_BTHK, k_BSHK, k_BSHK.dtype)
    if bias is not None:
        scores_BHTS += bias
        finite = bias != -jnp.inf  # what a bias of -inf rules out is masked
        mask = finite if mask is None else mask & finite
    allowed = may_attend(scores_BHTS.shape, causal, q_offset, kv_lengths_B, segment_ids, mask)
    if allowed is not None:
        scores_BHTS = jnp.where(allowed, scores_BHTS, jnp.finfo(jnp.float32).min)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1)
    if any(condition is not None for condition in (kv_lengths_B, segment_ids, mask)):
        # Only these can leave a query with nothing: causally, it always sees itself.
        weights_BHTS = jnp.where(allowed, weights_BHTS, 0)
    kept_BHTS = dropout(weights_BHTS, dropout_rate, dropout_key)
    y_BTHK = product('BHTS,BSHK->BTHK', kept_BHTS, v_BSHK, v_BSHK.dtype)
    return (y_BTHK, weights_BHTS) if return_weights else y_BTHK


def init_cache(batch_size, length, num_heads, d_head, dtype='float32'):
    """An empty key-value cache of one attention layer: {'k_BSHK', 'v_BSHK'}, all zeros."""
    shape_BSHK = (batch_size, length, num_heads, d_head)
    return {'k_BSHK': jnp.zeros(shape_BSHK, dtype), 'v_BSHK': jnp.zeros(shape_BSHK, dtype)}


class Attend(nnx.Module):
    """Attention between queries, keys and values: all of a layer but its projections.

    In this order: a norm of each query and key over its K dimensions (`qk_norm`); the cache, whose
    keys are not yet marked by positions; positions, where they act inside attention; dot products.

    `causal` lets a query see no later key. `cross` is for queries and keys of two texts, between
    which there is no distance: positions do not act.

    Shapes: q_BTHK, k_BSHK, v_BSHK -> y_BTHK, with S = T unless `cross`. Of the keys of row b the
    first kv_lengths_B[b] count, where lengths are given. With `segment_ids_BT` a query attends to
    keys of its own segment alone; they have no cache. A call may hold some of the layer's heads
    only, counted from `first_head`. With a `cache` (see `init_cache`) the new keys and values stand
    at `position`, `position + 1`, …, and queries attend to those of earlier calls as well. What a
    cache holds behind them is ruled out by causality, so it need not be cleared. With `cross` a
    cache is complete (see `remember`), and no keys and values are given.

    Returns:
      (y_BTHK, cache): the cache with the new keys and values, or None where there was none.

    Source: Vaswani et al. 2017, section 3.2.1. QK-norm: Henry et al. 2020; Dehghani et al. 2023,
    section 2, whose scale of (K,), shared by all heads, this has.
    """

    def __init__(self, config, *, causal=True, cross=False, rngs):
        self.causal = causal and not cross
        self.dropout_rate, self.implementation = config.dropout_rate, config.attention
        self.dtype = config.dtype
        d_head = config.d_model // config.num_heads
        # `scale_scores` off undoes the division by √K inside `dot_product_attention`.
        self.unscale = 1.0 if config.scale_scores else d_head**0.5
        self.query_norm = make_norm(config, d_head, rngs=rngs) if config.qk_norm else None
        self.key_norm = make_norm(config, d_head, rngs=rngs) if config.qk_norm else None
        positions = None if cross else ATTENTION_POSITIONS.get(config.positions)
        self.positions = positions and positions(config, rngs=rngs)

    def remember(self, k_BSHK, v_BSHK):
        """Keys and values as a cache holds them: {'k_BSHK', 'v_BSHK'}."""
        if self.key_norm is not None:
            k_BSHK = self.key_norm(k_BSHK)
        return {'k_BSHK': k_BSHK.astype(self.dtype), 'v_BSHK': v_BSHK.astype(self.dtype)}

    def __call__(
        self,
        q_BTHK,
        k_BSHK=None,
        v_BSHK=None,
        *,
        kv_lengths_B=None,
        segment_ids_BT=None,
        cache=None,
        position=0,
        first_head=0,
        dropout_key=None,
        tap=NO_TAP,
    ):
        if self.query_norm is not None:
            q_BTHK = self.query_norm(q_BTHK)
        new = None if k_BSHK is None else self.remember(k_BSHK, v_BSHK)
        q_BTHK = q_BTHK.astype(self.dtype)
        if cache is not None and new is not None:
            start = (0, position, 0, 0)
            cache = {
                name: jax.lax.dynamic_update_slice(cache[name], new[name], start) for name in cache
            }
        held = new if cache is None else cache
        k_BSHK, v_BSHK = held['k_BSHK'], held['v_BSHK']
        bias_BHTS = None
        if self.positions is not None:
            q_BTHK, k_BSHK, bias_BHTS = self.positions(q_BTHK, k_BSHK, position, first_head)
        if self.unscale != 1:
            q_BTHK = q_BTHK * self.unscale
        wants_weights = tap.wants('attention_weights')
        implementation = self.implementation
        if wants_weights:
            implementation = 'plain'  # whoever looks at the weights pays for them
        elif cache is not None and implementation in DEVICE_OBSTACLES:
            implementation = 'auto'  # kernels for training have no queries behind a cache
        y_BTHK = dot_product_attention(
            q_BTHK,
            k_BSHK,
            v_BSHK,
            causal=self.causal,
            q_offset=position,
            kv_lengths_B=kv_lengths_B,
            segment_ids=segment_ids_BT,
            bias=bias_BHTS,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
            implementation=implementation,
            return_weights=wants_weights,
        )
        if wants_weights:
            y_BTHK, weights_BHTS = y_BTHK
            tap('attention_weights', weights_BHTS)
        return tap('head_outputs', y_BTHK), cache


class Head(nnx.Module):
    """One attention head, attend(x W_Q, x W_K, x W_V), from x_BTD to y_BTK.

    With `attend` a `dot_product_attention`: softmax(x W_Q (x W_K)ᵀ / √K) x W_V, as y_BT1K. In a
    layer it is the layer's `Attend`, and the result is (y_BT1K, cache). Keys and values may come
    from another text, `memory_BSD`, or have been computed before: with `queries_only` the caller's
    `attend` has them.

    Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(self, config, *, rngs):
        D, K = config.d_model, config.d_model // config.num_heads
        # Glorot's rule sees the matrices of all heads side by side, as in the fused form.
        self.query = dense(config, D, K, fan_out=D, rngs=rngs)
        self.key = dense(config, D, K, fan_out=D, rngs=rngs)
        self.value = dense(config, D, K, fan_out=D, gain=branch_gain(config), rngs=rngs)

    def __call__(self, x_BTD, attend, *, memory_BSD=None, queries_only=False):
        q_BT1K = self.query(x_BTD)[:, :, None]
        if queries_only:
            return attend(q_BT1K)
        return attend(q_BT1K, *self.keys_values(x_BTD if memory_BSD is None else memory_BSD))

    def keys_values(self, x_BSD):
        """(k_BS1K, v_BS1K) of a text."""
        return self.key(x_BSD)[:, :, None], self.value(x_BSD)[:, :, None]


class MultiHeadAttention(nnx.Module):
    """Many heads side by side, concat(head₁ … head_H) W_O: the form of the textbooks.

    The one attention layer of every model. Queries are of x. Keys and values are of x too, or with
    `cross` of `memory_BSD`, the encoder's output (encoder-decoder attention).

    Shapes: x_BTD -> y_BTD, each head of width K = D / H. Of the keys of row b the first
    kv_lengths_B[b] count, where lengths are given; segments are as in `Attend`. With a `cache` (see
    `init_cache`) the new tokens stand at `position`; with `cross` it is what `remember` makes of
    the memory, once, which then is not given. Returns (y_BTD, cache). Dropout on the weights of
    each head and on the output.

    Source: Vaswani et al. 2017, sections 3.2.2 and 3.2.3.
    """

    def __init__(self, config, *, causal=True, cross=False, rngs):
        self.dropout_rate, self.cross = config.dropout_rate, cross
        self.heads = nnx.List([Head(config, rngs=rngs) for _ in range(config.num_heads)])
        self.attend = Attend(config, causal=causal, cross=cross, rngs=rngs)
        self.out = residual_output(config, config.d_model, rngs=rngs)

    def remember(self, memory_BSD):
        """The keys and values of a memory, as a cache: {'k_BSHK', 'v_BSHK'}."""
        parts = zip(*(head.keys_values(memory_BSD) for head in self.heads), strict=True)
        return self.attend.remember(*(jnp.concatenate(part, axis=2) for part in parts))

    def __call__(
        self,
        x_BTD,
        *,
        memory_BSD=None,
        kv_lengths_B=None,
        segment_ids_BT=None,
        cache=None,
        position=0,
        dropout_key=None,
        tap=NO_TAP,
    ):
        *head_keys, out_key = split_key(dropout_key, len(self.heads) + 1)
        taps = [Tap(tap.names) for _ in self.heads]
        y_BTK, caches = [], []
        for h, head in enumerate(self.heads):
            attend = functools.partial(
                self.attend,
                kv_lengths_B=kv_lengths_B,
                segment_ids_BT=segment_ids_BT,
                cache=cache and {name: x[:, :, h : h + 1] for name, x in cache.items()},
                position=position,
                first_head=h,
                dropout_key=head_keys[h],
                tap=taps[h],
            )
            queries_only = self.cross and cache is not None
            y_BT1K, head_cache = head(
                x_BTD, attend, memory_BSD=memory_BSD, queries_only=queries_only
            )
            y_BTK.append(y_BT1K[:, :, 0])
            caches.append(head_cache)
        if cache is not None and not self.cross:
            cache = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *caches)
        for name, axis in (('attention_weights', 1), ('head_outputs', 2)):
            if tap.wants(name):
                tap(name, jnp.concatenate([own.values[name] for own in taps], axis))
        y_BTD = self.out(jnp.concatenate(y_BTK, axis=-1))
        return dropout(y_BTD, self.dropout_rate, out_key), cache


class FusedMultiHeadAttention(nnx.Module):
    """The same function as `MultiHeadAttention`, in the form that hardware likes.

    All heads' queries, keys and values come from one projection of x, or with `cross` from one of x
    and one of the memory, then a reshape; all heads attend in one batched product. `fuse_heads` and
    `split_heads` convert the parameters.
    """

    def __init__(self, config, *, causal=True, cross=False, rngs):
        self.dropout_rate, self.cross = config.dropout_rate, cross
        D, H = config.d_model, config.num_heads
        heads = (H, D // H)
        gains_311 = np.array([1, 1, branch_gain(config)], np.float32)[:, None, None]
        if cross:
            self.query = dense(config, D, heads, fan_out=D, rngs=rngs)
            gains_211 = gains_311[1:]
            self.key_value = dense(config, D, (2, *heads), fan_out=D, gain=gains_211, rngs=rngs)
        else:
            self.qkv = dense(config, D, (3, *heads), fan_out=D, gain=gains_311, rngs=rngs)
        self.attend = Attend(config, causal=causal, cross=cross, rngs=rngs)
        self.out = residual_output(config, D, rngs=rngs)

    def remember(self, memory_BSD):
        """The keys and values of a memory, as a cache: {'k_BSHK', 'v_BSHK'}."""
        return self.attend.remember(*_parts(self.key_value(memory_BSD)))

    def __call__(
        self,
        x_BTD,
        *,
        memory_BSD=None,
        kv_lengths_B=None,
        segment_ids_BT=None,
        cache=None,
        position=0,
        dropout_key=None,
        tap=NO_TAP,
    ):
        weights_key, out_key = split_key(dropout_key, 2)
        if self.cross:
            qkv = [self.query(x_BTD)]
            if cache is None:
                qkv += _parts(self.key_value(memory_BSD))
        else:
            qkv = _parts(self.qkv(x_BTD))
        y_BTHK, cache = self.attend(
            *qkv,
            kv_lengths_B=kv_lengths_B,
            segment_ids_BT=segment_ids_BT,
            cache=cache,
            position=position,
            dropout_key=weights_key,
            tap=tap,
        )
        y_BTD = self.out(y_BTHK.reshape(x_BTD.shape))
        return dropout(y_BTD, self.dropout_rate, out_key), cache


def _parts(x_BTNHK):
    """[x_BTHK of each part]: a split, whose gradient is one array, where slices have N to add."""
    return [x.squeeze(2) for x in jnp.split(x_BTNHK, x_BTNHK.shape[2], axis=2)]


ATTENTION_FORMS = {'fused': FusedMultiHeadAttention, 'per_head': MultiHeadAttention}


def fuse_heads(params):
    """Parameters of a `MultiHeadAttention`, as the dict of `nnx.to_pure_dict`, in fused form.

    Shapes: H times {query, key, value} kernels (D, K) -> one of (D, 3, H, K); likewise biases,
    (K,) -> (3, H, K).
    """
    heads = [params['heads'][h] for h in sorted(params['heads'])]
    return {'qkv': _stack_heads(heads, ('query', 'key', 'value'))} | _without(params, 'heads')


def fuse_cross_heads(params):
    """The same with `cross`: a query kernel (D, H, K), one of keys and values (D, 2, H, K)."""
    heads = [params['heads'][h] for h in sorted(params['heads'])]
    query = jax.tree.map(lambda x: x[..., 0, :, :], _stack_heads(heads, ('query',)))
    key_value = _stack_heads(heads, ('key', 'value'))
    return {'query': query, 'key_value': key_value} | _without(params, 'heads')


def _stack_heads(heads, parts):
    """Kernels (D, K) of some parts of H heads as (D, parts, H, K); biases as (parts, H, K)."""

    def stack(name):
        return jnp.stack(
            [jnp.stack([head[part][name] for head in heads], axis=-2) for part in parts], axis=-3
        )

    return {name: stack(name) for name in heads[0]['query']}


def _without(params, key):
    return {name: x for name, x in params.items() if name != key}


def split_heads(params):
    """The inverse of `fuse_heads`."""
    num_heads = params['qkv']['kernel'].shape[-2]
    heads = {
        h: {
            part: {name: x[..., i, h, :] for name, x in params['qkv'].items()}
            for i, part in enumerate(('query', 'key', 'value'))
        }
        for h in range(num_heads)
    }
    return {'heads': heads} | _without(params, 'qkv')
