"""Configurations: what may stand in them, what is derived, and what a result was made with."""

import difflib
import importlib.metadata
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
from ml_collections import ConfigDict

from minigpt_jax.data.corpora import CORPORA
from minigpt_jax.data.tokenizers import TOKENIZERS
from minigpt_jax.model.attention import (
    ATTENTION_FORMS,
    DEVICE_OBSTACLES,
    IMPLEMENTATIONS,
    WITHOUT_WEIGHTS,
    obstacle,
)
from minigpt_jax.model.flash import Demand
from minigpt_jax.model.layers import INITS, NORM_PLACEMENTS, NORMS
from minigpt_jax.model.positions import POSITIONS
from minigpt_jax.model.transformer import ACTIVATIONS, MODELS
from minigpt_jax.report.tables import write_atomically
from minigpt_jax.training.optim import OPTIMIZERS, SCHEDULES, check_rules

VOCAB_SIZE = 4096  # of a tokenizer that is learned to a size, where none is given
DTYPES = ('float32', 'bfloat16')
SEED_MODES = ('auto', 'separate', 'map', 'vmap')
UNEVEN = ('replicate', 'refuse')


class ConfigError(ValueError):
    """A configuration that a user can mend: one line, what is wrong and what would be right."""


class RunError(ValueError):
    """A run directory that cannot be used: one line, what is wrong and what would be right."""


class DamagedError(RunError):
    """A file of a run that cannot be read."""


class ImpossibleError(ConfigError):
    """Keys that are well-formed one by one but cannot be true together."""


def _one_of(choices):
    def check(value):
        if value not in choices:
            return f'choose from {", ".join(choices)}{_nearest(str(value), choices)}'

    return check


_FLOAT32_MAX = 3.4e38  # parameters and losses are float32
_INT32_MAX = 2**31 - 1


def _number(test, what):
    def check(value):
        if not abs(value) <= _FLOAT32_MAX:  # NaN too
            return f'must be a finite number, {what}'
        if type(value) is int and value > _INT32_MAX:
            return f'must be at most {_INT32_MAX}'
        return None if test(value) else f'must be {what}'

    return check


def _corpus(value):
    if not value.startswith('tfds:'):
        return _one_of((*CORPORA, 'tfds:NAME'))(value)
    # Whether the catalogue has it is asked when it is read: to know takes a while.
    if not re.fullmatch(r'tfds:\w+(/[\w.+-]+)?', value):
        return 'expected tfds:NAME or tfds:NAME/CONFIG, for example tfds:tiny_shakespeare'
    return None


_positive = _number(lambda x: x > 0, 'above 0')
_not_negative = _number(lambda x: x >= 0, '0 or more')
_below_one = _number(lambda x: 0 <= x < 1, 'at least 0 and below 1')
_fraction = _number(lambda x: 0 < x < 1, 'between 0 and 1')
_seed = _number(lambda x: 0 <= x <= _INT32_MAX, f'from 0 to {_INT32_MAX}')
_devices = _number(lambda x: x == -1 or x > 0, 'above 0, or -1 for all devices')


def _not_empty(value):
    return None if value else 'must not be empty'


def _anything(value):
    return None


