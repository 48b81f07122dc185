"""The PyTorch side of `benchmark`: the same models, trained and sampled as its best users would.

Scaled dot products by `scaled_dot_product_attention`, a fused AdamW, `torch.compile` where asked
for, autocast for bfloat16, and a static key-value cache. Nothing here knows of JAX: parameters
come as the nested dicts of NumPy arrays that `nnx.to_pure_dict` gives.

Tensor names: B batch, T length, S keys or length of a source, D width, H heads, K head dimension,
V vocabulary, N new tokens.
"""

import functools
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# The decoder of configs/minigpt.py.


class Attention(nn.Module):
    """Causal self-attention; with a cache also to the tokens that earlier calls put there."""

    def __init__(self, model):
        super().__init__()
        self.num_heads = model.num_heads
        self.qkv = nn.Linear(model.d_model, 3 * model.d_model, bias=model.use_bias)
        self.out = nn.Linear(model.d_model, model.d_model, bias=model.use_bias)

    def forward(self, x_BTD, cache=None, positions_T=None):
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, self.num_heads, D // self.num_heads)
        q_BHTK, k_BHSK, v_BHSK = qkv.permute(2, 0, 3, 1, 4)
        if cache is None:
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, is_causal=True)
        else:
            k_BHSK = cache[0].index_copy_(2, positions_T, k_BHSK)
            v_BHSK = cache[1].index_copy_(2, positions_T, v_BHSK)
            mask_TS = positions_T[:, None] >= torch.arange(k_BHSK.shape[2])
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, attn_mask=mask_TS)
        return self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.d_model, bias=model.use_bias)
        self.attention = Attention(model)
        self.feed_forward_norm = nn.LayerNorm(model.d_model, bias=model.use_bias)
        self.hidden = nn.Linear(model.d_model, model.d_ff, bias=model.use_bias)
        self.out = nn.Linear(model.d_ff, model.d_model, bias=model.use_bias)

    def forward(self, x_BTD, cache=None, positions_T=None):
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cache, positions_T)
        h_BTF = F.gelu(self.hidden(self.feed_forward_norm(x_BTD)), approximate='tanh')
        return x_BTD + self.out(h_BTF)


class GPT(nn.Module):
    """Learned positions, norms before, GELU, tied embeddings; `model` is our configuration."""

    def __init__(self, model, vocab_size):
        super().__init__()
        self.context_length = model.context_length
        self.cache_shape = (model.num_heads, model.context_length, model.d_model // model.num_heads)
        self.embed = nn.Embedding(vocab_size, model.d_model)
        self.positions = nn.Embedding(model.context_length, model.d_model)
        self.blocks = nn.ModuleList([Block(model) for _ in range(model.num_layers)])
        self.final_norm = nn.LayerNorm(model.d_model, bias=model.use_bias)

    def forward(self, tokens_BT, caches=None, positions_T=None):
        """x_BTD of the last layer; with caches the tokens stand at `positions_T`."""
        if positions_T is None:
            positions_T = torch.arange(tokens_BT.shape[1])
        x_BTD = self.embed(tokens_BT) + self.positions(positions_T)
        for i, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, caches and caches[i], positions_T)
        return self.final_norm(x_BTD)

    def logits(self, x_BTD):
        return F.linear(x_BTD, self.embed.weight)

    def last_logits(self, tokens_BT, caches=None, positions_T=None):
        """logits_BV of the token that follows."""
        return self.logits(self(tokens_BT, caches, positions_T)[:, -1])

    def loss(self, batch):
        tokens_BT1 = batch['tokens_BT1']
        logits_BTV = self.logits(self(tokens_BT1[:, :-1]))
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten())

    def init_caches(self, batch_size):
        """Keys and values of each layer."""
        H, S, K = self.cache_shape
        return [tuple(torch.zeros(2, batch_size, H, S, K)) for _ in self.blocks]

    def load(self, params):
        """Takes over the parameters of our `MiniGPT`."""
        state = {
            'embed.weight': params['embed']['embedding'],
            'positions.weight': params['positions']['table'],
            **_norm('final_norm', params['final_norm']),
        }
        for i, block in params['blocks'].items():
            state |= _norm(f'blocks.{i}.attention_norm', block['attention_residual']['norm'])
            state |= _linear(f'blocks.{i}.attention.qkv', block['attention']['qkv'])
            state |= _linear(f'blocks.{i}.attention.out', block['attention']['out'])
            state |= _norm(f'blocks.{i}.feed_forward_norm', block['feed_forward_residual']['norm'])
            state |= _linear(f'blocks.{i}.hidden', block['feed_forward']['hidden'])
            state |= _linear(f'blocks.{i}.out', block['feed_forward']['out'])
        _load(self, state)


# The encoder-decoder of configs/multi30k.py.


