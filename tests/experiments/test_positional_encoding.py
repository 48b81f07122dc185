"""The sinusoidal encoding: its inner products, and what becomes of them with the distance."""

import numpy as np
import pytest

from experiments import positional_encoding as experiment


@pytest.fixture(scope='module')
def table_TD():
    return experiment.encode(np.arange(64))


def test_the_encoding_is_that_of_the_formula(table_TD):
    assert table_TD.shape == (64, 128)
    np.testing.assert_allclose(table_TD, experiment.exact_encoding(np.arange(64), 128), atol=1e-5)


def test_inner_products_are_half_the_width_at_0_and_depend_on_the_distance_alone(table_TD):
    products_TS = table_TD @ table_TD.T
    np.testing.assert_allclose(products_TS.diagonal(), 64, rtol=1e-5)
    product_T = experiment.by_distance(64, 128)
    distances_TS = np.abs(np.arange(64)[:, None] - np.arange(64))
    np.testing.assert_allclose(products_TS, product_T[distances_TS], atol=1e-3)


def test_the_inner_product_does_not_fall_always():
    product_T = experiment.by_distance(64, 128)
    rates = 10000.0 ** (-np.arange(0, 128, 2) / 128)
    exact_T = np.cos(np.arange(64)[:, None] * rates).sum(axis=1)
    risen = experiment.rises(product_T)
    np.testing.assert_array_equal(risen, experiment.rises(exact_T))
    assert len(risen) > 10
    assert (product_T[risen] > product_T[risen - 1]).all()
    assert product_T.argmax() == 0


def test_far_positions_have_the_same_inner_products():
    for start, (largest, spread, _) in experiment.extend().items():
        assert largest <= 1
        assert spread < (1e-3 if start <= 1000 else 1)
