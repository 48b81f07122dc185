"""Flash attention by kernels that ship with jax: cuDNN's on NVIDIA GPUs, Pallas's on TPUs.

Both compute `dot_product_attention` a block of scores at a time, as `kernels.blockwise_attention`
does in plain jax, for the shapes and types that they were written for: what keeps them from a call
is an *obstacle*. Only lowered and, the one of Pallas, interpreted in the tests: neither has been
run by us on the device that it is for.

Tensor names end in their dimensions: B batch, T queries, S keys, H heads, K head dimension.

Source: Dao et al. 2022 (FlashAttention).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from minigpt_jax.model.kernels import may_attend


class Demand(NamedTuple):
    """What a call asks of an implementation, as far as that decides whether it can run.

    Attributes:
      dtype: of queries, keys and values.
      d_head: K.
      lengths: (T, S).
      needs_weights: they are to be dropped or returned.
      has_offset: causal queries stand behind a cache.
      has_scores: a bias, a mask or segments, of which a kernel may want T × S numbers.
      num_devices: among which the compiler has to divide the call.
    """

    dtype: str
    d_head: int
    lengths: tuple[int, int]
    needs_weights: bool = False
    has_offset: bool = False
    has_scores: bool = False
    num_devices: int = 1


class Device(NamedTuple):
    """`platform` is cpu, cuda, rocm, tpu, …; `capability` the (major, minor) of an NVIDIA GPU."""

    platform: str
    capability: tuple[int, ...] = ()


def device():
    """The `Device` that programs are compiled for."""
    platform, first = jax.default_backend(), jax.devices()[0]
    if platform != 'gpu':
        return Device(platform)
    if 'cuda' not in first.client.platform_version:
        return Device('rocm')
    return Device('cuda', tuple(map(int, first.compute_capability.split('.'))))


def cudnn_obstacle(demand):
    """Why cuDNN cannot do what is asked, or None. Source: the checks of jax's own wrapper."""
    platform, capability = device()
    if platform != 'cuda':
        return f'runs on NVIDIA GPUs alone, and this is a {platform}'
    if capability < (8, 0):
        version = '.'.join(map(str, capability))
        return f'needs a GPU of compute capability 8.0 or above, and this one has {version}'
    if demand.dtype not in ('bfloat16', 'float16'):
        return f'multiplies in bfloat16 or float16, not in {demand.dtype}'
    widest = 256 if capability >= (9, 0) else 128
    if demand.d_head % 8 or demand.d_head > widest:
        return f'd_head is a multiple of 8 up to {widest} in it, not {demand.d_head}'
    if demand.has_offset:
        return 'has no causal queries behind a cache'
    if demand.has_scores and any(length % 2 for length in demand.lengths):
        return 'wants even lengths where there is a bias, a mask or segments'
    return None


def cudnn_attention(
    q_BTHK, k_BSHK, v_BSHK, *, causal, q_offset, kv_lengths_B, segment_ids, mask, bias
):
    """`dot_product_attention` by `jax.nn`'s door to cuDNN.

    Causality and lengths cost nothing. Segments and a mask become a bias, and a bias is rounded to
    the type of the queries and held for every row and head: T × S numbers each.
    """
    del q_offset  # 0: see `cudnn_obstacle`
    shape_BHTS = _scores_shape(q_BTHK, k_BSHK)
    bias, mask = _finite(bias, mask)
    can_see_nothing = any(x is not None for x in (kv_lengths_B, segment_ids, mask))
    allowed = may_attend(shape_BHTS, causal, 0, kv_lengths_B, segment_ids, mask)
    q_lengths = None
    if kv_lengths_B is not None:
        kv_lengths_B = jnp.maximum(kv_lengths_B, 1).astype(jnp.int32)
        q_lengths = jnp.int32(shape_BHTS[2])
    scores_mask = may_attend(shape_BHTS, False, 0, None, segment_ids, mask)
    if bias is not None:
        bias = bias.astype(q_BTHK.dtype)

    def own(x, shape):
        # With several seeds at once (vmap) jax's rule wants each head's and each seed's own, and
        # jax 0.10 makes no copies: so let it depend on q, in a choice that the compiler drops.
        if x is None:
            return None
        x, of_q_B = jnp.broadcast_to(x, shape), q_BTHK[:, 0, 0, 0] > 0
        return jnp.where(of_q_B.reshape(-1, *(1 for _ in shape[1:])), x, x)

    y_BTHK = jax.nn.dot_product_attention(
        q_BTHK,
        k_BSHK,
        v_BSHK,
        bias=own(bias, shape_BHTS),
        mask=own(scores_mask, shape_BHTS),
        is_causal=causal,
        query_seq_lengths=own(q_lengths, shape_BHTS[:1]),
        key_value_seq_lengths=own(kv_lengths_B, shape_BHTS[:1]),
        implementation='cudnn',
    ).astype(jnp.float32)
    return _zero_where_blind(y_BTHK, allowed) if can_see_nothing else y_BTHK


