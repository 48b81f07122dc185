"""Attention and the order of its tokens: the article's figures, and what a causal mask does."""

import numpy as np
import pytest

from experiments import permutation


@pytest.fixture(scope='module')
def largest():
    return [np.abs(x).max() for x in permutation.differences().values()]


def test_without_positions_and_mask_only_rounding_is_left(largest):
    assert 0 < largest[0] < permutation.ROUNDING


def test_in_float64_only_its_rounding_is_left():
    rng = np.random.default_rng(7)
    x_TD = rng.standard_normal((6, 16))
    w_q, w_k, w_v = (rng.standard_normal((16, 16)) / 4 for _ in range(3))

    def attend(x_TD):
        scores_TS = (x_TD @ w_q) @ (x_TD @ w_k).T / 4
        weights_TS = np.exp(scores_TS - scores_TS.max(axis=1, keepdims=True))
        return weights_TS / weights_TS.sum(axis=1, keepdims=True) @ (x_TD @ w_v)

    order = [3, 0, 5, 1, 4, 2]
    assert np.abs(attend(x_TD[order]) - attend(x_TD)[order]).max() < 2e-15


def test_sinusoidal_positions_give_the_figure_of_the_article(largest):
    assert largest[1] == pytest.approx(permutation.PRINTED, abs=1e-6)


def test_a_causal_mask_alone_breaks_it(largest):
    assert largest[2] > 0.01


@pytest.mark.slow
def test_the_last_token_reads_order_through_a_mask_and_two_layers():
    causal_N, unmasked_N = (permutation.last_changes(0, causal=on) for on in (True, False))
    assert causal_N[0] < 1e-4
    assert (causal_N[1:] > 1e-2).all()
    assert (unmasked_N < 1e-4).all()
