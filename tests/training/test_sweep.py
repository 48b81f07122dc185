"""The points of a sweep, and running them."""

import csv
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minigpt_jax.data import corpora
from minigpt_jax.data.batches import load_tokenized
from minigpt_jax.model.positions import POSITIONS
from minigpt_jax.report.writers import read_lines
from minigpt_jax.training import loop, sharding, steps, sweep
from minigpt_jax.training.checkpoint import Checkpoints, RunError, load_run
from minigpt_jax.training.config import ConfigError, read_config, resolve, write_config
from tests.conftest import ROOT, tiny_config

HEADS = (('model.num_heads', (1, 2)), ('seed', (0, 1, 2)))


def test_points_are_the_product_of_the_axes_without_seed():
    axes = (
        ('model.num_heads', (1, 2)),
        ('seed', (3, 4)),
        ('model.norm_placement', ('pre', 'post')),
    )
    points = sweep.expand(tiny_config(sweep=axes))
    assert [point.slug for point in points] == [
        'num_heads-1_norm_placement-pre',
        'num_heads-1_norm_placement-post',
        'num_heads-2_norm_placement-pre',
        'num_heads-2_norm_placement-post',
    ]
    assert {point.seeds for point in points} == {(3, 4)}
    assert [p.config.model.num_heads for p in points] == [1, 1, 2, 2]
    assert [p.config.model.norm_placement for p in points] == ['pre', 'post'] * 2


def test_keys_of_a_joint_axis_vary_together():
    axes = ((('model.num_heads', 'model.d_model'), ((2, 8), (4, 16))),)
    points = sweep.expand(tiny_config(sweep=axes))
    assert [(p.config.model.num_heads, p.config.model.d_model) for p in points] == [(2, 8), (4, 16)]
    assert [p.config.model.d_ff for p in points] == [32, 64]  # derived from the swept width


def test_without_a_sweep_there_is_one_point_at_the_workdir(tmp_path):
    (point,) = sweep.expand(tiny_config(seed=5))
    assert (point.slug, point.seeds, point.values) == (None, (5,), {})
    assert point.run_dir(tmp_path, 5) == tmp_path


def test_an_impossible_point_is_kept_with_its_reason():
    points = sweep.expand(tiny_config(sweep=(('model.num_heads', (1, 3, 4)),)))
    assert [point.config is None for point in points] == [False, True, False]
    assert 'does not divide' in points[1].error


@pytest.mark.parametrize(
    ('axes', 'line'),
    [
        ((3,), '3 is not an axis'),
        ((('model.num_heads', 4),), "the values of 'model.num_heads' must be a tuple"),
        ((('model.num_heads', ()),), "the values of 'model.num_heads' must be a tuple"),
        ((('model.num_hats', (1, 2)),), 'did you mean model.num_heads'),
        ((('model', (1, 2)),), 'model: a group, not a key; its keys: model.family'),
        ((('optim.weight_decay', (1e300,)),), 'must be a finite number, 0 or more'),
        ((('optim.learning_rate', (float('nan'),)),), 'must be a finite number, 0 or more'),
        ((('model.num_heads', ('a', 2)),), "model.num_heads='a': expected int"),
        ((('model.positions', ('learnt',)),), 'did you mean learned'),
        ((('model.num_heads', (1, 1)),), 'a value of model.num_heads stands twice'),
        ((('seed', (0, 1)), ('seed', (2,))), 'seed is on two axes'),
        ((('seed', (0, -1)),), 'seed=-1: must be from 0'),
        (((('model.num_heads', 'model.d_model'), ((2, 8), (4,))),), 'must have a value for each'),
        (((('seed', 'model.d_model'), ((2, 8),)),), 'seed must be an axis of its own'),
        ((('mesh.data', (1, 2)),), 'mesh.data cannot be an axis'),
        ((('data.corpus', ('text', 'python_docs')),), 'data.corpus cannot be an axis: losses of'),
        ((('model.family', ('decoder', 'encoder')),), 'model.family cannot be an axis: losses of'),
        ((('eval.sample_prompt', ('a/b', 'a_b')),), 'two points would share a directory'),
    ],
)
def test_a_sweep_of_the_wrong_structure_gets_one_line(axes, line):
    with pytest.raises(ConfigError) as caught:
        sweep.expand(tiny_config(sweep=axes))
    assert line in str(caught.value)
    assert '\n' not in str(caught.value)


