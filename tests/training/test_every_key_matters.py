"""Every leaf of a configuration does something: a second valid value changes what is computed.

`CASES` has a line for each key: another value, and where it shows. A new key fails the first test
until it has one; a key whose use is taken out of the code fails the second.
"""

import json

import jax
import numpy as np
import pytest

from minigpt_jax.data import corpora
from minigpt_jax.model import positions
from minigpt_jax.report.writers import read_lines
from minigpt_jax.training import loop, optim, sharding, steps, sweep, tasks
from minigpt_jax.training.config import KEYS, ConfigError, flatten, resolve, with_values
from tests.conftest import tiny_config


def task(config, corpus):
    return tasks.TASKS[config.model.family](config, corpus)


def load(config):
    return tasks.TASKS[config.model.family].load(config.data)


# Where a key shows. Each is a function of a resolved configuration and of its corpus.


def step(config, corpus):
    """The program of a train call, as it is handed to the compiler."""
    vocab_size = corpus.tokenizer.vocab_size
    state = jax.eval_shape(steps.make_init(config, vocab_size), 0)
    family = task(config, corpus)
    batches = family.abstract_batches()[0]
    model = steps.build_model(config, vocab_size)
    call = steps.make_train_call(config, model, losses=family.losses)
    return jax.jit(call).lower(state, batches).as_text()


def start(config, corpus):
    state = steps.make_init(config, corpus.tokenizer.vocab_size)(config.seed)
    return [x.tobytes() for x in jax.tree.leaves(state.params)]


def uncompiled(config, corpus, num_seeds=1):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Program, '_compile', lambda self: None)
        return loop.Program(config, corpus, num_seeds)


