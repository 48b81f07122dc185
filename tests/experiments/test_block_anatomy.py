"""Shares of a block's parameters, and what passes between tokens."""

import jax
import numpy as np
import pytest

from experiments import block_anatomy


@pytest.mark.parametrize(
    ('cross', 'd_model', 'share'),
    [(False, 512, 0.6665), (False, 64, 0.6654), (True, 512, 0.4999), (True, 64, 0.4995)],
)
def test_the_share_of_the_feed_forward(cross, d_model, share):
    counts = block_anatomy.parameters(d_model, cross)
    assert round(block_anatomy.share(counts), 4) == share
    assert counts['self-attention'] == 4 * d_model**2
    assert counts['encoder-decoder attention'] == (4 * d_model**2 if cross else 0)
    assert counts['feed-forward'] == 8 * d_model**2 + 5 * d_model
    assert counts['attention biases'] == (2 if cross else 1) * 4 * d_model


def test_the_feed_forward_is_a_convolution_and_only_attention_mixes_tokens():
    norms, difference, largest = jax.tree.map(np.asarray, block_anatomy.measure_block())
    assert difference < 1e-6 < 0.1 < largest
    assert (block_anatomy.between_tokens(norms['feed-forward']) == 0).all()
    assert (np.diag(norms['feed-forward']) > 0.5).all()
    assert (norms['attention'] > 0.01).all()
