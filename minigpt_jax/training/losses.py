"""Losses: what a model is trained on and judged by, in nats."""

import jax
import jax.numpy as jnp
import optax


def next_token_loss(logits_BTV, targets_BT, mask_BT=None, smoothing=0.0):
    """Cross-entropy of the next token: (sum of -log p(target), number of targets).

    Both in float32, over the positions where `mask_BT` is True (all of them without a mask); their
    quotient is the mean loss in nats a token, its exponential the perplexity. With a `smoothing` ε
    the target is 1 - ε of its token and ε of all V alike, and the loss of a position
    -(1 - ε) log p(target) - ε/V Σ_v log p(v): for training alone, since it is no perplexity.

    Source: Szegedy et al. 2016, section 7 (label smoothing); Vaswani et al. 2017, section 5.4.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    if smoothing:
        uniform_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - logits_BTV.mean(axis=-1)
        losses_BT = (1 - smoothing) * losses_BT + smoothing * uniform_BT
    if mask_BT is None:
        return losses_BT.sum(), jnp.float32(losses_BT.size)
    return jnp.where(mask_BT, losses_BT, 0).sum(), mask_BT.sum(dtype=jnp.float32)
