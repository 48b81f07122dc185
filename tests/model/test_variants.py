"""Every norm placement with every position encoding in both attention forms: it learns, it is
causal, and with a cache it computes the same, in float32 and in bfloat16."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from minigpt_jax.model.attention import ATTENTION_FORMS
from minigpt_jax.model.layers import NORM_PLACEMENTS
from minigpt_jax.model.positions import POSITIONS
from minigpt_jax.model.transformer import MiniGPT
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config

B, T, V = 2, 6, 11
VARIANTS = list(itertools.product(NORM_PLACEMENTS, POSITIONS, ATTENTION_FORMS))
PIECES = ((0, 3), (3, 6))  # what a cached pass reads at once
TOLERANCE = {'float32': 1e-4, 'bfloat16': 3e-2}


@functools.cache
def build(norm_placement, positions, attention_form, dtype):
    values = {
        'model.norm_placement': norm_placement,
        'model.positions': positions,
        'model.attention_form': attention_form,
        'model.dtype': dtype,
        # Where positions are defined beyond the context, everything here goes beyond it.
        'model.context_length': T if positions == 'learned' else T // 2,
    }
    config = resolve(tiny_config(**values)).model
    return nnx.split(nnx.eval_shape(lambda: MiniGPT(config, V, rngs=nnx.Rngs(params=0))))


def wild(params):
    """Larger than freshly initialised, so that every part of the model shows in its output."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.3, 0.3, x.shape), x.dtype), params)


class Given(nnx.Module):
    """Stands for the embedding, so that its output can be differentiated by."""

    def __init__(self, embed, x_BTD):
        self.embedding, self.x_BTD = embed.embedding, nnx.data(x_BTD)

    def __call__(self, tokens_BT):
        return self.x_BTD


def everything(model, params, tokens_BT):
    """(losses_T, gradients of each, influence_TBSD of embeddings s on them, logits, cached ones).

    Not compiled as a whole: all variants are made of the same few hundred operations, which are
    compiled once.
    """

    def losses_T(params, x_BTD):
        module = nnx.merge(model, params)
        module.embed = Given(module.embed, x_BTD)
        logits_BTV = module(tokens_BT)
        targets_BT = jnp.roll(tokens_BT, -1, axis=1)
        losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
        return losses_BT.sum(0), logits_BTV

    module = nnx.merge(model, params)
    x_BTD = module.embed(tokens_BT)
    losses, backward, logits_BTV = jax.vjp(losses_T, params, x_BTD, has_aux=True)
    gradients, influence_TBSD = jax.vmap(lambda one_T: backward(one_T))(jnp.eye(T))

    caches, cached = module.init_caches(B, T), []
    for start, end in PIECES:
        position = jnp.int32(start)
        x_BTD, caches = module.hidden(tokens_BT[:, start:end], caches=caches, position=position)
        cached.append(module.logits(x_BTD))
    return losses, gradients, influence_TBSD, logits_BTV, jnp.concatenate(cached, axis=1)


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('variant', VARIANTS, ids='-'.join)
def test_learns_is_causal_and_agrees_with_its_cache(variant, dtype):
    model, params = build(*variant, dtype)
    params = wild(params)
    tokens_BT = np.random.default_rng(1).integers(0, V, (B, T))
    losses_T, gradients, influence_TBSD, logits, cached = everything(model, params, tokens_BT)

    # A step down the gradient: finite, and of use.
    gradient = jax.tree.map(lambda x: x.sum(0), gradients)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient))
    if dtype == 'float32':  # bfloat16 does not resolve so small a step
        rate = 1e-3 / float(optax.tree.norm(gradient))
        stepped = jax.tree.map(lambda x, g: x - rate * g, params, gradient)
        logits_BTV = nnx.merge(model, stepped)(tokens_BT)
        losses_BT = optax.softmax_cross_entropy_with_integer_labels(
            logits_BTV, np.roll(tokens_BT, -1, axis=1)
        )
        assert losses_BT.sum() < losses_T.sum()

    influence_TS = np.abs(influence_TBSD).max((1, 3))
    later = np.triu(np.ones((T, T), bool), 1)
    assert (influence_TS[later] == 0).all()  # to the bit
    assert (influence_TS[~later] > 0).all()

    scale = np.abs(logits).max()
    np.testing.assert_allclose(cached, logits, atol=TOLERANCE[dtype] * scale)
