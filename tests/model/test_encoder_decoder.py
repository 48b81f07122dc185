"""The encoder-decoder: what may see what, one memory for all layers, caches, variants."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.analysis.programs import multiply_adds
from minigpt_jax.model.attention import ATTENTION_FORMS, fuse_cross_heads, fuse_heads
from minigpt_jax.model.layers import NORM_PLACEMENTS, deepnorm_factors, for_stack
from minigpt_jax.model.positions import POSITIONS
from minigpt_jax.model.transformer import (
    CAPTURES,
    CROSS_CAPTURES,
    EncoderDecoder,
    flops_per_token,
    stack_layers,
)
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config
from tests.model.test_transformer import from_dict

B, S, T = 2, 5, 6
SIZES = (9, 11)
LENGTHS_B = np.array([5, 3])  # ragged
rng = np.random.default_rng(0)
source_BS, target_BT = rng.integers(0, SIZES[0], (B, S)), rng.integers(0, SIZES[1], (B, T))


def model_config(**values):
    values = {'family': 'encoder_decoder', 'num_layers': 2, 'encoder_layers': 1} | values
    values = {f'model.{name}': value for name, value in values.items()}
    joint = values.get('model.joint_embeddings', False)
    return resolve(
        tiny_config(**{'data.corpus': 'dates', 'data.joint_vocabulary': joint} | values)
    ).model


@functools.cache
def build(sizes=SIZES, **values):
    """(model, parameters), larger than freshly initialised: every part shows in the output."""
    config = model_config(**values)
    like = nnx.eval_shape(lambda: EncoderDecoder(config, sizes, rngs=nnx.Rngs(params=0)))
    model, params = nnx.split(like)
    own = np.random.default_rng(0)
    # Without norms it would grow until one source token takes all the weight.
    scale = 0.1 if values.get('norm_placement') == 'none' else 0.3
    return model, jax.tree.map(
        lambda x: jnp.asarray(own.normal(scale, scale, x.shape), x.dtype), params
    )


class Given(nnx.Module):
    """Stands for an embedding, so that its output can be differentiated by."""

    def __init__(self, embed, x_BTD):
        self.embedding, self.x_BTD = embed.embedding, nnx.data(x_BTD)

    def __call__(self, tokens_BT):
        return self.x_BTD


def decode_in_pieces(module, pieces, source_BS=source_BS, lengths_B=LENGTHS_B):
    """Logits of the target, read piece by piece with caches, the source encoded once."""
    memory_BSD = module.encoder(source_BS, lengths_B)
    caches, logits = module.decoder.init_caches(B, T, memory_BSD=memory_BSD), []
    for start, end in itertools.pairwise(pieces):
        x_BTD, caches = module.decoder.hidden(
            target_BT[:, start:end],
            caches=caches,
            position=jnp.int32(start),
            memory_lengths_B=lengths_B,
        )
        logits.append(module.decoder.logits(x_BTD))
    return jnp.concatenate(logits, axis=1)


@pytest.mark.parametrize(
    'positions',
    [
        name if name in ('learned', 'relative') else pytest.param(name, marks=pytest.mark.slow)
        for name in POSITIONS
    ],
)
@pytest.mark.parametrize('norm_placement', NORM_PLACEMENTS)
def test_sees_the_source_and_earlier_targets_alone_and_agrees_with_its_cache(
    norm_placement, positions
):
    model, params = build(norm_placement=norm_placement, positions=positions)
    module = nnx.merge(model, params)

    def scores_T(source_BSD, target_BTD):
        own = nnx.merge(model, params)
        own.encoder.embed = Given(own.encoder.embed, source_BSD)
        own.decoder.embed = Given(own.decoder.embed, target_BTD)
        logits_BTV = own(source_BS, LENGTHS_B, target_BT)
        return (logits_BTV**2).sum((0, 2)), logits_BTV

    embedded = module.encoder.embed(source_BS), module.decoder.embed(target_BT)
    _, backward, logits_BTV = jax.vjp(scores_T, *embedded, has_aux=True)
    by_source_TBSD, by_target_TBTD = jax.vmap(backward)(jnp.eye(T))
    influence_TBS = np.abs(by_source_TBSD).max(-1)
    inside = np.arange(S) < LENGTHS_B[:, None]
    assert (influence_TBS[:, ~inside] == 0).all()  # padding, to the bit
    assert (influence_TBS[:, inside] > 0).all()  # each target sees all of its source
    influence_TT = np.abs(by_target_TBTD).max((1, 3))
    later = np.triu(np.ones((T, T), bool), 1)
    assert (influence_TT[later] == 0).all()
    assert (influence_TT[~later] > 0).all()

    scale = np.abs(logits_BTV).max()
    cached = decode_in_pieces(module, (0, 3, 4, 5, 6))  # a prompt of three, then token by token
    np.testing.assert_allclose(cached, logits_BTV, atol=1e-4 * scale)


def test_the_content_of_padding_changes_nothing():
    module = nnx.merge(*build())
    other = np.where(np.arange(S) < LENGTHS_B[:, None], source_BS, (source_BS + 3) % SIZES[0])
    assert (other != source_BS).any()
    logits = [module(source, LENGTHS_B, target_BT) for source in (source_BS, other)]
    np.testing.assert_array_equal(*logits)
    # Nor does its amount.
    short = module(source_BS[1:, :3], LENGTHS_B[1:], target_BT[1:])
    np.testing.assert_allclose(short[0], logits[0][1], atol=1e-4)
    assert np.abs(module(source_BS, np.array([5, 5]), target_BT)[1] - logits[0][1]).max() > 1e-3


@pytest.mark.parametrize('use_bias', [False, True])
def test_with_a_zero_memory_the_source_does_not_matter(use_bias):
    module = nnx.merge(*build(use_bias=use_bias))
    memories = [module.encoder(source, LENGTHS_B) for source in (source_BS, source_BS[::-1])]
    assert np.abs(memories[0] - memories[1]).max() > 0.1
    first, second = (
        module.decoder(target_BT, memory_BSD=0 * memory, memory_lengths_B=lengths)
        for memory, lengths in zip(memories, (LENGTHS_B, LENGTHS_B[::-1]), strict=True)
    )
    np.testing.assert_allclose(first, second, atol=1e-4 if use_bias else 1e-5)


def test_encoding_once_and_again_at_every_step_agree():
    module = nnx.merge(*build())
    once = decode_in_pieces(module, range(T + 1))
    again = [
        module(source_BS, LENGTHS_B, target_BT[:, : t + 1])[:, -1] for t in range(T)
    ]  # no cache, no memory kept
    np.testing.assert_allclose(once, np.stack(again, axis=1), atol=1e-4)


def test_positions_do_not_act_between_the_texts():
    for positions in ('rotary', 'alibi', 'relative'):
        module = nnx.merge(*build(positions=positions))
        block = module.decoder.blocks[0]
        assert block.attention.attend.positions is not None
        memory_BSD = rng.standard_normal((B, S, 16)).astype(np.float32)
        x_BTD = rng.standard_normal((B, T, 16)).astype(np.float32)
        y_BTD, _ = block.cross_attention(x_BTD, memory_BSD=memory_BSD)
        shuffled, _ = block.cross_attention(x_BTD, memory_BSD=memory_BSD[:, [3, 1, 4, 0, 2]])
        np.testing.assert_allclose(y_BTD, shuffled, atol=1e-4)


@pytest.mark.slow
def test_both_attention_forms_are_the_same_function():
    per_head, params = build(attention_form='per_head', qk_norm=True, use_bias=True)
    as_dict = nnx.to_pure_dict(params)
    for stack in as_dict.values():
        for block in stack['blocks'].values():
            block['attention'] = fuse_heads(block['attention'])
            if 'cross_attention' in block:
                block['cross_attention'] = fuse_cross_heads(block['cross_attention'])
    fused, like = build(qk_norm=True, use_bias=True)
    modules = nnx.merge(per_head, params), nnx.merge(fused, from_dict(like, as_dict))
    a, b = (module(source_BS, LENGTHS_B, target_BT) for module in modules)
    np.testing.assert_allclose(a, b, atol=2e-4)
    a, b = (decode_in_pieces(module, (0, 4, 6)) for module in modules)
    np.testing.assert_allclose(a, b, atol=2e-4)
    sizes = [len(jax.tree.leaves(nnx.state(module))) for module in modules]
    assert sizes[0] > sizes[1]
    assert set(ATTENTION_FORMS) == {'per_head', 'fused'}


@pytest.mark.parametrize('remat', [False, True])
def test_scanned_layers_equal_unrolled_ones(remat):
    values = {'encoder_layers': 3, 'positions': 'relative', 'norm_placement': 'deepnorm'}
    unrolled, params = build(**values)
    scanned, like = build(scan_layers=True, remat=remat, **values)
    stacked = {name: stack_layers(own) for name, own in nnx.to_pure_dict(params).items()}
    modules = nnx.merge(unrolled, params), nnx.merge(scanned, from_dict(like, stacked))
    key = jax.random.key(3)
    a, b = (module(source_BS, LENGTHS_B, target_BT, dropout_key=key) for module in modules)
    np.testing.assert_allclose(a, b, atol=1e-4)
    a, b = (decode_in_pieces(module, (0, 4, 6)) for module in modules)
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_joint_embeddings_are_one_table():
    sizes = {}
    for joint, tie in itertools.product((False, True), (False, True)):
        model, params = build((11, 11), joint_embeddings=joint, tie_embeddings=tie)
        sizes[joint, tie] = sum(x.size for x in jax.tree.leaves(params))
        tables = [x for x in jax.tree.leaves(params) if x.shape == (11, 16)]
        assert len(tables) == (1 if joint else 2)
        module = nnx.merge(model, params)
        assert (module.encoder.embed is module.decoder.embed) == joint
    assert sizes[False, True] - sizes[True, True] == 11 * 16
    assert sizes[True, False] - sizes[True, True] == 11 * 16


def test_deepnorm_has_factors_of_its_own_for_each_stack():
    # Wang et al. 2022, figure 2, at N = 2 encoder layers and M = 3 decoder layers.
    config = model_config(num_layers=3, encoder_layers=2)
    expected = {
        'encoder': (0.81 * 48 ** (1 / 16), 0.87 / 48 ** (1 / 16)),
        'decoder': (9**0.25, 36**-0.25),
    }
    for stack, factors in expected.items():
        np.testing.assert_allclose(deepnorm_factors(for_stack(config, stack)), factors)
    np.testing.assert_allclose(deepnorm_factors(config), (6**0.25, 24**-0.25))  # alone
    values = {'num_layers': 3, 'encoder_layers': 2, 'norm_placement': 'deepnorm'}
    module = nnx.merge(*build(**values))
    assert module.encoder.blocks[0].attention_residual.alpha == expected['encoder'][0]
    assert module.decoder.blocks[0].cross_residual.alpha == expected['decoder'][0]
    config = model_config(init='xavier', **values)
    module = EncoderDecoder(config, SIZES, rngs=nnx.Rngs(params=0))
    for stack, (_, beta) in expected.items():
        kernel = getattr(module, stack).blocks[0].attention.out.kernel[...]
        np.testing.assert_allclose(np.abs(kernel).max(), beta * (6 / 32) ** 0.5, rtol=0.05)


def test_gpt2_start_divides_by_the_branches_of_each_stack():
    config = model_config(d_model=128, num_layers=2, encoder_layers=4)
    module = EncoderDecoder(config, SIZES, rngs=nnx.Rngs(params=0))
    for stack, branches in (('encoder', 8), ('decoder', 6)):
        kernel = getattr(module, stack).blocks[0].feed_forward.out.kernel[...]
        np.testing.assert_allclose(kernel.std(), 0.02 / branches**0.5, rtol=0.02)


@pytest.mark.parametrize('positions', ['learned', 'relative'])
def test_the_formula_of_operations_counts_every_product(positions):
    values = {'positions': positions, 'encoder_layers': 3, 'activation': 'swiglu'}
    model, params = build(**values)
    square = rng.integers(0, 9, (B, 8))  # texts of context_length

    def loss(params):
        return nnx.merge(model, params)(square, np.array([8, 8]), square).sum()

    expected = flops_per_token(model_config(**values), SIZES[1]) * square.size
    assert 2 * multiply_adds(jax.grad(loss), params) == expected


def test_intermediates_of_both_stacks():
    module = nnx.merge(*build(num_heads=4, attention_form='per_head'))
    capture = CAPTURES + CROSS_CAPTURES
    logits_BTV, captured = module(source_BS, LENGTHS_B, target_BT, capture=capture)
    np.testing.assert_array_equal(logits_BTV, module(source_BS, LENGTHS_B, target_BT))
    assert {name: list(own) for name, own in captured.items()} == {
        'encoder': [0],
        'decoder': [0, 1],
    }
    assert set(captured['encoder'][0]) == set(CAPTURES)
    for own in captured['decoder'].values():
        assert set(own) == set(capture)
        weights_BHTS = own['cross_attention_weights']
        assert weights_BHTS.shape == (B, 4, T, S)
        np.testing.assert_allclose(weights_BHTS.sum(-1), 1, rtol=1e-5)
        assert (weights_BHTS[1, :, :, 3:] == 0).all()
        assert own['cross_head_outputs'].shape == (B, T, 4, 4)
    _, captured = module(source_BS, LENGTHS_B, target_BT, capture=CROSS_CAPTURES[:1])
    assert captured['encoder'] == {}
    assert set(captured['decoder'][0]) == {'cross_attention_weights'}
    with pytest.raises(ValueError, match='capture: heads: choose from'):
        module(source_BS, LENGTHS_B, target_BT, capture=('heads',))
