"""Who needs warm-up: what counts as failed, and the verdicts on made-up losses."""

import types

import numpy as np
import pytest

from experiments import norm_training
from minigpt_jax.report.figures import png
from minigpt_jax.training import sweep

POINTS = [
    (placement, depth, warmup, rate)
    for placement in ('post', 'pre')
    for depth in (2, 6)
    for warmup in (0, 100)
    for rate in (1e-3, 1e-2)
]


def test_frequencies_alone_give_their_cross_entropy():
    corpus = types.SimpleNamespace(
        tokenizer=types.SimpleNamespace(vocab_size=2),
        train_tokens=np.array([0] * 2 + [1] * 6),
        validation_tokens=np.array([0, 1]),
    )
    expected = -(np.log(3 / 10) + np.log(7 / 10)) / 2
    assert norm_training.frequency_loss(corpus) == pytest.approx(expected)


def test_an_infinite_run_counts_as_one_that_knows_frequencies_alone():
    rows = [
        dict(zip(norm_training.AXES, POINTS[0], strict=True))
        | {'seed': seed, 'status': status, 'val_loss': loss}
        for seed, status, loss in ((1, 'diverged', None), (0, 'ok', 2.0))
    ]
    losses = norm_training.losses_by_point(rows, frequencies=3.0)
    np.testing.assert_array_equal(losses[POINTS[0]], [2.0, 3.0])
    np.testing.assert_array_equal(norm_training.failed(losses[POINTS[0]], 3.0), [False, True])


def test_verdicts_tell_who_needs_warm_up():
    losses = {point: np.array([2.0, 2.1, 2.2]) for point in POINTS}
    verdicts = [claim.verdict for claim in norm_training.judge(losses, 3.0)]
    assert verdicts == ['does not hold', 'does not hold', 'holds', 'holds', 'holds']
    losses['post', 6, 0, 1e-2] = np.array([3.0, 3.0, 2.9])
    losses['pre', 6, 0, 1e-2] = np.array([2.0, 2.0, 3.1])
    verdicts = [claim.verdict for claim in norm_training.judge(losses, 3.0)]
    assert verdicts == [
        'does not hold', 'holds under a condition', 'holds', 'holds under a condition', 'holds',
    ]  # fmt: skip
    losses['post', 6, 0, 1e-2] = np.array([3.0, 3.0, 2.1])  # gains of 1.0, 0.9 and -0.1
    assert norm_training.judge(losses, 3.0)[1].verdict == 'not decided'


def test_losses_that_scatter_decide_nothing_of_the_better_placement():
    losses = {point: np.array([2.0, 2.1, 2.2]) for point in POINTS}
    for point in POINTS:
        if point[0] == 'post':
            losses[point] = np.array([2.8, 2.0, 2.4])
    assert norm_training.judge(losses, 3.0)[-1].verdict == 'not decided'


def test_a_map_of_runs_that_all_failed_is_drawn():
    losses = {point: np.array([3.2, 3.3, 3.4]) for point in POINTS}
    assert png(norm_training.draw(losses, frequencies=3.0, steps=10))


@pytest.mark.parametrize(('variant', 'runs'), [('', 72), ('quick', 6)])
def test_every_point_of_the_sweep_is_possible(variant, runs):
    points = sweep.expand(norm_training.ln_sweep.get_config(variant))
    assert sum(len(point.seeds) for point in points) == runs
    assert not any(point.error for point in points)
