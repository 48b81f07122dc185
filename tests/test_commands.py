"""Whole commands, as a user types them: exit status, what they print, what they leave."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from minigpt_jax.training.checkpoint import load_run
from minigpt_jax.training.config import RunError
from tests.conftest import ROOT

TINY = [
    '--config.data.corpus=text', '--config.data.batch_size=8', '--config.model.d_model=16',
    '--config.model.num_heads=2', '--config.model.num_layers=1', '--config.model.context_length=8',
    '--config.optim.warmup_steps=2', '--config.train.steps=12', '--config.train.steps_per_call=2',
    '--config.train.log_every=2', '--config.train.checkpoint_every=4', '--config.eval.every=4',
    '--config.eval.sample_tokens=12', '--config.mesh.data=1',
]  # fmt: skip


def run(module, *arguments, check=True, **kwargs):
    """Runs `python -m minigpt_jax.<module>` from the repository root."""
    done = subprocess.run(
        [sys.executable, '-m', f'minigpt_jax.{module}', *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=300, **kwargs,
    )  # fmt: skip
    if check:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope='module')
def korean(tmp_path_factory):
    """A run on Korean text, under a Korean name, by the command."""
    root = tmp_path_factory.mktemp('korean')
    path = root / '글.txt'
    path.write_text('민지는 책을 다 읽고 그것을 가방에 넣었다.\n' * 60)
    done = run('train', '--config=configs/minigpt.py', *TINY, f'--config.data.path={path}',
               f'--workdir={root / "run"}')  # fmt: skip
    return root / 'run', path, done


def test_train_prints_devices_parameters_progress_and_the_table(korean):
    _, _, done = korean
    for expected in ('devices: ', 'embed.embedding', 'total', 'step 12/12', 'val loss', 'report:'):
        assert expected in done.stdout
    assert 'Traceback' not in done.stderr
    assert 'I1' not in done.stderr  # no library's log lines on the terminal


def test_a_single_run_leaves_its_files_and_a_report(korean):
    workdir, path, _ = korean
    names = {p.name for p in workdir.iterdir()}
    assert names >= {
        'config.json', 'metrics.jsonl', 'timing.jsonl', 'summary.json', 'checkpoints',
        'samples.txt', 'tensorboard', 'results.csv', 'report.md', 'report.html', 'figures',
    }  # fmt: skip
    written = json.loads((workdir / 'config.json').read_text())
    assert written['config']['data']['path'] == str(path)
    environment = written['environment']
    assert {'jax', 'flax'} <= set(environment['packages'])
    assert environment['device'].endswith('(cpu)')
    assert len(environment['corpus_sha256']) == 64


def test_korean_text_trains_and_samples(korean):
    workdir, path, _ = korean
    sample = (workdir / 'samples.txt').read_text().removesuffix('\n')
    text = path.read_text()
    # The first words of the text, then one symbol or special token for each of `sample_tokens`.
    prompt = re.fullmatch(r'(.+?)(<\w+>|[^<]){12}', sample, re.S)[1]
    assert prompt in text
    assert set(re.sub(r'<\w+>', '', sample)) <= set(text)
    done = run('sample', f'--workdir={workdir}', '--prompt=민지는 ', '--num_tokens=9',
               '--temperature=0', '--num_samples=2')  # fmt: skip
    first, second, *_ = done.stdout.split('-' * 80 + '\n')
    assert first.startswith('민지는 ')
    assert len(first.rstrip('\n')) == len('민지는 ') + 9 or '\n' in first
    assert second.startswith(first.rstrip('\n'))  # greedy: both samples are the same


@pytest.mark.slow
@pytest.mark.parametrize('tokenizer', ['byte', 'sentencepiece'])
def test_korean_text_trains_and_samples_in_bytes_and_pieces(korean, tmp_path, tokenizer):
    _, path, _ = korean
    size = ['--config.data.vocab_size=300'] if tokenizer == 'sentencepiece' else []
    done = run('train', '--config=configs/minigpt.py', *TINY, f'--config.data.path={path}', *size,
               f'--config.data.tokenizer={tokenizer}', f'--workdir={tmp_path}')  # fmt: skip
    assert done.stderr.count('\n') <= 1  # the bar of progress, and nothing by SentencePiece
    summary = json.loads((tmp_path / 'summary.json').read_text())
    assert summary['status'] == 'ok'
    assert 0 < summary['bits_per_byte'] < 8
    prompt = '  민지는 책을漢😀 '  # with what the training text does not have
    done = run('sample', f'--workdir={tmp_path}', f'--prompt={prompt}', '--num_tokens=20',
               '--temperature=1')  # fmt: skip
    assert done.stdout.startswith(prompt)
    assert len(done.stdout.removeprefix(prompt).splitlines()[0]) > 0


@pytest.mark.slow
def test_sample_says_when_the_window_slides_and_follows_its_seed(korean):
    workdir, *_ = korean
    common = ('sample', f'--workdir={workdir}', '--prompt=책', '--temperature=1')
    short = run(*common, '--num_tokens=8').stdout  # the last of them sees the context of 8
    assert 'window slid' not in short
    long = [run(*common, '--num_tokens=30', f'--seed={seed}').stdout for seed in (0, 1)]
    assert 'the window slid' in long[0]
    assert long[0] != long[1]


SAMPLE_ERRORS = {
    'an unknown symbol': (['--prompt=책zz'], "unknown to the tokenizer of this run: 'z'"),
    'an empty prompt': (['--prompt='], 'the prompt is empty'),
    'a negative temperature': (['--prompt=책', '--temperature=-1'], 'temperature'),
    'top_p above 1': (['--prompt=책', '--top_p=2'], 'top_p'),
    'a number that is none': (['--prompt=책', '--num_tokens=x'], 'num_tokens'),
    'more samples than memory holds': (['--prompt=책', '--num_samples=99999'], 'num_samples'),
    'a number without end': (['--prompt=책', '--num_tokens=9999999'], 'num_tokens'),
    'NaN': (['--prompt=책', '--temperature=nan'], '--temperature must be a finite number'),
    'no prompt': ([], 'prompt'),
}


@pytest.mark.parametrize(('arguments', 'line'), SAMPLE_ERRORS.values(), ids=SAMPLE_ERRORS)
def test_sample_answers_bad_input_with_one_line(korean, arguments, line):
    assert_one_line(run('sample', f'--workdir={korean[0]}', *arguments, check=False), line)


def test_sample_refuses_a_directory_that_is_no_run(korean, tmp_path):
    done = run('sample', f'--workdir={tmp_path}', '--prompt=a', check=False)
    assert_one_line(done, 'no config.json there')
    for workdir in (tmp_path / 'nowhere', korean[0] / 'config.json'):
        with pytest.raises(RunError, match='no config'):
            load_run(workdir)


def assert_one_line(done, line, status=2):
    assert done.returncode == status
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert 'Traceback' not in done.stdout + done.stderr


TRAIN_ERRORS = {
    'no config': ([], '--config is missing'),
    'a config that is not there': (['--config=configs/nope.py'], 'no such file: configs/nope.py'),
    'a variant that is not there': (['--config=configs/heads_sweep.py:qick'], 'quick, shakespeare'),
    'a mistyped leaf': (
        ['--config=configs/minigpt.py', '--config.model.num_head=3'],
        'did you mean model.num_heads',
    ),
    'a mistyped group': (
        ['--config=configs/minigpt.py', '--config.modle.num_heads=3'],
        'did you mean model.num_heads',
    ),
    'a key below a value': (
        ['--config=configs/minigpt.py', '--config.sweep.axes=()'], 'did you mean sweep'
    ),
    'a mistyped key at the top': (
        ['--config=configs/minigpt.py', '--config.sede=3'], 'did you mean seed'
    ),
    'a mistyped flag': (['--config=configs/minigpt.py', '--wrkdir=x'], 'workdir'),
    'a wrong type': (['--config=configs/minigpt.py', '--config.model.num_heads=x'], 'num_heads'),
    'a wrong choice': (
        ['--config=configs/minigpt.py', '--config.model.positions=sinusoid'],
        'did you mean sinusoidal',
    ),
    'a sweep of the wrong structure': (
        ['--config=configs/minigpt.py', '--config.sweep=3'], 'is not an axis'
    ),
    'heads that do not divide the width': (
        ['--config=configs/minigpt.py', '--config.model.num_heads=3'], 'head counts that do'
    ),
    'no path': (['--config=configs/minigpt.py', '--config.data.corpus=text'], 'data.path'),
    'a path that is not there': (
        ['--config=configs/minigpt.py', '--config.data.corpus=text', '--config.data.path=nope.txt'],
        'no such file: nope.txt',
    ),
    'a size for a vocabulary that has one': (
        ['--config=configs/minigpt.py', '--config.data.vocab_size=300'],
        'set data.tokenizer=sentencepiece',
    ),
    'a data set that the catalogue does not have': (
        ['--config=configs/minigpt.py', '--config.data.corpus=tfds:tiny_shakspeare'],
        'did you mean tiny_shakespeare?',
    ),
    'a stray argument': (['--config=configs/minigpt.py', 'heads'], "unexpected argument 'heads'"),
    'a name that is not UTF-8': (
        ['--config=configs/minigpt.py', '--workdir=caf\udce9'], 'not UTF-8; rename it'
    ),
    'the path of no known user': (
        ['--config=configs/minigpt.py', '--config.data.corpus=text', '--config.data.path=~none/x'],
        'no such file: ~none/x',
    ),
    'an empty workdir': (['--config=configs/minigpt.py', '--workdir='], '--workdir is empty'),
    'a rule that matches nothing': (
        ['--config=configs/minigpt.py', "--config.optim.rules=(('.*bais','weight_decay',0.),)"],
        'matches no parameter',
    ),
    'a point that is not there': (
        ['--config=configs/heads_sweep.py:quick', '--point=2'], 'points go from 0 to 1'
    ),
}  # fmt: skip


@pytest.mark.parametrize(('arguments', 'line'), TRAIN_ERRORS.values(), ids=TRAIN_ERRORS)
def test_train_answers_bad_input_with_one_line_and_leaves_nothing(tmp_path, arguments, line):
    workdir = tmp_path / 'run'
    assert_one_line(run('train', f'--workdir={workdir}', *arguments, check=False), line)
    assert not workdir.exists()


TEXT_ERRORS = {
    'empty': (b'', 'empty'),
    'not UTF-8': (b'good text ' * 50 + b'\xff' + b' more' * 50, 'offset 500'),
    'too short for two splits': (b'ab', '2 characters are too few'),
    'too short for a context': (b'a line of text\n' * 4, 'needs at least 9'),
}


@pytest.mark.parametrize(('content', 'line'), TEXT_ERRORS.values(), ids=TEXT_ERRORS)
def test_train_names_what_is_wrong_with_a_text(tmp_path, content, line):
    path = tmp_path / 'text.txt'
    path.write_bytes(content)
    done = run('train', '--config=configs/minigpt.py', *TINY, f'--config.data.path={path}',
               f'--workdir={tmp_path / "run"}', check=False)  # fmt: skip
    assert_one_line(done, line)
    assert not (tmp_path / 'run').exists()


def test_train_refuses_the_workdir_of_another_configuration(korean):
    workdir, path, _ = korean
    before = (workdir / 'summary.json').read_bytes()
    done = run('train', '--config=configs/minigpt.py', *TINY, f'--config.data.path={path}',
               '--config.train.steps=24', f'--workdir={workdir}', check=False)  # fmt: skip
    assert_one_line(done, 'train.steps was 12, is 24')
    assert f'--workdir={workdir}-2' in done.stderr
    assert (workdir / 'summary.json').read_bytes() == before


# What the disk can do to a run.


def on_a_small_disk(tmp_path, options, *arguments):
    """Runs `train` with a workdir on a file system of its own, mounted with `options`."""
    mounted = tmp_path / 'disk'
    mounted.mkdir()
    command = [sys.executable, '-m', 'minigpt_jax.train', *arguments, f'--workdir={mounted}/run']
    done = subprocess.run(
        ['unshare', '-m', 'sh', '-c', f'mount -t tmpfs -o {options} tmpfs {mounted} && exec "$@"',
         'sh', *command],
        cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=300,
    )  # fmt: skip
    if 'unshare' in done.stderr or 'mount' in done.stderr.splitlines()[:1]:
        if os.environ.get('CI'):
            pytest.fail(done.stderr)
        pytest.skip(f'no file system can be mounted here: {done.stderr.strip()}')
    return done


@pytest.mark.parametrize(
    ('options', 'line'), [('size=200k', 'disk full'), ('ro,size=200k', 'Read-only file system')]
)
def test_train_says_in_one_line_what_is_wrong_with_the_disk(korean, tmp_path, options, line):
    _, path, _ = korean
    done = on_a_small_disk(
        tmp_path, options, '--config=configs/minigpt.py', *TINY, f'--config.data.path={path}'
    )
    assert_one_line(done, line)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(korean, tmp_path):
    workdir = tmp_path / 'run'
    shutil.copytree(korean[0], workdir)
    damage(workdir / 'checkpoints/12')
    common = ('sample', f'--workdir={workdir}', '--prompt=책', '--num_tokens=3')
    done = run(*common)
    assert 'checkpoints/12: unreadable checkpoint' in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout.startswith('책')
    damage(workdir / 'checkpoints/8')
    done = run(*common, check=False)
    assert done.returncode == 2
    assert 'none before it is readable' in done.stderr.splitlines()[-1]
    assert 'Traceback' not in done.stderr


def damage(checkpoint):
    files = list(checkpoint.glob('**/d/*'))
    assert files
    for file in files:
        file.write_bytes(b'')


@pytest.mark.slow
def test_profile_leaves_a_trace_and_refuses_what_is_no_range(korean, tmp_path):
    _, path, _ = korean
    common = ('--config=configs/minigpt.py', *TINY, f'--config.data.path={path}')
    run('train', *common, f'--workdir={tmp_path / "run"}', '--profile=3:4')
    assert list((tmp_path / 'run/profile').glob('**/*.xplane.pb'))
    # Resumed within the range: what is left of it is traced.
    shutil.rmtree(tmp_path / 'run/profile')
    shutil.rmtree(tmp_path / 'run/checkpoints/12')
    (tmp_path / 'run/summary.json').unlink()
    done = run('train', *common, f'--workdir={tmp_path / "run"}', '--profile=3:10')
    assert 'continues at step 8' in done.stdout
    assert list((tmp_path / 'run/profile').glob('**/*.xplane.pb'))
    for profile, line in (('5:2', 'steps from 1 to 12, START first'), ('x', 'expected START:STOP')):
        done = run('train', *common, f'--workdir={tmp_path / "no"}', f'--profile={profile}',
                   check=False)  # fmt: skip
        assert_one_line(done, line)


@pytest.mark.slow
def test_a_second_process_in_the_same_workdir_is_refused(korean, tmp_path):
    _, path, _ = korean
    longer = [*TINY, '--config.train.steps=400000', '--config.train.checkpoint_every=100000']
    common = ('--config=configs/minigpt.py', *longer, f'--config.data.path={path}',
              f'--workdir={tmp_path / "run"}')  # fmt: skip
    first = subprocess.Popen(
        [sys.executable, '-m', 'minigpt_jax.train', *common], cwd=ROOT, env=os.environ,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        metrics = tmp_path / 'run/metrics.jsonl'
        while not metrics.exists() and first.poll() is None:
            time.sleep(0.05)
        done = run('train', *common, check=False)
        assert_one_line(done, 'another process is training here')
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
