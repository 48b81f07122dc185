"""Command: train one configuration, or every point of a sweep, and report.

    python -m minigpt_jax.train --config=configs/heads_sweep.py

See the README for its flags and for what it leaves behind.
"""

import pathlib
import re

from absl import flags
from ml_collections import config_flags

from minigpt_jax import cli
from minigpt_jax.training import preemption, processes, sweep

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Recipe: FILE[:variant].')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Default: runs/<config>[-variant].')
_PROFILE = flags.DEFINE_string('profile', None, 'Steps to trace, START:STOP.')
_DISTRIBUTED = flags.DEFINE_string(
    'distributed', 'off', 'Several processes: off, auto (TPU pod, SLURM), HOST:PORT,COUNT,INDEX.'
)
_POINT = flags.DEFINE_integer('point', None, 'Train only this point of the sweep, from 0.')


def main():
    config = _CONFIG.value  # loads the file
    if config is None:
        cli.fail('--config is missing; for example --config=configs/heads_sweep.py')
    cli.use_compilation_cache()
    processes.start(_DISTRIBUTED.value)
    cli.use_cpu_devices(sweep.cpu_devices(config, cli.cpu_cores()))
    with processes.ending_together(), preemption.listening():
        if processes.is_leader():
            cli.print_devices()
        return sweep.run(config, _workdir(), _POINT.value, _profile())


def _profile():
    if _PROFILE.value is None:
        return None
    if not (match := re.fullmatch(r'(\d+):(\d+)', _PROFILE.value)):
        cli.fail(f'--profile={_PROFILE.value}: expected START:STOP, two steps such as 101:120')
    return int(match[1]), int(match[2])


def _workdir():
    if _WORKDIR.value is not None:
        return cli.directory('workdir', _WORKDIR.value)
    path, _, variant = config_flags.get_config_filename(flags.FLAGS['config']).partition(':')
    name = pathlib.Path(path).stem
    return pathlib.Path('runs') / (f'{name}-{variant}' if variant else name)


if __name__ == '__main__':
    cli.run_command(main)
