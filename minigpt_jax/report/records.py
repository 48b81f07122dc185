"""What the disk holds of a sweep."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt_jax.report import tables
from minigpt_jax.report.tables import Axes, Point

# Keys that change what a token is.
TOKEN_KEYS = ('data.tokenizer', 'data.vocab_size')


@dataclass(frozen=True)
class Sweep:
    """The rows and texts of a sweep, and what follows from them."""

    title: str
    axes: Axes
    rows: list[dict[str, Any]]  # a finished run each, in the order of the sweep
    points: list[Point]
    unfinished: list[str]  # names of run directories without a row
    curves: dict[tuple[str, int], dict[str, list[tuple[int, float]]]]
    samples: dict[str, str]  # by point, of its first run that has one
    config: dict[str, Any]
    environment: dict[str, Any]

    @property
    def metric(self) -> str:
        """What is compared: losses per token, or bits per byte where the tokenizers differ."""
        ok = [row for row in self.rows if row.get('status') == 'ok']
        # Where a text had symbols unknown to one tokenizer, its points have no bits per byte.
        measured = any(tables.is_finite(row.get('bits_per_byte')) for row in ok)
        other_tokens = any(key in axis for axis in self.axes for key in TOKEN_KEYS)
        return 'bits_per_byte' if measured and other_tokens else 'val_loss'

    @property
    def loss_unit(self) -> str:
        """Of losses: what is predicted is a token, a hidden one, or an image."""
        family = (self.config.get('model') or {}).get('family')
        predicted = {'encoder': 'hidden token', 'image': 'image'}.get(family, 'token')
        return f'nats per {predicted}'

    @property
    def unit(self) -> str:
        """Of the metric."""
        return self.loss_unit if self.metric == 'val_loss' else tables.METRICS[self.metric].unit

    def by_seed(self) -> dict[str, dict[int, float]]:
        """The metric, `{point: {seed: value}}`."""
        return {point.name: point.by_seed(self.metric) for point in self.points}


def read_sweep(workdir: Path, axes: Axes, run_dirs: Sequence[Path]) -> Sweep:
    """Everything that the pages show, from the files of the runs."""
    rows, unfinished, curves, samples = [], [], {}, {}
    for run_dir in map(Path, run_dirs):
        row = _read_json(run_dir / 'summary.json')
        if not row:
            unfinished.append(f'{run_dir.parent.name}/{run_dir.name}')
            continue
        rows.append(row)
        curves[row.get('point'), row.get('seed')] = _read_curves(run_dir / 'metrics.jsonl')
        sample = run_dir / 'samples.txt'
        if row.get('point') not in samples and row.get('status') == 'ok' and sample.exists():
            samples[row.get('point')] = sample.read_text(encoding='utf-8', errors='replace')
    recipe = _read_json(workdir / 'config.json')
    return Sweep(
        title=workdir.resolve().name,
        axes=tuple(axes),
        rows=rows,
        points=tables.group_points(axes, rows),
        unfinished=unfinished,
        curves=curves,
        samples=samples,
        config=recipe.get('config') or {},
        environment=recipe.get('environment') or {},
    )


def _read_json(path: Path) -> dict[str, Any]:
    """An object, empty where there is none: a killed run may have left no file, or half of one."""
    try:
        value = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    curves = {'train_loss': [], 'val_loss': []}
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a killed run
            continue
        if not (isinstance(record, dict) and tables.is_finite(record.get('step'))):
            continue
        for key, curve in curves.items():
            if tables.is_finite(record.get(key)):
                curve.append((record['step'], record[key]))
    return curves
