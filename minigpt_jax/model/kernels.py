"""Array kernels whose fast form differs from what autodiff or the compiler would write."""

import functools
import math
from typing import NamedTuple

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
    return _multiply(spec, a, b, dtype)


def _multiply(spec, a, b, dtype, precision=None):
    return _product((spec, dtype, precision, a.dtype, b.dtype), a, b)


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
    da = _multiply(f'{result},{right}->{left}', dy, b, dtype, precision)
    if spec == 'MI,IO->MO' and jax.default_backend() == 'cpu':
        db = _weight_gradient(a, b, dy, dtype, precision)
    else:
        db = _multiply(f'{left},{result}->{right}', a, dy, dtype, precision)
    return da.astype(a_dtype), db.astype(b_dtype)


_product.defvjp(_product_forward, _product_backward)


def _weight_gradient(x_MI, w_IO, dy_MO, dtype, precision):
    """dw = Σ_M x ⊗ dy, in the forms that XLA's CPU compiler (jax 0.10 to 0.12) has fast.

    In float32 the longer axis of the result stands last: the other way round takes half as long
    again. bfloat16 products have to contract the last axis of the left operand: x is turned before.
    Left to itself, the compiler folds both transposes back into the product.
    """
    if dtype != 'float32':
        return _multiply('IM,MO->IO', _turned(x_MI, w_IO[0, 0]), dy_MO, dtype, precision)
    if w_IO.shape[0] > w_IO.shape[1]:
        dw_OI = _multiply('MO,MI->OI', dy_MO, x_MI, dtype, precision)
        return lax.optimization_barrier(dw_OI).T
    return _multiply('MI,MO->IO', x_MI, dy_MO, dtype, precision)


def _turned(x_MI, witness):
    """x_IM as an array of its own: the result of a branch, which the compiler leaves alone.

    It is taken unless the witness, any number that is on every device, is NaN. The barrier is for
    `vmap`, which makes a choice of both branches.
    """

    def nothing(x_MI):
        return jnp.full(x_MI.shape[::-1], jnp.nan, x_MI.dtype)

    x_IM = lax.cond(witness == witness, jnp.transpose, nothing, x_MI)
    return lax.optimization_barrier(x_IM)


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
    y_MO = _multiply('MI,IO->MO', x_MI, w_IO, dtype, precision)
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


