"""Being asked to stop: a signal is noted, and the run stops where its state can be saved."""

import contextlib
import signal
import sys

import jax
from jax.experimental import multihost_utils

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command, run again, continues

_noted = []  # names of the signals that came


class Preempted(KeyboardInterrupt):
    """Raised where training stopped because it was asked to, its state saved."""


@contextlib.contextmanager
def listening():
    """Within it SIGTERM and SIGINT are noted, for `is_asked`; a second SIGINT interrupts at once.

    Of several processes jax itself notes a SIGTERM, on behalf of all of them.
    """
    signals = (signal.SIGINT, signal.SIGTERM) if jax.process_count() == 1 else ()
    before = {number: signal.signal(number, _note) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _noted.clear()


def _note(number, frame):
    name = signal.Signals(number).name
    if number == signal.SIGINT and name in _noted:
        raise KeyboardInterrupt
    _noted.append(name)
    hint = '; once more to leave at once' if number == signal.SIGINT else ''
    print(f'{name}: stops as soon as the state can be saved{hint}', file=sys.stderr, flush=True)


def is_asked(step=None):
    """Whether to stop now; of several processes the answer is the same on all, for a `step`."""
    if jax.process_count() == 1:
        return bool(_noted)
    return step is not None and multihost_utils.reached_preemption_sync_point(step)


def check():
    """Raises Preempted if asked to stop: called where nothing would be lost."""
    if is_asked():
        raise Preempted
