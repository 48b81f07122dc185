"""A run that is killed, at any moment, ends with the bits of one that was left alone."""

import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from minigpt_jax.training.checkpoint import load_run
from tests.conftest import ROOT
from tests.test_commands import TINY

LONGER = ['--config.train.steps=60', '--config.train.checkpoint_every=6', '--config.eval.every=6',
          '--config.model.dropout_rate=0.1', "--config.sweep=(('seed', (0, 1)),)"]  # fmt: skip


def command(path, workdir):
    return [
        sys.executable, '-m', 'minigpt_jax.train', '--config=configs/minigpt.py', *TINY, *LONGER,
        f'--config.data.path={path}', f'--workdir={workdir}',
    ]  # fmt: skip


def bits(workdir):
    """metrics.jsonl, samples and final parameters of both seeds."""
    found = []
    for seed in (0, 1):
        run_dir = workdir / f'points/base/seed-{seed}'
        parameters = jax.tree.leaves(load_run(run_dir).params)
        found.append([np.asarray(x).tobytes() for x in parameters])
        found.append([(run_dir / n).read_text() for n in ('metrics.jsonl', 'samples.txt')])
    return found


pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def undisturbed(text_file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('undisturbed') / 'run'
    subprocess.run(command(text_file, workdir), cwd=ROOT, check=True, capture_output=True)
    return bits(workdir)


def progress(workdir):
    """The last step in metrics.jsonl of the first seed, 0 before the first."""
    path = workdir / 'points/base/seed-0/metrics.jsonl'
    return path.read_text().count('train_loss') * 2 if path.exists() else 0


def test_three_kills_at_random_moments_change_nothing(undisturbed, text_file, tmp_path):
    workdir = tmp_path / 'run'
    chance = random.Random(0)
    killed = 0
    for _ in range(3):
        process = subprocess.Popen(
            command(text_file, workdir), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        until = progress(workdir) + chance.randrange(4, 16)
        while process.poll() is None and progress(workdir) < until:
            time.sleep(0.001)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        process.stdout.close()
    assert killed == 3
    assert 0 < progress(workdir) < 60
    done = subprocess.run(command(text_file, workdir), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'continues at step' in done.stdout
    assert bits(workdir) == undisturbed


# Kills itself as soon as a checkpoint of step 12 is partly on disk.
KILL_INSIDE_A_WRITE = """
import os, runpy, signal, sys, threading
from minigpt_jax.training.checkpoint import Checkpoints

save = Checkpoints.save

def save_and_die(self, step, state):
    if step == 12 and 'seed-1' in str(self._directory):
        def watch():
            while not list(self._directory.glob('12.orbax-checkpoint-tmp*/*')):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=watch).start()
    save(self, step, state)

Checkpoints.save = save_and_die
sys.argv = sys.argv[1:]
runpy.run_module('minigpt_jax.train', run_name='__main__')
"""


def test_a_kill_inside_a_checkpoint_write_changes_nothing(undisturbed, text_file, tmp_path):
    workdir = tmp_path / 'run'
    _, _, *arguments = command(text_file, workdir)
    killed = subprocess.run(
        [sys.executable, '-c', KILL_INSIDE_A_WRITE, *arguments], cwd=ROOT, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    names = [p.name for p in (workdir / 'points/base/seed-1/checkpoints').iterdir()]
    assert '12' not in names
    assert any(name.startswith('12.') for name in names)
    done = subprocess.run(command(text_file, workdir), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'continues at step 6 of 60' in done.stdout
    assert bits(workdir) == undisturbed
