"""What launch.sh installs and runs, seen through a stand-in for Python that notes its orders."""

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEFAULT = ['-m', 'minigpt_jax.train', '--config=configs/heads_sweep.py']

# It makes environments that hold a copy of itself, and leaves what needs a real Python (locks,
# TOML, metadata) to the one that runs the tests. Files in $STUB steer it: see Launcher.
STUB = """#!/usr/bin/env bash
version={version}
record() {{
  local line
  line=$(printf '%s\\037' "${{0##*/}}" "$PWD" "${{JAX_PLATFORMS-}}" "$@")
  echo "$line" >>"$STUB/calls"
}}
case "$1 $2" in
  '-c '*version_info*) [[ -n $version ]] && echo "$version"; exit ;;
  '-c '*google.colab*) exit 1 ;;
  '-c '*ensurepip*) [[ ! -e $STUB/lacks-venv ]]; exit ;;
  '-c '*importlinter*) record -m lint-imports ;;
  '-c '*) exec {real} "$@" ;;
  '-m venv')
    record "$@"
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "version = $version" >"$3/pyvenv.cfg" ;;
  '-m pip')
    for ((i = 3; i < $#; i++)); do
      next=$((i + 1))
      case ${{!i}} in -c | -r) cat "${{!next}}" >>"$STUB/pip$(printf '%s' "${{!i}}")" ;; esac
    done
    record "$@"
    while [[ -e $STUB/slow-pip ]]; do sleep 0.02; done ;;
  *) record "$@" ;;
esac
[[ ! -e $STUB/fails-$2 ]]
"""


class Launcher:
    """A copy of the repository's launch.sh with `python3` and friends replaced by stand-ins."""

    def __init__(self, tmp_path):
        self.repo = tmp_path / 'a clone'  # a space, as in many home directories
        self.repo.mkdir()
        for name in ('launch.sh', 'requirements.txt', 'pyproject.toml'):
            shutil.copy(ROOT / name, self.repo)
        self.stub = tmp_path / 'stub'
        self.bin = tmp_path / 'bin'
        self.stub.mkdir()
        self.bin.mkdir()
        self.pythons(python3='3.11.7', **{'python3.11': '', 'python3.12': '', 'python3.13': ''})
        hidden = ('PYTHON', 'MINIGPT_VENV', 'MINIGPT_CONSTRAINTS', 'COLAB_RELEASE_TAG')
        self.env = {k: v for k, v in os.environ.items() if k not in (*hidden, 'JAX_PLATFORMS')}
        self.env |= {'STUB': str(self.stub), 'PATH': f'{self.bin}:{os.environ["PATH"]}'}

    def pythons(self, **versions):
        """Puts stand-ins on the PATH; one without a version fails, like a shim of pyenv."""
        for name, version in versions.items():
            path = self.bin / name
            path.write_text(STUB.format(version=version, real=sys.executable))
            path.chmod(0o755)

    def start(self, *args, cwd=None, **env):
        return subprocess.Popen(
            [self.repo / 'launch.sh', *args],
            cwd=cwd or self.repo,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *args, **kwargs):
        process = self.start(*args, **kwargs)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def calls(self):
        """(name, working directory, JAX_PLATFORMS, arguments) of what was run, in order."""
        if not (self.stub / 'calls').exists():
            return []
        lines = (self.stub / 'calls').read_text().splitlines()
        return [(f[0], f[1], f[2], f[3:-1]) for f in (line.split('\037') for line in lines)]

    def commands(self):
        """The arguments of what was run, without what was installed."""
        return [c[3] for c in self.calls() if c[3][1] not in ('pip', 'venv')]

    def installs(self):
        """The arguments of each `pip install`."""
        return [c[3] for c in self.calls() if c[3][1:3] == ['pip', 'install']]

    def wait_for_pip(self):
        deadline = time.monotonic() + 20
        while not self.installs():
            assert time.monotonic() < deadline, 'pip was never started'
            time.sleep(0.01)


@pytest.fixture
def launcher(tmp_path):
    return Launcher(tmp_path)


def one_line(text):
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


def test_first_run_installs_requirements_into_venv_and_trains_the_default_config(launcher):
    result = launcher.run()
    assert result.returncode == 0, result.stderr
    assert 'installing (once) into .venv' in one_line(result.stderr)
    assert [c[0] for c in launcher.calls()] == ['python3', 'python', 'python']
    assert (launcher.stub / 'pip-r').read_text() == (ROOT / 'requirements.txt').read_text()
    assert launcher.commands() == [DEFAULT]


def test_second_run_installs_nothing_and_looks_for_no_python(launcher):
    launcher.run()
    launcher.pythons(python3='')
    result = launcher.run('--config.train.steps=10')
    assert (result.returncode, result.stderr) == (0, '')
    assert len(launcher.installs()) == 1
    assert launcher.commands() == [DEFAULT, [*DEFAULT, '--config.train.steps=10']]


