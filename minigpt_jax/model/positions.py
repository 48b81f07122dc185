"""Position encodings: what tells a Transformer the order of its tokens.

Some are added to the token embeddings, others act inside every attention layer, on its queries and
keys or on its scores. A new one is a class and a line in one of the two tables.

Tensor names end in their dimensions: B batch, T query length, S key length, D model width,
H heads, K head dimension.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minigpt_jax.model.kernels import product
from minigpt_jax.model.layers import EMBEDDING_INIT

# Added at the embedding: modules called as `encode(x_BTD, position)`, where the first token stands
# at `position`, or each at its own of `position_BT`.


def positions_in_segments(segment_ids_BT):
    """position_BT: how many tokens of the same segment stand before each, given equal ids in a run.

    So the positions of a packed document are those that it has alone: 0 at its first token. Only
    encodings at the embedding need it: those within attention know distances alone, and attention
    stays within the document.

    Source: Krell et al. 2021 ("Efficient Sequence Packing without Cross-contamination").
    """
    t_T = jnp.arange(segment_ids_BT.shape[1])
    goes_on_BT = segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]
    starts_BT = jnp.where(jnp.pad(goes_on_BT, ((0, 0), (1, 0))), 0, t_T)
    return t_T - jax.lax.cummax(starts_BT, axis=1)


class LearnedPositions(nnx.Module):
    """x_t + P_t with a trained table P of (context_length, D), drawn from N(0, 0.02²).

    Raises:
      ValueError: for a length beyond the context, where the table has no rows.

    Source: Gehring et al. 2017; GPT-2.
    """

    def __init__(self, config, *, rngs):
        shape = (config.context_length, config.d_model)
        self.table = nnx.Param(EMBEDDING_INIT(rngs.params(), shape))

    def __call__(self, x_BTD, position=0):
        length = x_BTD.shape[1]
        if jnp.ndim(position) == 2:
            self.check_length(length)
            return x_BTD + self.table[...][position]
        # A traced position is behind a cache, whose length has been checked.
        self.check_length(length + (position if isinstance(position, int) else 0))
        return x_BTD + jax.lax.dynamic_slice_in_dim(self.table[...], position, length)

    def check_length(self, length):
        """Raises ValueError if `length` tokens are more than the table has rows for."""
        limit = self.table.shape[0]
        if length > limit:
            raise ValueError(
                f'learned positions end at context_length={limit}, and {length} tokens were given; '
                'shorten the text, or train with other positions'
            )


class SinusoidalPositions(nnx.Module):
    """√D · x_t + PE_t, with PE_(t, 2i) = sin(t / 10000^(2i/D)) and cos for the odd dimensions.

    No parameters, defined at any length. The embeddings are multiplied by √D first, as in the
    paper: at their initial size they would drown in sines of amplitude 1.

    Source: Vaswani et al. 2017, sections 3.4 and 3.5.
    """

    def __init__(self, config, *, rngs):
        del rngs

    def __call__(self, x_BTD, position=0):
        T, D = x_BTD.shape[1:]
        positions = position if jnp.ndim(position) == 2 else position + jnp.arange(T)
        return x_BTD * D**0.5 + sinusoidal_encoding(positions, D)


def sinusoidal_encoding(positions, D):
    """PE_(t, 2i) = sin(t / 10000^(2i/D)) and PE_(t, 2i+1) = cos(t / 10000^(2i/D)).

    Shapes: positions of any axes, such as T or BT -> the same axes and D.

    Source: Vaswani et al. 2017, section 3.5.
    """
    rates = 10000.0 ** (-np.arange(0, D, 2) / D)
    angles = positions[..., None] * rates
    interleaved = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return interleaved.reshape(*positions.shape, -1)[..., :D]


# Inside attention: modules called as `encode(q_BTHK, k_BSHK, position, first_head)`, where query t
# stands at position + t and key s at s; they return (q_BTHK, k_BSHK, bias_BHTS or None). A cache
# holds the keys as they were before, so that with and without one the same code runs. A call may
# hold some of a layer's heads only, counted from `first_head`.


class RotaryPositions(nnx.Module):
    """Queries and keys turned by angles that grow with their position.

    Each pair of dimensions (2i, 2i + 1) of the vector at position t is rotated by
    t / 10000^(2i/K), so that q_t · k_s depends on s - t alone. No parameters, defined at any
    length.

    Source: Su et al. 2021 (RoFormer), section 3.2.2, equations 14 to 16 and 34.
    """

    def __init__(self, config, *, rngs):
        del config, rngs

    def __call__(self, q_BTHK, k_BSHK, position=0, first_head=0):
        del first_head
        positions_T = position + jnp.arange(q_BTHK.shape[1])
        positions_S = jnp.arange(k_BSHK.shape[1])
        return rotate(q_BTHK, positions_T), rotate(k_BSHK, positions_S), None


def rotate(x_BTHK, positions_T):
    """x_BTHK with each pair of dimensions (2i, 2i + 1) rotated by t / 10000^(2i/K), in float32."""
    K = x_BTHK.shape[-1]
    rates = 10000.0 ** (-np.arange(0, K, 2) / K)
    angles = (positions_T[:, None] * rates)[:, None]  # one for all heads
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    even, odd = x_BTHK[..., ::2], x_BTHK[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x_BTHK.shape).astype(x_BTHK.dtype)


class AlibiPositions(nnx.Module):
    """score_ts - m_h · |t - s|: each head h looks back as far as its slope m_h lets it.

    The slopes are fixed (see `alibi_slopes`). No parameters, defined at any length.

    Source: Press et al. 2022 (ALiBi), section 3.
    """

    def __init__(self, config, *, rngs):
        del rngs
        self.num_heads = config.num_heads

    def __call__(self, q_BTHK, k_BSHK, position=0, first_head=0):
        T, H, S = q_BTHK.shape[1], q_BTHK.shape[2], k_BSHK.shape[1]
        slopes_H = np.array(alibi_slopes(self.num_heads)[first_head : first_head + H], np.float32)
        distance_TS = jnp.abs(position + jnp.arange(T)[:, None] - jnp.arange(S))
        return q_BTHK, k_BSHK, -slopes_H[:, None, None] * distance_TS


def alibi_slopes(num_heads):
    """2^(-8·1/H), 2^(-8·2/H), …, 2^(-8) for H heads.

    If H is no power of two: the slopes of the next lower power, then every other one of twice that
    many heads. Source: Press et al. 2022, section 3 and its code.
    """
    lower = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (h + 1) / lower) for h in range(lower)]
    between = [2 ** (-8 * (h + 1) / (2 * lower)) for h in range(0, 2 * lower, 2)]
    return slopes + between[: num_heads - lower]


RELATIVE_CLIP = 16  # k, as in the paper; farther keys share one vector


class RelativePositions(nnx.Module):
    """score_ts + q_t · a_clip(s-t, -k, k) / √K: a trained vector for each distance up to k.

    The table a of a layer is (2k + 1, K), k = 16, shared by its heads: so the number of parameters
    depends on the number of heads, through K. Only the keys have such vectors: those of the values
    are left out, since the paper found them to bring nothing (section 4.3, table 4). Defined at any
    length. `scale_scores` off takes the 1/√K away here as well.

    Source: Shaw et al. 2018, section 3.2.
    """

    def __init__(self, config, *, rngs):
        d_head = config.d_model // config.num_heads
        self.scale = d_head**-0.5 if config.scale_scores else 1.0
        self.table = nnx.Param(EMBEDDING_INIT(rngs.params(), (2 * RELATIVE_CLIP + 1, d_head)))

    def __call__(self, q_BTHK, k_BSHK, position=0, first_head=0):
        del first_head
        queries_T, keys_S = position + jnp.arange(q_BTHK.shape[1]), jnp.arange(k_BSHK.shape[1])
        distance_TS = jnp.clip(keys_S - queries_T[:, None], -RELATIVE_CLIP, RELATIVE_CLIP)
        a_TSK = self.table[...][distance_TS + RELATIVE_CLIP]
        bias_BHTS = product('BTHK,TSK->BHTS', q_BTHK, a_TSK, q_BTHK.dtype)
        return q_BTHK, k_BSHK, bias_BHTS * self.scale


EMBEDDING_POSITIONS = {'learned': LearnedPositions, 'sinusoidal': SinusoidalPositions}
ATTENTION_POSITIONS = {
    'rotary': RotaryPositions,
    'alibi': AlibiPositions,
    'relative': RelativePositions,
}
POSITIONS = (*EMBEDDING_POSITIONS, *ATTENTION_POSITIONS, 'none')
