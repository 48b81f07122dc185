"""Shapes, counts and both forms of multi-head attention; W_O and the identity in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import multi_head_shapes
from minigpt_jax.data.batches import load_tokenized
from minigpt_jax.model.attention import FusedMultiHeadAttention, MultiHeadAttention
from minigpt_jax.training import steps
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config


def test_the_shapes_of_a_textbook_and_heads_as_a_sum():
    attention = multi_head_shapes.make_attention(FusedMultiHeadAttention, 512, 8)
    arrays = multi_head_shapes.stages(attention, jax.random.normal(jax.random.key(0), (2, 10, 512)))
    shapes = {
        stage: multi_head_shapes.textbook_shape(stage, x.shape) for stage, x in arrays.items()
    }
    assert shapes['q (k and v alike)'] == (2, 8, 10, 64)
    assert shapes['weights'] == (2, 8, 10, 10)
    assert shapes['concat'] == shapes['output'] == (2, 10, 512)
    summed_BTD = multi_head_shapes.sum_over_heads(attention, arrays['heads'])
    np.testing.assert_allclose(summed_BTD, arrays['output'], atol=1e-5)


@pytest.mark.parametrize('num_heads', [1, 8, 64])
def test_the_number_of_heads_changes_neither_parameters_nor_multiply_adds(num_heads):
    for form in (FusedMultiHeadAttention, MultiHeadAttention):
        assert multi_head_shapes.num_parameters(form, 512, num_heads) == 4 * 512**2
    assert multi_head_shapes.attention_multiply_adds(num_heads, 10, 512) == 2 * 10**2 * 512


def test_both_forms_agree_and_are_timed():
    compared = multi_head_shapes.compare_forms((2, 6, 16), 4, rounds=3)
    assert compared['difference'] < 1e-6 < 0.01 < compared['largest_output']
    assert compared['ratio'].shape == (3,)


@pytest.mark.slow
def test_the_identity_is_in_the_place_of_every_output_projection_and_is_not_trained():
    config = resolve(tiny_config(**{'model.num_layers': 2}))
    params = steps.make_init(config, 11)(0).params
    changed = multi_head_shapes.with_identity(params)
    for i in range(2):
        kernel = changed['blocks'][i]['attention']['out']['kernel'][...]
        np.testing.assert_array_equal(kernel, np.eye(16))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, changed)
    assert sum(not x for x in jax.tree.leaves(same)) == 2
    batch = {'tokens_BT1': jnp.arange(18).reshape(2, 9) % 11}
    model = steps.build_model(config, 11)
    gradient = jax.grad(
        lambda params: multi_head_shapes.identity_losses(params, batch, None, model=model)[0]
    )(params)
    assert (gradient['blocks'][0]['attention']['out']['kernel'][...] == 0).all()
    assert (gradient['blocks'][0]['attention']['qkv']['kernel'][...] != 0).any()


@pytest.mark.slow
def test_both_projections_learn(text_file):
    config = resolve(tiny_config(text_file, **{'train.steps': 60}))
    losses = multi_head_shapes.compare_projections(config, seeds=(0,))
    vocab_size = load_tokenized(config.data).tokenizer.vocab_size
    assert all((x < np.log(vocab_size) - 0.2).all() for x in losses.values())
    assert (losses['W_O'] != losses['identity']).all()
