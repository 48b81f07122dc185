"""What a configuration would take, by the compiler's own analysis: nothing is run or written."""

import functools
import types
from typing import ClassVar

import jax
import jaxlib

from minigpt_jax.data.tokenizers import TOKENIZERS
from minigpt_jax.model.transformer import flops_per_token
from minigpt_jax.report.tables import parameter_table, terminal_table
from minigpt_jax.training import sharding
from minigpt_jax.training.config import ImpossibleError, with_values
from minigpt_jax.training.loop import Program
from minigpt_jax.training.optim import parameter_name
from minigpt_jax.training.tasks import TASKS

MIB, GIB = 2**20, 2**30
LONGEST = 2**20  # tokens: where the search for the longest context ends


class Planned(Program):
    """The programs of a configuration, compiled to be looked at; there need be no such devices."""

    # Sooner, and the same memory: what it leaves out comes behind the assignment of buffers.
    compiler_options: ClassVar = {'xla_backend_optimization_level': 0}

    def _compile_evaluation(self):
        pass

    @functools.cached_property
    def memory(self):
        """Bytes on one device: {part: bytes}, of the largest train call."""
        analysis = max(
            (call.memory_analysis() for call in self.train_calls.values()),
            key=lambda x: x.temp_size_in_bytes,
        )
        own, state = self.state_sharding, self.of_all_seeds(self.abstract_state)
        parts = {
            'parameters': sharding.bytes_held(state.params, own.params),
            'optimizer state': sharding.bytes_held(state.opt_state, own.opt_state),
            'activations, gradients and other temporaries': analysis.temp_size_in_bytes,
        }
        whole = (
            analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes
        )
        return parts | {'batch and the rest': whole - sum(parts.values()), 'all': whole}


def load(data, family):
    """The corpus of a group `data`; where its text does not matter, what stands for it unread."""
    sizes = {'byte': TOKENIZERS['byte'].vocab_size, 'sentencepiece': data.vocab_size}
    size = sizes.get(data.tokenizer)
    if family not in ('decoder', 'encoder') or size is None:
        return TASKS[family].load(data)
    return types.SimpleNamespace(tokenizer=types.SimpleNamespace(vocab_size=size))


def plan(config, num_seeds=1):
    """The programs of a resolved configuration (see `Planned`), on the devices that jax has.

    Raises:
      ConfigError, DataError: as training would.
    """
    corpus = load(config.data, config.model.family)
    mesh = sharding.make_mesh(config.mesh, num_seeds=num_seeds)
    TASKS[config.model.family](config, corpus).check_batches(mesh)
    return Planned(config, corpus, num_seeds)


def longest_context(config, num_bytes, compiled=None):
    """(a context length that fits into the memory of a device, a longer one that does not).

    By compiling the train step at twice the length again and again, then half-way between. The
    first is None where the length of the configuration does not fit, the second where `LONGEST`
    does. Batches stay as they are.
    """

    def fits(length):
        program = (
            compiled
            if compiled is not None and length == config.model.context_length
            else plan(with_values(config, {'model.context_length': length}))
        )
        return program.memory['all'] <= num_bytes

    low, high = None, config.model.context_length
    while fits(high):
        low, high = high, 2 * high
        if high > LONGEST:
            return low, None
    if low is None:
        return None, high
    middle = (low + high) // 2
    return (middle, high) if fits(middle) else (low, middle)


def describe(program, num_bytes=None):
    """The plan as a text for a terminal; `num_bytes` is the memory of a device, where it is known.

    Raises:
      ConfigError: see `plan`.
    """
    config, task, mesh = program.config, program.task, program.mesh
    tokens = task.tokens_per_step()
    flops = tokens * flops_per_token(config.model, task.output_size)
    leaves = jax.tree_util.tree_leaves_with_path(program.abstract_state.params)
    named = [(parameter_name(path), x) for path, x in leaves]
    rows = [(name, x.shape, *sharding.describe_split(name, x.shape, mesh)) for name, x in named]
    memory = [[part, f'{size / MIB:,.1f}'] for part, size in program.memory.items()]
    shared = mesh.shape['data'] * mesh.shape['fsdp']
    lines = [
        parameter_table(rows),
        sharding.describe_mesh(mesh, program.abstract_state),
        '',
        terminal_table(['on each device', 'MiB'], memory, text_columns=1),
        '',
        f'a step: {tokens:,} tokens, {flops:.3g} floating-point operations by the formula, '
        f'{flops / mesh.size:.3g} a device, which has 1/{shared} of the rows',
        f'compiled in {program.compile_s:.1f} s by jax {jax.__version__}, jaxlib '
        f'{jaxlib.__version__} for {mesh.size} × {jax.devices()[0].device_kind} '
        f'({jax.default_backend()})',
    ]
    if jax.default_backend() == 'cpu':
        lines.append(
            'temporaries are those of the CPU compiler: those of a TPU or GPU are others, '
            'parameters and optimizer state are the same'
        )
    lines.append(_describe_context(program, num_bytes))
    return '\n'.join(lines)


def _describe_context(program, num_bytes):
    if num_bytes is None:
        return (
            'longest context: not asked for, since the memory of such a device is not known; '
            'say it with --memory_gb'
        )
    if program.num_seeds > 1 or program.config.model.family == 'image':
        return 'longest context: is found for one seed of a text'
    memory = f'{num_bytes / GIB:,.1f} GiB'
    try:
        longest, too_long = longest_context(program.config, num_bytes, program)
    except ImpossibleError as error:
        return f'longest context: not to be found: {error}'
    if longest is None:
        return f'longest context: {too_long:,} tokens do not fit into {memory}'
    if too_long is None:
        return (
            f'longest context: {longest:,} tokens fit into {memory}, and longer ones were not tried'
        )
    return f'longest context: {longest:,} tokens fit into {memory}, {too_long:,} do not'
