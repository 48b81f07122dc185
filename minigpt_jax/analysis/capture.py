"""What goes on inside a trained model: its attention weights, by name of token.

Tensor names end in their dimensions: B batch, T target, S source, H heads.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx


def translation_attention(
    model, params, tokenizer, source_ids, target_ids, *, layer=None, head=None
):
    """The encoder-decoder attention of a translation, from the ids of both texts with their EOS.

    Returns (weights_TS, names of the source's tokens, names of the target's).

    Row t holds the weights with which target token t was chosen; they sum to 1.
    `layer` and `head` count from 0; None is the mean over all.

    Raises:
      ValueError: for a layer or head that the model does not have.
    """
    ids_S, ids_T = np.asarray(source_ids, np.int32), np.asarray(target_ids, np.int32)
    inputs_T = np.append(tokenizer.bos_id, ids_T[:-1]).astype(np.int32)
    name = 'cross_attention_weights'
    _, captured = nnx.merge(model, params)(
        ids_S[None], jnp.array([len(ids_S)]), inputs_T[None], capture=(name,)
    )
    layers = captured['decoder']
    weights_NHTS = np.stack([np.asarray(layers[i][name][0]) for i in sorted(layers)])
    weights_HTS = _choose(weights_NHTS, 'layer', layer)
    weights_TS = _choose(weights_HTS, 'head', head)
    sources = [tokenizer.source.decode([i]) for i in ids_S]
    targets = [tokenizer.target.decode([i]) for i in ids_T]
    return weights_TS, sources, targets


def _choose(weights, axis, index):
    if index is None:
        return weights.mean(axis=0)
    if not 0 <= index < len(weights):
        raise ValueError(f'{axis} {index}: there are {len(weights)}, from 0 to {len(weights) - 1}')
    return weights[index]