def parameters(run_dir):
    return jax.tree.map(np.asarray, load_run(run_dir).params)


def bits(run_dir):
    """What bit-identical runs share: metrics, parameters, samples."""
    leaves = [x.tobytes() for x in jax.tree.leaves(parameters(run_dir))]
    texts = [(run_dir / name).read_text() for name in ('metrics.jsonl', 'samples.txt')]
    return leaves, texts


@pytest.fixture(scope='module')
def finished(text_file, tmp_path_factory):
    """A finished sweep over two head counts and three seeds, with dropout, mapped."""
    workdir = tmp_path_factory.mktemp('sweep')
    config = tiny_config(text_file, sweep=HEADS, **{'model.dropout_rate': 0.1})
    assert sweep.run(config, workdir) == 0
    return workdir, config


def test_a_sweep_leaves_all_its_files(finished):
    workdir, _ = finished
    run_dirs = [workdir / f'points/num_heads-{h}/seed-{s}' for h in (1, 2) for s in (0, 1, 2)]
    for run_dir in run_dirs:
        names = {path.name for path in run_dir.iterdir()}
        assert names >= {
            'config.json', 'metrics.jsonl', 'timing.jsonl', 'summary.json', 'checkpoints',
            'tensorboard', 'samples.txt', 'tokenizer.json',
        }  # fmt: skip
        assert list((run_dir / 'tensorboard').iterdir())
    names = {path.name for path in workdir.iterdir()}
    assert names >= {'config.json', 'results.csv', 'report.md', 'report.html', 'figures', 'points'}
    rows = list(csv.DictReader((workdir / 'results.csv').open()))
    assert [(row['num_heads'], row['seed']) for row in rows] == [
        (h, s) for h in '12' for s in '012'
    ]
    assert {row['status'] for row in rows} == {'ok'}
    assert len({row['num_params'] for row in rows}) == 1
    assert len({row['val_loss'] for row in rows}) == 6  # six different runs
    for row in rows:
        assert float(row['val_perplexity']) == pytest.approx(np.exp(float(row['val_loss'])))
        assert 0 < float(row['bits_per_byte']) < 8


@pytest.mark.slow
def test_tokenizers_are_compared_by_bits_per_byte_of_the_same_text(text_file, tmp_path):
    tokenizers = (('char', None), ('sentencepiece', 300), ('sentencepiece', 5000))
    axes = ((('data.tokenizer', 'data.vocab_size'), tokenizers),)
    assert sweep.run(tiny_config(text_file, sweep=axes), tmp_path) == 1
    _, (text,) = corpora.split_documents([text_file.read_text()], 0.1)
    num_tokens = []
    for tokenizer, size in tokenizers[:2]:
        run_dir = tmp_path / f'points/tokenizer-{tokenizer}_vocab_size-{size}/seed-0'
        run, summary = load_run(run_dir), json.loads((run_dir / 'summary.json').read_text())
        tokens = run.tokenizer.encode(text)
        nats = summary['val_loss'] * (len(tokens) - 1)  # every token but the first is predicted
        expected = nats / np.log(2) / len(text.encode())
        assert summary['bits_per_byte'] == pytest.approx(expected)
        assert (run_dir / 'samples.txt').read_text().startswith(text.split()[0])
        num_tokens.append(len(tokens))
    assert num_tokens[0] > num_tokens[1]
    report = (tmp_path / 'report.md').read_text()
    assert 'lowest validation loss' in report
    *_, large = csv.DictReader((tmp_path / 'results.csv').open())
    assert large['status'] == 'invalid'
    assert 'data.vocab_size=5000: the training text gives at most' in large['error']


