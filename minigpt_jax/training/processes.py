"""Several processes that train together, each with devices of its own: hosts of a pod or cluster.

All run the same program in step. The leader alone decides what is read from the workdir and writes
reports; checkpoints are written by all. With one process each of these functions does next to
nothing, so that nobody else needs to ask how many there are.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import traceback

import jax
import numpy as np
from jax.experimental import multihost_utils

from minigpt_jax.training.config import ConfigError

HEARTBEAT_S = 20  # after which a process that has fallen silent is taken for dead
_LOST = (
    'lost another process of this run; run the same command again on all of them to continue from '
    'the newest checkpoint'
)


def _take_leave():
    """Says that this process has said all there is to say."""


def start(flag):
    """Joins the other processes, as `--distributed` says: before jax looks for devices.

    Args:
      flag: `off`; `auto`, where jax finds the others by the environment of a TPU pod, SLURM or Open
        MPI; or `HOST:PORT,COUNT,INDEX`: where process 0 listens, how many there are, which this is.

    Raises:
      ConfigError: for another text, and where the others are not found.
    """
    if flag == 'off':
        return
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    known = {} if flag == 'auto' else _parse(flag)
    try:
        jax.distributed.initialize(**known, heartbeat_timeout_seconds=HEARTBEAT_S)
    except (RuntimeError, ValueError) as error:
        reason = ' '.join(str(error).split())[:300]
        raise ConfigError(
            f'--distributed={flag}: cannot join the other processes: {reason}'
        ) from error
    _leave_last_words(f'error: process {jax.process_index()}: {_LOST}')


def _leave_last_words(text):
    """Has a process of a few lines print `text` if this one ends without `_take_leave`.

    Where the leader dies, jax aborts the others, which can say nothing for themselves any more.
    """
    global _take_leave
    program = 'import sys\nif not sys.stdin.buffer.read(1): print(sys.argv[1], file=sys.stderr)'
    heir = subprocess.Popen(
        [sys.executable, '-c', program, text], stdin=subprocess.PIPE, start_new_session=True
    )

    def take_leave():
        with contextlib.suppress(OSError):
            os.write(heir.stdin.fileno(), b'.')

    _take_leave = take_leave
    atexit.register(take_leave)


def _parse(flag):
    address, *numbers = flag.split(',')
    host, _, port = address.rpartition(':')
    if not (host and port.isdecimal() and len(numbers) == 2 and all(map(str.isdecimal, numbers))):
        raise ConfigError(
            f'--distributed={flag}: expected off, auto, or HOST:PORT,COUNT,INDEX such as '
            'localhost:1234,2,0'
        )
    count, index = map(int, numbers)
    if index >= count:
        raise ConfigError(f'--distributed={flag}: of {count} processes INDEX is below {count}')
    return {'coordinator_address': address, 'num_processes': count, 'process_id': index}


def is_leader():
    """Whether this process writes what one alone writes."""
    return jax.process_index() == 0


def agree(value):
    """The leader's value, on every process: anything that JSON holds."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(size, np.uint8)
    if is_leader():
        padded[:] = text
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))))


def to_host(tree):
    """Arrays as NumPy's, whole on every process, wherever they lie."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(np.asarray, multihost_utils.process_allgather(tree, tiled=True))


def to_one_device(tree):
    """Arrays for programs of one process: of several, whole on a device of each."""
    if jax.process_count() == 1:
        return tree
    return jax.device_put(to_host(tree), jax.local_devices()[0])


def own_parts(sharding, shape):
    """(start, stop) along each axis of what the devices of this process hold of an array."""
    where = sharding.addressable_devices_indices_map(shape).values()
    ranges = [[part.indices(size) for part, size in zip(x, shape, strict=True)] for x in where]
    return [
        (min(start for start, *_ in axis), max(stop for _, stop, _ in axis))
        for axis in zip(*ranges, strict=True)
    ]


def place(part, sharding, shape, whole=False):
    """Parts of an array, or on every process the `whole` of it, as one array on a mesh.

    A part is what `own_parts` says of the process.
    """
    if jax.process_count() == 1:
        return jax.device_put(part, sharding)
    starts = [0 if whole else start for start, _ in own_parts(sharding, shape)]

    def piece(index):
        ranges = [x.indices(size) for x, size in zip(index, shape, strict=True)]
        return part[tuple(slice(a - s, b - s) for (a, b, _), s in zip(ranges, starts, strict=True))]

    return jax.make_array_from_callback(shape, sharding, piece)


@contextlib.contextmanager
def ending_together():
    """Ends this process at once when it, or another, fails: the others would wait for it for ever.

    Where one has died, what the rest see is a failed transfer, and their own end would wait for it.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        reason = ' '.join(str(error).split())[:200]
        failures = error, error.__cause__  # a checkpoint names what failed in its place
        # Within a checkpoint it may also show as a barrier that was not reached in time.
        if any(isinstance(x, jax.errors.JaxRuntimeError) for x in failures) or 'barrier' in reason:
            reason = f'{_LOST} ({reason})'
        elif not type(error).__module__.startswith('minigpt_jax.'):
            traceback.print_exc()
        sys.stdout.flush()
        print(f'error: process {jax.process_index()}: {reason}', file=sys.stderr, flush=True)
        _take_leave()
        os._exit(1)
