"""Attention: one function that computes it, a head, and many heads in two equivalent forms.

Tensor names end in their dimensions: B batch, T query length, S key/value length, D model width,
H heads, K head dimension.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from minigpt_jax.model.kernels import dot_general

IMPLEMENTATIONS = ('auto', 'plain')


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
    nothing gives zeros. Masked weights are exactly 0. The softmax is computed in float32.

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
      implementation: one of `IMPLEMENTATIONS`.
      return_weights: also return the weights (after softmax, before dropout).

    Returns:
      y_BTHK, or (y_BTHK, weights_BHTS) with `return_weights`.

    Raises:
      ValueError: for an unknown implementation.

    Source: Vaswani et al. 2017, section 3.2.1.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f'implementation={implementation!r}: choose from {IMPLEMENTATIONS}')
    K = q_BTHK.shape[-1]
    scores_BHTS = jnp.einsum(
        'BTHK,BSHK->BHTS', q_BTHK * K**-0.5, k_BSHK, preferred_element_type=jnp.float32
    )
    if bias is not None:
        scores_BHTS += bias
        finite = bias > -jnp.inf  # what a bias of -inf rules out is masked
        mask = finite if mask is None else mask & finite
    allowed = _may_attend(scores_BHTS.shape, causal, q_offset, kv_lengths_B, segment_ids, mask)
    if allowed is not None:
        scores_BHTS = jnp.where(allowed, scores_BHTS, jnp.finfo(jnp.float32).min)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1)
    if any(condition is not None for condition in (kv_lengths_B, segment_ids, mask)):
        # Only these can leave a query with nothing: causally, it always sees itself.
        weights_BHTS = jnp.where(allowed, weights_BHTS, 0)
    kept_BHTS = dropout(weights_BHTS, dropout_rate, dropout_key)
    y_BTHK = jnp.einsum('BHTS,BSHK->BTHK', kept_BHTS.astype(v_BSHK.dtype), v_BSHK)
    return (y_BTHK, weights_BHTS) if return_weights else y_BTHK


def _may_attend(shape_BHTS, causal, q_offset, kv_lengths_B, segment_ids, mask):
    """The conjunction of all conditions, broadcastable to BHTS; None where all may attend."""
    T, S = shape_BHTS[-2:]
    conditions = []
    if causal:
        conditions.append((q_offset + jnp.arange(T))[:, None] >= jnp.arange(S))
    if kv_lengths_B is not None:
        conditions.append(jnp.arange(S) < kv_lengths_B[:, None, None, None])
    if segment_ids is not None:
        ids_BT, ids_BS = (
            segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
        )
        conditions.append((ids_BT[:, :, None] == ids_BS[:, None, :])[:, None])
    if mask is not None:
        conditions.append(mask)
    allowed = None
    for condition in conditions:
        allowed = condition if allowed is None else allowed & condition
    return allowed


def dropout(x, rate, key):
    """Zeroes entries with probability `rate`, scales the rest by 1/(1 - rate); off without a key.

    Source: Srivastava et al. 2014.
    """
    return nnx.Dropout(rate)(x, deterministic=key is None, rngs=key)


def split_key(key, count):
    """`count` independent keys; `None` (dropout off) stays `None`."""
    return (None,) * count if key is None else jax.random.split(key, count)


def init_cache(batch_size, length, num_heads, d_head):
    """An empty key-value cache of one attention layer: {'k_BSHK', 'v_BSHK'}, all zeros."""
    shape_BSHK = (batch_size, length, num_heads, d_head)
    return {'k_BSHK': jnp.zeros(shape_BSHK), 'v_BSHK': jnp.zeros(shape_BSHK)}


def cached_attention(q_BTHK, k_BTHK, v_BTHK, cache, position, **kwargs):
    """Causal self-attention; with a cache, also over the keys and values of earlier calls.

    The new keys and values stand at `position`, `position + 1`, … . What a cache holds behind them
    is ruled out by causality, so a cache need not be cleared.

    Returns:
      (y_BTHK, cache): the cache with the new keys and values, or None where there was none.
    """
    if cache is not None:
        start = (0, position, 0, 0)
        cache = {
            'k_BSHK': jax.lax.dynamic_update_slice(cache['k_BSHK'], k_BTHK, start),
            'v_BSHK': jax.lax.dynamic_update_slice(cache['v_BSHK'], v_BTHK, start),
        }
        k_BTHK, v_BTHK = cache['k_BSHK'], cache['v_BSHK']
    y_BTHK = dot_product_attention(q_BTHK, k_BTHK, v_BTHK, causal=True, q_offset=position, **kwargs)
    return y_BTHK, cache


class Head(nnx.Module):
    """One causal attention head: softmax(x W_Q (x W_K)ᵀ / √K) x W_V, from x_BTD to y_BTK.

    Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(self, config, *, rngs):
        self.dropout_rate, self.implementation = config.dropout_rate, config.attention
        d_head = config.d_model // config.num_heads
        self.query = dense(config, config.d_model, d_head, rngs=rngs)
        self.key = dense(config, config.d_model, d_head, rngs=rngs)
        self.value = dense(config, config.d_model, d_head, rngs=rngs)

    def __call__(self, x_BTD, *, cache=None, position=0, dropout_key=None):
        q_BT1K, k_BT1K, v_BT1K = (
            project(x_BTD)[:, :, None] for project in (self.query, self.key, self.value)
        )
        y_BT1K, cache = cached_attention(
            q_BT1K,
            k_BT1K,
            v_BT1K,
            cache,
            position,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
            implementation=self.implementation,
        )
        return y_BT1K[:, :, 0], cache


