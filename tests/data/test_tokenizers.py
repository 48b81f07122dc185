import json
import re

import ml_collections
import numpy as np
import pytest

from minigpt_jax.data import corpora, tokenizers

KOREAN = '민지는 책을 다 읽고 그것을 가방에 넣었다.'
SENTENCES = [f'{KOREAN}\n  And {i} more words, that is {2 * i}.\n' for i in range(50)]


def char():
    return tokenizers.CharTokenizer.train(SENTENCES)


def byte():
    return tokenizers.ByteTokenizer.train(SENTENCES)


def sentencepiece():
    return tokenizers.SentencePieceTokenizer.train(SENTENCES, 340)


KINDS = [char, byte, sentencepiece]
OF_BYTES = [byte, sentencepiece]

# Of each kind.


def test_every_kind_is_tested():
    assert [train().kind for train in KINDS] == list(tokenizers.TOKENIZERS)


@pytest.mark.parametrize('train', KINDS)
@pytest.mark.parametrize(
    'text', ['', *SENTENCES[3:5], KOREAN * 200, f'  {KOREAN}  \n\n ', ' ', '\n']
)
def test_korean_spaces_and_lines_survive_the_round_trip(train, text):
    tokenizer = train()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.unk_id not in ids
    assert tokenizer.unknown_symbols(text) == []
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize('train', KINDS)
def test_a_tokenizer_travels_as_json(train):
    tokenizer = train()
    returned = tokenizers.tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert returned == tokenizer == train()  # training twice learns the same
    np.testing.assert_array_equal(returned.encode(KOREAN), tokenizer.encode(KOREAN))


@pytest.mark.parametrize('train', KINDS)
def test_the_special_tokens_are_the_first_ids_and_are_written_out(train):
    tokenizer = train()
    special = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id]
    assert special == [0, 1, 2, 3]
    a, b = tokenizer.encode(KOREAN[:1]), tokenizer.encode(KOREAN[1:])
    ids = [tokenizer.bos_id, *a, tokenizer.unk_id, *b, tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(ids) == f'<bos>{KOREAN[:1]}<unk>{KOREAN[1:]}<eos><pad>'
    assert max(ids) < tokenizer.vocab_size


@pytest.mark.parametrize('train', KINDS)
def test_the_text_of_a_sequence_is_the_text_of_its_parts(train):
    # What is sampled is decoded apart from its prompt, and a window may begin anywhere.
    tokenizer = train()
    text = SENTENCES[7]
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        before, after = tokenizer.decode(ids[:cut]), tokenizer.decode(ids[cut:])
        if '\ufffd' in before + after:  # a character was cut in two
            assert text.startswith(before.rstrip('\ufffd'))
            assert text.endswith(after.lstrip('\ufffd'))
            assert len(before + after) - len(text) in (0, 1, 2)
        else:
            assert before + after == text


# Tokenizers of bytes.

STRANGE = [
    ' ▁▁ a▁b ▅ ▁',  # SentencePiece's own signs for a space and an unknown character
    '\x00\t\r\n\x7f\u3000\ufeff\ufffd',
    '<pad><bos><eos><unk><0x41><s>',
    'ﬁ é e\u0301 ① Ａ 한 \u1112\u1161\u11ab',  # what normalisation would change
    '😀👩‍🔬 漢字 ελληνικά',
]


@pytest.mark.parametrize('train', OF_BYTES)
@pytest.mark.parametrize('text', STRANGE)
def test_what_was_never_seen_is_kept_as_it_is(train, text):
    tokenizer = train()
    assert tokenizer.unknown_symbols(text) == []
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).min() > tokenizer.unk_id  # no special token in the text


@pytest.mark.parametrize('train', OF_BYTES)
def test_half_a_surrogate_pair_is_named_and_does_not_raise(train):
    assert train().unknown_symbols('a\udcff\udcffb') == ['\udcff']
    assert train().decode(train().encode('a\udcffb')) == 'a?b'


def test_a_byte_is_a_token():
    tokenizer = byte()
    assert tokenizer.vocab_size == 260
    ids = tokenizer.encode(KOREAN)
    np.testing.assert_array_equal(ids - 4, list(KOREAN.encode()))
    assert tokenizer.decode(ids[:4]) == '민\ufffd'


def test_sentencepiece_has_the_size_that_was_asked_for_and_writes_the_rest_in_bytes():
    tokenizer = sentencepiece()
    assert tokenizer.vocab_size == 340
    assert [tokenizer.decode([i]) for i in range(4)] == ['<pad>', '<bos>', '<eos>', '<unk>']
    np.testing.assert_array_equal(tokenizer.encode('漢\n'), byte().encode('漢\n'))
    words = tokenizer.encode(' words, that')
    assert [tokenizer.decode([i]) for i in words] == [' words', ',', ' that']
    assert [len(tokenizer.encode(space)) for space in ('  ', ' ')] == [1, 1]


def test_sentencepiece_learns_from_lines_of_any_length(capfd):
    text = ''.join(f'word{i % 7} ' for i in range(5000))
    tokenizer = tokenizers.SentencePieceTokenizer.train([text], 280)
    assert len(tokenizer.encode('word3 word4')) < 5
    assert capfd.readouterr() == ('', '')  # SentencePiece tells of every step


@pytest.mark.parametrize(
    ('documents', 'vocab_size', 'line'),
    [
        (SENTENCES, 4096, r'vocab_size=4096: the training text gives at most (\d+) pieces'),
        (SENTENCES, 270, r'vocab_size=270: must be (\d+) or more'),
        (['\n\n'], 300, 'vocab_size=300: SentencePiece cannot learn from this text'),
    ],
)
def test_a_size_that_the_text_does_not_allow_gets_one_line_with_one_that_it_does(
    documents, vocab_size, line, capfd
):
    with pytest.raises(corpora.DataError, match=line) as caught:
        tokenizers.SentencePieceTokenizer.train(documents, vocab_size)
    assert '\n' not in str(caught.value)
    for size in re.findall(line, str(caught.value)) if '(' in line else ():
        tokenizer = tokenizers.SentencePieceTokenizer.train(documents, int(size))
        assert tokenizer.vocab_size == int(size)
    assert capfd.readouterr() == ('', '')


# Characters.


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


def test_other_characters_are_another_tokenizer():
    tokenizer = tokenizers.CharTokenizer.train([KOREAN, '\n"\\\x00😀'])
    returned = tokenizers.tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert returned == tokenizer
    assert returned != tokenizers.CharTokenizer.train([KOREAN])


# The choice.


def test_the_kind_is_chosen_by_name():
    data = ml_collections.ConfigDict({'tokenizer': 'char', 'vocab_size': None})
    assert tokenizers.train_tokenizer(data, ['abc']) == tokenizers.CharTokenizer('abc')
    assert tokenizers.tokenizer_key(data) == 'char'
    data.tokenizer = 'byte'
    assert tokenizers.train_tokenizer(data, ['abc']) == tokenizers.ByteTokenizer()
    data = ml_collections.ConfigDict({'tokenizer': 'sentencepiece', 'vocab_size': 340})
    assert tokenizers.train_tokenizer(data, SENTENCES) == sentencepiece()
    assert tokenizers.tokenizer_key(data) == 'sentencepiece-340'
    for call in (
        lambda: tokenizers.train_tokenizer(ml_collections.ConfigDict({'tokenizer': 'chr'}), ['a']),
        lambda: tokenizers.tokenizer_from_dict({'kind': 'chr'}),
    ):
        with pytest.raises(corpora.DataError, match=r"'chr'.*did you mean 'char'\?"):
            call()
