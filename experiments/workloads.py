"""What `benchmark` times on our side, as the commands of this project run it.

Tensor names: B batch, T length, K steps of a call, M, I, O rows, inner and columns of a product.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from configs import minigpt, multi30k
from minigpt_jax.analysis.programs import multiply_adds
from minigpt_jax.data.batches import TokenizedCorpus
from minigpt_jax.data.pairs import EncodedPairs, TokenizedPairs
from minigpt_jax.inference.decoding import generate
from minigpt_jax.model.attention import dot_product_attention
from minigpt_jax.model.kernels import product
from minigpt_jax.model.transformer import flops_per_token
from minigpt_jax.training import sharding, steps, sweep
from minigpt_jax.training.config import resolve
from minigpt_jax.training.loop import Program

CHARACTERS = 65  # of tiny Shakespeare
WORD_PIECES = 10_000
GPT2_TOKENS = 50_257


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and the shape of its batches.

    Attributes:
      name: what a table calls it.
      config: resolved.
      vocab_size: a pair, of source and target, for an encoder-decoder.
    """

    name: str
    config: ConfigDict
    vocab_size: int | tuple[int, int]

    @property
    def dtype(self):
        return self.config.model.dtype

    @property
    def tokens_per_call(self):
        """Tokens, of the target where there are two texts, that a train call trains on."""
        config = self.config
        return config.train.steps_per_call * config.data.batch_size * config.model.context_length

    @property
    def flops_per_call(self):
        sizes = self.vocab_size
        output_size = sizes if isinstance(sizes, int) else sizes[1]
        return self.tokens_per_call * flops_per_token(self.config.model, output_size)


def small():
    """nanoGPT's recipe for a CPU: 4 layers, 4 heads, width 128, 12 × 64 characters."""
    c = minigpt.get_config()
    c.data.batch_size = 12
    return c


def baby(dtype='float32'):
    """nanoGPT's recipe for a GPU, a quarter of its batch: 6 layers of width 384, 16 × 256."""
    c = minigpt.get_config()
    c.model.num_layers = c.model.num_heads = 6
    c.model.d_model, c.model.context_length, c.model.dtype = 384, 256, dtype
    c.train.steps_per_call = 4  # not 20, so that turns take seconds
    return c


def transformer_tiny():
    """The model of `configs/multi30k.py` as `torch.nn.Transformer` has it, 128 × (20 + 20)."""
    c = multi30k.get_config()
    c.data.batch_size, c.data.tokens_per_batch, c.data.num_buckets = 128, None, 1
    c.model.context_length = 20
    c.model.dropout_rate, c.model.dtype = 0.0, 'float32'
    c.optim = minigpt.get_config().optim
    c.train.label_smoothing = 0.0
    c.train.steps_per_call = 10  # not 1: in buckets, batches have several shapes
    return c


def gpt2(batch_size):
    """GPT-2 of 124 M parameters in bfloat16, on texts of 1024 tokens."""
    c = minigpt.get_config()
    c.data.batch_size = c.eval.batch_size = batch_size
    c.model.num_layers = c.model.num_heads = 12
    c.model.d_model, c.model.context_length, c.model.dtype = 768, 1024, 'bfloat16'
    c.model.use_bias = True
    c.train.steps_per_call = 4
    return c


def shrunk(c):
    """A recipe made much smaller: whether it runs, not how fast it is."""
    c.data.batch_size, c.eval.batch_size = 8, 8
    c.model.d_model, c.model.num_heads, c.model.num_layers = 32, 2, 1
    c.model.d_ff, c.model.context_length = 64, 8
    if c.model.family == 'encoder_decoder':
        c.model.encoder_layers = 1
    c.train.steps_per_call = 2
    return c


def make_workload(name, c, vocab_size):
    """The recipe as it trains on this machine: a CPU is as many devices as share its batches."""
    if jax.default_backend() == 'cpu':
        c.mesh.data = sweep.cpu_devices(c, len(jax.devices()))
    return Workload(f'{name}, {c.model.dtype}', resolve(c), vocab_size)


