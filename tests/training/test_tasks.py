"""An encoder-decoder trained through the loop: that it learns, its files, buckets and seeds."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest

from minigpt_jax.data import batches
from minigpt_jax.inference.decoding import translate
from minigpt_jax.report.writers import read_lines
from minigpt_jax.training import loop, losses, sharding, steps, sweep, tasks
from minigpt_jax.training.checkpoint import load_run
from minigpt_jax.training.config import ImpossibleError, RunError, resolve, with_values
from tests.conftest import tiny_config


def pair_config(corpus, **values):
    """A model that learns words of eight letters."""
    base = {
        'model.family': 'encoder_decoder',
        'model.d_model': 32,
        'model.num_layers': 1,
        'model.context_length': 16,
        'data.corpus': corpus,
        'data.batch_size': 64,
        'data.validation_fraction': 0.02,
        'optim.learning_rate': 1e-2,
        'optim.final_learning_rate': 1e-4,
        'optim.weight_decay': 0.0,
        'optim.warmup_steps': 20,
        'train.steps': 180,
        'train.steps_per_call': 20,
        'train.log_every': 20,
        'train.checkpoint_every': 180,
        'eval.every': 180,
        'eval.batch_size': 64,
        'eval.decoded_pairs': 256,
    }
    return tiny_config(**base | values)


def learned(corpus, workdir, **values):
    """A run on words, judged by greedy translations of words that it has not seen."""
    quickly = {'model.num_heads': 1, 'optim.b2': 0.95}
    assert sweep.run(pair_config(corpus, **quickly, **values), workdir) == 0
    summary = json.loads((workdir / 'summary.json').read_text())
    assert summary['exact_match'] >= 0.99
    assert read_lines(workdir / 'metrics.jsonl')[-1]['exact_match'] == summary['exact_match']
    return summary


@pytest.fixture(scope='module')
def copier(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('copier')
    summary = learned('copy', workdir)
    return workdir, load_run(workdir), summary


WORDS = ['abcd', 'hgfedcba', 'cab']


@pytest.mark.slow
def test_copies_words_that_it_has_not_seen(copier):
    workdir, run, summary = copier
    assert 0 < summary['padding_share'] < 1
    assert summary['bleu'] == 0  # which counts four words in a row: here is one a line
    found = translate(run.model, run.params, run.tokenizer, 16, WORDS, beam_size=3)
    assert [best[0].text for best in found] == WORDS
    lines = (workdir / 'samples.txt').read_text().splitlines()
    assert len(lines) == 15
    for source, found, target in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert len(found.removeprefix('→ ')) == len(source)
        assert target == f'= {source}'


@pytest.mark.slow
def test_reverses_words_that_it_has_not_seen(tmp_path):
    # To count from the end of a word takes a second layer.
    layers = {'model.num_layers': 2, 'model.encoder_layers': 2}
    summary = learned('reverse', tmp_path, **layers)
    assert summary['encoder_layers'] == 2
    lines = (tmp_path / 'samples.txt').read_text().splitlines()
    assert [line.removeprefix('= ') for line in lines[2::3]] == [x[::-1] for x in lines[::3]]


@pytest.mark.slow
def test_a_match_is_of_every_token_from_the_first_to_eos(copier):
    _, run, _ = copier
    corpus = tasks.TranslatePairs.load(run.config.data)
    target = corpus.validation.target.copy()
    target[corpus.validation.target_starts[:-1] + 2] = 4  # each third letter is an 'a'
    validation = dataclasses.replace(corpus.validation, target=target)
    changed = tasks.TranslatePairs(run.config, dataclasses.replace(corpus, validation=validation))
    judged = changed.judge(run.model, run.params)
    assert 0.05 < judged['exact_match'] < 0.25  # one in eight letters was an 'a'


SHORT = {
    'train.steps': 4,
    'train.steps_per_call': 1,
    'train.log_every': 1,
    'train.checkpoint_every': 2,
    'eval.every': 4,
    'eval.decoded_pairs': 0,
    'data.num_buckets': 2,
    'data.tokens_per_batch': 160,
    'model.dropout_rate': 0.1,
    'optim.warmup_steps': 1,
}


def bits(run_dir):
    leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves(load_run(run_dir).params)]
    return leaves, (run_dir / 'metrics.jsonl').read_text()


@pytest.mark.slow
def test_a_killed_run_on_buckets_resumes_to_the_same_bits(tmp_path, monkeypatch):
    config = pair_config('copy', **SHORT)
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    assert sweep.run(config, whole) == 0
    call, calls = loop.Program.train_call, []

    def fails_in_the_fourth_call(self, state, batches):
        calls.append(loop._shape(batches))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return call(self, state, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Program, 'train_call', fails_in_the_fourth_call)
        with pytest.raises(KeyboardInterrupt):
            sweep.run(config, killed)
    assert len(set(calls)) > 1  # there are several shapes among them
    assert sweep.run(config, killed) == 0
    assert bits(killed) == bits(whole)


@pytest.mark.slow
def test_the_newest_checkpoints_are_averaged(tmp_path):
    sweep.run(pair_config('copy', **SHORT), tmp_path)
    # At steps 2 and 4; the older one alone is read where the newer one is gone.
    newest, mean = (jax.tree.leaves(load_run(tmp_path, average).params) for average in (1, 2))
    with pytest.raises(
        RunError, match=r'checkpoints are 2, too few.* train with --config\.train\.keep=3'
    ):
        load_run(tmp_path, 3)
    shutil.rmtree(tmp_path / 'checkpoints' / '4')
    older = jax.tree.leaves(load_run(tmp_path).params)
    for x, y, both in zip(newest, older, mean, strict=True):
        np.testing.assert_allclose(both, (x + y) / 2, rtol=1e-6)
        assert (np.asarray(x) != y).any()


@pytest.mark.slow
def test_evaluation_over_buckets_is_that_over_one_shape(tmp_path):
    sums = []
    for num_buckets in (1, 2):
        values = SHORT | {'data.num_buckets': num_buckets, 'eval.batch_size': 7}
        config = resolve(pair_config('copy', **values))
        program = loop.Program(config, tasks.TranslatePairs.load(config.data))
        sums.append(jax.device_get(program.evaluate(program.init(0).params)))
    np.testing.assert_allclose(*sums, rtol=1e-5)
    assert sums[0][1] == program.corpus.validation.target_lengths.sum()


@pytest.mark.slow
def test_seeds_in_one_program_leave_the_bits_of_separate_runs(tmp_path):
    values = SHORT | {'data.num_buckets': 1, 'sweep': (('seed', (0, 1)),)}
    for mode in ('map', 'separate'):
        config = pair_config('copy', **values, **{'train.seeds': mode})
        assert sweep.run(config, tmp_path / mode) == 0
    for seed in (0, 1):
        one, other = (
            bits(tmp_path / mode / f'points/base/seed-{seed}') for mode in ('map', 'separate')
        )
        assert one == other


def test_label_smoothing_is_a_mixture_with_the_uniform_distribution():
    rng = np.random.default_rng(0)
    logits_BTV, targets_BT = rng.standard_normal((2, 3, 5)), rng.integers(0, 5, (2, 3))
    mask_BT = np.array([[1, 1, 0], [1, 0, 0]], bool)
    log_p = np.asarray(jax.nn.log_softmax(np.float32(logits_BTV)))
    wanted = 0.9 * np.eye(5)[targets_BT] + 0.1 / 5
    expected = -(wanted * log_p).sum(-1)[mask_BT].sum()
    total, count = losses.next_token_loss(logits_BTV, targets_BT, mask_BT, smoothing=0.1)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert count == 3


def test_the_loss_is_a_mean_over_target_tokens_whatever_the_padding():
    config = resolve(pair_config('copy', **SHORT))
    corpus = tasks.TranslatePairs.load(config.data)
    task = tasks.TranslatePairs(config, corpus)
    vocab_size = corpus.tokenizer.vocab_size
    model = steps.build_model(config, vocab_size)
    params = steps.make_init(config, vocab_size)(0).params
    batch = task.batch(0, 0)
    losses = jax.jit(functools.partial(steps.pair_losses, key=None, model=model))
    total, count = losses(params, batch)
    assert count == batch['target_lengths_B'].sum()
    wide = {
        name: np.pad(x, [(0, 3), *[(0, 2)] * (x.ndim - 1)], constant_values=0)
        for name, x in batch.items()
    }
    wide_total, wide_count = losses(params, wide)
    assert wide_count == count
    np.testing.assert_allclose(wide_total, total, rtol=1e-5)


@pytest.mark.parametrize(
    ('values', 'line'),
    [
        ({'data.corpus': 'text'}, 'data.corpus=text: model.family=encoder_decoder learns from'),
        ({'model.family': 'decoder'}, 'data.corpus=copy: model.family=decoder learns from'),
        ({'model.joint_embeddings': True}, 'set data.joint_vocabulary=True as well'),
        ({'data.num_buckets': 2, 'train.steps_per_call': 20}, 'the steps of a call share a shape'),
        ({'data.num_buckets': 2, 'train.seeds': 'map'}, 'the seeds of a program share a shape'),
    ],
)
def test_values_that_contradict_each_other_are_impossible(values, line):
    with pytest.raises(ImpossibleError) as caught:
        resolve(pair_config('copy', **values))
    assert line in str(caught.value)
    assert '\n' not in str(caught.value)


def test_keys_of_pairs_are_refused_for_a_decoder():
    for key, value in (('model.encoder_layers', 2), ('data.num_buckets', 3)):
        with pytest.raises(ImpossibleError, match=r'for model\.family=encoder_decoder alone'):
            resolve(tiny_config(**{key: value}))


# Encoders alone: hidden tokens, images.


ALONE = {
    'encoder': {'model.family': 'encoder', 'model.context_length': 16},
    'image': {
        'model.family': 'image',
        'model.context_length': 16,
        'data.corpus': 'digits',
        'data.path': None,
    },
}


@pytest.mark.parametrize('family', ALONE)
def test_a_family_learns_is_judged_and_resumes_to_the_same_bits(family, tmp_path, monkeypatch):
    alphabet = tmp_path / 'alphabet.txt'
    alphabet.write_text('abcdefghij' * 600)
    learns = {'train.steps': 240, 'train.steps_per_call': 20, 'train.log_every': 20}
    learns |= {'train.checkpoint_every': 100, 'eval.every': 100, 'optim.learning_rate': 1e-2}
    config = tiny_config(alphabet, **ALONE[family] | learns)
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    assert sweep.run(config, whole) == 0
    summary = json.loads((whole / 'summary.json').read_text())
    first, *_, last = (
        x['accuracy'] for x in read_lines(whole / 'metrics.jsonl') if 'accuracy' in x
    )
    assert summary['accuracy'] == last >= first
    assert last > 0.2  # one in ten by chance
    assert 'accuracy' in (whole / 'report.md').read_text()
    assert '→' in (whole / 'samples.txt').read_text()

    run = load_run(whole)
    task_class = tasks.TASKS[family]
    task = task_class(run.config, task_class.load(run.config.data))
    assert task.judge(run.model, run.params)['accuracy'] == last
    other = with_values(run.config, {'eval.batch_size': 7})
    judged = task_class(other, task.corpus).judge(run.model, run.params)['accuracy']
    np.testing.assert_allclose(judged, last, atol=0.01)  # whatever the batch

    call, calls = loop.Program.train_call, []

    def fails_behind_a_checkpoint(self, state, batches):
        calls.append(0)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return call(self, state, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Program, 'train_call', fails_behind_a_checkpoint)
        with pytest.raises(KeyboardInterrupt):
            sweep.run(config, killed)
    assert sweep.run(config, killed) == 0
    assert bits(killed) == bits(whole)


def test_the_same_tokens_of_validation_are_hidden_whatever_the_batch(text_file):
    hidden = []
    for batch_size in (3, 16):
        config = resolve(
            tiny_config(text_file, **ALONE['encoder'], **{'eval.batch_size': batch_size})
        )
        corpus = tasks.GuessTokens.load(config.data)
        (batches,) = tasks.GuessTokens(config, corpus).validation()
        count = len(corpus.validation_tokens) - 1
        hidden.append({name: x.reshape(-1)[:count] for name, x in batches.items()})
        assert not batches['mask_BT'].reshape(-1)[count:].any()
    for name, x in hidden[0].items():
        np.testing.assert_array_equal(x, hidden[1][name])
    np.testing.assert_array_equal(hidden[0]['targets_BT'], corpus.validation_tokens[1:])
    assert 0.05 < hidden[0]['mask_BT'].mean() < 0.3


def test_a_rate_that_hides_nothing_of_validation_is_refused(text_file):
    values = {'data.mask_rate': 1e-7, 'mesh.data': 1}
    config = resolve(tiny_config(text_file, **ALONE['encoder'] | values))
    corpus = tasks.GuessTokens.load(config.data)
    with pytest.raises(ValueError, match=r'data\.mask_rate=1e-07: hides none of the'):
        tasks.GuessTokens(config, corpus).check(sharding.make_mesh(config.mesh))


def test_no_more_pairs_are_decoded_than_asked_for(monkeypatch):
    decoded = []

    def nothing(model, params, batch, *_):
        decoded.append((batch['target_lengths_B'] > 0).sum())
        rows = len(batch['target_lengths_B'])
        return np.zeros((rows, 1), int), np.ones(rows, int)

    monkeypatch.setattr(tasks, 'translate_batch', nothing)
    for asked in (5, 7, 10**6):
        config = resolve(pair_config('copy', **SHORT | {'eval.decoded_pairs': asked}))
        task = tasks.TranslatePairs(config, tasks.TranslatePairs.load(config.data))
        decoded.clear()
        task.judge(None, None)
        assert sum(decoded) == min(asked, len(task.corpus.validation.source_lengths))


# Rows of several hosts.


@pytest.mark.parametrize('family', ['decoder', 'encoder', 'encoder_decoder', 'image'])
def test_hosts_read_their_rows_of_the_batches_that_one_host_reads(family, text_file):
    if family == 'encoder_decoder':
        config = pair_config('copy', **{'train.steps_per_call': 1, 'data.num_buckets': 2})
    else:
        config = resolve(tiny_config(text_file, **ALONE.get(family, {})))
    task = tasks.TASKS[config.model.family]
    task = task(config := resolve(config), task.load(config.data))
    shares = [batches.WHOLE, batches.Share(0, 3, 4), batches.Share(3, 4, 4)]
    whole, first, second = (task.batches(7, 4, share) for share in shares)
    for _, expected, *parts in zip(range(3), whole, first, second, strict=False):
        for name, x in expected.items():
            assert parts[0][name].shape[1] == 3 * parts[1][name].shape[1]
            np.testing.assert_array_equal(np.concatenate([p[name] for p in parts], 1), x)
