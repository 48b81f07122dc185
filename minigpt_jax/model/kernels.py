"""Array kernels whose fast form differs from what autodiff or the compiler would write."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax


def product(spec, a, b, dtype):
    """`jnp.einsum` of two arrays with operands in `dtype` and a float32 result.

    So it is in the gradient as well, where the arriving cotangent is cast to `dtype`: bfloat16
    units multiply, float32 adds up, and what is kept for the backward pass is of half the size.
    Every index stands in two of the three terms at least, as in any product of matrices.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return jnp.einsum(spec, a, b)  # JAX's own gradient does all that
    return _product((spec, dtype, None, a.dtype, b.dtype), a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static, a, b):
    spec, dtype, precision, *_ = static
    if dtype != 'float32' and _rounds_instead(spec):
        bits = jnp.finfo(dtype)
        a, b = (lax.reduce_precision(x.astype(jnp.float32), bits.nexp, bits.nmant) for x in (a, b))
    else:
        a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _rounds_instead(spec):
    """Whether operands are only rounded to `dtype`, and multiplied in float32: the same numbers.

    XLA's CPU compiler (jax 0.10 to 0.12) has fast bfloat16 products of matrices only where the
    last axes of the left one are contracted. Others it multiplies in float32 itself, or rearranges
    into what it cannot run: "Unsupported element type for DotThunk".
    """
    terms, result = spec.split('->')
    left, right = terms.split(',')
    contracted = ''.join(axis for axis in left if axis not in result)
    has_batch_axes = bool(set(left) & set(right) & set(result))
    is_fast = left.endswith(contracted) and not has_batch_axes
    return jax.default_backend() == 'cpu' and not is_fast


def _product_forward(static, a, b):
    dtype = static[1]
    return _product(static, a, b), (a.astype(dtype), b.astype(dtype))


def _product_backward(static, operands, dy):
    spec, dtype, precision, a_dtype, b_dtype = static
    terms, result = spec.split('->')
    left, right = terms.split(',')
    a, b = operands
    own = (dtype, precision, dy.dtype, dtype)
    da = _product((f'{result},{right}->{left}', *own), dy, b)
    db = _product((f'{left},{result}->{right}', *own), a, dy)
    return da.astype(a_dtype), db.astype(b_dtype)


_product.defvjp(_product_forward, _product_backward)


@functools.cache
def dense_product(dtype):
    """`dot_general` with its operands in `dtype`; the same object whenever it is asked for."""
    return functools.partial(dot_general, dtype=dtype)


def dot_general(
    x,
    w,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    dtype='float32',
):
    """`lax.dot_general` for dense layers, with a weight gradient the CPU compiler likes.

    Equation: y = x · w, contracting the last axes of `x` with the first axes of `w`;
    dx = dy · wᵀ and dw = Σ_tokens x ⊗ dy. Operands in `dtype`, results in float32 (see `product`).

    JAX's transpose rule writes dw as (out, in) and transposes it. XLA's CPU compiler then copies
    the whole residual chain behind `x` into a transposed operand: 2.4 times the step time of a
    small GPT. Contracting the token axes of both operands gives (in, out) directly.

    Shapes: x (*tokens, *in), w (*in, *out) -> (*tokens, *out). Pass it to `nnx.Linear` or
    `nnx.LinearGeneral` as `dot_general`.

    Raises:
      ValueError: if the contraction is not "last axes of x with first axes of w", or another type
        of result is asked for.
    """
    (x_axes, w_axes), batch_axes = dimension_numbers
    n = len(w_axes)
    dense = tuple(x_axes) == tuple(range(x.ndim - n, x.ndim)) and tuple(w_axes) == tuple(range(n))
    if not dense or any(batch_axes) or out_sharding is not None:
        raise ValueError(
            'dot_general: this kernel contracts the last axes of x with the first axes of w, '
            f'without batch axes or out_sharding; got {dimension_numbers}'
        )
    if preferred_element_type not in (None, jnp.float32):
        raise ValueError(f'dot_general: results are float32, not {preferred_element_type}')
    tokens_shape, out_shape = x.shape[: x.ndim - n], w.shape[n:]
    # Matrices only from here on: with several token axes to contract, the compiler would first
    # move them together, by the very copies that this is about. M tokens, I in, O out.
    x_MI = x.reshape(-1, math.prod(w.shape[:n]))
    w_IO = w.reshape(x_MI.shape[1], -1)
    y_MO = _product(('MI,IO->MO', dtype, precision, x.dtype, w.dtype), x_MI, w_IO)
    return y_MO.reshape(*tokens_shape, *out_shape)


