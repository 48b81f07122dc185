"""Four tokens by hand: the digits of the article."""

import numpy as np
import pytest

from experiments import worked_example
from experiments.worked_example import PRINTED, ROUNDING


@pytest.fixture(scope='module')
def steps():
    return worked_example.work_out()


def test_scores_are_exact(steps):
    np.testing.assert_array_equal(steps['scores'], PRINTED['scores'])


@pytest.mark.parametrize('name', ['weights', 'outputs', 'causal weights'])
def test_the_printed_digits_are_ours(steps, name):
    printed = np.array(PRINTED[name])
    np.testing.assert_allclose(steps[name][: len(printed)], printed, rtol=0, atol=ROUNDING)


def test_the_mask_leaves_exact_zeros_and_the_last_row(steps):
    assert not np.triu(steps['causal weights'], 1).any()
    np.testing.assert_allclose(steps['causal weights'][-1], steps['weights'][-1], atol=1e-7)
    np.testing.assert_array_equal(steps['causal outputs'][0], steps['V'][0])


def test_a_wrong_digit_is_seen(steps):
    wrong = steps | {'weights': steps['weights'] + np.float32(1e-3)}
    verdicts = [claim.verdict for claim in worked_example.judge(wrong)]
    assert verdicts.count('does not hold') == 2  # of the weights, and of the last row
    assert {claim.verdict for claim in worked_example.judge(steps)} == {'holds'}