TPU_BLOCK = 128  # lengths are padded to multiples of it
_MASKED = -1e30  # a score; the kernel adds its own -2.4e38, and the sum must not be -inf
_NOBODY = -(2**31)  # the segment of keys that are padding


def pallas_obstacle(demand):
    """Why the TPU kernel cannot do what is asked, or None."""
    platform, _ = device()
    if platform != 'tpu':
        return f'runs on TPUs alone, and this is a {platform}'
    if demand.d_head > TPU_BLOCK and demand.d_head % TPU_BLOCK:
        return f'd_head is at most {TPU_BLOCK} in it or a multiple of that, not {demand.d_head}'
    if demand.has_offset:
        return 'has no causal queries behind a cache'
    if demand.num_devices > 1:
        return (
            f'is a program of one device, which the compiler does not divide among '
            f'{demand.num_devices}: set mesh.data=1'
        )
    return None


def pallas_attention(
    q_BTHK, k_BSHK, v_BSHK, *, causal, q_offset, kv_lengths_B, segment_ids, mask, bias
):
    """`dot_product_attention` by `jax.experimental.pallas.ops.tpu.flash_attention`.

    Lengths are padded to multiples of 128. Lengths and segments are segments; a mask becomes a
    bias, and a bias is held for every row and head: T × S float32 numbers each.
    """
    # Imported when it is used: it takes a third of a second.
    from jax.experimental.pallas.ops.tpu import flash_attention as tpu

    del q_offset  # 0: see `pallas_obstacle`
    shape_BHTS = B, _, T, S = _scores_shape(q_BTHK, k_BSHK)
    bias, mask = _finite(bias, mask)
    can_see_nothing = any(x is not None for x in (kv_lengths_B, segment_ids, mask))
    allowed = may_attend(shape_BHTS, causal, 0, kv_lengths_B, segment_ids, mask)

    def whole_blocks(x, *axes, fill=0):
        widths = [(0, -x.shape[i] % TPU_BLOCK if i in axes else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=fill)

    if mask is not None:
        bias = jnp.where(mask, 0.0 if bias is None else bias, _MASKED)
    if bias is not None:
        bias = whole_blocks(jnp.broadcast_to(bias, shape_BHTS).astype(jnp.float32), 2, 3)
    ids = None
    if kv_lengths_B is not None or segment_ids is not None or S % TPU_BLOCK:
        if segment_ids is None:
            segment_ids = (jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32))
        elif not isinstance(segment_ids, tuple | list):
            segment_ids = (segment_ids, segment_ids)
        ids_BT, ids_BS = (jnp.asarray(ids, jnp.int32) for ids in segment_ids)
        if kv_lengths_B is not None:
            ids_BS = jnp.where(jnp.arange(S) < kv_lengths_B[:, None], ids_BS, _NOBODY)
        ids = tpu.SegmentIds(whole_blocks(ids_BT, 1), whole_blocks(ids_BS, 1, fill=_NOBODY))
    q_BHTK, k_BHSK, v_BHSK = (
        whole_blocks(x, 1).swapaxes(1, 2)
        for x in (q_BTHK * q_BTHK.shape[-1] ** -0.5, k_BSHK, v_BSHK)
    )
    y_BHTK = tpu.flash_attention(q_BHTK, k_BHSK, v_BHSK, bias, ids, causal=causal)
    y_BTHK = y_BHTK[:, :, :T].swapaxes(1, 2).astype(jnp.float32)
    return _zero_where_blind(y_BTHK, allowed) if can_see_nothing else y_BTHK


def _scores_shape(q_BTHK, k_BSHK):
    B, T, H, _ = q_BTHK.shape
    return B, H, T, k_BSHK.shape[1]


def _finite(bias, mask):
    """(bias, mask), where the mask has what a bias of -inf rules out."""
    if bias is None:
        return None, mask
    finite = bias != -jnp.inf
    return jnp.where(finite, bias, 0), finite if mask is None else mask & finite


def _zero_where_blind(y_BTHK, allowed):
    """Zeros for a query that may attend to nothing, of which kernels make a mean of something."""
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
    sees_BHT1 = allowed.any(-1, keepdims=True)  # reduced as it is made: never held as T × S
    return jnp.where(sees_BHT1.swapaxes(1, 2), y_BTHK, 0)
