"""MiniGPT: causality, parameters, operations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.model.attention import ATTENTION_FORMS
from minigpt_jax.model.positions import POSITIONS, sinusoidal_encoding
from minigpt_jax.model.transformer import NORM_PLACEMENTS, MiniGPT, flops_per_token
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config

VARIANTS = list(itertools.product(NORM_PLACEMENTS, POSITIONS, ATTENTION_FORMS))


def build(vocab_size=11, **values):
    config = resolve(tiny_config(**values)).model
    return MiniGPT(config, vocab_size, rngs=nnx.Rngs(params=0))


@pytest.mark.parametrize(('norm_placement', 'positions', 'attention_form'), VARIANTS)
def test_no_gradient_flows_from_a_position_to_a_later_token(
    norm_placement, positions, attention_form
):
    model = build(
        **{
            'model.norm_placement': norm_placement,
            'model.positions': positions,
            'model.attention_form': attention_form,
        }
    )
    tokens_BT = np.random.default_rng(0).integers(0, 11, (1, 8))
    x_BTD = model.embed(tokens_BT)

    class Given(nnx.Module):
        """Stands for the embedding, so that its output can be differentiated by."""

        def __init__(self, x_BTD):
            self.x_BTD = nnx.data(x_BTD)

        def __call__(self, tokens_BT):
            return self.x_BTD

    def hidden_TD(x_BTD):
        copy = nnx.clone(model)
        copy.embed = Given(x_BTD)
        return copy.hidden(tokens_BT)[0][0]

    jacobian_TDSD = jax.jit(jax.jacrev(hidden_TD))(x_BTD)[:, :, 0]
    influence_TS = np.abs(jacobian_TDSD).max((1, 3))
    later = np.triu(np.ones((8, 8), bool), 1)
    assert (influence_TS[later] == 0).all()
    assert (influence_TS[~later] > 0).all()


@pytest.mark.parametrize('positions', POSITIONS)
def test_the_head_count_does_not_change_the_number_of_parameters(positions):
    def count(num_heads):
        values = {'model.num_heads': num_heads, 'model.positions': positions}
        model = nnx.eval_shape(lambda: build(**values))
        return sum(x.size for x in jax.tree.leaves(nnx.state(model)))

    assert len({count(h) for h in (1, 2, 4, 8, 16)}) == 1


def test_parameters_of_the_cpu_recipe():
    config = {'model.d_model': 128, 'model.num_layers': 4, 'model.context_length': 64}
    model = nnx.eval_shape(lambda: build(65, **config))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    assert count == 4 * (12 * 128**2 + 2 * 128) + 128 + 65 * 128 + 64 * 128


def test_pre_norm_ends_in_a_norm_and_post_norm_has_no_second_one():
    pre = nnx.state(build(**{'model.norm_placement': 'pre'}))
    post = nnx.state(build(**{'model.norm_placement': 'post'}))
    assert 'final_norm' in pre
    assert 'final_norm' not in post


def test_norm_placements_are_what_they_say():
    x = jnp.arange(6.0).reshape(2, 3)
    norm, branch = (lambda x: 10 * x), (lambda x: (x + 1, None))
    np.testing.assert_array_equal(NORM_PLACEMENTS['pre'](norm, branch, x)[0], x + 10 * x + 1)
    np.testing.assert_array_equal(NORM_PLACEMENTS['post'](norm, branch, x)[0], 10 * (2 * x + 1))


def test_post_norm_leaves_every_position_normalised():
    model = build(**{'model.norm_placement': 'post', 'model.use_bias': True})
    x_BTD, _ = model.hidden(np.arange(8)[None])
    np.testing.assert_allclose(x_BTD.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(x_BTD.std(-1), 1, atol=1e-2)


def test_sinusoidal_encoding_against_the_formula():
    table = sinusoidal_encoding(jnp.arange(64), 128)
    expected = np.zeros((64, 128))
    for t, i in itertools.product(range(64), range(64)):
        angle = t / 10000 ** (2 * i / 128)
        expected[t, 2 * i], expected[t, 2 * i + 1] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(table, expected, atol=1e-5)
    np.testing.assert_allclose((table**2).sum(-1), 64, rtol=1e-5)


def test_tied_embeddings_are_the_output_layer():
    tied, untied = build(), build(**{'model.tie_embeddings': False})
    count = [sum(x.size for x in jax.tree.leaves(nnx.state(m))) for m in (tied, untied)]
    assert count[1] - count[0] == 11 * 16
    x_BTD = np.random.default_rng(0).standard_normal((1, 2, 16)).astype(np.float32)
    np.testing.assert_allclose(
        tied.logits(x_BTD), x_BTD @ np.asarray(tied.embed.embedding[...]).T, atol=1e-6
    )


def test_the_formula_of_operations_against_the_compiler():
    """With long contexts and without a loop, products are all but a few per cent of the count."""
    values = {'model.d_model': 64, 'model.context_length': 128, 'model.num_layers': 2}
    config = resolve(tiny_config(**values)).model
    model, params = nnx.split(build(50, **values))
    tokens_BT = np.zeros((2, 128), int)

    def loss(params):
        return nnx.merge(model, params)(tokens_BT).sum()

    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    counted = compiled.cost_analysis()['flops'] / tokens_BT.size
    assert flops_per_token(config, 50) == pytest.approx(counted, rel=0.1)


def test_the_number_of_heads_is_not_in_the_operations_but_in_the_scores():
    configs = [resolve(tiny_config(**{'model.num_heads': h})).model for h in (1, 8)]
    assert flops_per_token(configs[0], 50) == flops_per_token(configs[1], 50)