def first_batch(config, corpus):
    seeds = sweep.expand(config)[0].seeds
    batch = next(uncompiled(config, corpus, len(seeds)).batches(seeds, 0))
    return [(x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(batch)]


def learning_rates(config, corpus):
    schedule = optim.make_schedule(config.optim, config.train.steps)
    return [float(schedule(t)) for t in range(config.train.steps + 1)]


def validation(config, corpus):
    return [x.shape for x in jax.tree.leaves(uncompiled(config, corpus).task.validation())]


def text(config, corpus):
    held_out = getattr(corpus, 'validation_tokens', None)
    if held_out is None:
        held_out = corpus.validation.source
    return corpus.sha256, corpus.tokenizer, bytes(held_out)


def judged(config, corpus):
    vocab_size = corpus.tokenizer.vocab_size
    params = steps.make_init(config, vocab_size)(config.seed).params
    return list(task(config, corpus).judge(steps.build_model(config, vocab_size), params))


def prompt(config, corpus):
    return tasks.sample_prompt(config, corpus)


def mesh(config, corpus):
    return uncompiled(config, corpus).mesh.shape


def seed_mesh(config, corpus):
    return uncompiled(config, corpus, num_seeds=2).mesh.shape


def refusal(config, corpus):
    try:
        sweep._check_layout(config, corpus, sharding.make_mesh(config.mesh))
    except ConfigError as error:
        return str(error)
    return None


def points(config, corpus):
    return [point.slug for point in sweep.expand(config)]


def seeds(config, corpus):
    return uncompiled(config, corpus, num_seeds=2).mode


def files(config, corpus):
    """A file that a whole run leaves: asked for last, since it trains."""
    raise AssertionError('see test_keys_that_show_in_files')


CASES = {
    'seed': (3, first_batch),
    'sweep': ((('seed', (0, 1)),), points),
    'data.corpus': ('python_docs', text),
    'data.path': ('OTHER', text),
    'data.document_separator': ('.\n', text),
    'data.pack_documents': (True, step),
    'data.tokenizer': ('byte', text),
    'data.vocab_size': (300, text),
    'data.joint_vocabulary': (True, text),
    'data.source_language': ('fr', text),
    'data.target_language': ('fr', text),
    'data.batch_size': (4, first_batch),
    'data.tokens_per_batch': (400, first_batch),
    'data.num_buckets': (2, first_batch),
    'data.mask_rate': (0.5, first_batch),
    'data.patch_size': (4, first_batch),
    'data.validation_fraction': (0.3, text),
    'model.family': ('encoder_decoder', step),
    'model.d_model': (32, step),
    'model.num_heads': (4, step),
    'model.d_ff': (40, step),
    'model.num_layers': (2, step),
    'model.encoder_layers': (2, step),
    'model.context_length': (12, step),
    'model.norm_placement': ('post', step),
    'model.norm': ('rms', step),
    'model.qk_norm': (True, step),
    'model.residual': (False, step),
    'model.scale_scores': (False, step),
    'model.positions': ('sinusoidal', step),
    'model.activation': ('relu', step),
    'model.attention_form': ('per_head', step),
    'model.attention': ('blockwise', step),
    'model.dropout_rate': (0.5, step),
    'model.tie_embeddings': (False, step),
    'model.joint_embeddings': (True, step),
    'model.use_bias': (True, step),
    'model.init': ('xavier', start),
    'model.dtype': ('bfloat16', step),
    'model.remat': (True, step),
    'model.scan_layers': (True, step),
    'optim.name': ('sgd', step),
    'optim.learning_rate': (0.5, learning_rates),
    'optim.schedule': ('constant', learning_rates),
    'optim.warmup_steps': (5, learning_rates),
    'optim.final_learning_rate': (1e-3, learning_rates),
    'optim.b1': (0.5, step),
    'optim.b2': (0.5, step),
    'optim.weight_decay': (0.5, step),
    'optim.clip_norm': (0.5, step),
    'optim.rules': ((), step),
    'train.steps': (16, files),
    'train.steps_per_call': (1, first_batch),
    'train.accumulation_steps': (2, step),
    'train.label_smoothing': (0.1, step),
    'train.seeds': ('vmap', seeds),
    'train.log_every': (4, files),
    'train.log_layer_norms': (True, step),
    'train.checkpoint_every': (6, files),
    'train.keep': (3, files),
    'eval.every': (6, files),
    'eval.batch_size': (8, validation),
    'eval.decoded_pairs': (0, judged),
    'eval.sample_prompt': ('the next', prompt),
    'eval.sample_tokens': (5, files),
    'mesh.data': (2, mesh),
    'mesh.fsdp': (2, mesh),
    'mesh.tensor': (2, mesh),
    'mesh.seed': (2, seed_mesh),
    'mesh.uneven': ('refuse', refusal),
}


# What a key needs beside it to be of use, where that is not what `tiny_config` has.
PAIRS = {
    'model.family': 'encoder_decoder',
    'model.encoder_layers': 1,
    'model.context_length': 40,
    'data.corpus': 'parallel',
    'data.path': 'PAIRS',
    'train.steps_per_call': 1,
}
IMAGES = {
    'model.family': 'image',
    'model.context_length': 16,
    'data.corpus': 'digits',
    'data.path': None,
}
BASES = {
    'data.pack_documents': {'data.document_separator': '.\n'},
    'data.vocab_size': {'data.tokenizer': 'sentencepiece', 'data.vocab_size': 290},
    'data.joint_vocabulary': PAIRS,
    'data.source_language': PAIRS,
    'data.target_language': PAIRS,
    'data.tokens_per_batch': PAIRS,
    'data.num_buckets': PAIRS,
    'model.encoder_layers': PAIRS,
    'model.joint_embeddings': PAIRS | {'data.joint_vocabulary': True},
    'eval.decoded_pairs': PAIRS,
    'data.mask_rate': {'model.family': 'encoder'},
    'mesh.uneven': {'mesh.tensor': 3},
    'data.patch_size': IMAGES,
}
# What must change with a key, to stay possible.
ALONG = {'model.family': PAIRS, 'data.patch_size': {'model.context_length': 4}}


@pytest.fixture(scope='module')
def paths(text_file, tmp_path_factory):
    root = tmp_path_factory.mktemp('other')
    (root / 'other.txt').write_text(text_file.read_text().replace('and', 'und'))
    for end, word in (('en', 'and'), ('ko', '그리고'), ('fr', 'et')):
        lines = [f'{i} {word} {i * i}' + ' 0' * (i % 7) + '\n' for i in range(60)]
        (root / f'train.{end}').write_text(''.join(lines))
    return {'BASE': str(text_file), 'OTHER': str(root / 'other.txt'), 'PAIRS': str(root)}


def with_paths(values, paths):
    return {k: paths.get(v, v) if isinstance(v, str) else v for k, v in values.items()}


def shows(key, paths):
    """Whether the second value of `key` changes what its case looks at."""
    value, look = CASES[key]
    base = resolve(tiny_config(paths['BASE'], **with_paths(BASES.get(key, {}), paths)))
    changed = with_paths(ALONG.get(key, {}) | {key: value}, paths)
    if key == 'data.corpus':
        changed['data.path'] = None
    if key == 'model.d_model':
        changed['model.d_ff'] = base.model.d_ff
    other = resolve(with_values(base, changed))
    assert flatten(base)[key] != flatten(other)[key]
    seen = [look(config, load(config)) for config in (base, other)]
    assert look(base, load(base)) == seen[0], 'looking twice must see the same'
    return seen[0] != seen[1]


def test_every_key_has_a_case_and_every_case_a_key():
    assert set(CASES) == set(KEYS)


WITHOUT_FILES = [key for key, case in CASES.items() if case and case[1] is not files]


@pytest.mark.parametrize('key', WITHOUT_FILES)
def test_a_second_value_shows(key, paths):
    assert shows(key, paths)


FILES = {
    'train.steps': lambda run: read_lines(run / 'metrics.jsonl')[-1]['step'],
    'train.log_every': lambda run: (run / 'metrics.jsonl').read_text().count('train_loss'),
    'eval.every': lambda run: (run / 'metrics.jsonl').read_text().count('val_loss'),
    'train.checkpoint_every': lambda run: sorted(p.name for p in (run / 'checkpoints').iterdir()),
    'train.keep': lambda run: sorted(p.name for p in (run / 'checkpoints').iterdir()),
    'eval.sample_tokens': lambda run: len((run / 'samples.txt').read_text()),
}


@pytest.mark.slow
def test_keys_that_show_in_files(paths, tmp_path):
    assert set(FILES) == {key for key, case in CASES.items() if case and case[1] is files}
    sweep.run(tiny_config(paths['BASE']), tmp_path / 'base')
    for key, look in FILES.items():
        config = tiny_config(paths['BASE'], **{key: CASES[key][0]})
        sweep.run(config, tmp_path / key)
        assert look(tmp_path / key) != look(tmp_path / 'base'), key
        assert json.loads((tmp_path / key / 'summary.json').read_text())['status'] == 'ok'


# The proof can fail: with the use of a key taken out, its case sees nothing.


def test_a_key_without_use_is_found_out(paths, monkeypatch):
    monkeypatch.setattr(steps, 'dropout_key', lambda config, state: None)
    assert not shows('model.dropout_rate', paths)


def test_a_key_without_use_is_found_out_in_the_schedule(paths, monkeypatch):
    monkeypatch.setattr(optim, 'make_schedule', lambda *_: lambda step: 1e-3)
    assert not shows('optim.warmup_steps', paths)


def test_a_key_without_use_is_found_out_in_the_model(paths, monkeypatch):
    only = positions.LearnedPositions
    monkeypatch.setitem(positions.EMBEDDING_POSITIONS, 'sinusoidal', only)
    steps._abstract_model.cache_clear()  # of models as they were before, then of these
    assert not shows('model.positions', paths)
    steps._abstract_model.cache_clear()


def test_a_key_without_use_is_found_out_in_the_data(paths, monkeypatch):
    split = corpora.split_documents
    monkeypatch.setattr(corpora, 'split_documents', lambda texts, _: split(texts, 0.1))
    monkeypatch.setattr(corpora.TextFiles, 'VERSION', '9.9.9')  # nothing prepared before
    assert not shows('data.validation_fraction', paths)