def test_metrics_have_a_line_a_logged_step_and_evaluations_among_them(finished):
    workdir, _ = finished
    run_dir = workdir / 'points/num_heads-2/seed-1'
    lines = read_lines(run_dir / 'metrics.jsonl')
    assert [line['step'] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert [line['step'] for line in lines if 'val_loss' in line] == [4, 8, 12]
    assert all(np.isfinite(line['train_loss']) for line in lines)
    assert lines[-1]['val_loss'] < lines[1]['val_loss']
    timing = read_lines(run_dir / 'timing.jsonl')
    assert [line['step'] for line in timing] == [2, 4, 6, 8, 10, 12]
    assert not {'seconds', 'tokens_per_second'} & set(lines[0])  # metrics are reproducible


@pytest.mark.slow
def test_the_same_seed_sees_the_same_start_and_batches_at_every_point(
    finished, text_file, tmp_path
):
    """With a learning rate of 0 nothing but the batches can differ from step to step."""
    axes = (('model.num_heads', (1, 2)), ('seed', (0, 1)))
    config = tiny_config(text_file, sweep=axes, **{'optim.learning_rate': 0.0})
    sweep.run(config, tmp_path)
    losses = {
        (h, s): [
            line['train_loss']
            for line in read_lines(tmp_path / f'points/num_heads-{h}/seed-{s}/metrics.jsonl')
        ]
        for h in (1, 2)
        for s in (0, 1)
    }
    # At the start all heads attend almost evenly, so that the head count hardly matters yet.
    np.testing.assert_allclose(losses[1, 0], losses[2, 0], rtol=1e-3)
    assert not np.allclose(losses[1, 0], losses[1, 1], rtol=1e-3)
    assert len(set(losses[1, 0])) > 1


@pytest.mark.slow
def test_mapped_seeds_leave_the_bits_of_separate_runs(finished, tmp_path):
    workdir, config = finished
    separate = config.copy_and_resolve_references()
    separate.train.seeds = 'separate'
    sweep.run(separate, tmp_path)
    for seed in (0, 1, 2):
        name = f'points/num_heads-2/seed-{seed}'
        assert bits(workdir / name) == bits(tmp_path / name)


@pytest.mark.slow
def test_seeds_at_once_are_close_to_mapped_ones_and_resume_to_their_own_bits(
    finished, tmp_path, monkeypatch
):
    """What `auto` means on an accelerator, from the first step to the samples."""
    workdir, config = finished
    config = config.copy_and_resolve_references()
    config.train.seeds = 'vmap'
    config.sweep = (('model.num_heads', (2,)), ('seed', (0, 1, 2)))
    assert sweep.run(config, tmp_path / 'undisturbed') == 0
    with monkeypatch.context() as patch:
        kill_before_save(patch, 5)
        with pytest.raises(Killed):
            sweep.run(config, tmp_path / 'killed')
    assert sweep.run(config, tmp_path / 'killed') == 0
    for seed in (0, 1, 2):
        name = f'points/num_heads-2/seed-{seed}'
        assert bits(tmp_path / 'killed' / name) == bits(tmp_path / 'undisturbed' / name)
        mapped, vmapped = (
            [line['train_loss'] for line in read_lines(root / name / 'metrics.jsonl')]
            for root in (workdir, tmp_path / 'undisturbed')
        )
        np.testing.assert_allclose(mapped, vmapped, rtol=1e-3)
    # The same point but for how its seeds train.
    corpus, in_turn = load_tokenized(config.data), config.copy_and_resolve_references()
    in_turn.train.seeds = 'map'
    programs = [loop.Program(sweep.expand(c)[0].config, corpus, 3) for c in (config, in_turn)]
    at_once, one_by_one = ([x.as_text() for x in p.train_calls.values()] for p in programs)
    assert len(at_once) == 1
    assert at_once != one_by_one


@pytest.mark.slow
def test_a_sweep_over_all_positions_reports_them_and_their_sizes(text_file, tmp_path):
    axes = (('model.positions', POSITIONS),)
    config = tiny_config(text_file, sweep=axes, **{'train.steps': 4, 'optim.rules': RULES})
    assert sweep.run(config, tmp_path) == 0
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    assert [row['positions'] for row in rows] == list(POSITIONS)
    assert len(rows) == 6
    assert len({row['num_params'] for row in rows}) == 3  # a table of each position, of distances
    report = (tmp_path / 'report.md').read_text()
    assert 'The points differ in size' in report
    for name in POSITIONS:
        assert f'| {name}' in report


# One that the points with a table of positions have, and only they.
RULES = ((r'positions\.table', 'learning_rate', 0.5), ('.*scale', 'weight_decay', 0.0))


def test_a_finished_sweep_is_not_trained_again_but_its_report_is_rebuilt(finished, monkeypatch):
    workdir, config = finished
    before = (workdir / 'results.csv').read_bytes()
    (workdir / 'results.csv').unlink()
    monkeypatch.setattr(sweep, 'Program', None)  # nothing may be compiled
    assert sweep.run(config, workdir) == 0
    assert (workdir / 'results.csv').read_bytes() == before


def test_another_configuration_is_refused_with_the_command_for_a_fresh_workdir(
    finished, monkeypatch
):
    workdir, config = finished
    monkeypatch.setattr(sys, 'argv', ['train.py', '--config=a b.py', f'--workdir={workdir}'])
    other = config.copy_and_resolve_references()
    other.optim.learning_rate = 1.0
    with pytest.raises(RunError, match=r'optim\.learning_rate was 0\.002, is 1\.0') as caught:
        sweep.run(other, workdir)
    command = f"python -m minigpt_jax.train '--config=a b.py' --workdir={workdir}-2"
    assert str(caught.value).endswith(command)
    assert read_config(workdir).optim.learning_rate == 0.002


def test_a_sweep_and_a_single_run_do_not_share_a_directory(finished, text_file, tmp_path):
    workdir, config = finished
    single = config.copy_and_resolve_references()
    single.sweep = ()
    with pytest.raises(RunError, match='holds a sweep, and this is a single run; for a fresh one'):
        sweep.run(single, workdir)
    write_config(tmp_path, resolve(single), {})
    with pytest.raises(RunError, match='holds a single run, and this is a sweep'):
        sweep.run(config, tmp_path)


def test_a_path_that_nothing_would_read_is_refused(text_file, tmp_path):
    config = tiny_config(text_file, **{'data.corpus': 'python_docs'})
    with pytest.raises(ConfigError, match=r'is read with data\.corpus=text or parallel alone'):
        sweep.run(config, tmp_path)


@pytest.mark.slow
def test_axes_may_grow_and_only_what_is_new_is_trained(finished, tmp_path):
    workdir, config = finished
    copy = tmp_path / 'run'
    shutil.copytree(workdir, copy)
    grown = config.copy_and_resolve_references()
    grown.sweep = (('model.num_heads', (1, 2, 4)), ('seed', (0, 1, 2, 3)))
    old = sorted(workdir.glob('points/*/*/summary.json'))
    assert sweep.run(grown, copy) == 0
    assert len(list(csv.DictReader((copy / 'results.csv').open()))) == 12
    for path in old:
        assert (copy / path.relative_to(workdir)).read_bytes() == path.read_bytes()
    # Mapped alone or beside others, a seed leaves the same bits.
    alone = config.copy_and_resolve_references()
    alone.sweep = (('model.num_heads', (2,)), ('seed', (3,)))
    sweep.run(alone, tmp_path / 'alone')
    name = 'points/num_heads-2/seed-3'
    assert bits(copy / name) == bits(tmp_path / 'alone' / name)


class Killed(BaseException):
    """Stands for a kill: no handler of the code under test may catch it."""


def kill_before_save(monkeypatch, number):
    """The save of this number, counted over all seeds, ends the process."""
    save, count = Checkpoints.save, []

    def save_until_killed(self, step, state):
        count.append(step)
        if len(count) == number:
            raise Killed
        save(self, step, state)

    monkeypatch.setattr(Checkpoints, 'save', save_until_killed)


@pytest.mark.slow
def test_a_seed_that_is_added_to_an_unfinished_point_takes_no_other_back(
    finished, tmp_path, monkeypatch, capsys
):
    workdir, config = finished
    config = config.copy_and_resolve_references()
    config.sweep = (('model.num_heads', (2,)), ('seed', (0, 1)))
    with monkeypatch.context() as patch:
        kill_before_save(patch, 5)
        with pytest.raises(Killed):
            sweep.run(config, tmp_path)
    config.sweep = (('model.num_heads', (2,)), ('seed', (0, 1, 2)))
    capsys.readouterr()
    assert sweep.run(config, tmp_path) == 0
    assert 'continues at step 8 of 12' in capsys.readouterr().out
    for seed in (0, 1, 2):
        name = f'points/num_heads-2/seed-{seed}'
        assert bits(tmp_path / name) == bits(workdir / name)


@pytest.mark.parametrize('killed_at', [1, 2, 4])
def test_a_killed_group_of_seeds_resumes_to_the_same_bits(
    finished, tmp_path, monkeypatch, killed_at
):
    """A kill before the k-th save of three seeds' states: some seeds are a checkpoint ahead."""
    workdir, config = finished
    config = config.copy_and_resolve_references()
    config.sweep = (('model.num_heads', (2,)), ('seed', (0, 1, 2)))
    with monkeypatch.context() as patch:
        kill_before_save(patch, killed_at + 3)
        with pytest.raises(Killed):
            sweep.run(config, tmp_path)
    run_dirs = [f'points/num_heads-2/seed-{seed}' for seed in (0, 1, 2)]
    assert not (tmp_path / run_dirs[0] / 'summary.json').exists()
    # What was written behind the checkpoint, and a line torn by the kill, must go.
    with (tmp_path / run_dirs[0] / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 11, "train_loss": 0.0}\n{"step": 12, "tr')
    assert sweep.run(config, tmp_path) == 0
    for name in run_dirs:
        assert bits(tmp_path / name) == bits(workdir / name)


@pytest.mark.slow
def test_a_kill_after_the_last_save_of_a_point_with_a_diverged_seed(
    text_file, tmp_path, monkeypatch
):
    """Seed 1 diverges at step 7; the kill comes before any summary."""
    config = tiny_config(text_file, sweep=(('seed', (0, 1)),))
    train_step = steps.make_train_step

    def breaking(*args):
        step = train_step(*args)

        def broken(state, batch):
            bad = (state.seed == 1) & (state.step == 6)
            params = jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x), state.params)
            new, metrics = step(state._replace(params=params), batch)
            keep = jax.tree.map(lambda a, b: jnp.where(bad, a, b), state, new)
            return keep._replace(finite=new.finite), metrics

        return broken

    monkeypatch.setattr(steps, 'make_train_step', breaking)
    assert sweep.run(config, tmp_path / 'undisturbed') == 0
    with monkeypatch.context() as patch:
        patch.setattr(loop, 'summarize', lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            sweep.run(config, tmp_path / 'killed')
    assert sweep.run(config, tmp_path / 'killed') == 0
    for seed, status in ((0, 'ok'), (1, 'diverged')):
        runs = [tmp_path / name / f'points/base/seed-{seed}' for name in ('undisturbed', 'killed')]
        summaries = [json.loads((run / 'summary.json').read_text()) for run in runs]
        assert [summary['status'] for summary in summaries] == [status] * 2
        assert [summary['steps'] for summary in summaries] == [12 if status == 'ok' else 6] * 2
        assert len({(run / 'metrics.jsonl').read_text() for run in runs}) == 1


def test_point_trains_that_point_alone(finished, tmp_path):
    _, config = finished
    assert sweep.run(config, tmp_path, only_point=1) == 0
    assert [path.name for path in (tmp_path / 'points').iterdir()] == ['num_heads-2']
    assert 'unfinished' in (tmp_path / 'report.md').read_text()
    with pytest.raises(ConfigError, match='points go from 0 to 1'):
        sweep.run(config, tmp_path, only_point=2)


def test_invalid_and_failed_points_are_recorded_and_only_they_are_tried_again(
    text_file, tmp_path, monkeypatch
):
    config = tiny_config(text_file, sweep=(('model.num_heads', (1, 3, 2)),))
    train, tried = sweep.train, []

    def train_but(program, *rest):
        tried.append(program.config.model.num_heads)
        if program.config.model.num_heads == 2 and tried.count(2) == 1:
            raise RuntimeError('out of memory\nwith details')
        return train(program, *rest)

    monkeypatch.setattr(sweep, 'train', train_but)
    assert sweep.run(config, tmp_path) == 1
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    assert [row['status'] for row in rows] == ['ok', 'invalid', 'failed']
    assert 'head counts that do' in rows[1]['error']
    assert [row['num_heads'] for row in rows] == ['1', '3', '2']
    assert [row['d_model'] for row in rows] == ['16', '', '16']
    assert rows[2]['error'] == 'RuntimeError: out of memory'
    assert sweep.run(config, tmp_path) == 1  # the invalid one stays
    assert tried == [1, 2, 2]
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    assert [row['status'] for row in rows] == ['ok', 'invalid', 'ok']


def test_a_diverged_point_is_a_result_with_a_diagnosis(text_file, tmp_path, capsys):
    axes = (('optim.learning_rate', (1e-3, 1e30)), ('seed', (0, 1)))
    config = tiny_config(text_file, sweep=axes)
    assert sweep.run(config, tmp_path) == 0
    summaries = [
        json.loads((tmp_path / f'points/learning_rate-1e+30/seed-{s}/summary.json').read_text())
        for s in (0, 1)
    ]
    assert [s['status'] for s in summaries] == ['diverged'] * 2
    for summary in summaries:
        assert 'first gradient that is not finite' in summary['error']
        text = summary['error'].rsplit("'", 2)[1]
        assert text in text_file.read_text()
        assert len(text) >= 8  # the context
    assert 0 < summaries[0]['steps'] < 12
    capsys.readouterr()
    assert sweep.run(config, tmp_path) == 0
    again = capsys.readouterr().out
    assert f'seed-1: diverged, a result, not tried again: {summaries[1]["error"]}' in again


def test_results_hold_what_was_swept_and_is_no_column_of_its_own(text_file, tmp_path):
    axes = (('optim.learning_rate', (1e-3, 2e-3)),)
    assert sweep.run(tiny_config(text_file, sweep=axes, **{'train.steps': 4}), tmp_path) == 0
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    assert [row['learning_rate'] for row in rows] == ['0.001', '0.002']


def test_seeds_that_share_a_program_one_by_one_share_its_compile_time(text_file, tmp_path):
    config = tiny_config(text_file, sweep=(('seed', (0, 1)),), **{'train.seeds': 'separate'})
    built = []
    program = sweep.Program

    def keep(*arguments):
        built.append(program(*arguments))
        built.append(built[0].compile_s)
        return built[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, 'Program', keep)
        assert sweep.run(config, tmp_path) == 0
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    assert sum(float(row['compile_s']) for row in rows) == pytest.approx(built[1])


def test_a_damaged_run_of_a_sweep_fails_and_the_others_go_on(finished, tmp_path):
    workdir, config = finished
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    for h in (1, 2):
        for seed in (0, 1, 2):
            (tmp_path / f'points/num_heads-{h}/seed-{seed}/summary.json').unlink()
    for file in (tmp_path / 'points/num_heads-1/seed-1/checkpoints').glob('*/**/d/*'):
        file.write_bytes(b'')
    assert sweep.run(config, tmp_path) == 1
    rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
    assert [row['status'] for row in rows] == ['failed'] * 3 + ['ok'] * 3
    assert 'unreadable checkpoint' in rows[0]['error']


def test_lines_that_are_damaged_or_gone_are_named(finished, tmp_path):
    workdir, config = finished
    config = config.copy_and_resolve_references()
    config.sweep = (('model.num_heads', (2,)), ('seed', (0,)))
    run_dir = tmp_path / 'points/num_heads-2/seed-0'
    for lines, complaint in (
        ('{"step": 2}\nrubbish\n', 'metrics.jsonl: line 2 is damaged'),
        ('', 'metrics.jsonl: its lines are gone'),
    ):
        shutil.rmtree(tmp_path)
        shutil.copytree(workdir / 'points/num_heads-2/seed-0', run_dir)
        (run_dir / 'summary.json').unlink()
        (run_dir / 'metrics.jsonl').write_text(lines)
        assert sweep.run(config, tmp_path) == 1
        (row,) = csv.DictReader((tmp_path / 'results.csv').open())
        assert row['status'] == 'failed'
        assert complaint in row['error']


@pytest.mark.slow
def test_a_rule_may_name_what_only_some_points_have_but_must_name_something(text_file, tmp_path):
    axes = (('model.use_bias', (False, True)),)
    rules = (('.*bias', 'weight_decay', 0.0),)
    values = {'optim.rules': rules, 'train.steps': 4}
    assert sweep.run(tiny_config(text_file, sweep=axes, **values), tmp_path / 'run') == 0
    values['optim.rules'] = (('.*bais', 'weight_decay', 0.0),)
    with pytest.raises(ConfigError, match=r'bais. matches no parameter'):
        sweep.run(tiny_config(text_file, **values), tmp_path / 'no')


def test_devices_share_each_part_of_a_batch(text_file, tmp_path):
    values = {'mesh.data': 2, 'train.accumulation_steps': 8}
    with pytest.raises(ConfigError, match='8 accumulation steps, need a multiple of 16'):
        sweep.run(tiny_config(text_file, **values), tmp_path)


@pytest.mark.parametrize(
    ('cores', 'batch_sizes', 'devices'),
    [(1, {12}, 1), (2, {12}, 2), (2, {12, 9}, 1), (8, {16}, 4), (8, {12}, 3), (16, {3}, 1)],
)
def test_the_cores_of_a_cpu_share_every_batch_evenly(cores, batch_sizes, devices):
    assert sharding.devices_for_cores(cores, batch_sizes) == devices


def test_cores_are_devices_that_suit_every_point():
    values = {'data.batch_size': 16, 'eval.batch_size': 16, 'mesh.data': -1}
    assert sweep.cpu_devices(tiny_config(**values), 8) == 4
    axes = (('train.accumulation_steps', (1, 2)),)
    assert sweep.cpu_devices(tiny_config(sweep=axes, **values), 8) == 2
    assert sweep.cpu_devices(tiny_config(**values | {'mesh.data': 8}), 8) == 8  # as asked for


def test_a_long_value_makes_a_short_directory():
    prompts = ('a' * 5000, 'a' * 5000 + 'b')
    slugs = [p.slug for p in sweep.expand(tiny_config(sweep=(('eval.sample_prompt', prompts),)))]
    assert len(set(slugs)) == 2
    assert max(map(len, slugs)) < 60


def test_a_finished_run_keeps_the_record_of_what_made_it(finished, monkeypatch):
    workdir, config = finished
    before = (workdir / 'config.json').read_bytes()
    monkeypatch.setattr(sweep, 'describe_environment', lambda corpus: {'device': 'another'})
    assert sweep.run(config, workdir) == 0
    assert (workdir / 'config.json').read_bytes() == before


def test_a_text_that_has_changed_is_refused(text_file, tmp_path):
    path = tmp_path / 'text.txt'
    path.write_text(text_file.read_text())
    config = tiny_config(path, **{'train.steps': 4})
    assert sweep.run(config, tmp_path / 'run') == 0
    path.write_text(text_file.read_text().replace('next', 'text'))
    with pytest.raises(RunError, match='began on a corpus of sha256'):
        sweep.run(config, tmp_path / 'run')


def test_a_last_update_that_breaks_the_parameters_is_a_divergence(text_file, tmp_path):
    """The loss of a step is taken before its update: a call of the last step alone sees it."""
    config = tiny_config(
        text_file,
        **{
            'optim.schedule': 'constant',
            'optim.warmup_steps': 0,
            'optim.learning_rate': 1e38,
            'optim.weight_decay': 1e38,
            'train.steps': 1,
            'train.steps_per_call': 1,
            'train.log_every': 1,
            'train.checkpoint_every': 1,
            'eval.every': 1,
        },
    )
    assert sweep.run(config, tmp_path) == 1
    summary = json.loads((tmp_path / 'summary.json').read_text())
    assert summary['status'] == 'diverged'
    assert 'validation loss' in summary['error']


def test_an_empty_newest_checkpoint_is_skipped(finished, tmp_path):
    workdir, _ = finished
    run_dir = tmp_path / 'run'
    shutil.copytree(workdir / 'points/num_heads-2/seed-0', run_dir)
    for path in (run_dir / 'checkpoints/12').iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert load_run(run_dir).step == 8


def test_a_damaged_file_of_a_run_is_named(finished, tmp_path):
    workdir, _ = finished
    for number, (name, content) in enumerate(
        [
            ('config.json', '{"conf'),
            ('config.json', '{"config": 3}'),
            ('tokenizer.json', '{}'),
            ('tokenizer.json', '{"tokenizer": {"kind": "char"}}'),
            ('tokenizer.json', '{"tokenizer": {"kind": "sentencepiece", "model": "YWJj"}}'),
        ]
    ):
        run_dir = tmp_path / str(number)
        shutil.copytree(workdir / 'points/num_heads-2/seed-0', run_dir)
        (run_dir / name).write_text(content)
        with pytest.raises(RunError, match=f'{name}: damaged'):
            load_run(run_dir)


def test_files_of_two_runs_are_told_apart_from_damaged_ones(finished, text_file, tmp_path):
    workdir, _ = finished
    run_dir = tmp_path / 'run'
    shutil.copytree(workdir / 'points/num_heads-2/seed-0', run_dir)
    whole = {name: (run_dir / name).read_text() for name in ('config.json', 'tokenizer.json')}

    def changed(name, keys, value):
        content = json.loads(whole[name])
        group = content
        for key in keys[:-1]:
            group = group[key]
        group[keys[-1]] = value
        for other, text in whole.items():
            (run_dir / other).write_text(text)
        (run_dir / name).write_text(json.dumps(content))
        return run_dir

    for keys, value, line in (
        (('model', 'd_model'), 'x', r'config\.json: damaged \(model\.d_model'),
        (('model', 'family'), 'foo', r'config\.json: damaged \(model\.family'),
        (('model', 'context_length'), 0, r'config\.json: damaged \(model\.context_length'),
        (('data',), 3, r"config\.json: damaged \(no group 'data'"),
        (('model', 'd_ff'), 32, r'checkpoints/12: of another model than config\.json'),
        (('model', 'num_layers'), 2, r'checkpoints/12: of another model than config\.json'),
    ):
        with pytest.raises(RunError, match=line):
            load_run(changed('config.json', ('config', *keys), value))
    tokenizer = {'kind': 'char', 'characters': 'ab'}
    with pytest.raises(RunError, match=r'tokenizer\.json: of another run: it has 6 ids'):
        load_run(changed('tokenizer.json', ('tokenizer',), tokenizer))


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_is_read_on_one(text_file, tmp_path):
    config = tiny_config(text_file, **{'mesh.data': 8, 'train.steps': 4})
    assert sweep.run(config, tmp_path) == 0
    script = (
        'import pathlib, sys, jax\n'
        'from minigpt_jax.training.checkpoint import load_run\n'
        'assert len(jax.devices()) == 1\n'
        'print(load_run(pathlib.Path(sys.argv[1])).step)'
    )
    done = subprocess.run(
        [sys.executable, '-c', script, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {'XLA_FLAGS': ''},
    )  # fmt: skip
    assert done.stdout.strip() == '4', done.stderr
