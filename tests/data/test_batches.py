import itertools
import pathlib
import subprocess
import sys

import ml_collections
import numpy as np
import pytest

from minigpt_jax.data import batches, corpora, tokenizers

ROOT = pathlib.Path(__file__).parents[2]


def take(iterator, count):
    return np.concatenate(list(itertools.islice(iterator, count)))


# Training: with tokens 0, 1, 2, ... a window is known by its first token.


def test_windows_are_stretches_of_the_tokens():
    tokens = np.random.default_rng(0).integers(0, 200, 500).astype(np.uint8)
    tokens_KBT1 = next(
        batches.training_batches(tokens, context_length=7, batch_size=3, seed=0, steps_per_call=5)
    )
    assert tokens_KBT1.shape == (5, 3, 8)
    assert tokens_KBT1.dtype == np.int32
    stretches = {tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)}
    assert {tuple(window) for window in tokens_KBT1.reshape(-1, 8)} <= stretches


@pytest.mark.parametrize('seed', [0, 1, 2**31 - 1])
def test_an_epoch_takes_every_start_once_and_the_next_in_another_order(seed):
    num_starts, batch_size = 101, 4  # an epoch ends within a batch
    steps = batches.training_batches(
        np.arange(num_starts + 6), context_length=6, batch_size=batch_size, seed=seed
    )
    starts = take(steps, num_starts)[..., 0].reshape(batch_size, num_starts)  # four epochs
    for epoch in starts:
        assert sorted(epoch) == list(range(num_starts))
    assert len({tuple(epoch) for epoch in starts}) == batch_size
    assert starts[0].tolist() != list(range(num_starts))


def test_seeds_differ_and_no_epoch_of_one_is_an_epoch_of_the_next():
    def epochs(seed):
        steps = batches.training_batches(np.arange(41), context_length=1, batch_size=40, seed=seed)
        return {tuple(window[:, 0]) for window in take(steps, 5)}

    def count(*seeds):
        return len(set().union(*map(epochs, seeds)))

    assert count(0, 0) == 5
    assert count(0, 1, 2) == 15


def test_the_batch_of_a_step_depends_on_seed_and_step_alone():
    tokens = np.arange(60)
    kwargs = dict(context_length=4, batch_size=3, seed=7)
    whole = take(batches.training_batches(tokens, **kwargs), 40)  # more than two epochs
    assert len(np.unique(whole.reshape(40, -1), axis=0)) == 40

    for steps_per_call, first_step in ((1, 13), (4, 0), (5, 20), (6, 7)):
        calls = batches.training_batches(
            tokens, **kwargs, steps_per_call=steps_per_call, first_step=first_step
        )
        steps = take(calls, 3)
        assert len(steps) == 3 * steps_per_call
        np.testing.assert_array_equal(steps, whole[first_step : first_step + len(steps)])
    for step in (0, 39):
        np.testing.assert_array_equal(
            batches.training_batch(tokens, **kwargs, step=step), whole[step]
        )


def test_an_unfinished_iterator_does_not_keep_the_process_alive():
    program = """
import numpy as np
from minigpt_jax.data import batches
iterator = batches.training_batches(np.arange(99), context_length=8, batch_size=4, seed=0)
print(next(iterator).shape)
"""
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, '(1, 4, 9)\n', '')


# Validation.


@pytest.mark.parametrize('num_tokens', [6, 10, 11, 12, 30, 31, 32, 100])
@pytest.mark.parametrize('batch_size', [1, 3])
def test_every_token_but_the_first_is_a_target_once_behind_the_token_before_it(
    num_tokens, batch_size
):
    tokens = np.arange(1000, 1000 + num_tokens)
    tokens_NBT1, mask_NBT = batches.validation_batches(
        tokens, context_length=5, batch_size=batch_size, pad_id=77
    )
    assert tokens_NBT1.shape == (*mask_NBT.shape[:2], 6)
    assert mask_NBT.shape[1:] == (batch_size, 5)
    assert tokens_NBT1.dtype == np.int32
    assert mask_NBT.dtype == bool
    assert mask_NBT.any(axis=(1, 2)).all()  # no batch of padding alone
    inputs, targets = tokens_NBT1[..., :-1], tokens_NBT1[..., 1:]
    np.testing.assert_array_equal(targets[mask_NBT], tokens[1:])
    np.testing.assert_array_equal(inputs[mask_NBT], tokens[:-1])
    assert (targets[~mask_NBT] == 77).all()