class MultiHeadAttention(nnx.Module):
    """Many heads side by side, concat(head₁ … head_H) W_O: the form of the textbooks.

    Shapes: x_BTD -> y_BTD, each head of width K = D / H. With a `cache` (see `init_cache`) the
    new tokens stand at `position`; returns (y_BTD, cache). Dropout on the weights of each head and
    on the output.

    Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(self, config, *, rngs):
        self.dropout_rate = config.dropout_rate
        self.heads = nnx.List([Head(config, rngs=rngs) for _ in range(config.num_heads)])
        self.out = residual_output(config, config.d_model, rngs=rngs)

    def __call__(self, x_BTD, *, cache=None, position=0, dropout_key=None):
        *head_keys, out_key = split_key(dropout_key, len(self.heads) + 1)
        y_BTK, caches = zip(
            *(
                head(
                    x_BTD,
                    cache=cache and {name: x[:, :, h : h + 1] for name, x in cache.items()},
                    position=position,
                    dropout_key=head_keys[h],
                )
                for h, head in enumerate(self.heads)
            ),
            strict=True,
        )
        if cache is not None:
            cache = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *caches)
        y_BTD = self.out(jnp.concatenate(y_BTK, axis=-1))
        return dropout(y_BTD, self.dropout_rate, out_key), cache


class FusedMultiHeadAttention(nnx.Module):
    """The same function as `MultiHeadAttention`, in the form that hardware likes.

    All heads' queries, keys and values come from one projection of x, then a reshape; all heads
    attend in one batched product. `fuse_heads` and `split_heads` convert the parameters.
    """

    def __init__(self, config, *, rngs):
        self.dropout_rate, self.implementation = config.dropout_rate, config.attention
        d_head = config.d_model // config.num_heads
        self.qkv = dense(config, config.d_model, (3, config.num_heads, d_head), rngs=rngs)
        self.out = residual_output(config, config.d_model, rngs=rngs)

    def __call__(self, x_BTD, *, cache=None, position=0, dropout_key=None):
        weights_key, out_key = split_key(dropout_key, 2)
        qkv_BT3HK = self.qkv(x_BTD)
        q_BTHK, k_BTHK, v_BTHK = (qkv_BT3HK[:, :, i] for i in range(3))
        y_BTHK, cache = cached_attention(
            q_BTHK,
            k_BTHK,
            v_BTHK,
            cache,
            position,
            dropout_rate=self.dropout_rate,
            dropout_key=weights_key,
            implementation=self.implementation,
        )
        y_BTD = self.out(y_BTHK.reshape(x_BTD.shape))
        return dropout(y_BTD, self.dropout_rate, out_key), cache


ATTENTION_FORMS = {'fused': FusedMultiHeadAttention, 'per_head': MultiHeadAttention}


def fuse_heads(params):
    """Parameters of a `MultiHeadAttention`, as the dict of `nnx.to_pure_dict`, in fused form.

    Shapes: H times {query, key, value} kernels (D, K) -> one of (D, 3, H, K); likewise biases,
    (K,) -> (3, H, K).
    """
    heads = [params['heads'][h] for h in sorted(params['heads'])]
    qkv = {
        name: jnp.stack(
            [
                jnp.stack([head[part][name] for head in heads], axis=-2)
                for part in ('query', 'key', 'value')
            ],
            axis=-3,
        )
        for name in heads[0]['query']
    }
    return {'qkv': qkv, 'out': params['out']}


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
    return {'heads': heads, 'out': params['out']}


def dense(config, d_in, d_out, *, rngs, stddev=0.02):
    """A dense layer x W + b; W ~ N(0, stddev²) as in GPT-2, b = 0 or absent (`use_bias`)."""
    return nnx.LinearGeneral(
        d_in,
        d_out,
        use_bias=config.use_bias,
        kernel_init=nnx.initializers.normal(stddev),
        dot_general=dot_general,
        rngs=rngs,
    )


def residual_output(config, d_in, *, rngs):
    """The last dense layer of a residual branch, with σ = 0.02/√(2·num_layers).

    The residual stream is a sum of 2·num_layers branches; the division keeps its variance from
    growing with depth. Source: Radford et al. 2019 (GPT-2), section 2.3.
    """
    stddev = 0.02 / (2 * config.num_layers) ** 0.5
    return dense(config, d_in, config.d_model, rngs=rngs, stddev=stddev)
