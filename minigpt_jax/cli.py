"""What every command shares: flags, one line for an error that a user can mend, devices."""

import contextlib
import math
import os
import pathlib
import re
import shutil
import sys

import jax
from absl import app, flags, logging

from minigpt_jax.training import preemption
from minigpt_jax.training.checkpoint import load_run
from minigpt_jax.training.config import KEYS, is_utf8, unknown_key
from minigpt_jax.training.preemption import Preempted

flags.disclaim_key_flags()  # a flag that is defined here stands in --help of the command


def run_command(main):
    """Runs `main()`, which returns an exit status, with parsed flags.

    Errors of flags, configuration, data or files end in one line on stderr and exit status 2. The
    exceptions that this project defines are of that kind; any other is a fault of the code, and
    keeps its traceback.
    """

    def parse(argv):
        try:
            rest = flags.FLAGS(argv)
            if not flags.FLAGS['verbosity'].present:
                # Orbax logs every save, and in tracebacks what is raised and told here anyway.
                logging.set_verbosity(logging.FATAL)
            if 'config' in flags.FLAGS and flags.FLAGS['config'].value is not None:
                flags.FLAGS['config'].value.keys()  # a missing file is reported on first use
            if len(rest) > 1:
                fail(f'unexpected argument {rest[1]!r}; flags look like --name=value')
            return rest
        except (AttributeError, KeyError, TypeError) as error:
            fail(_mistyped(argv, error))
        except (flags.Error, ValueError, OSError, ImportError) as error:
            fail(error)

    def guarded(_):
        try:
            status = main()
            sys.stdout.flush()
            sys.exit(status)
        except BrokenPipeError:  # whoever read the output has enough of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except OSError as error:
            fail(f'{error.filename}: {error.strerror}' if error.filename else error)
        except ValueError as error:
            if not type(error).__module__.startswith('minigpt_jax.'):
                raise
            fail(error)
        except Preempted:
            print('stopped as asked, state saved: run the same command again', file=sys.stderr)
            sys.exit(preemption.EXIT_STATUS)
        except KeyboardInterrupt:
            print('\ninterrupted: run the same command again to continue', file=sys.stderr)
            sys.exit(130)

    app.run(guarded, flags_parser=parse)


def directory(flag, value):
    """The path in the value of `--flag`; ends the command if there is none."""
    if not value.strip():
        fail(f'--{flag} is empty: give a directory')
    if not is_utf8(value):
        fail(f'--{flag}={value!r}: not UTF-8; rename it')
    return pathlib.Path(value)


def fail(message):
    """Prints one line and ends the command with exit status 2."""
    print(f'error: {" ".join(_reason(str(message)).split())}', file=sys.stderr)
    sys.exit(2)


def _reason(message):
    """The part for a person of what ml_collections says when it cannot load a configuration."""
    if missing := re.search(
        "Failed loading config.*No such file or directory: '(.*)'", message, re.S
    ):
        return f'--config: no such file: {missing[1]}'
    if 'Traceback' in message:
        return message.strip().splitlines()[-1]
    return message


def _mistyped(argv, error):
    """The line for a key of `--config.…` that does not exist; ml_collections names no other."""
    for argument in argv[1:]:
        flag = argument.lstrip('-').split('=')[0]
        key = flag.removeprefix('config.')
        if key != flag and key not in KEYS:
            return unknown_key(key)
    return error


def define_search_flags():
    """Defines --beam, --average and --length_penalty, of commands that translate."""
    beam = flags.DEFINE_integer(
        'beam', 1, 'Hypotheses a line; 1: greedy.', lower_bound=1, upper_bound=1000
    )
    average = flags.DEFINE_integer('average', 1, 'Newest checkpoints to average.', lower_bound=1)
    penalty = flags.DEFINE_float(
        'length_penalty', 0.6, 'α of lp = ((5 + length) / 6)^α; a score is log p / lp.',
        lower_bound=0, upper_bound=100,
    )  # fmt: skip
    flags.register_validator(penalty, math.isfinite, 'must be a finite number')  # a bound lets NaN
    return beam, average, penalty


_COMMANDS = {
    'decoder': 'sample',
    'encoder_decoder': 'translate',
    'encoder': 'evaluate',
    'image': 'evaluate',
}


def load_run_of(family, workdir, average=1):
    """The run in a directory (see `load_run`); ends the command if its model is of another family.

    Raises:
      RunError: if there is none.
    """
    run = load_run(workdir, average)
    if (found := run.config.model.family) != family:
        fail(
            f'{workdir}: holds a model of the family {found}, and this command takes {family}; '
            f'try python -m minigpt_jax.{_COMMANDS[found]} --workdir={workdir}'
        )
    return run


def use_compilation_cache():
    """Keeps compiled programs between commands, in the user's cache directory.

    `JAX_COMPILATION_CACHE_DIR` names another place; set it empty to switch the cache off.
    """
    if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
        home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
        jax.config.update('jax_compilation_cache_dir', str(pathlib.Path(home) / 'minigpt_jax'))
    # Without these two, small programs are compiled anew every time.
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def cpu_cores():
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def use_cpu_devices(count):
    """Makes the CPU `count` devices, before jax looks for any; `XLA_FLAGS` may say otherwise."""
    if 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', ''):
        return
    with contextlib.suppress(RuntimeError):  # a kernel of a GPU or TPU was asked for, and looked
        jax.config.update('jax_num_cpu_devices', count)


def use_imagined_devices(count):
    """Makes the CPU `count` devices whatever is there, for programs that are compiled alone."""
    os.environ['XLA_FLAGS'] = re.sub(
        r'--xla_force_host_platform_device_count=\d+', '', os.environ.get('XLA_FLAGS', '')
    )
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', count)


def device_memory():
    """Bytes of the first device's memory; of a CPU, its share of the machine's. None: unknown."""
    device = jax.devices()[0]
    if device.platform != 'cpu':
        return (device.memory_stats() or {}).get('bytes_limit')
    if 'SC_PHYS_PAGES' not in os.sysconf_names:
        return None
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / jax.device_count()


def print_devices():
    """Prints the devices that jax found, and how to get at a GPU that it did not."""
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    print(f'devices: {len(devices)} × {", ".join(kinds)} ({devices[0].platform})')
    has_gpu = shutil.which('nvidia-smi') or pathlib.Path('/proc/driver/nvidia/version').exists()
    if devices[0].platform == 'cpu' and has_gpu:
        print(
            "a GPU is present that jax does not see; this may fix it: pip install -U 'jax[cuda13]'"
        )