# Queries of a block are a quarter of all, but so many: few of them skip more keys, many make
# better products.
BLOCKS = (64, 128)


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
    block=None,
):
    """`dot_product_attention` without its B × H × T × S scores: a block of them exists at a time.

    A block is some queries of a head, and all the keys that causality leaves them. Its scores are
    made, used and forgotten. The backward pass is given y and the logarithm of the sum that each
    row of weights was divided by, and makes the scores again. So memory grows with T + S, and by
    one block. A query that may attend to nothing gives zeros.

    Heads have turns, and on a CPU the texts of a batch too: what one head needs stays in the cache,
    and its products are of plain matrices, which take half as long as batched ones.

    The arguments and the result are those of `dot_product_attention`; `block` is the largest number
    of queries in a block (None: see `BLOCKS`).

    Source: Rabe and Staats 2021; Dao et al. 2022 (FlashAttention), algorithm 4.
    """
    B, T = q_BTHK.shape[:2]
    # Texts at once: a CPU's devices share a batch in rows that follow each other, so one of each.
    at_once = math.gcd(B, jax.device_count()) if jax.default_backend() == 'cpu' else B

    def split(x):
        """x with the texts at once as a new first axis, and that axis; None where all share it."""
        if x is None or jnp.ndim(x) == 0 or len(x) < B:
            return x, None
        return x.reshape(at_once, -1, *x.shape[1:]), 0

    ids = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    conditions = {
        'q_offset': q_offset,
        'lengths_B': kv_lengths_B,
        'ids_BT': ids[0],
        'ids_BS': ids[1],
        'mask_BHTS': _with_four_axes(mask),
    }
    conditions = {name: split(x) for name, x in conditions.items()}
    condition_axes = {name: axis for name, (_, axis) in conditions.items()}
    conditions = {name: x for name, (x, _) in conditions.items()}
    operands = (q_BTHK, k_BSHK, v_BSHK, _with_four_axes(bias, jnp.float32))
    arrays, axes = zip(*map(split, operands), strict=True)
    # Only an offset that is not traced says which keys no query of a stage can see.
    offset = q_offset if causal and isinstance(q_offset, int) else None
    block = block or min(max(BLOCKS[0], T // 4), BLOCKS[1])
    stages = make_stages(T, k_BSHK.shape[1], block, offset)
    attend = functools.partial(_attend_in_blocks, (causal, stages))
    y = jax.vmap(attend, (*axes, condition_axes))(*arrays, conditions)
    return y.reshape(*q_BTHK.shape[:3], v_BSHK.shape[-1])


class Stage(NamedTuple):
    """`count` blocks of `size` queries, from `start` on, which all read the first `seen` keys.

    They are a loop: a program has a part for each stage, not for each block.
    """

    start: int
    size: int
    count: int
    seen: int


def make_stages(T, S, block, offset):
    """One stage, or with causal queries that stand at `offset` up to eight, which skip 7/16."""
    size = min(T, block)
    num_blocks = -(-T // size)
    per_stage = num_blocks if offset is None else -(-num_blocks // 8)
    stages = []
    for first in range(0, num_blocks, per_stage):
        count = min(per_stage, num_blocks - first)
        seen = S if offset is None else min(S, offset + (first + count) * size)
        stages.append(Stage(first * size, size, count, seen))
    return tuple(stages)


def _with_four_axes(x, dtype=None):
    """A mask or bias as BHTS, with axes of length 1 for those that it lacks."""
    if x is None:
        return None
    x = jnp.asarray(x, dtype)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _pick(x, *index):
    """x[index], where an axis of length 1 stands for all of its indices; None of None."""
    for i in index if x is not None else ():
        x = lax.dynamic_index_in_dim(x, i if x.shape[0] > 1 else 0, keepdims=False)
    return x


def _head(x_BTHK, b, h, start, size):
    """Rows of a head, as (size, K); from the array itself: a part of a part is copied twice."""
    x_TK = lax.dynamic_slice(x_BTHK, (b, start, h, 0), (1, size, 1, x_BTHK.shape[3]))
    return x_TK.reshape(size, -1)


def _with_head(x_BTHK, stages_TK, b, h):
    """With the rows of all stages in the place of a head, without what fills up the last block."""
    x_TK = jnp.concatenate(stages_TK)[: x_BTHK.shape[1]].astype(x_BTHK.dtype)
    return lax.dynamic_update_slice(x_BTHK, x_TK[None, :, None], (b, 0, h, 0))


def _rows_and_keys(stage, q_BTHK, k_BSHK, v_BSHK, bias_BHTS, conditions, b, h):
    """What belongs to the queries of a stage of a head, and what belongs to the keys they see."""
    size = min(stage.size * stage.count, q_BTHK.shape[1] - stage.start)

    def of_queries(x):
        return x if x is None or len(x) == 1 else x[stage.start : stage.start + size]

    rows = {
        'q_TK': _head(q_BTHK, b, h, stage.start, size) * q_BTHK.shape[-1] ** -0.5,
        'bias_TS': of_queries(_pick(bias_BHTS, b, h)),
        'mask_TS': of_queries(_pick(conditions['mask_BHTS'], b, h)),
        'ids_T': of_queries(_pick(conditions['ids_BT'], b)),
    }
    ids_S = _pick(conditions['ids_BS'], b)
    keys = {
        'k_SK': _head(k_BSHK, b, h, 0, stage.seen),
        'v_SK': _head(v_BSHK, b, h, 0, stage.seen),
        'ids_S': None if ids_S is None else ids_S[: stage.seen],
        'length': _pick(conditions['lengths_B'], b),
    }
    return rows, keys


def _scan_blocks(function, carry, stage, rows, q_offset):
    """`function(carry, rows)` for each block of a stage: (carry, outputs one after another).

    A block has the position of its first query among its rows.
    """

    def blocks(name, x):
        if x is None:
            return None
        size = min(stage.size, len(x))  # 1 is the same for all queries
        # What fills up the last block is no query: its weights are made to be 0.
        fill = jnp.inf if name == 'logsumexp_T1' else 0
        widths = ((0, -len(x) % size), *((0, 0),) * (x.ndim - 1))
        x = jnp.pad(x, widths, constant_values=fill)
        x = x.reshape(-1, size, *x.shape[1:])
        return jnp.broadcast_to(x, (stage.count, *x.shape[1:]))

    first = q_offset + stage.start + stage.size * jnp.arange(stage.count)
    rows = {name: blocks(name, x) for name, x in rows.items()} | {'position': first}
    carry, outputs = lax.scan(function, carry, rows, unroll=stage.count == 1)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def _scores(causal, rows, keys):
    """scores_TS of a block in float32, -inf where it may not attend."""
    scores_TS = product('TK,SK->TS', rows['q_TK'], keys['k_SK'], keys['k_SK'].dtype)
    T, S = scores_TS.shape
    bias_TS, mask_TS = (None if rows[x] is None else rows[x][:, :S] for x in ('bias_TS', 'mask_TS'))
    if bias_TS is not None:
        scores_TS += bias_TS  # where it is -inf it masks by itself
    ids = None if rows['ids_T'] is None else (rows['ids_T'][None], keys['ids_S'][None])
    length_1 = None if keys['length'] is None else keys['length'][None]
    allowed = may_attend((1, 1, T, S), causal, rows['position'], length_1, ids, mask_TS)
    if allowed is None:
        return scores_TS
    return jnp.where(allowed.reshape(allowed.shape[-2:]), scores_TS, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_in_blocks(static, q_BTHK, k_BSHK, v_BSHK, bias_BHTS, conditions):
    """y_BTHK, one head after the other; `static` is (causal, stages)."""
    return _attend_forward(static, q_BTHK, k_BSHK, v_BSHK, bias_BHTS, conditions)[0]


def _attend_forward(static, q_BTHK, k_BSHK, v_BSHK, bias_BHTS, conditions):
    causal, stages = static
    B, T, H, _ = q_BTHK.shape

    def block(keys, _, rows):
        scores_TS = _scores(causal, rows, keys)
        # The smallest number instead of -inf: two of those have no difference.
        max_T1 = scores_TS.max(-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
        weights_TS = jnp.exp(scores_TS - max_T1)
        sum_T1 = weights_TS.sum(-1, keepdims=True)
        sum_T1 = jnp.where(sum_T1 == 0, 1, sum_T1)  # of a query that sees nothing
        y_TK = product('TS,SK->TK', weights_TS, keys['v_SK'], keys['v_SK'].dtype)
        return None, (y_TK / sum_T1, max_T1 + jnp.log(sum_T1))

    def head(turn, results):
        b, h = turn // H, turn % H
        found = []
        for stage in stages:
            rows, keys = _rows_and_keys(stage, q_BTHK, k_BSHK, v_BSHK, bias_BHTS, conditions, b, h)
            of_keys = functools.partial(block, keys)
            found.append(_scan_blocks(of_keys, None, stage, rows, conditions['q_offset'])[1])
        found = zip(*found, strict=True)
        return tuple(_with_head(x, parts, b, h) for x, parts in zip(results, found, strict=True))

    results = (jnp.zeros((B, T, H, v_BSHK.shape[-1])), jnp.zeros((B, T, H, 1)))
    y_BTHK, logsumexp_BTH1 = lax.fori_loop(0, B * H, head, results)
    return y_BTHK, (q_BTHK, k_BSHK, v_BSHK, bias_BHTS, conditions, y_BTHK, logsumexp_BTH1)


def _attend_backward(static, residuals, dy_BTHK):
    """With weights P = exp(s - logsumexp): dv = Pᵀ dy and ds = P ∘ (dy vᵀ - rowsum(dy ∘ y))."""
    q_BTHK, k_BSHK, v_BSHK, bias_BHTS, conditions, y_BTHK, logsumexp_BTH1 = residuals
    causal, stages = static
    B, _, H, K = q_BTHK.shape
    k_dtype, v_dtype = k_BSHK.dtype, v_BSHK.dtype

    def block(keys, carry, rows):
        dk_SK, dv_SK = carry
        weights_TS = jnp.exp(_scores(causal, rows, keys) - rows['logsumexp_T1'])
        dweights_TS = product('TK,SK->TS', rows['dy_TK'], keys['v_SK'], v_dtype)
        dscores_TS = weights_TS * (dweights_TS - rows['mean_T1'])
        dq_TK = product('TS,SK->TK', dscores_TS, keys['k_SK'], k_dtype)
        dk_SK += product('ST,TK->SK', dscores_TS.T, rows['q_TK'], k_dtype)
        dv_SK += product('ST,TK->SK', weights_TS.T, rows['dy_TK'], v_dtype)
        summed = [] if bias_BHTS is None else [i for i in (0, 1) if bias_BHTS.shape[2 + i] == 1]
        dbias_TS = None if bias_BHTS is None else dscores_TS.sum(summed, keepdims=True)
        return (dk_SK, dv_SK), (dq_TK, dbias_TS)

    def head(turn, results):
        b, h = turn // H, turn % H
        dq, dk, dv, dbias = [], [], [], []
        for stage in stages:
            rows, keys = _rows_and_keys(stage, q_BTHK, k_BSHK, v_BSHK, bias_BHTS, conditions, b, h)
            dy_TK, y_TK, logsumexp_T1 = (
                _head(x, b, h, stage.start, len(rows['q_TK']))
                for x in (dy_BTHK, y_BTHK, logsumexp_BTH1)
            )
            # A product: the sum along so short an axis takes ten times as long.
            mean_T1 = (dy_TK * y_TK) @ jnp.ones((dy_TK.shape[1], 1))
            rows |= {'dy_TK': dy_TK, 'logsumexp_T1': logsumexp_T1, 'mean_T1': mean_T1}
            zeros = tuple(jnp.zeros(keys[x].shape) for x in ('k_SK', 'v_SK'))
            (dk_SK, dv_SK), (dq_TK, dbias_TS) = _scan_blocks(
                functools.partial(block, keys), zeros, stage, rows, conditions['q_offset']
            )
            dq.append(dq_TK * K**-0.5)
            dk.append(_pad_keys(dk_SK, 0))
            dv.append(_pad_keys(dv_SK, 0))
            if dbias_TS is not None:
                dbias.append(_pad_keys(dbias_TS, 1) if bias_BHTS.shape[3] > 1 else dbias_TS)
        *results, dbias_BHTS = results
        results = [
            _with_head(x, part, b, h)
            for x, part in zip(results, (dq, [sum(dk)], [sum(dv)]), strict=True)
        ]
        if dbias_BHTS is not None:
            dbias_BHTS = _add_to_head(dbias_BHTS, jnp.concatenate(dbias), b, h)
        return *results, dbias_BHTS

    def _pad_keys(x, axis):
        widths = [(0, 0), (0, 0)]
        widths[axis] = (0, k_BSHK.shape[1] - x.shape[axis])
        return jnp.pad(x, widths)

    operands = (q_BTHK, k_BSHK, v_BSHK, bias_BHTS)
    # In float32 until all are there: a part of a bfloat16 array is written by converting it whole.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), operands)
    gradients = lax.fori_loop(0, B * H, head, zeros)
    return *jax.tree.map(lambda dx, x: dx.astype(x.dtype), gradients, operands), None


def _add_to_head(x_BHTS, rows_TS, b, h):
    """Adds to a head of a bias, or to what stands for several heads or queries."""
    B, H, T, _ = x_BHTS.shape
    rows_TS = rows_TS[:T] if T > 1 else rows_TS.sum(0, keepdims=True)
    where = (b if B > 1 else 0, h if H > 1 else 0, 0, 0)
    old = lax.dynamic_slice(x_BHTS, where, (1, 1, *rows_TS.shape))
    return lax.dynamic_update_slice(x_BHTS, old + rows_TS, where)


_attend_in_blocks.defvjp(_attend_forward, _attend_backward)