def test_changed_requirements_are_installed_and_an_earlier_accelerator_is_kept(launcher):
    launcher.run('--accelerator=cuda')
    with open(launcher.repo / 'requirements.txt', 'a') as f:
        f.write('another>=1\n')
    launcher.run()
    assert ['jax[cuda13]' in args for args in launcher.installs()] == [True, True]
    assert (launcher.stub / 'pip-r').read_text().endswith('another>=1\n')


@pytest.mark.parametrize(
    ('flags', 'arguments'),
    [
        (['--config=my conf.py:v', '-x'], ['--config=my conf.py:v', '-x']),
        (['-x', '--config', 'mine.py'], ['-x', '--config', 'mine.py']),
        (['--config.seed=1', '--workdir=a b'], [DEFAULT[2], '--config.seed=1', '--workdir=a b']),
        (['--', '--help'], [DEFAULT[2], '--help']),
    ],
)
def test_flags_reach_training_and_a_given_config_replaces_the_default(launcher, flags, arguments):
    assert launcher.run(*flags).returncode == 0
    assert launcher.commands() == [['-m', 'minigpt_jax.train', *arguments]]


def test_exit_status_of_the_command_is_passed_on(launcher):
    (launcher.stub / 'fails-minigpt_jax.train').touch()
    assert launcher.run().returncode == 1


