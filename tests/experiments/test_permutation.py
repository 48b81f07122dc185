"""Attention and the order of its tokens: the article's figures, and what a causal mask does."""

import numpy as np
import pytest

from experiments import permutation


@pytest.fixture(scope='module')
def largest():
    return [np.abs(x).max() for x in permutation.differences().values()]


def test_without_positions_and_mask_only_rounding_is_left(largest):
    assert 0 < largest[0] < permutation.ROUNDING


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
