"""Encoders alone: the model of hidden tokens, and the one of images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.analysis.programs import multiply_adds
from minigpt_jax.model.transformer import (
    CAPTURES,
    MODELS,
    Decoder,
    ImageClassifier,
    MaskedLM,
    flops_per_token,
)
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config
from tests.model.test_encoder_decoder import Given

rng = np.random.default_rng(0)
tokens_BT = rng.integers(0, 9, (2, 8))
images_BTP = rng.random((2, 8, 4)).astype(np.float32)


def model_config(**values):
    return resolve(
        tiny_config(
            **{'data.corpus': 'digits' if values.get('family') == 'image' else 'python_docs'},
            **{f'model.{name}': value for name, value in values.items()},
        )
    ).model


def masked_lm(**values):
    return MaskedLM(model_config(family='encoder', **values), 9, rngs=nnx.Rngs(params=0))


def classifier(**values):
    config = model_config(family='image', **values)
    return ImageClassifier(config, (4, 3), rngs=nnx.Rngs(params=0))


@pytest.mark.parametrize('scan_layers', [False, True])
def test_every_position_of_a_masked_model_sees_every_other(scan_layers):
    def sees(module):
        """[t, s]: whether the output at t depends on the token at s."""
        x_BTD, parts = module.embed(tokens_BT), nnx.split(module)

        def outputs(x_BTD):
            module = nnx.merge(*parts)
            module.embed = Given(module.embed, x_BTD)
            x_TD = module.hidden(tokens_BT)[0][0]
            return x_TD @ jnp.arange(x_TD.shape[-1])  # the sum alone is fixed by the last norm

        return np.abs(jax.jacobian(outputs)(x_BTD)[:, 0]).sum(-1) > 0

    config = model_config(scan_layers=scan_layers)
    assert sees(masked_lm(scan_layers=scan_layers)).all()
    causal = Decoder(config, 9, rngs=nnx.Rngs(params=0))
    np.testing.assert_array_equal(sees(causal), np.tri(8, dtype=bool))


def test_a_masked_model_has_the_parameters_of_a_decoder_and_other_outputs():
    masked, causal = masked_lm(), MODELS['decoder'](model_config(), 9, rngs=nnx.Rngs(params=0))
    jax.tree.map(
        np.testing.assert_array_equal, nnx.state(masked, nnx.Param), nnx.state(causal, nnx.Param)
    )
    logits_BTV, other_BTV = masked(tokens_BT), causal(tokens_BT)
    assert logits_BTV.shape == (2, 8, 9)
    assert np.abs(logits_BTV - other_BTV)[:, 0].max() > 1e-6


def test_without_positions_an_image_is_a_set_of_patches():
    logits_BC = classifier(positions='none')(images_BTP)
    shuffled = images_BTP[:, [3, 1, 0, 2, 7, 6, 4, 5]]
    np.testing.assert_allclose(classifier(positions='none')(shuffled), logits_BC, atol=1e-4)
    different = classifier()(images_BTP) - classifier()(shuffled)
    assert np.abs(different).max() > 1e-4


def test_every_value_of_every_patch_matters():
    module = classifier()
    grads_BTP = jax.grad(lambda x: (module(x) ** 2).sum())(jnp.asarray(images_BTP))
    assert (grads_BTP != 0).all()


def test_intermediates_of_an_image():
    logits_BC, captured = classifier()(images_BTP, capture=CAPTURES)
    np.testing.assert_array_equal(logits_BC, classifier()(images_BTP))
    weights_BHTS = captured[0]['attention_weights']
    np.testing.assert_allclose(weights_BHTS.sum(-1), 1, rtol=1e-5)
    assert (weights_BHTS > 0).all()


@pytest.mark.parametrize('family', ['encoder', 'image'])
def test_the_formula_of_operations_counts_every_product(family):
    config = model_config(family=family, context_length=8)
    module = masked_lm() if family == 'encoder' else classifier()
    graph, params = nnx.split(module)
    inputs, outputs = (tokens_BT, 9) if family == 'encoder' else (images_BTP, 4 + 3 / 8)

    def loss(params):
        return nnx.merge(graph, params)(inputs).sum()

    assert 2 * multiply_adds(jax.grad(loss), params) == flops_per_token(config, outputs) * 16
