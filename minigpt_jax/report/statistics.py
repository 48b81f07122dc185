"""Intervals and tests that tell a difference between points from the noise of seeds.

Throughout, `values` maps a point to its results by seed, `{point: {seed: value}}`; lower is
better. The same seed sees the same batches at every point, so points are compared within seeds:
what a lucky seed does to all of them cancels.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import scipy  # loads scipy.stats, over a second, when it is first used

# Two seeds give a t interval 12.7 standard errors wide: it would be read as evidence and is none.
MINIMUM_SEEDS = 3

Values = Mapping[Hashable, Mapping[int, float]]


class Comparison(NamedTuple):
    """A point against the best point, paired by seed. Intervals and p values may be None."""

    point: Hashable
    best: Hashable
    difference: float  # mean of point − best, in the units of the values
    half_width: float | None  # of its interval, not corrected for the number of comparisons
    p_value: float | None  # two-sided paired t-test
    p_holm: float | None  # the same, corrected for the number of comparisons
    num_seeds: int


class FTest(NamedTuple):
    """A repeated-measures F test; `points` and `seeds` are those that took part."""

    statistic: float
    df_points: int
    df_residual: int
    p_value: float
    points: tuple[Hashable, ...]
    seeds: tuple[int, ...]


def mean_interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float | None]:
    """Mean of independent runs and the half width of Student's t interval.

    half = t_{n−1, (1+confidence)/2} · s / √n, with s the sample standard deviation (ddof 1), in the
    units of the values. The half width is None under three values, the mean NaN without any.
    """
    values = np.asarray(list(values), dtype=np.float64)
    if values.size == 0:
        return float('nan'), None
    if values.size < MINIMUM_SEEDS:
        return float(values.mean()), None
    quantile = scipy.stats.t.ppf((1 + confidence) / 2, values.size - 1)
    return float(values.mean()), float(quantile * scipy.stats.sem(values))


def holm(p_values: Iterable[float]) -> list[float]:
    """Holm's step-down correction: p̃₍ᵢ₎ = max_{j≤i} min(1, (m−j+1) · p₍ⱼ₎), p sorted upwards.

    It bounds the chance of even one false finding among m tests and assumes nothing about how they
    depend on each other. Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    p_values = np.asarray(list(p_values), dtype=np.float64)
    order = np.argsort(p_values, kind='stable')
    factors = np.arange(p_values.size, 0, -1)
    corrected = np.empty_like(p_values)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, factors * p_values[order]))
    return corrected.tolist()


def best_point(values: Values) -> Hashable | None:
    """The point with the lowest mean; of equal ones the first; None without any.

    Points under three seeds win only where all are: one lucky run must not decide.
    """
    enough = {p: by_seed for p, by_seed in values.items() if len(by_seed) >= MINIMUM_SEEDS}
    candidates = enough or {p: by_seed for p, by_seed in values.items() if by_seed}
    return min(candidates, key=lambda p: np.mean(list(candidates[p].values())), default=None)


def paired_differences(values: Values, confidence: float = 0.95) -> list[Comparison]:
    """Every other point against the best one, over the seeds that both have.

    Two-sided paired t-tests with Holm's correction over the comparisons made; no interval and no
    test under three common seeds. The best point is picked from the same runs, which flatters it a
    little: `seed_noise_test` is the answer that does not depend on the pick.
    """
    best = best_point(values)
    comparisons = []
    for point, by_seed in values.items():
        seeds = [seed for seed in by_seed if seed in values[best]] if by_seed else []
        if point == best or not seeds:
            continue
        differences = np.array([by_seed[seed] - values[best][seed] for seed in seeds])
        mean, half_width = mean_interval(differences, confidence)
        p_value = None
        if half_width is not None:
            # An axis without any effect gives the same bits at every point: t would be 0/0.
            p_value = (
                float(scipy.stats.ttest_1samp(differences, 0).pvalue) if differences.any() else 1.0
            )
        comparisons.append(Comparison(point, best, mean, half_width, p_value, None, len(seeds)))
    corrected = iter(holm(c.p_value for c in comparisons if c.p_value is not None))
    return [c if c.p_value is None else c._replace(p_holm=next(corrected)) for c in comparisons]


def seed_noise_test(values: Values) -> FTest | None:
    """Do the differences between points exceed the noise of seeds? Repeated-measures F test.

    With k points, n seeds and x_ij the value of point i at seed j,

        F = [n Σᵢ (x̄ᵢ − x̄)² / (k−1)] / [Σᵢⱼ (x_ij − x̄ᵢ − x̄ⱼ + x̄)² / ((k−1)(n−1))]

    follows F(k−1, (k−1)(n−1)) when the points do not differ. Seeds are blocks: what a seed does to
    all points leaves the residual. With two points it is the paired t-test, F = t².

    It assumes normal noise of the same size at every point. Simulated at k = 5 with one point three
    times as noisy as the others, a nominal 5 % is 9 to 10 %. Friedman's rank test kept to 2 to 5 %
    there, but at three seeds it finds half as often what is there (17 % against 39 %), and so does
    the Greenhouse-Geisser correction (7 %): read a p value just below 0.05 as "perhaps".

    Points under three seeds are left out, then seeds that one of the rest lacks. None when fewer
    than two points or three seeds remain.
    """
    points = [point for point, by_seed in values.items() if len(by_seed) >= MINIMUM_SEEDS]
    if len(points) < 2:
        return None
    seeds = [seed for seed in values[points[0]] if all(seed in values[p] for p in points)]
    if len(seeds) < MINIMUM_SEEDS:
        return None
    x = np.array([[values[point][seed] for seed in seeds] for point in points], dtype=np.float64)
    x -= x[0].copy()  # F does not change, and an axis without any effect leaves exact zeros
    point_effects = x.mean(axis=1, keepdims=True) - x.mean()
    residual = x - x.mean(axis=0, keepdims=True) - point_effects
    df_points = len(points) - 1
    df_residual = df_points * (len(seeds) - 1)
    between = len(seeds) * np.sum(point_effects**2) / df_points
    within = np.sum(residual**2) / df_residual
    with np.errstate(divide='ignore'):
        statistic = float(between / within) if between else 0.0
    p_value = float(scipy.stats.f.sf(statistic, df_points, df_residual))
    return FTest(statistic, df_points, df_residual, p_value, tuple(points), tuple(seeds))
