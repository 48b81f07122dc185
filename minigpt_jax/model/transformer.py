"""The Transformer's blocks, and the decoder-only model built of them.

Tensor names end in their dimensions: B batch, T length, D model width, F feed-forward hidden,
V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from minigpt_jax.model.attention import (
    ATTENTION_FORMS,
    dense,
    dropout,
    init_cache,
    residual_output,
    split_key,
)
from minigpt_jax.model.positions import POSITIONS

ACTIVATIONS = {'gelu': lambda x: jax.nn.gelu(x, approximate=True), 'relu': jax.nn.relu}


class FeedForward(nnx.Module):
    """activation(x W₁ + b₁) W₂ + b₂ at each position alone, D -> F -> D.

    Source: Vaswani et al. 2017, section 3.3.
    """

    def __init__(self, config, *, rngs):
        self.dropout_rate = config.dropout_rate
        self.activation = ACTIVATIONS[config.activation]
        self.hidden = dense(config, config.d_model, config.d_ff, rngs=rngs)
        self.out = residual_output(config, config.d_ff, rngs=rngs)

    def __call__(self, x_BTD, *, dropout_key=None):
        h_BTF = self.activation(self.hidden(x_BTD))
        return dropout(self.out(h_BTF), self.dropout_rate, dropout_key)


def layer_norm(config, *, rngs):
    """(x - mean) / √(variance + 1e-5) over the width, times a scale, plus a bias (`use_bias`).

    Source: Ba et al. 2016.
    """
    return nnx.LayerNorm(config.d_model, epsilon=1e-5, use_bias=config.use_bias, rngs=rngs)


# Where the norm stands in a residual branch: (norm, branch, x) -> (y, what else branch returns).
# A new placement is a line here; `NEEDS_FINAL_NORM` names those whose stream leaves unnormalised.


def _pre_norm(norm, branch, x):
    """x + branch(norm(x)): the stream is never normalised. Xiong et al. 2020; GPT-2."""
    y, aux = branch(norm(x))
    return x + y, aux


def _post_norm(norm, branch, x):
    """norm(x + branch(x)): as in the original paper. Vaswani et al. 2017, section 3.1."""
    y, aux = branch(x)
    return norm(x + y), aux


NORM_PLACEMENTS = {'pre': _pre_norm, 'post': _post_norm}
NEEDS_FINAL_NORM = ('pre',)


class Block(nnx.Module):
    """One layer: causal self-attention, then a feed-forward, each in a residual branch."""

    def __init__(self, config, *, rngs):
        self.residual = NORM_PLACEMENTS[config.norm_placement]
        self.attention_norm = layer_norm(config, rngs=rngs)
        self.attention = ATTENTION_FORMS[config.attention_form](config, rngs=rngs)
        self.feed_forward_norm = layer_norm(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(self, x_BTD, *, cache=None, position=0, dropout_key=None):
        attention_key, feed_forward_key = split_key(dropout_key, 2)

        def attend(x):
            return self.attention(x, cache=cache, position=position, dropout_key=attention_key)

        def feed(x):
            return self.feed_forward(x, dropout_key=feed_forward_key), None

        x_BTD, cache = self.residual(self.attention_norm, attend, x_BTD)
        x_BTD, _ = self.residual(self.feed_forward_norm, feed, x_BTD)
        return x_BTD, cache


class MiniGPT(nnx.Module):
    """A decoder-only Transformer: tokens_BT -> the scores of each position's next token.

    `config` is the `model` group of a configuration with `d_ff` filled in. Nothing is kept on the
    module between calls: a key-value cache goes in and comes out.

    Source: Radford et al. 2019 (GPT-2), Vaswani et al. 2017.
    """

    def __init__(self, config, vocab_size, *, rngs):
        self.dropout_rate = config.dropout_rate
        self.context_length = config.context_length
        self.cache_shape = (config.num_heads, config.d_model // config.num_heads)
        self.embed = nnx.Embed(
            vocab_size,
            config.d_model,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.positions = POSITIONS[config.positions](config, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        needs_norm = config.norm_placement in NEEDS_FINAL_NORM
        self.final_norm = layer_norm(config, rngs=rngs) if needs_norm else None
        self.unembed = (
            None if config.tie_embeddings else dense(config, config.d_model, vocab_size, rngs=rngs)
        )

    def __call__(self, tokens_BT, *, dropout_key=None):
        """logits_BTV; the logits at t depend on the tokens up to t alone."""
        x_BTD, _ = self.hidden(tokens_BT, dropout_key=dropout_key)
        return self.logits(x_BTD)

    def hidden(self, tokens_BT, *, caches=None, position=0, dropout_key=None):
        """The last layer's output, before `logits`: (x_BTD, caches).

        With `caches` (see `init_caches`) the tokens stand at `position` and also attend to what
        earlier calls left before it; without, caches is None.
        """
        embed_key, *block_keys = split_key(dropout_key, 1 + len(self.blocks))
        x_BTD = self.positions(self.embed(tokens_BT), position)
        x_BTD = dropout(x_BTD, self.dropout_rate, embed_key)
        new_caches = []
        for i, block in enumerate(self.blocks):
            cache = caches and caches[i]
            x_BTD, cache = block(x_BTD, cache=cache, position=position, dropout_key=block_keys[i])
            new_caches.append(cache)
        if self.final_norm is not None:
            x_BTD = self.final_norm(x_BTD)
        return x_BTD, caches and new_caches

    def logits(self, x_BTD):
        """logits_BTV, by the embedding table itself where embeddings are tied.

        Source: Press and Wolf 2017.
        """
        if self.unembed is not None:
            return self.unembed(x_BTD)
        return jnp.einsum('BTD,VD->BTV', x_BTD, self.embed.embedding[...])

    def init_caches(self, batch_size):
        """An empty key-value cache a layer, for `context_length` positions."""
        return [init_cache(batch_size, self.context_length, *self.cache_shape) for _ in self.blocks]


def flops_per_token(config, vocab_size):
    """Floating-point operations of training on one token; a multiply-add is two.

    forward = 2 · weights of all products + 4·L·T·D for scores and weighted sums (each 2·T·D a
    layer, masked or not); forward and backward = 3 · forward. The number of heads is not in it.

    Source: Kaplan et al. 2020, section 2.1; with the context term 4·L·T·D counted in full.
    """
    D, F, L, T = config.d_model, config.d_ff, config.num_layers, config.context_length
    weights = L * (4 * D * D + 2 * D * F) + vocab_size * D
    return 3 * (2 * weights + 4 * L * T * D)
