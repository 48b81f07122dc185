"""Command: train one configuration, or every point of a sweep, and report.

    python -m minigpt_jax.train --config=configs/heads_sweep.py

See the README for its flags and for what it leaves behind.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from minigpt_jax import cli
from minigpt_jax.training import sweep

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Recipe: FILE[:variant].')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Default: runs/<config>[-variant].')
_POINT = flags.DEFINE_integer('point', None, 'Train only this point of the sweep, from 0.')


def main():
    config = _CONFIG.value  # loads the file
    if config is None:
        cli.fail('--config is missing; for example --config=configs/heads_sweep.py')
    cli.use_compilation_cache()
    cli.print_devices()
    return sweep.run(config, _workdir(), _POINT.value)


def _workdir():
    if _WORKDIR.value:
        return pathlib.Path(_WORKDIR.value)
    path, _, variant = config_flags.get_config_filename(flags.FLAGS['config']).partition(':')
    name = pathlib.Path(path).stem
    return pathlib.Path('runs') / (f'{name}-{variant}' if variant else name)


if __name__ == '__main__':
    cli.run_command(main)