def make_corpus(workload):
    """Random tokens, as many as a call and a batch of validation take."""
    config, rng = workload.config, np.random.default_rng(0)
    about = {'unknown_share': 0.0, 'sha256': '', 'name': 'random'}
    about['tokenizer'] = types.SimpleNamespace(vocab_size=workload.vocab_size)
    batch_sizes = (config.train.steps_per_call * config.data.batch_size, config.eval.batch_size)
    length = config.model.context_length
    if config.model.family != 'encoder_decoder':
        train, validation = (
            rng.integers(0, workload.vocab_size, B * length + 1).astype(np.int32)
            for B in batch_sizes
        )
        return TokenizedCorpus(
            train_tokens=train, validation_tokens=validation, validation_bytes=1, **about
        )

    def pairs(count):
        texts = (rng.integers(0, size, count * length) for size in workload.vocab_size)
        starts = np.arange(count + 1) * length
        return EncodedPairs(*texts, starts, starts)

    return TokenizedPairs(train=pairs(batch_sizes[0]), validation=pairs(batch_sizes[1]), **about)


def make_program(workload, num_seeds=1):
    """The program that `minigpt_jax.train` makes of a workload."""
    return Program(workload.config, make_corpus(workload), num_seeds)


class Training:
    """Calls of a train program, one after the other, as the loop of `minigpt_jax.train` has them.

    Each call is `steps_per_call` steps of every seed in one dispatch, from batches in the host's
    memory to the metrics. The batches are the same every time: no thread prepares others while
    somebody else has a turn.
    """

    def __init__(self, program, seeds):
        self.program = program
        self.state = program.start([program.init(seed) for seed in seeds])
        batches = [next(program.task.batches(seed, 0)) for seed in seeds]
        self.batches = (
            batches[0] if len(batches) == 1 else jax.tree.map(lambda *x: np.stack(x), *batches)
        )

    def __call__(self):
        """The mean loss of the call's steps."""
        batches = jax.device_put(self.batches, self.program.batch_sharding)
        self.state, metrics = self.program.train_call(self.state, batches)
        return metrics['train_loss'].mean()


class Generation:
    """Texts of a model that is not trained, as `minigpt_jax.sample` writes them."""

    def __init__(self, workload, batch_size, num_tokens):
        self.model = steps.build_model(workload.config, workload.vocab_size)
        self.params = steps.make_init(workload.config, workload.vocab_size)(0).params
        self.num_tokens = num_tokens
        self.prompt_BT = jnp.zeros((batch_size, workload.config.model.context_length), jnp.int32)

    def __call__(self, temperature=1.0):
        """tokens_BN that follow a prompt of one token."""
        return generate(
            self.model,
            self.params,
            self.prompt_BT,
            1,
            jax.random.key(0),
            num_tokens=self.num_tokens,
            temperature=jnp.float32(temperature),
            top_k=jnp.int32(0),
            top_p=jnp.float32(1.0),
        )


def make_product(dtype, size):
    """A call of x_MI · w_IO, both of size × size, by the kernel of this project's layers."""
    x_MI, w_IO = jax.random.normal(jax.random.key(0), (2, size, size)).astype(dtype)
    program = jax.jit(lambda x_MI, w_IO: product('MI,IO->MO', x_MI, w_IO, dtype))
    return functools.partial(program, x_MI, w_IO)


def make_attention(implementation, shape_BTHK):
    """A call of `attention_pass`, the batch shared by the devices as in a train step."""
    count = sharding.devices_for_cores(len(jax.devices()), {shape_BTHK[0]})
    rows = sharding.batch_sharding(sharding.make_mesh(ConfigDict({'data': count})), leading_axes=0)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.device_put(jax.random.normal(key, shape_BTHK), rows) for key in keys]
    program = jax.jit(attention_pass(implementation), in_shardings=rows, out_shardings=rows)
    return functools.partial(program, *arrays)


def attention_pass(implementation):
    """(q_BTHK, k_BSHK, v_BSHK, dy_BTHK) -> (y_BTHK, their gradients), causal."""
    attend = functools.partial(dot_product_attention, causal=True, implementation=implementation)

    def forward_backward(q_BTHK, k_BSHK, v_BSHK, dy_BTHK):
        y_BTHK, backward = jax.vjp(attend, q_BTHK, k_BSHK, v_BSHK)
        return y_BTHK, backward(dy_BTHK)

    return forward_backward


def attention_flops(shape_BTHK):
    """Those of plain attention, forward and backward, whoever skips or repeats some."""
    x_BTHK = jax.ShapeDtypeStruct(shape_BTHK, jnp.float32)
    return 2 * multiply_adds(attention_pass('plain'), *[x_BTHK] * 4)
