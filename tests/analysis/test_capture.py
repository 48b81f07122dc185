"""Attention of a translation, by name of token."""

import numpy as np
import pytest
from flax import nnx

from minigpt_jax.analysis.capture import translation_attention
from minigpt_jax.data.tokenizers import CharTokenizer, PairTokenizer
from minigpt_jax.model.transformer import EncoderDecoder
from tests.model.test_encoder_decoder import model_config

TOKENIZER = PairTokenizer(CharTokenizer('abc'), CharTokenizer('가나'))


@pytest.fixture(scope='module')
def model():
    config = model_config(num_layers=2, num_heads=2, context_length=8)
    return EncoderDecoder(config, TOKENIZER.vocab_size, rngs=nnx.Rngs(params=0))


def ids(source, target):
    return (
        [*TOKENIZER.source.encode(source), TOKENIZER.eos_id],
        [*TOKENIZER.target.encode(target), TOKENIZER.eos_id],
    )


def test_a_row_is_what_chose_the_token_of_its_name(model):
    layers = []
    for layer in range(2):
        heads = [
            translation_attention(
                *nnx.split(model), TOKENIZER, *ids('cab', '나가'), layer=layer, head=head
            )
            for head in range(2)
        ]
        assert heads[0][1:] == (['c', 'a', 'b', '<eos>'], ['나', '가', '<eos>'])
        layers.append([weights_TS for weights_TS, *_ in heads])
    weights_NHTS = np.array(layers)
    assert weights_NHTS.shape == (2, 2, 3, 4)
    np.testing.assert_allclose(weights_NHTS.sum(-1), 1, rtol=1e-5)
    assert len({x.tobytes() for x in weights_NHTS.reshape(4, -1)}) == 4
    for layer, head in ((None, None), (1, None), (None, 0)):
        mean_TS, *_ = translation_attention(
            *nnx.split(model), TOKENIZER, *ids('cab', '나가'), layer=layer, head=head
        )
        chosen = weights_NHTS[slice(None) if layer is None else [layer]]
        chosen = chosen[:, slice(None) if head is None else [head]]
        np.testing.assert_allclose(mean_TS, chosen.mean((0, 1)), rtol=1e-5)
    # The row of a token is that of the tokens before it: it does not see itself.
    other_TS, *_ = translation_attention(*nnx.split(model), TOKENIZER, *ids('cab', '나나'))
    mean_TS, *_ = translation_attention(*nnx.split(model), TOKENIZER, *ids('cab', '나가'))
    np.testing.assert_allclose(other_TS[:2], mean_TS[:2], rtol=1e-6)
    assert np.abs(other_TS[2] - mean_TS[2]).max() > 1e-6


def test_layers_and_heads_that_are_not_there_are_named(model):
    with pytest.raises(ValueError, match='head 2: there are 2, from 0 to 1'):
        translation_attention(*nnx.split(model), TOKENIZER, *ids('a', '가'), layer=0, head=2)
