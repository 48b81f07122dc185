"""A sweep as training leaves it on disk, without the training."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

SAMPLE = 'To be, or not to be\nthat is the question of the attention heads.\n'


def write_sweep(
    workdir: Path,
    axes=((('model.num_heads',), ((1,), (2,), (4,), (8,), (16,))),),
    seeds=(0, 1, 2),
    changes=None,
    samples=None,
    config=None,
    environment=None,
):
    """Writes WORKDIR/config.json and the runs of a made-up sweep.

    Args:
        workdir: Its root.
        axes: As in the contract, with the values: (keys, tuples of values).
        seeds: Of every point.
        changes: {(index of the point, seed): columns that differ, or None for an unfinished run}.
        samples: {index of the point: text}.
        config: Further entries of the configuration, by group.
        environment: Further entries of the environment.

    Returns:
        The arguments of `write_report`.
    """
    base = {
        'data': {'corpus': 'python_docs', 'tokenizer': 'char', 'batch_size': 12},
        'model': {'family': 'decoder', 'context_length': 64},
        'optim': {'name': 'adamw', 'learning_rate': 0.001, 'schedule': 'cosine'},
        'seed': 0,
    }
    for group, values in (config or {}).items():
        base.setdefault(group, {}).update(values)
    recipe = {
        'config': base,
        'environment': {
            'packages': {'jax': '0.10.2', 'flax': '0.12.8'},
            'device': 'cpu',
            'git_commit': '0123abc',
            'corpus_sha256': 'c0ffee' * 10,
            'unknown_share': 0.00012,
            'command': 'python -m minigpt_jax.train --config=configs/heads_sweep.py',
            **(environment or {}),
        },
    }
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / 'config.json').write_text(json.dumps(recipe))
    run_dirs = []
    for index, values in enumerate(itertools.product(*(values for _, values in axes))):
        keys = [key for names, _ in axes for key in names]
        chosen = dict(zip(keys, itertools.chain(*values), strict=True))
        slug = '-'.join(f'p{index}-{v}'.replace('/', '_') for v in chosen.values()) or 'base'
        for seed in seeds:
            run_dir = workdir / 'points' / slug / f'seed-{seed}'
            run_dirs.append(run_dir)
            run_dir.mkdir(parents=True)
            change = (changes or {}).get((index, seed), {})
            row = {**_row(index, seed, slug, chosen), **(change or {})}
            (run_dir / 'config.json').write_text(json.dumps(recipe))
            (run_dir / 'metrics.jsonl').write_text(_metrics(row))
            (run_dir / 'samples.txt').write_text((samples or {}).get(index, SAMPLE))
            if change is not None:
                (run_dir / 'summary.json').write_text(json.dumps(row))
    return workdir, [tuple(names) for names, _ in axes], run_dirs


def _row(index, seed, slug, chosen):
    heads = chosen.get('model.num_heads', 4)
    width = chosen.get('model.d_model', 128)
    rng = np.random.default_rng([index, seed])
    lucky = np.random.default_rng(1000 + seed).normal(0, 0.02)  # shared by all points
    best = 0.02 * (np.log2(heads) - 2) ** 2 if isinstance(heads, int) else 0.0
    loss = 1.9 + best + lucky + rng.normal(0, 0.006) + 0.04 * (index % 2)
    return {
        'point': slug,
        'seed': seed,
        'num_heads': heads,
        'd_head': width // heads,
        'd_model': width,
        'num_layers': 4,
        'norm_placement': 'pre',
        'positions': 'learned',
        'num_params': 802_944,
        'steps': 2000,
        'tokens_seen': 1_536_000,
        'train_loss': loss - 0.08,
        'val_loss': loss,
        'val_perplexity': float(np.exp(loss)),
        'bits_per_byte': loss / np.log(2),
        'tokens_per_second': 19_000 - 700 * np.log2(heads) + rng.normal(0, 200),
        'step_ms': 40.4 + heads,
        'flops_per_token': 5_113_000,
        'peak_memory_mb': 61.0 + 3.1 * heads,
        'compile_s': 4.2,
        'train_s': 81.5,
        'status': 'ok',
        'error': None,
        'axes': chosen,
    }


def _metrics(row):
    rng = np.random.default_rng(row['seed'])
    train, val = (
        row[k] if np.isfinite(row[k] or np.nan) else 2.1 for k in ('train_loss', 'val_loss')
    )
    lines = []
    for step in range(50, 2001, 50):
        fall = 2.6 * np.exp(-step / 250)
        line = {'step': step, 'learning_rate': 1e-3, 'grad_norm': 0.8}
        if row['status'] == 'diverged' and step > 1000:
            line['train_loss'] = float('nan')
        else:
            line['train_loss'] = train + fall + rng.normal(0, 0.03)
            if step % 200 == 0:
                line['val_loss'] = val + fall
        lines.append(json.dumps(line) + '\n')
    return ''.join(lines)


@pytest.fixture
def make_sweep(tmp_path):
    """`make_sweep(**what_differs)` writes a sweep and returns the arguments of `write_report`."""
    return lambda name='heads_sweep', **differs: write_sweep(tmp_path / name, **differs)
