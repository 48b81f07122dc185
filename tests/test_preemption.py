"""A run that is asked to stop saves its state, says so by its exit status, and continues."""

import hashlib
import shutil
import signal
import subprocess
import time

import pytest

from minigpt_jax.training import checkpoint, loop, preemption, sweep
from minigpt_jax.training.checkpoint import MANIFEST, load_run
from minigpt_jax.training.config import DamagedError
from tests.conftest import ROOT, tiny_config
from tests.test_kills import bits, command, progress


@pytest.fixture(scope='module')
def undisturbed(text_file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('undisturbed') / 'run'
    subprocess.run(command(text_file, workdir), cwd=ROOT, check=True, capture_output=True)
    return bits(workdir)


def start(text_file, workdir):
    return subprocess.Popen(
        command(text_file, workdir), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(workdir, process, steps):
    while progress(workdir) < steps and process.poll() is None:
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_continues_to_the_same_bits(
    number, undisturbed, text_file, tmp_path
):
    workdir = tmp_path / 'run'
    for steps in (2, 20):  # before the first checkpoint, and between two
        process = start(text_file, workdir)
        wait_for(workdir, process, progress(workdir) + steps)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == preemption.EXIT_STATUS, errors
        assert f'{number.name}: stops as soon as' in errors
        assert (
            errors.splitlines()[-1] == 'stopped as asked, state saved: run the same command again'
        )
        assert 0 < progress(workdir) < 60
        assert not list(workdir.glob('points/*/*/summary.json'))
    done = start(text_file, workdir)
    printed, errors = done.communicate(timeout=240)
    assert done.returncode == 0, errors
    assert 'continues at step' in printed
    assert bits(workdir) == undisturbed


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(text_file, tmp_path):
    workdir = tmp_path / 'run'
    process = start(text_file, workdir)
    # Before the first step nothing is at a boundary: the first signal is noted, the second acts.
    while not list(workdir.glob('points/*/*/config.json')) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, preemption.EXIT_STATUS), errors  # if it was that fast
    assert 'Traceback' not in errors


class Asked:
    """Stands for a signal that comes within a call of steps."""

    def __init__(self, step):
        self.step = step

    def __call__(self, step=None):
        return step == self.step


def stopped(config, workdir, monkeypatch, step):
    with monkeypatch.context() as patch:
        patch.setattr(preemption, 'is_asked', Asked(step))
        with pytest.raises(preemption.Preempted):
            sweep.run(config, workdir)


def saved(workdir):
    return sorted(int(path.name) for path in (workdir / 'checkpoints').iterdir())


def test_the_checkpoint_between_two_gives_way_to_the_next(text_file, tmp_path, monkeypatch):
    config = tiny_config(text_file, **{'train.keep': 3})
    stopped(config, tmp_path / 'run', monkeypatch, step=6)
    assert saved(tmp_path / 'run') == [4, 6]
    assert sweep.run(config, tmp_path / 'run') == 0
    assert saved(tmp_path / 'run') == [4, 8, 12]  # as if nothing had been


def test_asked_to_stop_before_a_point_nothing_is_compiled(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, 'is_asked', lambda step=None: True)
    monkeypatch.setattr(loop, 'Program', None)
    with pytest.raises(preemption.Preempted):
        sweep.run(tiny_config(text_file), tmp_path / 'run')


# Manifests.


@pytest.fixture(scope='module')
def finished(text_file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('finished') / 'run'
    assert sweep.run(tiny_config(text_file), workdir) == 0
    return workdir


def test_a_manifest_is_what_sha256sum_writes(finished):
    directory = finished / 'checkpoints/12'
    lines = dict(line.split('  ')[::-1] for line in (directory / MANIFEST).read_text().splitlines())
    files = {str(p.relative_to(directory)) for p in directory.rglob('*') if p.is_file()}
    assert set(lines) == files - {MANIFEST}
    for name, digest in lines.items():
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest


def test_any_file_of_a_checkpoint_that_changed_is_found_out(finished, capfd):
    directory = finished / 'checkpoints/12'
    paths = [p for p in directory.rglob('*') if p.is_file()]
    assert len(paths) > 3
    for path in paths:
        sound = path.read_bytes()
        for damaged in (sound[:-1], bytes([sound[0] ^ 1]) + sound[1:]):
            path.write_bytes(damaged)
            assert load_run(finished).step == 8  # the one before
            assert f'{directory}: unreadable checkpoint: ' in capfd.readouterr().err
        path.write_bytes(sound)
    assert load_run(finished).step == 12


def test_where_no_checkpoint_is_sound_it_is_said(finished, monkeypatch):
    def damaged(self, step):
        raise DamagedError(f'{step}: unreadable checkpoint: x is damaged')

    monkeypatch.setattr(checkpoint.Checkpoints, '_verify', damaged)
    with pytest.raises(DamagedError, match='none before it is readable'):
        load_run(finished)


def test_a_checkpoint_without_its_manifest_is_not_finished(finished, text_file, tmp_path, capfd):
    shutil.copytree(finished, tmp_path / 'run')
    (tmp_path / 'run/summary.json').unlink()
    (tmp_path / f'run/checkpoints/12/{MANIFEST}').unlink()
    assert sweep.run(tiny_config(text_file), tmp_path / 'run') == 0
    printed = capfd.readouterr()
    assert f'checkpoints/12: no {MANIFEST}: not finished, passed over' in printed.err
    assert 'continues at step 8 of 12' in printed.out
    assert load_run(tmp_path / 'run').step == 12
