"""The rules of a decoder, as the experiment measures them."""

import functools

import numpy as np
import pytest

from experiments import decoder_rules

LENGTH = decoder_rules.LENGTH


@functools.cache
def model():
    return decoder_rules.make_model()


@pytest.mark.slow
def test_masked_weights_are_exactly_zero():
    masked = decoder_rules.masked_weights(*model())
    assert masked.size == 2 * 4 * 4 * LENGTH * (LENGTH - 1) // 2  # layers, texts, heads, pairs
    assert (masked == 0).all()


def test_later_tokens_change_later_outputs_alone():
    changes_TU = decoder_rules.changes_by_later_tokens(*model())
    before = np.tril(np.ones((LENGTH, LENGTH), bool))
    assert changes_TU[before].max() < 1e-6
    assert changes_TU[~before].min() > 1e-3


def test_each_layer_has_keys_of_its_own_of_the_one_memory():
    keys_NBSHK = decoder_rules.keys_of_layers(*model())
    assert keys_NBSHK.shape == (2, 4, LENGTH, 4, 32)
    assert decoder_rules.key_difference(keys_NBSHK) > 0.5


@pytest.mark.slow
def test_with_a_memory_of_zeros_the_source_does_not_matter():
    assert decoder_rules.change_by_source(*model(), 0.0) == 0
    assert decoder_rules.change_by_source(*model(), 1.0) > 1e-3
    biased = decoder_rules.make_model(use_bias=True)
    assert decoder_rules.change_by_source(*biased, 0.0) < 1e-5


@pytest.mark.slow
def test_all_ways_to_decode_give_the_same_logits():
    differences, largest, again = decoder_rules.compare_ways(*model())
    assert max(*differences.values(), again) < 1e-5 * max(largest, 1)
    assert largest > 0.1