# Every key that a configuration holds: its type and what its value must satisfy. A key of type
# `(type, None)` is a placeholder: None until `resolve` or the data decides.
KEYS = {
    'seed': (int, _seed),
    'sweep': (tuple, _anything),
    'data.corpus': (str, _corpus),
    'data.path': ((str, None), _anything),
    'data.document_separator': ((str, None), _not_empty),
    'data.pack_documents': (bool, _anything),
    'data.tokenizer': (str, _one_of(TOKENIZERS)),
    'data.vocab_size': ((int, None), _number(lambda x: 0 < x <= 10**6, 'from 1 to 1000000')),
    'data.joint_vocabulary': (bool, _anything),
    'data.source_language': (str, _anything),
    'data.target_language': (str, _anything),
    'data.batch_size': (int, _positive),
    'data.tokens_per_batch': ((int, None), _positive),
    'data.num_buckets': (int, _positive),
    'data.mask_rate': (float, _fraction),
    'data.patch_size': (int, _positive),
    'data.validation_fraction': (float, _fraction),
    'model.family': (str, _one_of(MODELS)),
    'model.d_model': (int, _positive),
    'model.num_heads': (int, _positive),
    'model.d_ff': ((int, None), _positive),
    'model.num_layers': (int, _positive),
    'model.encoder_layers': ((int, None), _positive),
    'model.context_length': (int, _positive),
    'model.norm_placement': (str, _one_of(NORM_PLACEMENTS)),
    'model.norm': (str, _one_of(NORMS)),
    'model.qk_norm': (bool, _anything),
    'model.residual': (bool, _anything),
    'model.scale_scores': (bool, _anything),
    'model.positions': (str, _one_of(POSITIONS)),
    'model.activation': (str, _one_of(ACTIVATIONS)),
    'model.attention_form': (str, _one_of(ATTENTION_FORMS)),
    'model.attention': (str, _one_of(IMPLEMENTATIONS)),
    'model.dropout_rate': (float, _below_one),
    'model.tie_embeddings': (bool, _anything),
    'model.joint_embeddings': (bool, _anything),
    'model.use_bias': (bool, _anything),
    'model.init': (str, _one_of(INITS)),
    'model.dtype': (str, _one_of(DTYPES)),
    'model.remat': (bool, _anything),
    'model.scan_layers': (bool, _anything),
    'optim.name': (str, _one_of(OPTIMIZERS)),
    'optim.learning_rate': (float, _not_negative),
    'optim.schedule': (str, _one_of(SCHEDULES)),
    'optim.warmup_steps': (int, _not_negative),
    'optim.final_learning_rate': (float, _not_negative),
    'optim.b1': (float, _below_one),
    'optim.b2': (float, _below_one),
    'optim.weight_decay': (float, _not_negative),
    'optim.clip_norm': (float, _not_negative),
    'optim.rules': (tuple, check_rules),
    'train.steps': (int, _positive),
    'train.steps_per_call': (int, _positive),
    'train.seeds': (str, _one_of(SEED_MODES)),
    'train.accumulation_steps': (int, _positive),
    'train.label_smoothing': (float, _below_one),
    'train.log_every': (int, _positive),
    'train.log_layer_norms': (bool, _anything),
    'train.checkpoint_every': (int, _positive),
    'train.keep': (int, _number(lambda x: x >= 2, '2 or more')),
    'eval.every': (int, _positive),
    'eval.batch_size': (int, _positive),
    'eval.decoded_pairs': (int, _not_negative),
    'eval.sample_prompt': ((str, None), _anything),
    'eval.sample_tokens': (int, _not_negative),
    'mesh.data': (int, _devices),
    'mesh.fsdp': (int, _devices),
    'mesh.tensor': (int, _devices),
    'mesh.seed': (int, _devices),
    'mesh.uneven': (str, _one_of(UNEVEN)),
}

# A workdir of the same configuration is resumed. These may change without making it another one.
NOT_COMPARED = ('sweep', 'train.seeds', 'train.log_', 'mesh.')


def _nearest(name, names):
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f'; did you mean {" or ".join(close)}?' if close else ''


def unknown_key(key):
    """One line for a key that does not exist, with the nearest that do."""
    groups = sorted({name.split('.')[0] for name in KEYS if '.' in name})
    if key in groups:
        leaves = ', '.join(name for name in KEYS if name.startswith(f'{key}.'))
        return f'{key}: a group, not a key; its keys: {leaves}'
    known = list(KEYS) + groups
    # A mistyped leaf is mostly right in its last word, a mistyped group in all but its first.
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    if not close:
        last = key.rsplit('.', 1)[-1]
        close = [name for name in known if last == name.rsplit('.', 1)[-1]]
    hint = f'; did you mean {" or ".join(close)}?' if close else f'; keys: {", ".join(KEYS)}'
    return f'{key}: no such configuration key{hint}'


