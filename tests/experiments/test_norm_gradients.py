"""Gradient norms before training: what is measured, and the article within seed noise."""

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import norm_gradients
from experiments.norm_gradients import FEED_FORWARD, QKV, last_over_first


def test_attention_has_no_biases_and_other_layers_do():
    config = norm_gradients.make_config('Post-LN', 3)
    _, params = jax.eval_shape(lambda: norm_gradients.make_model(config, jax.random.key(0)))
    block = nnx.to_pure_dict(params)['blocks']
    assert set(block['attention']['qkv']) == set(block['attention']['out']) == {'kernel'}
    assert {'kernel', 'bias'} == set(block['feed_forward']['out'])
    assert block['attention']['qkv']['kernel'].shape[0] == 3


@pytest.mark.parametrize(('placement', 'last'), [('Post-LN', False), ('Pre-LN', True)])
def test_only_free_sums_end_in_a_norm(placement, last):
    config = norm_gradients.make_config(placement, 1)
    _, params = jax.eval_shape(lambda: norm_gradients.make_model(config, jax.random.key(0)))
    assert ('final_norm' in nnx.to_pure_dict(params)) is last


# Means and standard deviations of 8 to 12 seeds in PyTorch, the same setting.
ELSEWHERE = {
    'Post-LN': {6: (1.63, 0.24), 12: (2.53, 0.48), 24: (3.27, 0.54)},
    'Pre-LN': {6: (1.41, 0.20), 12: (1.73, 0.29), 24: (1.54, 0.22)},
}


@pytest.mark.slow
def test_the_ratios_of_the_article_are_within_the_spread_of_seeds():
    seeds = tuple(range(8))
    norms = {
        (name, depth): norm_gradients.measure_norms(name, depth, seeds)
        for name in ('Post-LN', 'Pre-LN')
        for depth in (6, 12, 24)
    }
    for (name, depth), by_parameter in norms.items():
        ratio_E = last_over_first(by_parameter[QKV])
        article = norm_gradients.ARTICLE[name][depth]
        assert abs(article - ratio_E.mean()) < 2.5 * ratio_E.std(ddof=1)
        mean, deviation = ELSEWHERE[name][depth]
        assert abs(ratio_E.mean() - mean) < deviation
    shares = [last_over_first(norms['Pre-LN', L][FEED_FORWARD]).mean() for L in (6, 12, 24)]
    assert shares[0] == pytest.approx(0.81, abs=0.06)
    assert shares[2] == pytest.approx(0.56, abs=0.06)
    assert shares == sorted(shares, reverse=True)
    post, pre = (last_over_first(norms[name, 12][QKV]) for name in ('Post-LN', 'Pre-LN'))
    assert post.mean() > pre.mean() + 0.3
    assert (last_over_first(norms['Pre-LN', 12][FEED_FORWARD]) < 1).all()
    whole_EN = norms['Pre-LN', 6][norm_gradients.WHOLE]
    parts = [x for name, x in norms['Pre-LN', 6].items() if name != norm_gradients.WHOLE]
    np.testing.assert_allclose(whole_EN**2, sum(x**2 for x in parts), rtol=1e-4)
