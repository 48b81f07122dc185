"""The Transformer's blocks, and the four families of models built of them.

Tensor names end in their dimensions: B batch, T length, S length of the source, D model width,
F feed-forward hidden, V vocabulary.
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
    for_stack,
    make_norm,
    residual_output,
    split_key,
)
from minigpt_jax.model.positions import EMBEDDING_POSITIONS, LearnedPositions, positions_in_segments

ACTIVATIONS = {
    'gelu': lambda x: jax.nn.gelu(x, approximate=True),
    'relu': jax.nn.relu,
    'swiglu': jax.nn.silu,
}
GATED = ('swiglu',)  # activation(x W_g) ⊙ x W₁ in the place of activation(x W₁)

CAPTURES = ('attention_weights', 'head_outputs', 'block_outputs')
CROSS_CAPTURES = ('cross_attention_weights', 'cross_head_outputs')  # of encoder-decoder attention


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
    """One layer: self-attention, encoder-decoder attention if `cross`, then a feed-forward.

    Each is in a residual branch. `causal` is about the self-attention.

    Shapes: x_BTD -> (x_BTD, cache). `lengths_B`, where given, are the valid tokens of x's rows, and
    `segment_ids_BT` the packed documents that they are of, within which self-attention stays;
    `memory_BSD`, with its own `memory_lengths_B`, is what `cross` attends to. A `cache` is
    {'self': see `init_cache`}, and with `cross` also {'cross': see `MultiHeadAttention.remember`},
    which takes the place of the memory.

    Source: Vaswani et al. 2017, section 3.1.
    """

    def __init__(self, config, *, causal=True, cross=False, rngs):
        residual = NORM_PLACEMENTS[config.norm_placement]
        attention = ATTENTION_FORMS[config.attention_form]
        self.attention_residual = residual(config, rngs=rngs)
        self.attention = attention(config, causal=causal, rngs=rngs)
        self.cross_residual = residual(config, rngs=rngs) if cross else None
        self.cross_attention = attention(config, cross=True, rngs=rngs) if cross else None
        self.feed_forward_residual = residual(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(
        self,
        x_BTD,
        *,
        lengths_B=None,
        segment_ids_BT=None,
        memory_BSD=None,
        memory_lengths_B=None,
        cache=None,
        position=0,
        dropout_key=None,
        tap=NO_TAP,
    ):
        crosses = self.cross_attention is not None
        attention_key, feed_forward_key, *cross_key = split_key(dropout_key, 2 + crosses)

        def attend(x):
            return self.attention(
                x,
                kv_lengths_B=lengths_B,
                segment_ids_BT=segment_ids_BT,
                cache=cache and cache['self'],
                position=position,
                dropout_key=attention_key,
                tap=tap,
            )

        def attend_to_memory(x):
            cross_tap = Tap(name[len('cross_') :] for name in tap.names if name in CROSS_CAPTURES)
            y_BTD, kept = self.cross_attention(
                x,
                memory_BSD=memory_BSD,
                kv_lengths_B=memory_lengths_B,
                cache=cache and cache['cross'],
                dropout_key=cross_key[0],
                tap=cross_tap,
            )
            for name, value in cross_tap.values.items():
                tap(f'cross_{name}', value)
            return y_BTD, kept

        def feed(x):
            return self.feed_forward(x, dropout_key=feed_forward_key), None

        x_BTD, new = self.attention_residual(x_BTD, attend)
        if crosses:
            x_BTD, _ = self.cross_residual(x_BTD, attend_to_memory)
        x_BTD, _ = self.feed_forward_residual(x_BTD, feed)
        return tap('block_outputs', x_BTD), cache and cache | {'self': new}


class Stack(nnx.Module):
    """Token embeddings, positions, blocks and a last norm: what every model here is made of.

    `config` is the `model` group of a configuration with `d_ff` filled in. Nothing is kept on the
    module between calls: a key-value cache goes in and comes out. With `scan_layers`, `blocks` is
    one block whose parameters have a leading layer axis (see `stack_layers`): the same numbers from
    the same keys, as a loop in a program of the size of one layer. `embed` may be another stack's.
    """

    captures = CAPTURES

    def __init__(
        self, config, vocab_size, *, num_layers, causal=True, cross=False, embed=None, rngs
    ):
        self.dropout_rate, self.dtype = config.dropout_rate, config.dtype
        self.context_length, self.num_layers = config.context_length, num_layers
        self.cache_shape = (config.num_heads, config.d_model // config.num_heads)
        self.scan_layers, self.remat = config.scan_layers, config.remat
        if embed is None:
            embed = nnx.Embed(vocab_size, config.d_model, embedding_init=EMBEDDING_INIT, rngs=rngs)
        self.embed = embed
        positions = EMBEDDING_POSITIONS.get(config.positions)
        self.positions = positions and positions(config, rngs=rngs)

        def make_block(key):
            return Block(config, causal=causal, cross=cross, rngs=nnx.Rngs(params=key))

        keys_N = jax.random.split(rngs.params(), num_layers)
        if config.scan_layers:
            self.blocks = nnx.merge(*jax.vmap(lambda key: nnx.split(make_block(key)))(keys_N))
        else:
            self.blocks = nnx.List([make_block(key) for key in keys_N])
        needs_norm = NORM_PLACEMENTS[config.norm_placement].needs_final_norm
        self.final_norm = make_norm(config, config.d_model, rngs=rngs) if needs_norm else None

    def hidden(
        self,
        tokens_BT,
        *,
        segment_ids_BT=None,
        caches=None,
        position=0,
        dropout_key=None,
        capture=(),
        **conditions,
    ):
        """The last layer's output: (x_BTD, caches).

        With `caches` (see `Decoder.init_caches`) the tokens stand at `position` and also attend to
        what earlier calls left before it; without, caches is None. With `segment_ids_BT` each run
        of tokens of equal ids is a text of its own, with the outputs that it has alone. With
        `capture` a third thing is returned, {layer: {name: array}}: attention_weights are BHTS
        (before dropout), head_outputs BTHK, block_outputs BTD. `conditions` are those of `Block`:
        lengths, memory.

        Raises:
          ValueError: for a length that learned positions do not reach, an unknown name to capture.
        """
        if unknown := set(capture) - set(self.captures):
            choices = ', '.join(self.captures)
            raise ValueError(f'capture: {", ".join(unknown)}: choose from {choices}')
        embed_key, *block_keys = split_key(dropout_key, 1 + self.num_layers)
        x_BTD = self.embed(tokens_BT)
        if segment_ids_BT is not None:
            conditions['segment_ids_BT'] = segment_ids_BT
        if self.positions is not None:
            packed = segment_ids_BT is not None
            own = positions_in_segments(segment_ids_BT) if packed else position
            x_BTD = self.positions(x_BTD, own)
        x_BTD = dropout(x_BTD, self.dropout_rate, embed_key)
        run_block = self._block_function(position, capture, conditions)
        run = self._run_scanned if self.scan_layers else self._run_unrolled
        x_BTD, caches, captured = run(run_block, x_BTD, caches, block_keys)
        if self.final_norm is not None:
            x_BTD = self.final_norm(x_BTD)
        return (x_BTD, caches, captured) if capture else (x_BTD, caches)

    def _run_unrolled(self, run_block, x_BTD, caches, keys_N):
        new_caches, captured = [], {}
        for i, block in enumerate(self.blocks):
            layer = (nnx.split(block), caches and caches[i], keys_N[i])
            x_BTD, (cache, captured[i]) = run_block(x_BTD, layer)
            new_caches.append(cache)
        return x_BTD, caches and new_caches, captured

    def _run_scanned(self, run_block, x_BTD, caches, keys_N):
        keys = None if keys_N[0] is None else jnp.stack(keys_N)
        layers = (nnx.split(self.blocks), caches, keys)
        x_BTD, (caches, values) = jax.lax.scan(run_block, x_BTD, layers)
        captured = {i: {name: x[i] for name, x in values.items()} for i in range(self.num_layers)}
        return x_BTD, caches, captured

    def _block_function(self, position, capture, conditions):
        """(x_BTD, (block, cache, key)) -> (x_BTD, (cache, captured)), recomputed with `remat`."""

        def run_block(x_BTD, layer):
            block, cache, key = layer
            tap = Tap(capture)
            x_BTD, cache = nnx.merge(*block)(
                x_BTD, cache=cache, position=position, dropout_key=key, tap=tap, **conditions
            )
            return x_BTD, (cache, tap.values)

        # Within a loop nothing can be shared with the forward pass: no barriers are needed.
        return (
            jax.checkpoint(run_block, prevent_cse=not self.scan_layers) if self.remat else run_block
        )


class Encoder(Stack):
    """A stack in which every token sees every other of its text: tokens_BS -> x_BSD.

    Source: Vaswani et al. 2017, section 3.1.
    """

    def __init__(self, config, vocab_size, *, rngs):
        layers = config.encoder_layers
        super().__init__(config, vocab_size, num_layers=layers, causal=False, rngs=rngs)

    def __call__(self, tokens_BS, lengths_B=None, *, dropout_key=None, capture=()):
        """memory_BSD, with `capture` (memory_BSD, {layer: {name: array}}).

        Tokens behind the first lengths_B[b] of row b are padding: no other sees them, and what the
        memory holds at their place means nothing.
        """
        memory_BSD, _, *captured = self.hidden(
            tokens_BS, lengths_B=lengths_B, dropout_key=dropout_key, capture=capture
        )
        return (memory_BSD, *captured) if capture else memory_BSD


class Vocabulary(Stack):
    """A stack whose outputs are scores of the tokens of its vocabulary.

    Source: Press and Wolf 2017 (tied embeddings).
    """

    def __init__(self, config, vocab_size, *, rngs, **stack):
        super().__init__(config, vocab_size, num_layers=config.num_layers, rngs=rngs, **stack)
        self.unembed = (
            None if config.tie_embeddings else dense(config, config.d_model, vocab_size, rngs=rngs)
        )

    def __call__(self, tokens_BT, *, dropout_key=None, capture=(), **conditions):
        """logits_BTV, with `capture` (logits_BTV, {layer: {name: array}}), see `hidden`.

        `conditions` are segment_ids_BT, see `hidden`; memory_BSD, memory_lengths_B, see `Block`.
        """
        x_BTD, _, *captured = self.hidden(
            tokens_BT, dropout_key=dropout_key, capture=capture, **conditions
        )
        return (self.logits(x_BTD), *captured) if capture else self.logits(x_BTD)

    def logits(self, x_BTD):
        """logits_BTV, by the embedding table itself where embeddings are tied."""
        if self.unembed is not None:
            return self.unembed(x_BTD)
        return product('BTD,VD->BTV', x_BTD, self.embed.embedding[...], self.dtype)


class Decoder(Vocabulary):
    """A causal stack, each token's output the scores of the next; `cross` attends to a memory too.

    The logits at t depend on the tokens up to t alone, and on the memory.

    Source: Vaswani et al. 2017, section 3.1.
    """

    def __init__(self, config, vocab_size, *, cross=False, embed=None, rngs):
        super().__init__(config, vocab_size, cross=cross, embed=embed, rngs=rngs)
        if cross:
            self.captures = CAPTURES + CROSS_CAPTURES

    def init_caches(self, batch_size, length=None, *, memory_BSD=None):
        """Empty key-value caches for `length` positions (None: `context_length`), a list of one a
        layer, or with `scan_layers` one with a leading layer axis. With `cross` each layer's keys
        and values of the memory are in them, computed here once.

        Raises:
          ValueError: for a length that learned positions do not reach.
        """
        length = self.context_length if length is None else length
        if isinstance(self.positions, LearnedPositions):
            self.positions.check_length(length)
        own = {'self': init_cache(batch_size, length, *self.cache_shape, self.dtype)}

        def of_block(block):
            if memory_BSD is None:
                return own
            return own | {'cross': block.cross_attention.remember(memory_BSD)}

        if not self.scan_layers:
            return [of_block(block) for block in self.blocks]
        graph, params = nnx.split(self.blocks)
        return jax.lax.map(lambda layer: of_block(nnx.merge(graph, layer)), params)


class MiniGPT(Decoder):
    """A decoder-only Transformer: tokens_BT -> the scores of each position's next token.

    Source: Radford et al. 2019 (GPT-2), Vaswani et al. 2017.
    """

    def __init__(self, config, vocab_size, *, rngs):
        super().__init__(config, vocab_size, rngs=rngs)


class EncoderDecoder(nnx.Module):
    """The Transformer that translates: an encoder of the source, a decoder that attends to it.

    `vocab_sizes` are of source and target. With `joint_embeddings` both have one table, whose
    vocabulary is that of both; with `tie_embeddings` the target's table is the output layer too.
    All layers of the decoder attend to the same memory, the encoder's output, each with projections
    of its own.

    Source: Vaswani et al. 2017, sections 3.1 and 3.4.
    """

    def __init__(self, config, vocab_sizes, *, rngs):
        source_size, target_size = vocab_sizes
        self.encoder = Encoder(for_stack(config, 'encoder'), source_size, rngs=rngs)
        self.decoder = Decoder(
            for_stack(config, 'decoder'),
            target_size,
            cross=True,
            embed=self.encoder.embed if config.joint_embeddings else None,
            rngs=rngs,
        )

    def __call__(self, source_BS, source_lengths_B, tokens_BT, *, dropout_key=None, capture=()):
        """logits_BTV of each target position's next token, given the source: teacher forcing.

        The first source_lengths_B[b] tokens of row b are the source, the rest is padding, whose
        content changes nothing. With `capture`: (logits_BTV, {'encoder': …, 'decoder': …}), each
        {layer: {name: array}}, see `Stack.hidden`; cross_… are of the decoder alone.

        Raises:
          ValueError: for a length that learned positions do not reach, an unknown name to capture.
        """
        encoder_key, decoder_key = split_key(dropout_key, 2)
        encoder_capture = tuple(name for name in capture if name not in CROSS_CAPTURES)
        memory_BSD, *captured = _as_tuple(
            self.encoder(
                source_BS, source_lengths_B, dropout_key=encoder_key, capture=encoder_capture
            )
        )
        logits_BTV, *own = _as_tuple(
            self.decoder(
                tokens_BT,
                memory_BSD=memory_BSD,
                memory_lengths_B=source_lengths_B,
                dropout_key=decoder_key,
                capture=capture,
            )
        )
        if not capture:
            return logits_BTV
        return logits_BTV, {'encoder': captured[0] if captured else {}, 'decoder': own[0]}


def _as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


class MaskedLM(Vocabulary):
    """An encoder alone: tokens_BT, some of them hidden, -> the scores of each position's own token.

    Source: Devlin et al. 2019 (BERT), section 3.1.
    """

    def __init__(self, config, vocab_size, *, rngs):
        super().__init__(config, vocab_size, causal=False, rngs=rngs)


class ImageClassifier(Stack):
    """Patches of an image as the tokens of an encoder: patches_BTP -> the scores of its classes.

    An embedding is a dense layer, P values a patch; the classes are read off the mean of the last
    layer's outputs. `sizes` is (P, number of classes).

    Source: Dosovitskiy et al. 2021 (ViT), section 3.1; the mean in the place of a class token:
    Beyer et al. 2022, section 2.
    """

    def __init__(self, config, sizes, *, rngs):
        patch_size, num_classes = sizes
        embed = dense(config, patch_size, config.d_model, rngs=rngs)
        layers = config.num_layers
        super().__init__(config, None, num_layers=layers, causal=False, embed=embed, rngs=rngs)
        self.classes = dense(config, config.d_model, num_classes, rngs=rngs)

    def __call__(self, patches_BTP, *, dropout_key=None, capture=()):
        """logits_BC, with `capture` (logits_BC, {layer: {name: array}}), see `hidden`."""
        x_BTD, _, *captured = self.hidden(patches_BTP, dropout_key=dropout_key, capture=capture)
        logits_BC = self.classes(x_BTD.mean(axis=1))
        return (logits_BC, *captured) if capture else logits_BC


MODELS = {
    'decoder': MiniGPT,
    'encoder_decoder': EncoderDecoder,
    'encoder': MaskedLM,
    'image': ImageClassifier,
}


def stack_layers(params):
    """Parameters of a `Stack`, as the dict of `nnx.to_pure_dict`, for `scan_layers`.

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

    Of an encoder-decoder: of one token of the source and one of the target, both texts of
    `context_length` tokens. Encoder-decoder attention adds 4·D² weights and 4·T·D a layer.
    `vocab_size` is that of the output.

    Source: Kaplan et al. 2020, section 2.1; with the context term 4·L·T·D counted in full.
    """
    D, F, L, T = config.d_model, config.d_ff, config.num_layers, config.context_length
    crossed = L if config.family == 'encoder_decoder' else 0
    L += config.encoder_layers if crossed else 0
    feed_forward = (3 if config.activation in GATED else 2) * D * F
    weights = L * (4 * D * D + feed_forward) + crossed * 4 * D * D + vocab_size * D
    context = (6 if config.positions == 'relative' else 4) * L * T * D + crossed * 4 * T * D
    return 3 * (2 * weights + context)