def test_works_from_another_directory(launcher, tmp_path):
    result = launcher.run(cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert launcher.calls()[-1][1] == str(launcher.repo)
    assert not (tmp_path / '.venv').exists()


def test_too_old_python_is_told_in_one_line(launcher):
    old = dict.fromkeys(('python3', 'python3.11', 'python3.12', 'python3.13'), '3.9.2')
    launcher.pythons(**old)
    result = launcher.run()
    assert result.returncode == 1
    message = one_line(result.stderr)
    assert 'Python 3.11 or newer is needed' in message
    assert 'python3 is 3.9.2' in message
    assert launcher.calls() == []


def test_a_shim_that_fails_and_an_old_python_are_passed_over(launcher):
    launcher.pythons(**{'python3': '3.10.1', 'python3.13': '', 'python3.12': '3.12.1'})
    assert launcher.run().returncode == 0
    assert launcher.calls()[0][0] == 'python3.12'


def test_a_named_python_that_is_unfit_is_not_replaced_by_another(launcher):
    launcher.pythons(old='3.8.18')
    result = launcher.run(PYTHON=str(launcher.bin / 'old'))
    assert result.returncode == 1
    assert 'old is 3.8.18' in one_line(result.stderr)
    assert launcher.calls() == []


def test_another_named_python_remakes_the_environment(launcher):
    launcher.run()
    launcher.pythons(newer='3.12.1')
    (launcher.repo / '.venv' / 'of-the-old').touch()
    newer = str(launcher.bin / 'newer')
    assert launcher.run(PYTHON=newer).returncode == 0
    assert not (launcher.repo / '.venv' / 'of-the-old').exists()
    assert len(launcher.installs()) == 2
    assert launcher.run(PYTHON=newer).returncode == 0
    assert len(launcher.installs()) == 2


def test_missing_venv_module_names_the_package_to_install(launcher):
    (launcher.stub / 'lacks-venv').touch()
    result = launcher.run()
    assert result.returncode == 1
    assert 'apt install python3-venv' in one_line(result.stderr)
    assert launcher.calls() == []


def test_failed_install_runs_nothing_and_is_done_again(launcher):
    (launcher.stub / 'fails-pip').touch()
    result = launcher.run()
    assert result.returncode == 1
    assert 'the installation failed' in result.stderr
    assert launcher.commands() == []
    (launcher.stub / 'fails-pip').unlink()
    assert launcher.run().returncode == 0
    assert len(launcher.installs()) == 2
    assert launcher.commands() == [DEFAULT]


def test_interrupted_install_is_done_again_from_nothing(launcher):
    (launcher.stub / 'slow-pip').touch()
    process = launcher.start('--accelerator=tpu')
    launcher.wait_for_pip()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (launcher.stub / 'slow-pip').unlink()
    (launcher.repo / '.venv' / 'half-a-package').touch()

    result = launcher.run()
    assert result.returncode == 0, result.stderr
    assert not (launcher.repo / '.venv' / 'half-a-package').exists()
    assert ['jax[tpu]' in args for args in launcher.installs()] == [True, True]
    assert launcher.commands() == [DEFAULT]


def test_two_at_once_install_once_and_both_run(launcher):
    (launcher.stub / 'slow-pip').touch()
    first = launcher.start()
    launcher.wait_for_pip()
    second = launcher.start()
    assert 'waiting for another installation' in second.stderr.readline()
    assert launcher.commands() == []
    (launcher.stub / 'slow-pip').unlink()
    for process in (first, second):
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert len(launcher.installs()) == 1
    assert launcher.commands() == [DEFAULT, DEFAULT]


@pytest.mark.parametrize('colab', [False, True])
def test_without_venv_the_jax_that_is_there_is_kept(launcher, colab):
    flags, env = ([], {'COLAB_RELEASE_TAG': 'x'}) if colab else (['--no-venv'], {})
    result = launcher.run(*flags, **env)
    assert result.returncode == 0, result.stderr
    kept = (launcher.stub / 'pip-c').read_text().split()
    assert kept == [f'{name}=={metadata.version(name)}' for name in ('jax', 'jaxlib')]
    assert not (launcher.repo / '.venv').exists()
    assert {c[0] for c in launcher.calls()} == {'python3'}
    assert launcher.commands() == [DEFAULT]


@pytest.mark.parametrize(
    ('accelerator', 'extra', 'platforms'),
    [('cuda', ['jax[cuda13]'], ''), ('tpu', ['jax[tpu]'], ''), ('cpu', [], 'cpu')],
)
def test_accelerator_selects_the_extra_of_jax(launcher, accelerator, extra, platforms):
    assert launcher.run(f'--accelerator={accelerator}').returncode == 0
    (install,) = launcher.installs()
    assert [arg for arg in install if arg.startswith('jax')] == extra
    assert launcher.calls()[-1][2:] == (platforms, DEFAULT)


@pytest.mark.parametrize(
    ('args', 'named'),
    [
        (['--accelerator=gpu'], 'cuda, tpu, cpu'),
        (['--accelerator='], 'cuda, tpu, cpu'),
        (['tset'], 'test, help'),
        (['--constraint=none.txt'], 'none.txt'),
    ],
)
def test_unknown_values_exit_2_and_name_the_valid_ones(launcher, args, named):
    result = launcher.run(*args)
    assert result.returncode == 2
    assert named in one_line(result.stderr)
    assert launcher.calls() == []


@pytest.mark.parametrize('flag', [True, False])
def test_constraints_reach_pip(launcher, flag):
    (launcher.repo / 'pins.txt').write_text('numpy==2.4.6\n')
    result = launcher.run(
        *(['--constraint=pins.txt'] if flag else []),
        **({} if flag else {'MINIGPT_CONSTRAINTS': 'pins.txt'}),
    )
    assert result.returncode == 0, result.stderr
    assert (launcher.stub / 'pip-c').read_text() == 'numpy==2.4.6\n'


def test_help_prints_usage_and_installs_nothing(launcher):
    for args in (['help'], ['--help'], ['test', '-h']):
        result = launcher.run(*args)
        assert result.returncode == 0
        assert result.stdout.startswith('usage: ./launch.sh')
    assert launcher.calls() == []


def test_test_runs_every_part_on_the_cpu_without_slow_tests(launcher):
    result = launcher.run('test', 'tests/model', '-x')
    assert result.returncode == 0, result.stderr
    assert launcher.commands() == [
        ['-m', 'ruff', 'check', '.'],
        ['-m', 'ruff', 'format', '--check', '.'],
        ['-m', 'lint-imports'],
        [
            '-m',
            'pytest',
            '-n',
            '2',
            '--dist',
            'worksteal',
            '--durations=20',
            '-m',
            'not slow',
            'tests/model',
            '-x',
        ],
    ]
    assert launcher.calls()[-1][2] == 'cpu'
    installed = (launcher.stub / 'pip-r').read_text()
    assert 'pytest>=' in installed
    assert 'import-linter>=' in installed


def test_test_all_includes_slow_tests(launcher):
    launcher.run('test', '--all')
    assert launcher.commands()[-1] == [
        '-m',
        'pytest',
        '-n',
        '2',
        '--dist',
        'worksteal',
        '--durations=20',
    ]


@pytest.mark.parametrize('part', ['ruff', 'pytest'])
def test_test_runs_all_parts_and_fails_when_one_does(launcher, part):
    (launcher.stub / f'fails-{part}').touch()
    result = launcher.run('test')
    assert result.returncode == 1
    assert f'failed: {part}' in result.stderr
    assert len(launcher.commands()) == 4


def test_test_after_training_adds_what_it_needs(launcher):
    launcher.run()
    launcher.run('test')
    launcher.run()
    assert len(launcher.installs()) == 2


def test_changed_test_group_is_installed_but_other_settings_of_the_project_are_not(launcher):
    project = launcher.repo / 'pyproject.toml'
    launcher.run('test')
    project.write_text(project.read_text().replace('line-length = 100', 'line-length = 99'))
    launcher.run('test')
    assert len(launcher.installs()) == 1
    project.write_text(project.read_text().replace('"pytest>=', '"another>=1", "pytest>='))
    launcher.run('test')
    assert len(launcher.installs()) == 2
    assert 'another>=1\n' in (launcher.stub / 'pip-r').read_text()
