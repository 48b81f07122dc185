"""Faults, each produced here: what is lost is named, and the rest goes on to the same bits."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys

import jax
import pytest

from minigpt_jax.training import checkpoint, loop, sweep
from minigpt_jax.training.checkpoint import MANIFEST, load_run
from minigpt_jax.training.config import RunError
from tests.conftest import ROOT, tiny_config
from tests.test_commands import TINY


def summaries(workdir):
    paths = sorted(workdir.glob('points/*/seed-*/summary.json'))
    return [json.loads(path.read_text()) for path in paths]


# Of the machine.


def test_a_point_without_memory_fails_and_the_others_go_on(text_file, tmp_path, monkeypatch):
    config = tiny_config(text_file, sweep=(('model.d_model', (16, 32)), ('seed', (0, 1))))
    call = loop.Program.train_call

    def out_of_memory(self, state, batches):
        if self.config.model.d_model == 16:
            raise jax.errors.JaxRuntimeError(
                'RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.'
            )
        return call(self, state, batches)

    monkeypatch.setattr(loop.Program, 'train_call', out_of_memory)
    assert sweep.run(config, tmp_path) == 1
    monkeypatch.undo()
    found = summaries(tmp_path)
    assert [x['status'] for x in found] == ['failed'] * 2 + ['ok'] * 2
    assert 'RESOURCE_EXHAUSTED' in found[0]['error']
    assert sweep.run(config, tmp_path) == 0  # what failed is tried again
    assert [x['status'] for x in summaries(tmp_path)] == ['ok'] * 4


# Kills itself when the report is about to be written, its table already there.
KILL_IN_THE_REPORT = """
import os, runpy, signal, sys
from minigpt_jax.report import tables

write = tables.write_atomically

def write_and_die(path, content):
    if path.suffix == '.html':
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, content)

tables.write_atomically = write_and_die
from minigpt_jax.report import pages
pages.write_atomically = write_and_die
sys.argv = sys.argv[1:]
runpy.run_module('minigpt_jax.train', run_name='__main__')
"""


@pytest.mark.slow
def test_a_kill_in_the_report_loses_the_report_alone(text_file, tmp_path):
    arguments = [
        'minigpt_jax.train', '--config=configs/minigpt.py', *TINY,
        f'--config.data.path={text_file}', f'--workdir={tmp_path / "run"}',
    ]  # fmt: skip
    killed = subprocess.run(
        [sys.executable, '-c', KILL_IN_THE_REPORT, *arguments], cwd=ROOT, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / 'run/report.html').exists()
    metrics = (tmp_path / 'run/metrics.jsonl').read_text()
    done = subprocess.run(
        [sys.executable, '-m', *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert 'compiled in' not in done.stdout  # nothing is trained again
    assert (tmp_path / 'run/report.html').exists()
    assert (tmp_path / 'run/metrics.jsonl').read_text() == metrics


# Files from others.


class Poison:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_file_of_a_run_is_ever_unpickled(text_file, tmp_path):
    workdir, sign = tmp_path / 'run', tmp_path / 'executed'
    assert sweep.run(tiny_config(text_file), workdir) == 0
    files = [
        path for path in workdir.rglob('*') if path.is_file() and 'tensorboard' not in str(path)
    ]
    assert len(files) > 10
    payload = pickle.dumps(Poison(sign))
    for path in files:
        sound, step_dir = path.read_bytes(), workdir / 'checkpoints/12'
        path.write_bytes(payload)
        if path.is_relative_to(step_dir) and path.name != MANIFEST:  # vouched for as well
            manifest = (step_dir / MANIFEST).read_bytes()
            (step_dir / MANIFEST).write_text(checkpoint._hash_files(step_dir))
        with contextlib.suppress(RunError):  # whatever it is taken for
            load_run(workdir)
        assert not sign.exists(), path
        path.write_bytes(sound)
        if path.is_relative_to(step_dir) and path.name != MANIFEST:
            (step_dir / MANIFEST).write_bytes(manifest)
    assert load_run(workdir).step == 12
    pickle.loads(payload)
    assert sign.exists()  # the poison works
