"""Losses: what a model is trained on and judged by, in nats."""

import jax.numpy as jnp
import optax


def next_token_loss(logits_BTV, targets_BT, mask_BT=None):
    """Cross-entropy of the next token: (sum of -log p(target), number of targets).

    Both in float32, over the positions where `mask_BT` is True (all of them without a mask); their
    quotient is the mean loss in nats a token, its exponential the perplexity.
    """
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(
        logits_BTV.astype(jnp.float32), targets_BT
    )
    if mask_BT is None:
        return losses_BT.sum(), jnp.float32(losses_BT.size)
    return jnp.where(mask_BT, losses_BT, 0).sum(), mask_BT.sum(dtype=jnp.float32)