# Attention. Here B is the batch, T queries, S keys, H heads, K the head dimension.


def may_attend(shape_BHTS, causal, q_offset, kv_lengths_B, segment_ids, mask):
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


# At most so many queries or keys. By `experiments.cost_curve`, without a mask, a layer took 0.97,
# 0.79 and 0.84 of the time of plain attention at n = 512, 1024 and 2048; in blocks of 128 it took
# 1.15, 1.08 and 1.06 times as long.
BLOCK = 512


def blockwise_attention(
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
    block=BLOCK,
):
    """`dot_product_attention` without its T × S scores: a block of them exists at a time.

    For each block of queries, the blocks of keys that causality and lengths leave are read one
    after the other. The softmax goes along: with the largest score m so far, the sum of exp(s - m)
    and of exp(s - m) v are kept, and rescaled when m grows. The backward pass is given y and the
    logarithm of the sum of every row, and computes each block again. So memory grows with T + S,
    unless there is a mask or a bias of T × S. A query that may attend to nothing gives zeros.

    The arguments and the result are those of `dot_product_attention`; `block` is the largest number
    of queries or keys in a block.

    Source: Rabe and Staats 2021; Dao et al. 2022 (FlashAttention), algorithms 1 and 4.
    """
    T, S = q_BTHK.shape[1], k_BSHK.shape[1]
    by_queries, by_keys = _Blocks(T, block), _Blocks(S, block)
    if by_keys.padding:
        kv_lengths_B = jnp.minimum(S, S if kv_lengths_B is None else kv_lengths_B)
        kv_lengths_B = jnp.broadcast_to(kv_lengths_B, len(k_BSHK))
    if segment_ids is not None:
        if not isinstance(segment_ids, tuple | list):
            segment_ids = (segment_ids, segment_ids)
        segment_ids = [
            by.split(jnp.asarray(ids), axis=1)
            for by, ids in zip((by_queries, by_keys), segment_ids, strict=True)
        ]
    if bias is not None:
        bias = jnp.asarray(bias, jnp.float32)
    conditions = {
        'q_offset': q_offset,
        'kv_lengths_B': kv_lengths_B,
        'segment_ids': segment_ids,
        'mask': _pad_scores(mask, by_queries, by_keys),
    }
    scaled_q_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
    y_IBHTK = _attend_in_blocks(
        causal,
        by_queries.split(scaled_q_BTHK, axis=1).swapaxes(2, 3),
        by_keys.split(k_BSHK, axis=1).swapaxes(2, 3),
        by_keys.split(v_BSHK, axis=1).swapaxes(2, 3),
        _pad_scores(bias, by_queries, by_keys),
        conditions,
    )
    return by_queries.join(y_IBHTK.swapaxes(2, 3), axis=1)


