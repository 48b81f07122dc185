"""Two real processes train one run together, and end together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from minigpt_jax.report.writers import read_lines
from minigpt_jax.training.checkpoint import MANIFEST
from tests.conftest import ROOT
from tests.test_commands import TINY, run

pytestmark = pytest.mark.slow

STEPS = ['--config.train.steps=160', '--config.train.log_every=16', '--config.eval.every=80',
         '--config.train.checkpoint_every=16']  # fmt: skip


def free_port():
    with socket.socket() as probe:
        probe.bind(('localhost', 0))
        return probe.getsockname()[1]


def start(path, workdir, *flags, devices=2, count=1, steps=STEPS):
    """The processes of a train command, of so many devices each."""
    port = free_port()
    env = os.environ | {'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'}
    return [
        subprocess.Popen(
            [
                sys.executable, '-m', 'minigpt_jax.train', '--config=configs/minigpt.py', *TINY,
                *steps, f'--config.data.path={path}', f'--workdir={workdir}',
                '--config.mesh.data=-1', *flags,
                f'--distributed=localhost:{port},{count},{i}' if count > 1 else '--distributed=off',
            ],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip


def finish(processes, timeout=600):
    """[(status, what it printed, its errors)]."""
    return [
        (process.returncode, *texts)
        for process in processes
        for texts in [process.communicate(timeout=timeout)]
    ]


def numbers(run_dir):
    lines = read_lines(run_dir / 'metrics.jsonl')
    return [line['step'] for line in lines], [
        [line[name] for line in lines if name in line] for name in ('train_loss', 'val_loss')
    ]


SHORT = ['--config.train.steps=24', '--config.train.checkpoint_every=12', '--config.eval.every=8']


@pytest.mark.parametrize(
    'flags',
    [
        [],
        ['--config.mesh.fsdp=2', '--config.mesh.tensor=2', '--config.mesh.data=1'],
        ['--config.mesh.seed=2', "--config.sweep=(('seed',(0,1)),)"],
    ],
    ids=['data', 'fsdp and tensor', 'seed'],
)
def test_two_processes_give_the_losses_of_one(flags, text_file, tmp_path):
    printed = {}
    for count, devices in ((1, 4), (2, 2)):
        workdir = tmp_path / f'{count}'
        processes = start(text_file, workdir, *flags, devices=devices, count=count, steps=SHORT)
        done = finish(processes)
        assert [status for status, *_ in done] == [0] * count, done
        printed[count] = [out for _, out, _ in done]
    (alone,), (leader, other) = printed[1], printed[2]
    # One alone writes the report.
    assert ['report: ' in text for text in (alone, leader, other)] == [True, True, False]
    for run_dir in (tmp_path / '1').glob('**/metrics.jsonl'):
        other = tmp_path / '2' / run_dir.parent.relative_to(tmp_path / '1')
        steps, (train, val) = numbers(run_dir.parent)
        other_steps, (other_train, other_val) = numbers(other)
        assert steps == other_steps
        np.testing.assert_allclose(train, other_train, rtol=1e-4)
        np.testing.assert_allclose(val, other_val, rtol=1e-4)
        assert json.loads((other / 'summary.json').read_text())['status'] == 'ok'


@pytest.mark.parametrize('victim', [0, 1])
def test_when_one_is_killed_the_other_says_so_and_both_resume(victim, text_file, tmp_path):
    workdir = tmp_path / 'run'
    processes = start(text_file, workdir, count=2)
    deadline = time.monotonic() + 120
    while not list(workdir.glob(f'checkpoints/*/{MANIFEST}')) and time.monotonic() < deadline:
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.05)
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    status, _, errors = finish([processes[1 - victim]], timeout=60)[0]
    assert time.monotonic() - killed < 30
    assert status not in (0, None)
    assert 'lost another process of this run' in errors
    assert 'run the same command again' in errors.splitlines()[-1]
    processes[victim].communicate()
    done = finish(start(text_file, workdir, count=2))
    assert [status for status, *_ in done] == [0, 0], done
    assert 'continues at step' in done[0][1]
    assert numbers(workdir)[0][-1] == 160


@pytest.mark.parametrize('flag', ['on', 'localhost:1234,2', 'localhost:1234,2,2', ':1,2,0'])
def test_a_wrong_flag_is_one_line(flag, text_file, tmp_path):
    done = run(
        'train', '--config=configs/minigpt.py', *TINY, f'--config.data.path={text_file}',
        f'--workdir={tmp_path / "run"}', f'--distributed={flag}', check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f'error: --distributed={flag}: ')
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / 'run').exists()
