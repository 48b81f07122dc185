"""What a run writes while it trains: JSON lines, TensorBoard events, a line for the person."""

import json
import sys
import time

from tensorboardX import SummaryWriter
from tqdm import tqdm


class RunWriter:
    """`metrics.jsonl`, `timing.jsonl` and `tensorboard/` of one run.

    Opening at `step` drops every line behind that step: what a resumed run will write again.
    Lines are flushed one by one, so that a killed run loses none before its checkpoint.
    """

    def __init__(self, run_dir, step=0):
        run_dir.mkdir(parents=True, exist_ok=True)
        self._files = {}
        for name in ('metrics', 'timing'):
            path = run_dir / f'{name}.jsonl'
            lines = [line for line in read_lines(path) if line['step'] <= step]
            temporary = path.with_name(f'.{path.name}.part')
            temporary.write_text(''.join(json.dumps(line) + '\n' for line in lines))
            temporary.replace(path)
            self._files[name] = path.open('a')
        self._tensorboard = SummaryWriter(str(run_dir / 'tensorboard'), purge_step=step + 1)

    def write(self, name, step, values):
        """Appends {'step': step, **values} to `<name>.jsonl`; name is 'metrics' or 'timing'."""
        self._files[name].write(json.dumps({'step': step, **values}) + '\n')
        self._files[name].flush()
        for key, value in values.items():
            self._tensorboard.add_scalar(f'{name}/{key}', value, step)

    def close(self):
        for file in self._files.values():
            file.close()
        self._tensorboard.close()


class DamagedLineError(ValueError):
    """A line that this module did not write."""


def read_lines(path):
    """The JSON lines of a file as dicts; [] without a file. A torn last line is left out.

    Raises:
      DamagedLineError: naming the file and the line.
    """
    if not path.exists():
        return []
    values = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b'\n'):
            try:
                values.append(json.loads(line))
                values[-1]['step'] + 0  # a number
            except (ValueError, TypeError, KeyError):
                raise DamagedLineError(
                    f'{path}: line {number} is damaged; restore it, or remove the directory of '
                    'this run to train it again'
                ) from None
    return values


class Progress:
    """Loss, speed and time left: a bar on a terminal, plain lines elsewhere.

    Args:
      name: what stands in front, such as the point of a sweep.
      start, total: the first and the last step.
      every: seconds between plain lines.
      shown: whether this process is the one that says it.
    """

    def __init__(self, name, start, total, every=10.0, shown=True):
        self._name, self._start, self._total, self._every = name, start, total, every
        self._began = self._printed = time.monotonic()
        self._bar, self._shown = None, shown
        if shown and sys.stderr.isatty():
            self._bar = tqdm(
                desc=name, initial=start, total=total, unit='step', leave=True, dynamic_ncols=True
            )

    def update(self, step, **shown):
        """`shown`: texts by label, such as loss='2.31'."""
        text = '  '.join(f'{label} {value}' for label, value in shown.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if not self._shown or (now - self._printed < self._every and step < self._total):
            return
        self._printed = now
        left = (now - self._began) / max(1, step - self._start) * (self._total - step)
        print(
            f'{self._name}  step {step:,}/{self._total:,}  {text}  '
            f'{tqdm.format_interval(left)} left',
            flush=True,
        )

    def close(self):
        if self._bar is not None:
            self._bar.close()