class _Blocks:
    """How an axis of some length is cut into blocks of one size, the last one padded."""

    def __init__(self, length, largest):
        self.length = length
        self.count = -(-length // largest)
        self.size = -(-length // self.count)
        self.padding = self.count * self.size - length

    def pad(self, x, axis):
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, self.padding)
        return jnp.pad(x, widths) if self.padding else x

    def split(self, x, axis):
        """The blocks along a new first axis."""
        shape = (*x.shape[:axis], self.count, self.size, *x.shape[axis + 1 :])
        return jnp.moveaxis(self.pad(x, axis).reshape(shape), axis, 0)

    def join(self, blocks, axis):
        x = jnp.moveaxis(blocks, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return lax.slice_in_dim(x, 0, self.length, axis=axis)


def _pad_scores(x, by_queries, by_keys):
    """A mask or bias with four axes, of which the last two are whole blocks, or 1."""
    if x is None:
        return None
    x = jnp.asarray(x)
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    for axis, by in ((2, by_queries), (3, by_keys)):
        x = by.pad(x, axis) if x.shape[axis] > 1 else x
    return x


def _block_of_scores(x_BHTS, T, S, i, j):
    """Block (i, j) of a mask or bias that broadcasts to the scores: (block, where it starts)."""
    start = [0, 0, i * T if x_BHTS.shape[2] > 1 else 0, j * S if x_BHTS.shape[3] > 1 else 0]
    sizes = [*x_BHTS.shape[:2], min(T, x_BHTS.shape[2]), min(S, x_BHTS.shape[3])]
    return lax.dynamic_slice(x_BHTS, start, sizes), start


def _scores(causal, q_BHTK, k_BHSK, bias, conditions, i, j):
    """Scores of query block i and key block j in float32, -inf where they may not attend."""
    T, S = q_BHTK.shape[2], k_BHSK.shape[2]
    scores_BHTS = product('BHTK,BHSK->BHTS', q_BHTK, k_BHSK, k_BHSK.dtype)
    mask, lengths_B, ids = (conditions[name] for name in ('mask', 'kv_lengths_B', 'segment_ids'))
    if mask is not None:
        mask, _ = _block_of_scores(mask, T, S, i, j)
    if bias is not None:
        # A bias of -inf masks by itself.
        scores_BHTS += _block_of_scores(bias, T, S, i, j)[0]
    allowed = may_attend(
        scores_BHTS.shape,
        causal,
        conditions['q_offset'] + i * T - j * S,
        None if lengths_B is None else lengths_B - j * S,
        None if ids is None else (ids[0][i], ids[1][j]),
        mask,
    )
    return scores_BHTS if allowed is None else jnp.where(allowed, scores_BHTS, -jnp.inf)


def _num_key_blocks(causal, q_IBHTK, k_JBHSK, conditions, i):
    """How many key blocks, from the first, the queries of block i may attend to at most."""
    (_, _, _, T, _), (J, _, _, S, _) = q_IBHTK.shape, k_JBHSK.shape
    end = J * S
    if causal:
        end = jnp.minimum(end, conditions['q_offset'] + (i + 1) * T)
    if conditions['kv_lengths_B'] is not None:
        end = jnp.minimum(end, conditions['kv_lengths_B'].max())
    return (end + S - 1) // S


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_in_blocks(causal, q_IBHTK, k_JBHSK, v_JBHSK, bias, conditions):
    """y_IBHTK of I blocks of T queries, already scaled, and J blocks of S keys."""
    return _attend_forward(causal, q_IBHTK, k_JBHSK, v_JBHSK, bias, conditions)[0]


def _attend_forward(causal, q_IBHTK, k_JBHSK, v_JBHSK, bias, conditions):
    def query_block(x):
        i, q_BHTK = x

        def key_block(j, carry):
            max_BHT1, sum_BHT1, y_BHTK = carry
            scores_BHTS = _scores(causal, q_BHTK, k_JBHSK[j], bias, conditions, i, j)
            new_max_BHT1 = jnp.maximum(max_BHT1, scores_BHTS.max(-1, keepdims=True))
            weights_BHTS = jnp.exp(scores_BHTS - new_max_BHT1)
            scale_BHT1 = jnp.exp(max_BHT1 - new_max_BHT1)
            sum_BHT1 = sum_BHT1 * scale_BHT1 + weights_BHTS.sum(-1, keepdims=True)
            y = product('BHTS,BHSK->BHTK', weights_BHTS, v_JBHSK[j], v_JBHSK.dtype)
            return new_max_BHT1, sum_BHT1, y_BHTK * scale_BHT1 + y

        # The smallest number instead of -inf: two of those have no difference.
        zeros_BHTK = jnp.zeros((*q_BHTK.shape[:-1], v_JBHSK.shape[-1]), jnp.float32)
        zeros_BHT1 = zeros_BHTK[..., :1]
        start = (zeros_BHT1 + jnp.finfo(jnp.float32).min, zeros_BHT1, zeros_BHTK)
        end = _num_key_blocks(causal, q_IBHTK, k_JBHSK, conditions, i)
        max_BHT1, sum_BHT1, y_BHTK = lax.fori_loop(0, end, key_block, start)
        sees_nothing = sum_BHT1 == 0
        sum_BHT1 = jnp.where(sees_nothing, 1, sum_BHT1)
        # Where all scores are -inf, any finite logarithm makes their weights 0.
        return y_BHTK / sum_BHT1, jnp.where(sees_nothing, 0, max_BHT1 + jnp.log(sum_BHT1))

    y_IBHTK, logsumexp_IBHT1 = lax.map(query_block, (jnp.arange(len(q_IBHTK)), q_IBHTK))
    residuals = (q_IBHTK, k_JBHSK, v_JBHSK, bias, conditions, y_IBHTK, logsumexp_IBHT1)
    return y_IBHTK, residuals


def _attend_backward(causal, residuals, dy_IBHTK):
    """With weights P = exp(s - logsumexp): dv = Pᵀ dy and ds = P ∘ (dy vᵀ - rowsum(dy ∘ y))."""
    q_IBHTK, k_JBHSK, v_JBHSK, bias, conditions, y_IBHTK, logsumexp_IBHT1 = residuals
    T, S = q_IBHTK.shape[3], k_JBHSK.shape[3]
    k_dtype, v_dtype = k_JBHSK.dtype, v_JBHSK.dtype
    mean_IBHT1 = (dy_IBHTK * y_IBHTK).sum(-1, keepdims=True)

    def query_block(carry, x):
        i, q_BHTK, dy_BHTK, logsumexp_BHT1, mean_BHT1 = x

        def key_block(j, carry):
            dq_BHTK, dk_JBHSK, dv_JBHSK, dbias = carry
            scores_BHTS = _scores(causal, q_BHTK, k_JBHSK[j], bias, conditions, i, j)
            weights_BHTS = jnp.exp(scores_BHTS - logsumexp_BHT1)
            dweights_BHTS = product('BHTK,BHSK->BHTS', dy_BHTK, v_JBHSK[j], v_dtype)
            dscores_BHTS = weights_BHTS * (dweights_BHTS - mean_BHT1)
            dq_BHTK += product('BHTS,BHSK->BHTK', dscores_BHTS, k_JBHSK[j], k_dtype)
            dk_BHSK = product('BHTS,BHTK->BHSK', dscores_BHTS, q_BHTK, k_dtype)
            dv_BHSK = product('BHTS,BHTK->BHSK', weights_BHTS, dy_BHTK, v_dtype)
            if bias is not None:
                part, start = _block_of_scores(dbias, T, S, i, j)
                summed = [axis for axis, size in enumerate(part.shape) if size == 1]
                part += dscores_BHTS.sum(summed, keepdims=True)
                dbias = lax.dynamic_update_slice(dbias, part, start)
            return dq_BHTK, dk_JBHSK.at[j].add(dk_BHSK), dv_JBHSK.at[j].add(dv_BHSK), dbias

        start = (jnp.zeros(q_BHTK.shape, jnp.float32), *carry)
        end = _num_key_blocks(causal, q_IBHTK, k_JBHSK, conditions, i)
        dq_BHTK, *carry = lax.fori_loop(0, end, key_block, start)
        return tuple(carry), dq_BHTK

    start = (
        jnp.zeros(k_JBHSK.shape, jnp.float32),
        jnp.zeros(v_JBHSK.shape, jnp.float32),
        None if bias is None else jnp.zeros_like(bias),
    )
    blocks = (jnp.arange(len(q_IBHTK)), q_IBHTK, dy_IBHTK, logsumexp_IBHT1, mean_IBHT1)
    (dk_JBHSK, dv_JBHSK, dbias), dq_IBHTK = lax.scan(query_block, start, blocks)
    return (
        dq_IBHTK.astype(q_IBHTK.dtype),
        dk_JBHSK.astype(k_dtype),
        dv_JBHSK.astype(v_dtype),
        dbias,
        None,
    )


_attend_in_blocks.defvjp(_attend_forward, _attend_backward)
