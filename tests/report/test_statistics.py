import numpy as np
import pytest
from scipy import stats

from minigpt_jax.report.statistics import (
    best_point,
    holm,
    mean_interval,
    paired_differences,
    seed_noise_test,
)


def table(x, seeds=None):
    """{point: {seed: value}} of an array with a row a point."""
    seeds = range(x.shape[1]) if seeds is None else seeds
    return {f'p{i}': dict(zip(seeds, map(float, row), strict=True)) for i, row in enumerate(x)}


def anova_by_normal_equations(x):
    """F of the point effect as the gain of a least-squares fit: another road to the same number."""
    k, n = x.shape
    point, seed = np.divmod(np.arange(k * n), n)
    blocks = np.eye(n)[seed]
    full = np.concatenate([blocks, np.eye(k)[point][:, 1:]], axis=1)

    def rss(design):
        fit = design @ np.linalg.lstsq(design, x.ravel(), rcond=None)[0]
        return np.sum((x.ravel() - fit) ** 2)

    df = k * n - n - (k - 1)
    f = (rss(blocks) - rss(full)) / (k - 1) / (rss(full) / df)
    return f, stats.f.sf(f, k - 1, df)


def test_interval_is_students_t():
    values = [1.90, 1.93, 1.95]
    mean, half = mean_interval(values)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert mean == pytest.approx(1.9266666667)
    assert (mean - half, mean + half) == (pytest.approx(low), pytest.approx(high))
    # By hand: s = 0.0251661, t(0.975, 2) = 4.302653.
    assert half == pytest.approx(4.302653 * 0.0251661 / np.sqrt(3), rel=1e-5)


@pytest.mark.parametrize('values', [[1.5], [1.5, 2.5]])
def test_under_three_seeds_there_is_a_mean_and_no_interval(values):
    assert mean_interval(values) == (np.mean(values), None)


def test_interval_covers_the_truth_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(size=(800, 3))
    covered = [abs(mean) <= half for mean, half in map(mean_interval, draws)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.025)


def test_holm_by_hand():
    # Sorted: .01 × 4, .02 × 3, .03 × 2 = .06 (monotone: not below .06), .04 × 1 → raised to .06.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_paired_differences_agree_with_scipy():
    x = np.random.default_rng(1).normal(2, 0.1, size=(4, 5))
    x[2] -= 1.0
    comparisons = paired_differences(table(x))
    assert [c.point for c in comparisons] == ['p0', 'p1', 'p3']
    expected = [stats.ttest_rel(x[i], x[2]) for i in (0, 1, 3)]
    for c, test in zip(comparisons, expected, strict=True):
        low, high = test.confidence_interval(0.95)
        assert c.best == 'p2'
        assert c.p_value == pytest.approx(test.pvalue)
        assert c.difference - c.half_width == pytest.approx(low)
        assert c.difference + c.half_width == pytest.approx(high)
    assert [c.p_holm for c in comparisons] == pytest.approx(holm([t.pvalue for t in expected]))


def test_pairing_is_by_seed_and_not_by_order():
    values = {'a': {0: 1.0, 1: 2.0, 2: 3.0}, 'b': {2: 3.5, 0: 1.5, 1: 2.6}}
    (comparison,) = paired_differences(values)
    assert comparison.difference == pytest.approx((0.5 + 0.6 + 0.5) / 3)
    assert comparison.half_width < 0.2  # in the order of the dictionaries it would exceed 2


def test_only_common_seeds_are_compared():
    values = {'a': {0: 1.0, 1: 1.1, 2: 1.2, 3: 9.0}, 'b': {0: 5.0, 1: 5.2, 2: 5.1}}
    values['a'][3] = 1.0
    (comparison,) = paired_differences(values)
    assert comparison.num_seeds == 3
    assert comparison.difference == pytest.approx(4.0)


def test_two_seeds_give_a_difference_and_no_test():
    (comparison,) = paired_differences(table(np.array([[1.0, 1.1], [2.0, 2.3]])))
    assert comparison.difference == pytest.approx(1.1)
    assert (comparison.half_width, comparison.p_value, comparison.p_holm) == (None, None, None)
    assert seed_noise_test(table(np.array([[1.0, 1.1], [2.0, 2.3]]))) is None


def test_one_lucky_run_does_not_make_the_best_point():
    values = {'lucky': {0: 1.0}, 'solid': {0: 2.0, 1: 2.1, 2: 2.2}}
    assert best_point(values) == 'solid'
    assert best_point({'lucky': {0: 1.0}, 'other': {0: 2.0, 1: 2.0}, 'lost': {}}) == 'lucky'
    assert best_point({'lost': {}}) is None


@pytest.mark.parametrize('shape', [(5, 3), (2, 4), (3, 8)])
def test_f_test_agrees_with_least_squares(shape):
    rng = np.random.default_rng(2)
    x = rng.normal(size=shape) + rng.normal(size=shape[1]) + np.arange(shape[0])[:, None] * 0.5
    test = seed_noise_test(table(x))
    f, p = anova_by_normal_equations(x)
    assert (test.statistic, test.p_value) == (pytest.approx(f), pytest.approx(p))
    assert (test.df_points, test.df_residual) == (shape[0] - 1, (shape[0] - 1) * (shape[1] - 1))


def test_f_test_of_two_points_is_the_paired_t_test():
    x = np.random.default_rng(3).normal(size=(2, 6))
    test, paired = seed_noise_test(table(x)), stats.ttest_rel(x[0], x[1])
    assert test.statistic == pytest.approx(paired.statistic**2)
    assert test.p_value == pytest.approx(paired.pvalue)


def test_a_lucky_seed_is_not_noise():
    points = np.array([[0.0], [0.1], [0.2]])
    noise = np.random.default_rng(4).normal(0, 0.01, size=(3, 3))
    seeds = np.array([-5.0, 0.0, 5.0])  # fifty times the effect, the same at every point
    assert seed_noise_test(table(points + noise + seeds)).p_value < 0.001
    assert stats.f_oneway(*(points + noise + seeds)).pvalue > 0.9  # what pairing is good for


def test_an_axis_without_any_effect_is_no_evidence():
    for losses in np.random.default_rng(6).uniform(1, 3, size=(50, 3)):
        values = table(np.tile(losses, (3, 1)))
        assert seed_noise_test(values).p_value == 1.0
        assert [c.p_holm for c in paired_differences(values)] == [1.0, 1.0]


def test_f_test_leaves_out_points_with_few_seeds_and_seeds_that_are_missing():
    x = np.random.default_rng(5).normal(size=(4, 5))
    values = table(x)
    values['p1'] = {0: 1.0}
    del values['p3'][2]
    test = seed_noise_test(values)
    assert (test.points, test.seeds) == (('p0', 'p2', 'p3'), (0, 1, 3, 4))
    expected = anova_by_normal_equations(x[np.ix_([0, 2, 3], [0, 1, 3, 4])])[0]
    assert test.statistic == pytest.approx(expected)
