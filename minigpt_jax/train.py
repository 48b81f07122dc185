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
_PLAN = flags.DEFINE_boolean('plan', False, 'Say what it would take, and train nothing.')
_DEVICES = flags.DEFINE_integer(
    'devices', None, 'Of --plan: so many imagined devices.', lower_bound=1, upper_bound=4096
)
_MEMORY_GB = flags.DEFINE_float(
    'memory_gb', None, "Of --plan: a device's memory, GiB.", lower_bound=1e-6, upper_bound=1e6
)
_POINT = flags.DEFINE_integer('point', None, 'Train only this point of the sweep, from 0.')


def main():
    config = _CONFIG.value  # loads the file
    if config is None:
        cli.fail('--config is missing; for example --config=configs/heads_sweep.py')
    cli.use_compilation_cache()
    if _PLAN.value:
        return _plan(config)
    for flag in (_DEVICES, _MEMORY_GB):
        if flag.value is not None:
            cli.fail(f'--{flag.name}={flag.value}: is of --plan')
    processes.start(_DISTRIBUTED.value)
    cli.use_cpu_devices(sweep.cpu_devices(config, cli.cpu_cores()))
    with processes.ending_together(), preemption.listening():
        if processes.is_leader():
            cli.print_devices()
        return sweep.run(config, _workdir(), _POINT.value, _profile())


def _plan(config):
    if _DEVICES.value is not None:
        cli.use_imagined_devices(_DEVICES.value)
    else:
        cli.use_cpu_devices(sweep.cpu_devices(config, cli.cpu_cores()))
    cli.print_devices()
    num_bytes = cli.device_memory() if _DEVICES.value is None else None
    if _MEMORY_GB.value is not None:
        num_bytes = _MEMORY_GB.value * 2**30
    return sweep.plan(config, _POINT.value, num_bytes)


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
