"""What a run shows of its text; that a run trains is tested with sweeps and commands."""

import types

import numpy as np
import pytest

from minigpt_jax.data import tokenizers
from minigpt_jax.training import tasks
from tests.conftest import tiny_config

KOREAN = '민지는 책을 다 읽고 그것을 가방에 넣었다.\n'
TEXTS = {
    'the first words': ('one two three four\n', 'one two three'),
    'words of a Korean text': (KOREAN * 20, '민지는 책을 다'),
    'a line with words': ('   \n\n <a>\n  five six\nseven\n', 'five six'),
    # Two bytes of the sixth syllable are within the 200 tokens.
    'no half of a character': ('<' * 182 + '\n' + '가' * 20, '가' * 5),
    'no more than a line of a console': ('가' * 90, '가' * 24),
}


@pytest.mark.parametrize(('text', 'prompt'), TEXTS.values(), ids=TEXTS)
def test_the_prompt_of_a_sample_is_text_of_the_validation_split(text, prompt):
    byte = tokenizers.ByteTokenizer()
    corpus = types.SimpleNamespace(tokenizer=byte, validation_tokens=byte.encode(text))
    assert tasks.sample_prompt(tiny_config(), corpus) == prompt


@pytest.mark.parametrize('kind', list(tokenizers.TOKENIZERS))
def test_the_prompt_of_a_sample_is_the_same_for_each_tokenizer(kind):
    data = types.SimpleNamespace(tokenizer=kind, vocab_size=290)
    tokenizer = tokenizers.train_tokenizer(data, [KOREAN * 20])
    corpus = types.SimpleNamespace(
        tokenizer=tokenizer, validation_tokens=np.asarray(tokenizer.encode(KOREAN * 20))
    )
    assert tasks.sample_prompt(tiny_config(), corpus) == '민지는 책을 다'