class Translator(nn.Module):
    """`nn.Transformer` with norms before, one table for both texts and the logits, and sines."""

    def __init__(self, model, vocab_sizes):
        super().__init__()
        self.embed = nn.Embedding(vocab_sizes[0], model.d_model)
        self.register_buffer(
            'positions_TD', sinusoidal_encoding(model.context_length, model.d_model)
        )
        with warnings.catch_warnings():
            # That it has no nested tensors with norms before, which it would use in evaluation.
            warnings.simplefilter('ignore', UserWarning)
            self.transformer = nn.Transformer(
                model.d_model,
                model.num_heads,
                model.encoder_layers,
                model.num_layers,
                model.d_ff,
                dropout=model.dropout_rate,
                activation=model.activation,
                batch_first=True,
                norm_first=True,
                bias=model.use_bias,
            )

    def forward(self, source_BS, source_lengths_B, tokens_BT):
        """logits_BTV of each target position's next token."""
        S, T = source_BS.shape[1], tokens_BT.shape[1]
        padding_BS = torch.arange(S) >= source_lengths_B[:, None]
        x_BTD = self.transformer(
            self._embedded(source_BS),
            self._embedded(tokens_BT),
            tgt_mask=torch.ones(T, T, dtype=torch.bool).triu(1),
            src_key_padding_mask=padding_BS,
            memory_key_padding_mask=padding_BS,
            tgt_is_causal=True,
        )
        return F.linear(x_BTD, self.embed.weight)

    def _embedded(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        return x_BTD * x_BTD.shape[-1] ** 0.5 + self.positions_TD[: tokens_BT.shape[1]]

    def loss(self, batch):
        target_BT1 = batch['target_BT1']
        logits_BTV = self(batch['source_BS'], batch['source_lengths_B'], target_BT1[:, :-1])
        counted_BT = torch.arange(logits_BTV.shape[1]) < batch['target_lengths_B'][:, None]
        targets_BT = torch.where(counted_BT, target_BT1[:, 1:], -100)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-100)

    def load(self, params):
        """Takes over the parameters of our `EncoderDecoder` with joint embeddings."""
        (embed,) = (stack['embed'] for stack in params.values() if 'embed' in stack)
        state = {'embed.weight': embed['embedding'], 'positions_TD': self.positions_TD}
        for name, stack in params.items():
            state |= _norm(f'transformer.{name}.norm', stack['final_norm'])
            for i, block in stack['blocks'].items():
                layer = f'transformer.{name}.layers.{i}'
                state |= _attention(f'{layer}.self_attn', block['attention'])
                if 'cross_attention' in block:
                    state |= _attention(f'{layer}.multihead_attn', block['cross_attention'])
                state |= _linear(f'{layer}.linear1', block['feed_forward']['hidden'])
                state |= _linear(f'{layer}.linear2', block['feed_forward']['out'])
                residuals = ('attention_residual', 'cross_residual', 'feed_forward_residual')
                norms = [block[residual]['norm'] for residual in residuals if residual in block]
                for number, norm in enumerate(norms, start=1):
                    state |= _norm(f'{layer}.norm{number}', norm)
        _load(self, state)


def sinusoidal_encoding(length, width):
    """sin and cos of t / 10000^(2i/D) in turn, as our `SinusoidalPositions`."""
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    table_TD = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, -1)
    return torch.tensor(table_TD, dtype=torch.float32)


MODELS = {'decoder': GPT, 'encoder_decoder': Translator}


# Our parameters under PyTorch's names: a kernel (in, *out) is a weight (out, in).


def _weight(layer):
    return layer['kernel'].reshape(layer['kernel'].shape[0], -1).T


def _linear(name, layer):
    state = {f'{name}.weight': _weight(layer)}
    return state | {f'{name}.bias': layer['bias'].reshape(-1)} if 'bias' in layer else state


def _attention(name, attention):
    crosses = 'key_value' in attention
    inputs = [attention['query'], attention['key_value']] if crosses else [attention['qkv']]
    return {
        f'{name}.in_proj_weight': np.concatenate([_weight(x) for x in inputs]),
        f'{name}.in_proj_bias': np.concatenate([x['bias'].reshape(-1) for x in inputs]),
        **_linear(f'{name}.out_proj', attention['out']),
    }


def _norm(name, norm):
    return {f'{name}.{"weight" if key == "scale" else key}': x for key, x in norm.items()}


def _load(module, state):
    module.load_state_dict({name: torch.tensor(np.asarray(x)) for name, x in state.items()})


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


# Training.


