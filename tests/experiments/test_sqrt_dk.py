"""Why scores are divided by √d_k: the article's digits, their limit, and a pair of models."""

import types

import numpy as np
import pytest

from experiments import sqrt_dk


@pytest.fixture(scope='module')
def samples():
    return sqrt_dk.sample_softmax((4, 16, 64))


def test_the_printed_digits_are_ours(samples):
    for d in samples:
        assert sqrt_dk.digits(samples, d) == sqrt_dk.PRINTED[d]


@pytest.mark.slow
def test_all_printed_digits_are_ours():
    samples = sqrt_dk.sample_softmax(sqrt_dk.PRINTED)
    assert {d: sqrt_dk.digits(samples, d) for d in samples} == sqrt_dk.PRINTED
    value, half = sqrt_dk.slope(samples, 64, 1024)
    assert value == pytest.approx(-0.507, abs=0.0005)
    assert abs(value + 0.5) < half


def test_scores_grow_as_the_root_of_d(samples):
    for d, columns in samples.items():
        assert np.sqrt(columns['square'].mean()) == pytest.approx(np.sqrt(d), rel=0.01)


def test_at_few_dimensions_the_indicator_falls_more_slowly(samples):
    value, half = sqrt_dk.slope(samples, 4, 16)
    assert value == pytest.approx(-0.39, abs=0.005)
    assert value - half > -0.5


def test_the_limit_is_the_mean_of_the_largest_of_eight_normals(samples):
    drawn = np.random.default_rng(0).standard_normal((200_000, 8)).max(axis=1)
    assert sqrt_dk.asymptote() == pytest.approx(drawn.mean(), abs=0.005)
    at_64 = samples[64]['raw_gradient'].mean() * 8
    assert at_64 == pytest.approx(sqrt_dk.asymptote(), rel=0.02)


def test_draws_are_those_of_a_loop_over_trials():
    rng = np.random.default_rng(5)
    stds = []
    for _ in range(3):
        q_K = rng.standard_normal(4)
        k_SK = rng.standard_normal((8, 4))
        stds.append((k_SK @ q_K).std())
    together = sqrt_dk.sample_trials(np.random.default_rng(5), 4, 3)
    np.testing.assert_allclose(together['std'], stds)


def test_counted_losses_are_those_of_frequencies_and_pairs():
    tokens = np.tile(np.array([0, 1], np.uint8), 5000)
    corpus = types.SimpleNamespace(
        tokenizer=types.SimpleNamespace(vocab_size=2),
        train_tokens=tokens,
        validation_tokens=tokens[:101],
    )
    counted = sqrt_dk.counted_losses(corpus)
    assert counted['frequencies'] == pytest.approx(np.log(2), abs=1e-3)
    assert counted['pairs'] == pytest.approx(0, abs=1e-3)


def test_the_two_models_differ_in_the_division_alone():
    with_division, without = (sqrt_dk.make_config('normed', 32, on, 60) for on in (True, False))
    changed = {
        key
        for group in with_division
        if group in ('model', 'optim', 'train', 'data')
        for key in with_division[group]
        if with_division[group][key] != without[group][key]
    }
    assert changed == {'scale_scores'}
    assert with_division.model.num_heads == 4


def claim_of(raw):
    divided = np.array([2.0, 2.01, 1.99])
    losses = {('gpt2', 8, True): divided, ('gpt2', 8, False): np.array(raw)}
    (claim,) = sqrt_dk.judge_training(losses, {'frequencies': 3.0, 'pairs': 2.5})
    return claim


@pytest.mark.parametrize(
    ('raw', 'verdict'),
    [
        ([2.1, 2.12, 2.08], 'does not hold'),
        ([2.9, 2.92, 2.88], 'holds'),
        ([2.2, 2.9, 2.5], 'not decided'),
    ],
)
def test_a_model_hardly_learns_if_it_comes_less_than_half_the_way(raw, verdict):
    assert claim_of(raw).verdict == verdict


@pytest.mark.slow
def test_training_falls_below_the_frequencies_of_characters(text_file):
    config = sqrt_dk.make_config('gpt2', 64, True, 60)
    config.data.corpus, config.data.path = 'text', str(text_file)
    corpus = sqrt_dk.ContinueText.load(config.data)
    losses = sqrt_dk.train(config, corpus, (0, 1))
    assert losses.shape == (2,)
    assert losses[0] != losses[1]
    assert (losses < sqrt_dk.counted_losses(corpus)['frequencies']).all()