def test_documents_end_with_eos_and_their_first_token_is_no_target():
    eos = 2
    tokens_BT1 = np.array([[5, 6, eos, 7, eos, 8, 9], [eos, eos, 5, 5, 5, 5, eos]])
    packed = batches.document_segments(tokens_BT1, eos_id=eos)
    np.testing.assert_array_equal(
        packed['segment_ids_BT'], [[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2]]
    )
    np.testing.assert_array_equal(
        packed['mask_BT'], np.array([[1, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 1]], bool)
    )
    assert packed['segment_ids_BT'].dtype == np.int32
    of_calls = batches.document_segments(tokens_BT1[None], eos_id=eos)
    np.testing.assert_array_equal(of_calls['segment_ids_BT'][0], packed['segment_ids_BT'])


def test_a_split_shorter_than_a_window_is_told_by_numbers():
    enough, short = np.arange(9), np.arange(8)
    kwargs = dict(context_length=8, batch_size=2)
    assert batches.validation_batches(enough, **kwargs)[1].sum() == 8
    assert next(batches.training_batches(enough, **kwargs, seed=0)).shape == (1, 2, 9)
    with pytest.raises(corpora.DataError, match=r'validation split has 8 tokens.* at least 9'):
        batches.validation_batches(short, **kwargs)
    with pytest.raises(corpora.DataError, match=r'training split has 8 tokens.* at least 9'):
        batches.training_batches(short, **kwargs, seed=0)  # at once, not when iterated
    with pytest.raises(corpora.DataError, match='training split has 8 tokens'):
        batches.training_batch(short, **kwargs, seed=0, step=0)


# From files to tokens.


@pytest.fixture
def data(monkeypatch, tmp_path):
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'tfds'))
    (tmp_path / 'texts').mkdir()
    return ml_collections.ConfigDict(
        {
            'corpus': 'text',
            'path': str(tmp_path / 'texts'),
            'tokenizer': 'char',
            'validation_fraction': 0.25,
        }
    )


def write_texts(data, *texts):
    for number, text in enumerate(texts):
        (pathlib.Path(data.path) / f'{number:02}.txt').write_text(text)


def test_the_vocabulary_is_of_the_training_split_and_the_unknown_are_counted(data):
    write_texts(data, 'abcabc' * 5 + '가zabcabcac')
    corpus = batches.load_tokenized(data)
    assert corpus.name == 'text'
    assert corpus.tokenizer == tokenizers.CharTokenizer('abc')
    assert corpus.tokenizer.decode(corpus.train_tokens) == 'abcabc' * 5
    assert corpus.tokenizer.decode(corpus.validation_tokens) == '<unk><unk>abcabcac'
    assert corpus.unknown_share == 0.2
    assert corpus.validation_bytes == 12
    assert corpus.train_tokens.dtype == np.uint8


def test_more_characters_take_a_wider_type(data):
    text = ''.join(map(chr, range(0xAC00, 0xAC00 + 253)))
    write_texts(data, text + text[:84])
    corpus = batches.load_tokenized(data)
    assert corpus.tokenizer.vocab_size == 257
    assert corpus.train_tokens.dtype == np.uint16
    assert corpus.tokenizer.decode(corpus.train_tokens) == text


def test_documents_are_joined_by_eos(data):
    write_texts(data, *(f'{i:02} ' for i in range(16)))
    corpus = batches.load_tokenized(data)
    train = corpus.tokenizer.decode(corpus.train_tokens).split('<eos>')
    validation = corpus.tokenizer.decode(corpus.validation_tokens)
    assert len(train) == 12
    assert train == sorted(train)
    assert validation.count('<eos>') == 3
    assert not set(train) & set(validation.split('<eos>'))
    assert corpus.validation_bytes == 12  # EOS is not of the text


