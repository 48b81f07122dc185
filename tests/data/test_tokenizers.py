import json

import ml_collections
import numpy as np
import pytest

from minigpt_jax.data import corpora, tokenizers

KOREAN = '민지는 책을 다 읽고 그것을 가방에 넣었다.'


def test_korean_survives_the_round_trip():
    tokenizer = tokenizers.CharTokenizer.train([KOREAN])
    ids = tokenizer.encode(KOREAN)
    assert ids.dtype == np.int32
    assert len(ids) == len(KOREAN)
    assert tokenizer.decode(ids) == KOREAN


def test_ids_are_those_of_a_plain_look_up():
    rng = np.random.default_rng(0)
    text = ''.join(map(chr, rng.choice([*range(32, 300), 0xAC00, 0x1F600, 0x10FFFF], 2000)))
    tokenizer = tokenizers.CharTokenizer.train([text[:1000]])
    plain = {c: i for i, c in enumerate(sorted(set(text[:1000])), start=4)}
    expected = [plain.get(c, tokenizer.unk_id) for c in text]
    assert tokenizer.unk_id in expected
    np.testing.assert_array_equal(tokenizer.encode(text), expected)


def test_the_vocabulary_is_every_character_once_in_order_behind_the_special_tokens():
    tokenizer = tokenizers.CharTokenizer.train(['cab', 'bad'])
    assert tokenizer.characters == 'abcd'
    assert tokenizer.vocab_size == 8
    special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id}
    assert special | set(tokenizer.encode('abcd').tolist()) == set(range(8))
    assert len(special) == 4


def test_what_was_not_seen_is_unknown_and_is_named_once():
    tokenizer = tokenizers.CharTokenizer.train(['abc'])
    text = 'a\udcffz가z'  # the second cannot be written as UTF-8
    unknown = tokenizer.encode(text) == tokenizer.unk_id
    assert unknown.tolist() == [False, True, True, True, True]
    assert tokenizer.unknown_symbols(text) == ['\udcff', 'z', '가']
    assert tokenizer.unknown_symbols('cab') == []


def test_special_tokens_are_written_out():
    tokenizer = tokenizers.CharTokenizer.train(['abc'])
    ids = [tokenizer.bos_id, *tokenizer.encode('ax'), tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(np.array(ids)) == '<bos>a<unk><eos><pad>'
    assert tokenizer.decode([]) == ''
    assert tokenizer.encode('').shape == (0,)


def test_a_tokenizer_travels_as_json():
    tokenizer = tokenizers.CharTokenizer.train([KOREAN, '\n"\\\x00😀'])
    returned = tokenizers.tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert returned == tokenizer
    assert returned != tokenizers.CharTokenizer.train([KOREAN])


def test_the_kind_is_chosen_by_name():
    data = ml_collections.ConfigDict({'tokenizer': 'char'})
    assert tokenizers.train_tokenizer(data, ['abc']) == tokenizers.CharTokenizer('abc')
    for call in (
        lambda: tokenizers.train_tokenizer(ml_collections.ConfigDict({'tokenizer': 'chr'}), ['a']),
        lambda: tokenizers.tokenizer_from_dict({'kind': 'chr'}),
    ):
        with pytest.raises(corpora.DataError, match=r"'chr'.*did you mean 'char'\?"):
            call()
