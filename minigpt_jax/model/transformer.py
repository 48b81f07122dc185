"""The Transformer's blocks, and the decoder-only model built of them.

Tensor names end in their dimensions: B batch, T length, D model width, F feed-forward hidden,
V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from minigpt_jax.model.attention import ATTENTION_FORMS, init_cache
from minigpt_jax.model.kernels import product
from minigpt_jax.model.layers import (
    EMBEDDING_INIT,
    NO_TAP,
    NORM_PLACEMENTS,
    Tap,
    branch_gain,
    dense,
    dropout,
    make_norm,
    residual_output,
    split_key,
)
from minigpt_jax.model.positions import EMBEDDING_POSITIONS, LearnedPositions

ACTIVATIONS = {
    'gelu': lambda x: jax.nn.gelu(x, approximate=True),
    'relu': jax.nn.relu,
    'swiglu': jax.nn.silu,
}
GATED = ('swiglu',)  # activation(x W_g) ⊙ x W₁ in the place of activation(x W₁)

CAPTURES = ('attention_weights', 'head_outputs', 'block_outputs')


class FeedForward(nnx.Module):
    """activation(x W₁ + b₁) W₂ + b₂ at each position alone, D -> F -> D.

    A gated one is (silu(x W_g + b_g) ⊙ (x W₁ + b₁)) W₂ + b₂: with both hidden widths `d_ff` it has
    half as many weights again.

    Source: Vaswani et al. 2017, section 3.3. GELU: Hendrycks and Gimpel 2016. SwiGLU: Shazeer 2020.
    """

    def __init__(self, config, *, rngs):
        self.dropout_rate = config.dropout_rate
        self.activation = ACTIVATIONS[config.activation]
        D, F, gain = config.d_model, config.d_ff, branch_gain(config)
        self.hidden = dense(config, D, F, gain=gain, rngs=rngs)
        gated = config.activation in GATED
        self.gate = dense(config, D, F, gain=gain, rngs=rngs) if gated else None
        self.out = residual_output(config, F, rngs=rngs)

    def __call__(self, x_BTD, *, dropout_key=None):
        h_BTF = self.hidden(x_BTD)
        if self.gate is None:
            h_BTF = self.activation(h_BTF)
        else:
            h_BTF = self.activation(self.gate(x_BTD)) * h_BTF
        return dropout(self.out(h_BTF), self.dropout_rate, dropout_key)


class Block(nnx.Module):
    """One layer: causal self-attention, then a feed-forward, each in a residual branch."""

    def __init__(self, config, *, rngs):
        residual = NORM_PLACEMENTS[config.norm_placement]
        self.attention_residual = residual(config, rngs=rngs)
        self.attention = ATTENTION_FORMS[config.attention_form](config, rngs=rngs)
        self.feed_forward_residual = residual(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(self, x_BTD, *, cache=None, position=0, dropout_key=None, tap=NO_TAP):
        attention_key, feed_forward_key = split_key(dropout_key, 2)

        def attend(x):
            return self.attention(
                x, cache=cache, position=position, dropout_key=attention_key, tap=tap
            )

        def feed(x):
            return self.feed_forward(x, dropout_key=feed_forward_key), None

        x_BTD, cache = self.attention_residual(x_BTD, attend)
        x_BTD, _ = self.feed_forward_residual(x_BTD, feed)
        return tap('block_outputs', x_BTD), cache


class MiniGPT(nnx.Module):
    """A decoder-only Transformer: tokens_BT -> the scores of each position's next token.

    `config` is the `model` group of a configuration with `d_ff` filled in. Nothing is kept on the
    module between calls: a key-value cache goes in and comes out. With `scan_layers`, `blocks` is
    one block whose parameters have a leading layer axis (see `stack_layers`): the same numbers from
    the same keys, as a loop in a program of the size of one layer.

    Source: Radford et al. 2019 (GPT-2), Vaswani et al. 2017.
    """

    def __init__(self, config, vocab_size, *, rngs):
        self.dropout_rate, self.dtype = config.dropout_rate, config.dtype
        self.context_length, self.num_layers = config.context_length, config.num_layers
        self.cache_shape = (config.num_heads, config.d_model // config.num_heads)
        self.scan_layers, self.remat = config.scan_layers, config.remat
        self.embed = nnx.Embed(vocab_size, config.d_model, embedding_init=EMBEDDING_INIT, rngs=rngs)
        positions = EMBEDDING_POSITIONS.get(config.positions)
        self.positions = positions and positions(config, rngs=rngs)

        def make_block(key):
            return Block(config, rngs=nnx.Rngs(params=key))

        keys_N = jax.random.split(rngs.params(), config.num_layers)
        if config.scan_layers:
            self.blocks = nnx.merge(*jax.vmap(lambda key: nnx.split(make_block(key)))(keys_N))
        else:
            self.blocks = nnx.List([make_block(key) for key in keys_N])
        needs_norm = NORM_PLACEMENTS[config.norm_placement].needs_final_norm
        self.final_norm = make_norm(config, config.d_model, rngs=rngs) if needs_norm else None
        self.unembed = (
            None if config.tie_embeddings else dense(config, config.d_model, vocab_size, rngs=rngs)
        )

    def __call__(self, tokens_BT, *, dropout_key=None, capture=()):
        """logits_BTV; the logits at t depend on the tokens up to t alone.

        With `capture`, names from `CAPTURES`: (logits_BTV, {layer: {name: array}}), where
        attention_weights are BHTS (before dropout), head_outputs BTHK, block_outputs BTD.
        """
        x_BTD, _, *captured = self.hidden(tokens_BT, dropout_key=dropout_key, capture=capture)
        return (self.logits(x_BTD), *captured) if capture else self.logits(x_BTD)

    def hidden(self, tokens_BT, *, caches=None, position=0, dropout_key=None, capture=()):
        """The last layer's output, before `logits`: (x_BTD, caches).

        With `caches` (see `init_caches`) the tokens stand at `position` and also attend to what
        earlier calls left before it; without, caches is None. With `capture` a third thing is
        returned: see `__call__`.

        Raises:
          ValueError: for a length that learned positions do not reach, an unknown name to capture.
        """
        if unknown := set(capture) - set(CAPTURES):
            raise ValueError(f'capture: {", ".join(unknown)}: choose from {", ".join(CAPTURES)}')
        embed_key, *block_keys = split_key(dropout_key, 1 + self.num_layers)
        x_BTD = self.embed(tokens_BT)
        if self.positions is not None:
            x_BTD = self.positions(x_BTD, position)
        x_BTD = dropout(x_BTD, self.dropout_rate, embed_key)
        run = self._run_scanned if self.scan_layers else self._run_unrolled
        x_BTD, caches, captured = run(x_BTD, caches, position, block_keys, capture)
        if self.final_norm is not None:
            x_BTD = self.final_norm(x_BTD)
        return (x_BTD, caches, captured) if capture else (x_BTD, caches)

    def _run_unrolled(self, x_BTD, caches, position, keys_N, capture):
        run_block, new_caches, captured = self._block_function(position, capture), [], {}
        for i, block in enumerate(self.blocks):
            layer = (nnx.split(block), caches and caches[i], keys_N[i])
            x_BTD, (cache, captured[i]) = run_block(x_BTD, layer)
            new_caches.append(cache)
        return x_BTD, caches and new_caches, captured

    def _run_scanned(self, x_BTD, caches, position, keys_N, capture):
        run_block = self._block_function(position, capture)
        keys = None if keys_N[0] is None else jnp.stack(keys_N)
        layers = (nnx.split(self.blocks), caches, keys)
        x_BTD, (caches, values) = jax.lax.scan(run_block, x_BTD, layers)
        captured = {i: {name: x[i] for name, x in values.items()} for i in range(self.num_layers)}
        return x_BTD, caches, captured

    def _block_function(self, position, capture):
        """(x_BTD, (block, cache, key)) -> (x_BTD, (cache, captured)), recomputed with `remat`."""

        def run_block(x_BTD, layer):
            block, cache, key = layer
            tap = Tap(capture)
            x_BTD, cache = nnx.merge(*block)(
                x_BTD, cache=cache, position=position, dropout_key=key, tap=tap
            )
            return x_BTD, (cache, tap.values)

        # Within a loop nothing can be shared with the forward pass: no barriers are needed.
        return (
            jax.checkpoint(run_block, prevent_cse=not self.scan_layers) if self.remat else run_block
        )

    def logits(self, x_BTD):
        """logits_BTV, by the embedding table itself where embeddings are tied.

        Source: Press and Wolf 2017.
        """
        if self.unembed is not None:
            return self.unembed(x_BTD)
        return product('BTD,VD->BTV', x_BTD, self.embed.embedding[...], self.dtype)

    def init_caches(self, batch_size, length=None):
        """Empty key-value caches for `length` positions (None: `context_length`), a list of one a
        layer, or with `scan_layers` one with a leading layer axis.

        Raises:
          ValueError: for a length that learned positions do not reach.
        """
        length = self.context_length if length is None else length
        if isinstance(self.positions, LearnedPositions):
            self.positions.check_length(length)
        caches = [
            init_cache(batch_size, length, *self.cache_shape, self.dtype)
            for _ in range(self.num_layers)
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *caches) if self.scan_layers else caches


def stack_layers(params):
    """Parameters of a `MiniGPT`, as the dict of `nnx.to_pure_dict`, for `scan_layers`.

    Shapes: the parameters of blocks 0 … N-1, each (…), become one of (N, …).
    """
    blocks = [params['blocks'][i] for i in sorted(params['blocks'])]
    return params | {'blocks': jax.tree.map(lambda *x: jnp.stack(x), *blocks)}


def unstack_layers(params):
    """The inverse of `stack_layers`."""
    num_layers = jax.tree.leaves(params['blocks'])[0].shape[0]
    blocks = {i: jax.tree.map(lambda x, i=i: x[i], params['blocks']) for i in range(num_layers)}
    return params | {'blocks': blocks}


def flops_per_token(config, vocab_size):
    """Floating-point operations of training on one token; a multiply-add is two.

    forward = 2 · weights of all products + 4·L·T·D for scores and weighted sums (each 2·T·D a
    layer, masked or not); forward and backward = 3 · forward. The number of heads is not in it.
    Relative positions add 2·L·T·D, for a second product of the size of the scores. What `remat`
    computes twice is not in it.

    Source: Kaplan et al. 2020, section 2.1; with the context term 4·L·T·D counted in full.
    """
    D, F, L, T = config.d_model, config.d_ff, config.num_layers, config.context_length
    feed_forward = (3 if config.activation in GATED else 2) * D * F
    weights = L * (4 * D * D + feed_forward) + vocab_size * D
    context = (6 if config.positions == 'relative' else 4) * L * T * D
    return 3 * (2 * weights + context)