def test_a_separator_cuts_files_into_documents(data):
    whole = '<|>'.join(f'{i:02} ' for i in range(8))
    write_texts(data, f'<|>{whole}<|>\n', whole.replace('0', '1'))
    with pytest.raises(corpora.DataError, match='none of 2 documents fits'):
        batches.load_tokenized(data)
    data.document_separator = '<|>'
    cut = batches.load_tokenized(data)
    texts = [cut.tokenizer.decode(x) for x in (cut.train_tokens, cut.validation_tokens)]
    train, validation = (set(filter(None, text.split('<eos>'))) for text in texts)
    assert len(validation) == 3
    assert all(len(document) == 3 for document in train | validation)
    assert '|' not in texts[0] + texts[1]


def test_tokens_are_read_from_the_cache_and_only_if_it_was_finished(data, monkeypatch):
    write_texts(data, 'abcd' * 20)
    first = batches.load_tokenized(data)

    def fail(*_):
        raise AssertionError('tokenized again')

    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, 'train_tokenizer', fail)
        again = batches.load_tokenized(data)
    assert isinstance(again.train_tokens, np.memmap)
    assert again.tokenizer == first.tokenizer
    assert again.validation_bytes == first.validation_bytes
    np.testing.assert_array_equal(again.train_tokens, first.train_tokens)

    # As if the process had been killed while it wrote the tokens.
    directory = corpora.load_corpus(data).directory
    (directory / 'tokens-char.json').unlink()
    (directory / 'tokens-char-train.npy').unlink()
    (directory / 'tokens-char-train.npy').write_bytes(b'half')
    np.testing.assert_array_equal(batches.load_tokenized(data).train_tokens, first.train_tokens)


def test_other_text_has_other_tokens(data):
    write_texts(data, 'abcd' * 20)
    first = batches.load_tokenized(data)
    write_texts(data, 'abce' * 20)
    second = batches.load_tokenized(data)
    assert second.sha256 != first.sha256
    assert second.tokenizer.characters == 'abce'


def test_a_mistyped_tokenizer_is_noticed_before_anything_is_prepared(data, tmp_path):
    write_texts(data, 'abcd' * 20)
    data.tokenizer = 'cha'
    with pytest.raises(corpora.DataError, match=r"data.tokenizer is 'cha'.*'char'"):
        batches.load_tokenized(data)
    assert not (tmp_path / 'tfds').exists()


def test_a_batch_of_one_window():
    tokens = np.arange(50, dtype=np.uint8)
    first = next(batches.training_batches(tokens, context_length=4, batch_size=1, seed=0))
    assert first.shape == (1, 1, 5)
    np.testing.assert_array_equal(np.diff(first[0, 0]), 1)


def test_hidden_tokens_are_those_of_bert():
    tokenizer = tokenizers.CharTokenizer('abcdefgh')
    tokens = np.random.default_rng(0).integers(tokenizer.first_id, 12, (300, 200)).astype(np.int32)
    hidden = batches.hide_tokens(
        tokens, rate=0.15, tokenizer=tokenizer, rng=np.random.default_rng(1)
    )
    chosen = hidden['mask_BT']
    np.testing.assert_array_equal(hidden['targets_BT'], tokens)
    np.testing.assert_array_equal(hidden['tokens_BT'][~chosen], tokens[~chosen])
    seen, was = hidden['tokens_BT'][chosen], tokens[chosen]
    masked, same = (seen == tokenizer.mask_id).mean(), (seen == was).mean()
    # Standard deviations at 9,000 chosen tokens are below 0.005; a random token is right in 1 of 8.
    np.testing.assert_allclose(
        [chosen.mean(), masked, same], [0.15, 0.8, 0.1 + 0.1 / 8], atol=0.015
    )
    others = seen[(seen != tokenizer.mask_id) & (seen != was)]
    assert set(others) == set(range(tokenizer.first_id, tokenizer.vocab_size))
