"""Configurations: derived values, checks, and the line that each mistake gets."""

import subprocess
import sys

import pytest

from configs import (
    heads_sweep,
    minigpt,
    shakespeare_char,
    shakespeare_speedrun,
    translate_dates,
)
from minigpt_jax.training.config import (
    KEYS,
    ConfigError,
    ImpossibleError,
    differences,
    flatten,
    resolve,
    with_values,
)
from tests.conftest import tiny_config

RECIPES = [
    recipe.get_config()
    for recipe in (minigpt, shakespeare_char, shakespeare_speedrun, translate_dates)
]
RECIPES += [heads_sweep.get_config(variant) for variant in heads_sweep.VARIANTS]


@pytest.mark.parametrize('config', RECIPES)
def test_every_recipe_holds_exactly_the_known_keys_and_resolves(config):
    assert set(flatten(config)) == set(KEYS)
    resolve(config)


def test_the_hidden_width_is_derived_after_overrides():
    assert resolve(tiny_config(**{'model.d_model': 48})).model.d_ff == 192
    assert resolve(tiny_config(**{'model.d_ff': 7})).model.d_ff == 7


def test_the_size_of_a_learned_vocabulary_has_a_default():
    assert resolve(tiny_config()).data.vocab_size is None
    sized = {'data.tokenizer': 'sentencepiece'}
    assert resolve(tiny_config(**sized)).data.vocab_size == 4096
    assert resolve(tiny_config(**sized, **{'data.vocab_size': 300})).data.vocab_size == 300


@pytest.mark.parametrize('name', ['tfds:tiny_shakespeare', 'tfds:para_crawl/enbg', 'tfds:glue'])
def test_a_corpus_may_be_one_of_the_catalogue(name):
    assert resolve(tiny_config(**{'data.corpus': name})).data.corpus == name


def test_changing_a_copy_leaves_the_original_alone():
    config = tiny_config()
    changed = with_values(config, {'model.num_heads': 4, 'optim.learning_rate': 1})
    assert (changed.model.num_heads, changed.optim.learning_rate) == (4, 1.0)
    assert config.model.num_heads == 2
    resolve(config)
    assert config.model.d_ff is None