class Training:
    """Optimizer steps on the batches of a call, in PyTorch's loop.

    Args:
      config: of our workload.
      module: a model, its parameters float32; with `model.dtype` bfloat16 under autocast.
      batches: of our call, with a leading axis of steps.
      rates: the learning rate of every step.
      compiled: whether loss and gradient go through `torch.compile`.
    """

    def __init__(self, config, module, batches, rates, *, compiled):
        self.clip_norm, self.rates = config.optim.clip_norm, iter(rates)
        self.parameters = list(module.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {'params': [x for x in self.parameters if x.dim() > 1]},
                {'params': [x for x in self.parameters if x.dim() < 2], 'weight_decay': 0.0},
            ],
            betas=(config.optim.b1, config.optim.b2),
            weight_decay=config.optim.weight_decay,
            fused=True,
        )
        self.loss = torch.compile(module.loss) if compiled else module.loss
        # As its users have bfloat16: products in it, parameters and norms in float32.
        self.precision = torch.autocast(
            'cpu', torch.bfloat16, enabled=config.model.dtype == 'bfloat16'
        )
        self.batches = batches

    def __call__(self):
        """The mean loss of the call's steps."""
        num_steps = len(next(iter(self.batches.values())))
        return sum(self._step(k) for k in range(num_steps)) / num_steps

    def warm_up(self):
        """Compiles, and leaves the parameters as they were."""
        batch = {name: torch.from_numpy(x[0]).long() for name, x in self.batches.items()}
        with self.precision:
            self.loss(batch).backward()
        self.optimizer.zero_grad(set_to_none=True)

    def _step(self, k):
        batch = {name: torch.from_numpy(x[k]).long() for name, x in self.batches.items()}
        rate = next(self.rates)
        for group in self.optimizer.param_groups:
            group['lr'] = rate
        with self.precision:
            loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


@torch.inference_mode()
def validation_loss(gpt, batches):
    """Nats a token over batches with an axis N in front, where `mask_BT` says which count."""
    total = count = 0
    for tokens_BT1, mask_BT in zip(batches['tokens_BT1'], batches['mask_BT'], strict=True):
        tokens_BT1, mask_BT = torch.from_numpy(tokens_BT1).long(), torch.from_numpy(mask_BT)
        logits_BTV = gpt.logits(gpt(tokens_BT1[:, :-1]))
        losses = F.cross_entropy(
            logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten(), reduction='none'
        )
        total += losses[mask_BT.flatten()].sum().item()
        count += mask_BT.sum().item()
    return total / count


# Generation.


@torch.inference_mode()
def generate(last_logits, gpt, prompt_BT, num_tokens, temperature=1.0):
    """tokens_BN that follow a prompt, as nanoGPT has it: the context is read for every token.

    `last_logits` is that of `gpt`, or it compiled.
    """
    tokens_BT = prompt_BT
    for _ in range(num_tokens):
        # Of one stride whatever the length: torch.compile makes a program for each kind.
        logits_BV = last_logits(tokens_BT[:, -gpt.context_length :].contiguous())
        tokens_BT = torch.cat([tokens_BT, _draw(logits_BV, temperature)], dim=1)
    return tokens_BT[:, -num_tokens:]


@torch.inference_mode()
def generate_cached(last_logits, gpt, prompt_BT, num_tokens, temperature=1.0):
    """The same with a static key-value cache, whose window slides as ours does.

    When the context is full its older half is dropped, and the younger one read again in one pass.
    """
    caches = gpt.init_caches(len(prompt_BT))
    tokens_BT, new_BT, position = prompt_BT, prompt_BT, 0
    for _ in range(num_tokens):
        end = position + new_BT.shape[1]
        logits_BV = last_logits(new_BT, caches, torch.arange(position, end))
        token_B1 = _draw(logits_BV, temperature)
        tokens_BT = torch.cat([tokens_BT, token_B1], dim=1)
        is_full = end == gpt.context_length
        new_BT = tokens_BT[:, -(gpt.context_length // 2 + 1) :] if is_full else token_B1
        position = 0 if is_full else end
    return tokens_BT[:, -num_tokens:]


def _draw(logits_BV, temperature):
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    return torch.multinomial(F.softmax(logits_BV / temperature, dim=-1), 1)


def make_generations(gpt, batch_size, num_tokens):
    """{how: a call that writes texts behind one token}."""
    # One function of few lengths, two batch sizes and both ways: more programs than dynamo allows.
    torch._dynamo.config.recompile_limit = 64
    prompt_BT = torch.zeros(batch_size, 1, dtype=torch.long)
    # Without a cache every length is a shape; with one there are two, a token and half a context.
    ways = {
        'PyTorch without a cache': (generate, torch.compile(gpt.last_logits, dynamic=True)),
        'PyTorch with a cache': (generate_cached, torch.compile(gpt.last_logits, dynamic=False)),
    }
    return {
        f'{name}, {form}': functools.partial(write, last_logits, gpt, prompt_BT, num_tokens)
        for name, (write, compiled) in ways.items()
        for form, last_logits in (('eager', gpt.last_logits), ('compiled', compiled))
    }


# Products and attention alone.


def make_product(dtype, size):
    x_MI, w_IO = torch.randn(2, size, size).to(getattr(torch, dtype))
    return functools.partial(torch.matmul, x_MI, w_IO)


def make_attention(shape_BTHK):
    """A forward and backward pass of causal attention, its heads split off as in `Attention`."""
    q_BTHK, k_BSHK, v_BSHK = (torch.randn(shape_BTHK, requires_grad=True) for _ in range(3))
    dy_BTHK = torch.randn(shape_BTHK)

    def forward_backward():
        heads_first = (x.transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHK))
        y_BHTK = F.scaled_dot_product_attention(*heads_first, is_causal=True)
        y_BTHK = y_BHTK.transpose(1, 2)
        return torch.autograd.grad(y_BTHK, (q_BTHK, k_BSHK, v_BSHK), dy_BTHK)

    return forward_backward