def flatten(config):
    """{'model.num_heads': 4, …}: every leaf of a configuration under its dotted key."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict | dict):
            flat |= {f'{key}.{name}': leaf for name, leaf in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def get_key(config, key):
    """The value under a dotted key."""
    return flatten(config)[key]


def with_values(config, values):
    """A copy of `config` with other values, `{'model.num_heads': 8}`, checked as overrides are.

    Raises:
      ConfigError: for an unknown key, a wrong type or choice.
    """
    copy = config.copy_and_resolve_references()
    with copy.unlocked():
        for key, value in values.items():
            value = _checked(key, value)
            group, _, leaf = key.rpartition('.')
            (copy[group] if group else copy)[leaf] = value
    return copy


def _checked(key, value):
    if key not in KEYS:
        raise ConfigError(unknown_key(key))
    kind, check = KEYS[key]
    optional = isinstance(kind, tuple)
    kind = kind[0] if optional else kind
    if value is None and optional:
        return None
    if kind is float and type(value) is int:
        value = float(value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    if type(value) is not kind:
        raise ConfigError(f'{key}={value!r}: expected {kind.__name__}, got {type(value).__name__}')
    if kind is str and not is_utf8(value):
        raise ConfigError(f'{key}={value!r}: not UTF-8; rename it')
    if complaint := check(value):
        raise ConfigError(f'{key}={value!r}: {complaint}')
    return value


def is_utf8(text):
    """Whether a text from the command line can be written to a file."""
    return not any('\ud800' <= c <= '\udfff' for c in text)


def resolve(config):
    """A copy of `config`, complete and checked: derived values filled in, every key valid.

    `model.d_ff` of None becomes 4 · d_model (Vaswani et al. 2017 and GPT-2 both use 4),
    `data.vocab_size` of None, where it is learned to a size, `VOCAB_SIZE`, and
    `model.encoder_layers` of None, where there is an encoder, `model.num_layers`.

    Raises:
      ConfigError: for a missing or unknown key, a wrong type, an unknown choice.
      ImpossibleError: for values that contradict each other.
    """
    flat = flatten(config)
    if missing := [key for key in KEYS if key not in flat]:
        raise ConfigError(f'{missing[0]}: missing; build on get_config() of configs/minigpt.py')
    config = with_values(config, flat)
    with config.unlocked():
        if config.model.d_ff is None:
            config.model.d_ff = 4 * config.model.d_model
        if config.data.vocab_size is None and _learns_to_size(config):
            config.data.vocab_size = VOCAB_SIZE
        if config.model.encoder_layers is None and config.model.family == 'encoder_decoder':
            config.model.encoder_layers = config.model.num_layers
    _check_together(config)
    return config


def _learns_to_size(config):
    return 'vocab_size' in TOKENIZERS[config.data.tokenizer].settings


CONTENTS = {'decoder': 'text', 'encoder': 'text', 'encoder_decoder': 'pairs', 'image': 'images'}

RECIPES = {
    'text': 'configs/minigpt.py',
    'pairs': 'configs/translate_dates.py',
    'images': 'configs/vit_digits.py',
}

# Keys that mean something to one family alone: {key: (family, its value elsewhere)}.
ONLY_FOR = {
    'model.encoder_layers': ('encoder_decoder', None),
    'model.joint_embeddings': ('encoder_decoder', False),
    'data.joint_vocabulary': ('encoder_decoder', False),
    'data.tokens_per_batch': ('encoder_decoder', None),
    'data.num_buckets': ('encoder_decoder', 1),
    'data.mask_rate': ('encoder', 0.15),
    'data.pack_documents': ('decoder', False),
    'data.patch_size': ('image', 2),
}


def _check_family(config):
    family, corpus = config.model.family, config.data.corpus
    contents = {name: builder.content for name, builder in CORPORA.items()}
    content = contents.get(corpus, 'text')
    if content != CONTENTS[family]:
        wanted = [name for name, held in contents.items() if held == CONTENTS[family]]
        raise ImpossibleError(
            f'data.corpus={corpus}: model.family={family} learns from {CONTENTS[family]}; '
            f'choose from {", ".join(wanted)}, or build on the recipe {RECIPES[content]}'
        )
    for key, (only, neutral) in ONLY_FOR.items():
        if family != only and (value := get_key(config, key)) != neutral:
            raise ImpossibleError(f'{key}={value}: for model.family={only} alone')
    if family != 'encoder_decoder':
        return
    if config.model.joint_embeddings and not config.data.joint_vocabulary:
        raise ImpossibleError(
            'model.joint_embeddings: one table for two vocabularies; set '
            'data.joint_vocabulary=True as well'
        )
    if config.data.num_buckets > 1 and config.train.seeds in ('map', 'vmap'):
        raise ImpossibleError(
            f'train.seeds={config.train.seeds}: the seeds of a program share a shape, which '
            f'data.num_buckets={config.data.num_buckets} do not; set train.seeds=separate'
        )
    if config.data.num_buckets > 1 and config.train.steps_per_call > 1:
        raise ImpossibleError(
            f'train.steps_per_call={config.train.steps_per_call}: the steps of a call share a '
            f'shape, which data.num_buckets={config.data.num_buckets} do not; set one of them to 1'
        )


def _check_together(config):
    _check_family(config)
    files = ('text', 'parallel')
    if config.data.path is not None and config.data.corpus not in files:
        raise ImpossibleError(
            f'data.path={config.data.path}: is read with data.corpus={" or ".join(files)} alone, '
            f'and it is {config.data.corpus}; set that as well, or leave the path out'
        )
    if config.data.document_separator is not None and config.data.corpus != 'text':
        raise ImpossibleError(
            f'data.document_separator={config.data.document_separator!r}: cuts the files of '
            f'data.corpus=text alone; {config.data.corpus} has documents of its own'
        )
    if config.data.vocab_size is not None and not _learns_to_size(config):
        sized = ' or '.join(name for name, kind in TOKENIZERS.items() if kind.settings)
        raise ImpossibleError(
            f'data.vocab_size={config.data.vocab_size}: the tokenizer {config.data.tokenizer} has '
            f'the size that it has; leave it out, or set data.tokenizer={sized}'
        )
    d_model, num_heads = config.model.d_model, config.model.num_heads
    if d_model % num_heads:
        divisors = [h for h in range(1, d_model + 1) if d_model % h == 0]
        raise ImpossibleError(
            f'model.num_heads={num_heads}: does not divide model.d_model={d_model}; '
            f'head counts that do: {", ".join(map(str, divisors))}'
        )
    d_head = d_model // num_heads
    if config.model.positions == 'rotary' and d_head % 2:
        even = [h for h in range(1, d_model + 1) if d_model % (2 * h) == 0]
        hint = (
            f'head counts that make it even: {", ".join(map(str, even))}'
            if even
            else 'take an even model.d_model'
        )
        raise ImpossibleError(
            f'model.positions=rotary: turns pairs of dimensions, and d_head = '
            f'{d_model}/{num_heads} = {d_head} is odd; {hint}'
        )
    if config.model.norm_placement == 'deepnorm' and not config.model.residual:
        raise ImpossibleError(
            'model.norm_placement=deepnorm: weighs the residual connection, which '
            'model.residual=False takes away; use post, which is the same without it'
        )
    attention = config.model.attention
    if attention in WITHOUT_WEIGHTS and config.model.dropout_rate:
        raise ImpossibleError(
            f'model.dropout_rate={config.model.dropout_rate}: drops attention weights, which '
            f'model.attention={attention} never holds; set the rate to 0, or model.attention=plain'
        )
    if why := attention_obstacle(config):
        raise ImpossibleError(f'model.attention={attention}: {why}')
    per_call = config.train.steps_per_call
    for key in ('train.steps', 'train.log_every', 'train.checkpoint_every', 'eval.every'):
        value = get_key(config, key)
        if value % per_call:
            raise ImpossibleError(
                f'{key}={value}: must be a multiple of train.steps_per_call={per_call}, '
                f'for example {per_call * max(1, round(value / per_call))}'
            )
    by_tokens = config.data.tokens_per_batch is not None  # in batches that it makes divisible
    if not by_tokens and config.data.batch_size % config.train.accumulation_steps:
        raise ImpossibleError(
            f'train.accumulation_steps={config.train.accumulation_steps}: must divide '
            f'data.batch_size={config.data.batch_size}'
        )
    schedule, warmup = config.optim.schedule, config.optim.warmup_steps
    if schedule in ('cosine', 'linear') and warmup >= config.train.steps:
        raise ImpossibleError(
            f'optim.warmup_steps={warmup}: must be below train.steps={config.train.steps}'
        )
    if schedule == 'inverse_sqrt' and not warmup:
        raise ImpossibleError(
            'optim.warmup_steps=0: inverse_sqrt falls from the end of the warm-up; give at least 1'
        )


def attention_obstacle(config):
    """Why `model.attention` cannot run here, or None.

    Only a kernel that is for some device looks for devices: `cli` may still say how many there are.
    """
    data, model = config.data, config.model
    axes = [config.mesh[axis] for axis in ('data', 'fsdp', 'tensor', 'seed')]
    if model.attention not in DEVICE_OBSTACLES:
        return None
    demand = Demand(
        dtype=model.dtype,
        d_head=model.d_model // model.num_heads,
        lengths=(model.context_length, model.context_length),
        has_scores=data.pack_documents or model.positions in ('alibi', 'relative'),
        num_devices=jax.device_count() if -1 in axes else math.prod(axes),
    )
    return obstacle(model.attention, demand)


def differences(old, new):
    """Keys whose change makes a workdir another experiment: {key: (old, new)}."""

    def plain(value):
        return list(map(plain, value)) if isinstance(value, list | tuple) else value

    old, new = flatten(old), flatten(new)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if not key.startswith(NOT_COMPARED) and plain(old.get(key)) != plain(new.get(key))
    }


def describe_environment(corpus):
    """What produced a result: command, packages, device, git commit, corpus."""
    return {
        'command': train_command(),
        **describe_machine(),
        'corpus': corpus.name,
        'corpus_sha256': corpus.sha256,
        'unknown_share': corpus.unknown_share,
        'vocab_size': corpus.tokenizer.vocab_size,
    }


def describe_machine():
    """Packages, device and git commit."""
    packages = (
        'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy', 'sentencepiece',
        'tensorflow-datasets', 'babel',
    )  # fmt: skip
    device = jax.devices()[0]
    return {
        'packages': {name: importlib.metadata.version(name) for name in packages},
        'python': sys.version.split()[0],
        'device': f'{len(jax.devices())} × {device.device_kind} ({device.platform})',
        **_git_state(),
    }


def train_command(workdir=None):
    """The command line that was typed, or the same with another `--workdir`."""
    arguments = sys.argv[1:]
    if workdir is not None:
        arguments = [a for a in arguments if not a.lstrip('-').startswith('workdir=')]
        arguments.append(f'--workdir={workdir}')
    return shlex.join(['python', '-m', 'minigpt_jax.train', *arguments])


def _git_state():
    def git(*arguments):
        root = Path(__file__).parent
        done = subprocess.run(['git', *arguments], cwd=root, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit, changes = git('rev-parse', 'HEAD'), git('status', '--porcelain')
    except FileNotFoundError:  # no git on this machine
        commit = changes = None
    return {'git_commit': commit, 'git_clean': None if changes is None else not changes}


def write_config(run_dir, config, environment):
    """Writes `config.json`: the resolved configuration and what it was run with."""
    write_json(run_dir / 'config.json', {'config': config.to_dict(), 'environment': environment})


def read_config(run_dir):
    """The configuration in `config.json`, or None where there is no such file."""
    path = run_dir / 'config.json'
    return ConfigDict(read_json(path, 'config')) if path.exists() else None


def read_json(path, key, kind=dict):
    """What a file of a run, a JSON object, holds under `key`: something of type `kind`.

    Raises:
      DamagedError: naming the file.
    """
    try:
        value = json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise DamagedError(
            f'{path}: damaged ({error}); restore it or take a fresh workdir'
        ) from None
    if not isinstance(value, dict) or not isinstance(value.get(key), kind):
        raise DamagedError(
            f'{path}: damaged (no {key!r} in it); restore it or take a fresh workdir'
        )
    return value[key]


def write_json(path, value):
    """Writes `value` as JSON, atomically: a reader finds the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + '\n')