@pytest.mark.parametrize(
    ('values', 'line'),
    [
        (
            {'model.num_head': 2},
            'model.num_head: no such configuration key; did you mean model.num_heads',
        ),
        ({'modle.d_model': 2}, 'did you mean model.d_model'),
        ({'model.num_heads': '2'}, "model.num_heads='2': expected int, got str"),
        ({'model.num_heads': True}, 'expected int, got bool'),
        ({'model.num_heads': 2.0}, 'expected int, got float'),
        ({'model.use_bias': 1}, 'expected bool, got int'),
        ({'model.positions': None}, 'expected str, got NoneType'),
        (
            {'model.positions': 'sinusoid'},
            'learned, sinusoidal, rotary, alibi, relative, none; did you mean sinusoidal',
        ),
        ({'model.dropout_rate': 1.0}, 'at least 0 and below 1'),
        ({'optim.learning_rate': float('nan')}, 'must be a finite number, 0 or more'),
        ({'model.num_layers': 0}, 'must be above 0'),
        ({'seed': -1}, 'must be from 0 to 2147483647'),
        ({'train.steps': 10**20}, 'must be at most 2147483647'),
        ({'data.vocab_size': 2**32}, 'must be at most 2147483647'),
        ({'data.vocab_size': 2**30}, 'must be from 1 to 1000000'),
        ({'data.path': 'caf\udce9.txt'}, 'not UTF-8; rename it'),
        ({'data.document_separator': ''}, 'must not be empty'),
        ({'data.pack_documents': 1}, 'expected bool, got int'),
        ({'train.keep': 1}, 'must be 2 or more'),
        ({'mesh.data': 0}, 'or -1 for all devices'),
        ({'data.corpus': 'python_doc'}, 'digits, tfds:NAME; did you mean python_docs'),
        ({'data.corpus': 'tfds:'}, 'expected tfds:NAME or tfds:NAME/CONFIG, for example'),
        ({'data.corpus': 'tfds:two words'}, 'expected tfds:NAME or tfds:NAME/CONFIG'),
        ({'data.tokenizer': 'bytes'}, 'choose from char, byte, sentencepiece; did you mean byte'),
        ({'data.vocab_size': 0}, 'must be from 1 to 1000000'),
        ({'data.vocab_size': 'many'}, 'expected int, got str'),
    ],
)
def test_a_wrong_value_gets_one_line(values, line):
    with pytest.raises(ConfigError) as caught:
        with_values(tiny_config(), values)
    assert line in str(caught.value)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('values', 'line'),
    [
        ({'model.num_heads': 3}, 'does not divide model.d_model=16; head counts that do: 1, 2, 4'),
        ({'train.log_every': 3}, 'must be a multiple of train.steps_per_call=2, for example 4'),
        ({'train.steps': 13}, 'train.steps=13: must be a multiple'),
        (
            {'model.positions': 'rotary', 'model.num_heads': 16},
            'd_head = 16/16 = 1 is odd; head counts that make it even: 1, 2, 4, 8',
        ),
        (
            {'model.positions': 'rotary', 'model.d_model': 9, 'model.num_heads': 3},
            'd_head = 9/3 = 3 is odd; take an even model.d_model',
        ),
        (
            {'model.norm_placement': 'deepnorm', 'model.residual': False},
            'weighs the residual connection, which model.residual=False takes away',
        ),
        (
            {'model.attention': 'blockwise', 'model.dropout_rate': 0.1},
            'model.dropout_rate=0.1: drops attention weights, which model.attention=blockwise',
        ),
        (
            {'model.attention': 'cudnn', 'model.dtype': 'bfloat16'},
            'model.attention=cudnn: runs on NVIDIA GPUs alone, and this is a cpu',
        ),
        ({'model.attention': 'pallas'}, 'model.attention=pallas: runs on TPUs alone'),
        (
            {'data.document_separator': '\n', 'data.corpus': 'python_docs'},
            "data.document_separator='\\n': cuts the files of data.corpus=text alone",
        ),
        (
            {'data.pack_documents': True, 'model.family': 'encoder'},
            'data.pack_documents=True: for model.family=decoder alone',
        ),
        ({'optim.warmup_steps': 12}, 'optim.warmup_steps=12: must be below train.steps=12'),
        ({'data.vocab_size': 300}, 'leave it out, or set data.tokenizer=sentencepiece'),
        (
            {'data.vocab_size': 300, 'data.tokenizer': 'byte'},
            'data.vocab_size=300: the tokenizer byte has the size that it has',
        ),
    ],
)
def test_values_that_contradict_each_other_are_impossible(values, line):
    with pytest.raises(ImpossibleError) as caught:
        resolve(tiny_config(**values))
    assert line in str(caught.value)


def test_a_missing_key_is_named():
    config = tiny_config()
    del config.model.norm_placement
    with pytest.raises(ConfigError, match=r'model\.norm_placement: missing'):
        resolve(config)


def test_differences_leave_out_topology_axes_and_logging():
    a = resolve(tiny_config())
    same = with_values(
        a,
        {'mesh.data': 8, 'sweep': (('seed', (0, 1)),), 'train.seeds': 'map', 'train.log_every': 4},
    )
    assert differences(a, same) == {}
    other = with_values(a, {'model.num_heads': 4, 'seed': 3})
    assert differences(a, other) == {'model.num_heads': (2, 4), 'seed': (0, 3)}


def test_a_configuration_is_read_before_jax_looks_for_devices():
    """How many devices a CPU is follows from the configuration, and can be said only before."""
    program = (
        'from configs import heads_sweep; from minigpt_jax.training import sweep;'
        'from jax._src import xla_bridge;'
        'sweep.cpu_devices(heads_sweep.get_config(), 2);'
        'assert not xla_bridge.backends_are_initialized()'
    )
    subprocess.run([sys.executable, '-c', program], check=True)
