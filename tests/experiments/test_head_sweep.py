"""Head counts along further axes: what is said of which losses."""

import numpy as np
import pytest

from experiments import head_sweep
from minigpt_jax.report import figures


def rows(loss, memory, place):
    """Three seeds of one head count."""
    noise = np.roll((-0.01, 0.002, 0.008), place)
    return [
        {'seed': seed, 'status': 'ok', 'val_loss': loss + noise, 'step_ms': 10.0,
         'peak_memory_mb': memory, 'tokens_per_second': 1e3, 'num_params': 9, 'sample': 'To be'}
        for seed, noise in enumerate(noise)
    ]  # fmt: skip


def series(*losses):
    """{title: {heads: rows}} of head counts 1, 2, 4, …; every head takes 2 MB."""
    by_heads = {2**i: rows(loss, 20 + 2 * 2**i, i) for i, loss in enumerate(losses)}
    return {'learning_rate 0.004': by_heads}


@pytest.mark.parametrize(
    ('losses', 'verdicts'),
    [
        ((2.5, 2.4, 2.0, 2.1, 2.6), ['holds', 'holds']),  # more help, then hurt
        ((2.0, 2.1, 2.3, 2.4, 2.6), ['does not hold', 'holds']),  # one is best
        ((2.6, 2.4, 2.3, 2.2, 2.0), ['holds', 'does not hold']),  # the most are best
        ((2.301, 2.3, 2.3, 2.3, 2.302), ['not decided', 'not decided']),  # seed noise
    ],
)
def test_more_heads_are_judged_by_intervals_of_paired_differences(losses, verdicts):
    assert [claim.verdict for claim in head_sweep.judge(series(*losses))[:-1]] == verdicts


def test_memory_is_of_each_head():
    claim = head_sweep.judge(series(2.5, 2.0, 2.6))[-1]
    assert claim.verdict == 'holds'
    assert '22.0 MB with 1, 28.0 with 4: 2.00 MB a head' in claim.ours


def test_a_head_count_whose_runs_diverged_is_left_out():
    found = series(2.5, 2.0, 2.6)
    for row in found['learning_rate 0.004'][4]:
        row['status'] = 'diverged'
    _, _, table = head_sweep.tabulate(found)
    assert [row[2] for row in table] == ['2.500 ± 0.023', '2.000 ± 0.023', 'diverged']
    assert [row[3] for row in table] == [table[0][3], 'best', '–']
    assert figures.png(head_sweep.draw(found))


def test_series_are_named_by_what_differs():
    row = {'learning_rate': 4e-3, 'd_model': 64, 'context_length': 32, 'd_head': 16}
    assert [head_sweep.title_of(name, row) for name in head_sweep.SWEEPS] == [
        'learning_rate 0.004',
        'd_model 64',
        'context_length 32',
        'd_head 16, the width grows',
    ]
