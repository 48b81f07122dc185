"""Position encodings: what tells a Transformer the order of its tokens.

Each is a module called as `encode(x_BTD, position)` on the token embeddings, where the first token
stands at `position`. A new one is a class and a line in `POSITIONS`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class LearnedPositions(nnx.Module):
    """x_t + P_t with a trained table P of (context_length, D), drawn from N(0, 0.02²).

    Defined up to the context length only. Source: Gehring et al. 2017; GPT-2.
    """

    def __init__(self, config, *, rngs):
        shape = (config.context_length, config.d_model)
        self.table = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))

    def __call__(self, x_BTD, position=0):
        length = x_BTD.shape[1]
        return x_BTD + jax.lax.dynamic_slice_in_dim(self.table[...], position, length)


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
        table_TD = sinusoidal_encoding(position + jnp.arange(T), D)
        return x_BTD * D**0.5 + table_TD


def sinusoidal_encoding(positions_T, D):
    """PE_TD with PE_(t, 2i) = sin(t / 10000^(2i/D)) and PE_(t, 2i+1) = cos(t / 10000^(2i/D)).

    Source: Vaswani et al. 2017, section 3.5.
    """
    rates = 10000.0 ** (-np.arange(0, D, 2) / D)
    angles = positions_T[:, None] * rates
    interleaved = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return interleaved.reshape(len(positions_T), -1)[:, :D]


POSITIONS = {'learned': LearnedPositions, 'sinusoidal': SinusoidalPositions}
