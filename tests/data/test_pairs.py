"""Corpora of pairs, and batches of them."""

import gzip
import itertools
import pathlib
import re

import ml_collections
import numpy as np
import pytest

from minigpt_jax.data import DataError, corpora, pairs, tokenizers


@pytest.fixture
def data(monkeypatch, tmp_path):
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'tfds'))
    (tmp_path / 'texts').mkdir()
    return ml_collections.ConfigDict(
        {
            'corpus': 'parallel',
            'path': str(tmp_path / 'texts'),
            'source_language': 'en',
            'target_language': 'de',
            'tokenizer': 'char',
            'joint_vocabulary': False,
            'validation_fraction': 0.25,
        }
    )


# Dates.


@pytest.fixture(scope='module')
def some_days():
    """Fewer days, of which all else is as in use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, 'LAST_DAY', corpora.FIRST_DAY.replace(year=1991))
        yield


@pytest.fixture
def dates(data, some_days):
    data.corpus, data.target_language = 'dates', 'ko'
    return data


def test_dates_are_in_the_words_of_both_languages_and_in_the_length_of_the_source(dates):
    corpus = corpora.load_corpus(dates)
    found = dict([*corpus.train, *corpus.validation])
    assert found['Monday, January 1, 1990'] == ('1990년 1월 1일 월요일')
    assert found['January 1, 1990'] == '1990년 1월 1일'
    assert found['Jan 1, 1990'] == '1990. 1. 1.'
    weekday = re.compile('요일$')
    for source, target in found.items():
        assert bool(weekday.search(target)) == source.split(',')[0].endswith('day')


def test_dates_are_split_by_day_over_all_lengths(dates):
    corpus = corpora.load_corpus(dates)

    def days(split):
        return {tuple(map(int, re.findall(r'\d+', target)[:3])) for _, target in split}

    train, validation = days(corpus.train), days(corpus.validation)
    assert not train & validation
    assert len(train | validation) == 366
    assert len(validation) == 92  # a quarter, rounded
    assert {source for source, _ in corpus.train}.isdisjoint(s for s, _ in corpus.validation)


def test_dates_of_any_pair_of_locales(dates):
    dates.source_language, dates.target_language = 'de', 'fr'
    corpus = corpora.load_corpus(dates)
    found = dict([*corpus.train, *corpus.validation])
    assert found['Dienstag, 2. Januar 1990'] == 'mardi 2 janvier 1990'
    dates.target_language = 'xx_YY'
    with pytest.raises(DataError, match=r"data\.target_language='xx_YY': no locale"):
        corpora.load_corpus(dates)


def test_a_source_with_two_readings_is_there_once(dates):
    dates.source_language, dates.target_language = 'zh', 'en'  # long and medium are the same
    corpus = corpora.load_corpus(dates)
    sources = [source for source, _ in [*corpus.train, *corpus.validation]]
    assert len(sources) == len(set(sources)) == 2 * 366


# Files.


def write(data, name, lines):

    path = pathlib.Path(data.path) / name
    content = ''.join(f'{line}\n' for line in lines).encode()
    path.write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
    return path


def test_a_directory_with_the_names_of_multi30k(data):
    write(data, 'train.en.gz', ['a dog', 'a cat', 'both'])
    write(data, 'train.de', ['ein Hund', 'eine Katze', 'beide'])
    write(data, 'val.en', ['both', 'a bird'])
    write(data, 'val.de.gz', ['die zwei', 'ein Vogel'])
    corpus = corpora.load_corpus(data)
    assert list(corpus.train) == [
        ('a dog', 'ein Hund'),
        ('a cat', 'eine Katze'),
    ]  # both is held out
    assert list(corpus.validation) == [('both', 'die zwei'), ('a bird', 'ein Vogel')]


def test_two_files_are_split_by_source(data):
    one = write(data, 'left', [f'{i % 20}' for i in range(40)])
    other = write(data, 'right', [f'n{i}' for i in range(40)])
    data.path = f'{one},{other}'
    corpus = corpora.load_corpus(data)
    train, validation = ({source for source, _ in x} for x in (corpus.train, corpus.validation))
    assert not train & validation
    assert (len(train), len(validation)) == (15, 5)
    assert len(corpus.train) + len(corpus.validation) == 40


def test_empty_sides_are_left_out_and_counted(data, capsys):
    write(data, 'train.en', ['a', '', 'c', ' ', 'e', 'f'])
    write(data, 'train.de', ['A', 'B', '', 'D', 'E', 'F'])
    corpus = corpora.load_corpus(data)
    found = sorted([*corpus.train, *corpus.validation])
    assert found == [('a', 'A'), ('e', 'E'), ('f', 'F')]
    assert 'parallel: 3 pairs left out, of which a side is empty' in capsys.readouterr().out


def test_characters_that_end_lines_elsewhere_do_not_here(data):
    write(data, 'train.en', ['a\u2028b', 'c\x0bd', 'e\r', 'g'])
    write(data, 'train.de', ['1', '2', '3', '4'])
    corpus = corpora.load_corpus(data)
    found = dict([*corpus.train, *corpus.validation])
    assert found == {'a\u2028b': '1', 'c\x0bd': '2', 'e': '3', 'g': '4'}


def test_bad_files_get_one_line(data, tmp_path):
    en = write(data, 'train.en', ['a', 'b', 'c'])
    with pytest.raises(DataError, match=r'has no train\.de: it takes train\.en and'):
        corpora.load_corpus(data)
    de = write(data, 'train.de', ['A', 'B'])
    with pytest.raises(DataError, match=f'{en} has 3 lines and {de} has 2'):
        corpora.load_corpus(data)
    de.write_bytes(b'A\nB\xff\nC\n')
    with pytest.raises(DataError, match=f'{de} is not UTF-8 text: byte 0xff at offset 3'):
        corpora.load_corpus(data)
    de.unlink()
    zipped = write(data, 'train.de.gz', ['A', 'B', 'C'])
    zipped.write_bytes(zipped.read_bytes()[:-4])
    with pytest.raises(DataError, match=r'train\.de\.gz is no whole gzip file'):
        corpora.load_corpus(data)
    zipped.unlink()
    data.target_language = 'fr'
    write(data, 'train.en.gz', ['a', 'b', 'c'])  # twice the one, and nothing of the other
    with pytest.raises(DataError, match=r'has both train\.en and train\.en\.gz and no'):
        corpora.load_corpus(data)
    data.target_language = 'en'
    with pytest.raises(DataError, match=r"data\.target_language are both 'en'"):
        corpora.load_corpus(data)
    data.path = f'{en},{en}'
    with pytest.raises(DataError, match='no such directory, nor two files'):
        corpora.load_corpus(data)
    data.path = str(en)
    with pytest.raises(DataError, match='no such directory, nor two files'):
        corpora.load_corpus(data)
    data.path = None
    with pytest.raises(DataError, match=r'needs --config\.data\.path'):
        corpora.load_corpus(data)
    data.path = f'{en},{tmp_path / "none"}'
    with pytest.raises(DataError, match=f'cannot read {tmp_path / "none"}'):
        corpora.load_corpus(data)


def test_neither_split_takes_all(data):
    data.corpus, data.path = 'copy', None
    for fraction in (1e-9, 1 - 1e-9):
        data.validation_fraction = fraction
        corpus = corpora.load_corpus(data)
        assert min(len(corpus.train), len(corpus.validation)) == 1


# Tokens.


def test_vocabularies_are_separate_or_joint_and_of_the_training_split(data):
    write(data, 'train.en', ['abc', 'abd'])
    write(data, 'train.de', ['xyz', 'xyw'])
    write(data, 'val.en', ['abq'])
    write(data, 'val.de', ['xyqq'])
    separate = pairs.load_pairs(data)
    assert separate.tokenizer.source.characters == 'abcd'
    assert separate.tokenizer.target.characters == 'wxyz'
    assert separate.tokenizer.vocab_size == (8, 8)
    assert separate.unknown_share == 3 / 9  # q, and qq; EOS is among them
    data.joint_vocabulary = True
    joint = pairs.load_pairs(data)
    assert joint.tokenizer.source == joint.tokenizer.target
    assert joint.tokenizer.source.characters == 'abcdwxyz'
    again = pairs.load_pairs(data)  # from the cache
    assert again.tokenizer == joint.tokenizer
    np.testing.assert_array_equal(again.train.target, joint.train.target)
    as_dict = joint.tokenizer.to_dict()
    assert tokenizers.tokenizer_from_dict(as_dict) == joint.tokenizer


# Batches.

LETTERS = tokenizers.CharTokenizer('abcdefghijklmnopqrstuvwxyz')
PAIR = tokenizers.PairTokenizer(LETTERS, LETTERS)


def some_pairs(count=50):
    """Pairs known by their lengths and first letters."""
    rng = np.random.default_rng(0)
    words = [
        ''.join(rng.choice(list(LETTERS.characters), size=rng.integers(1, 20)))
        for _ in range(2 * count)
    ]
    return list(zip(words[::2], words[1::2], strict=True))


TEXTS = some_pairs()
ENCODED = pairs.encode_pairs(PAIR, TEXTS)


def decoded(batch):
    """The pairs of a batch, and how many rows are padding alone."""
    found, empty = [], 0
    for source, s, target, t in zip(
        batch['source_BS'],
        batch['source_lengths_B'],
        batch['target_BT1'],
        batch['target_lengths_B'],
        strict=True,
    ):
        assert target[0] == PAIR.bos_id
        assert (source[s:] == PAIR.pad_id).all()
        assert (target[1 + t :] == PAIR.pad_id).all()
        if not s:
            assert not t
            empty += 1
            continue
        assert source[s - 1] == target[t] == PAIR.eos_id
        found.append((LETTERS.decode(source[: s - 1]), LETTERS.decode(target[1:t])))
    return found, empty


def buckets_of(**values):
    settings = dict(context_length=32, num_buckets=3, batch_size=4) | values
    return pairs.make_buckets(ENCODED, **settings)


@pytest.mark.parametrize('num_buckets', [1, 3])
def test_an_epoch_takes_every_pair_once_and_the_next_in_another_order(num_buckets):
    buckets = buckets_of(num_buckets=num_buckets)
    batches = pairs.PairBatches(ENCODED, buckets, seed=1)
    epochs = []
    for epoch in range(3):
        found = []
        for step in range(batches.epoch_length):
            found += decoded(batches[epoch * batches.epoch_length + step])[0]
        assert sorted(found) == sorted(TEXTS)
        epochs.append(tuple(found))
    assert len(set(epochs)) == 3
    shapes = {batches[step]['source_BS'].shape for step in range(batches.epoch_length)}
    assert len(shapes) == num_buckets
    other = pairs.PairBatches(ENCODED, buckets, seed=2)
    assert [decoded(other[i]) for i in range(3)] != [decoded(batches[i]) for i in range(3)]


def test_the_batch_of_a_step_depends_on_seed_and_step_alone():
    buckets = buckets_of(num_buckets=1)
    batches = pairs.PairBatches(ENCODED, buckets, seed=7)
    for steps_per_call, first_step in ((1, 13), (4, 0), (5, 20)):
        calls = pairs.training_pairs(
            ENCODED, buckets, seed=7, steps_per_call=steps_per_call, first_step=first_step
        )
        step = first_step
        for call in itertools.islice(calls, 8):  # over the end of an epoch
            for k in range(steps_per_call):
                for name, array in batches[step].items():
                    np.testing.assert_array_equal(call[name][k], array)
                step += 1
        assert step > batches.epoch_length or first_step == 0


def test_validation_holds_every_pair_once_and_fills_with_rows_of_padding():
    buckets = buckets_of()
    found, empty = [], 0
    for batches_N in pairs.validation_pairs(ENCODED, buckets):
        for n in range(len(batches_N['source_BS'])):
            own, padding = decoded({name: x[n] for name, x in batches_N.items()})
            found, empty = found + own, empty + padding
    assert sorted(found) == sorted(TEXTS)
    assert empty == sum(b.num_batches * b.batch_size for b in buckets) - len(TEXTS) > 0


def test_buckets_hold_pairs_of_like_length_and_batches_of_like_size_in_tokens():
    buckets = buckets_of(tokens_per_batch=200, multiple=2)
    widths = [max(bucket.S, bucket.T) for bucket in buckets]
    assert widths == sorted(widths)
    for bucket, width in zip(buckets, widths, strict=True):
        assert bucket.batch_size == 200 // width // 2 * 2
        assert ENCODED.source_lengths[bucket.rows].max() == bucket.S
        assert ENCODED.target_lengths[bucket.rows].max() == bucket.T
    one, three = (
        pairs.padding_share(ENCODED, buckets_of(num_buckets=n, batch_size=2)) for n in (1, 3)
    )
    assert 0 < three < one < 1
    (one_bucket,) = buckets_of(num_buckets=1, batch_size=50)
    batch = pairs.gather(ENCODED, one_bucket.rows, one_bucket.S, one_bucket.T)
    tokens = (batch['source_BS'] != 0).sum() + (batch['target_BT1'][:, 1:] != 0).sum()
    places = batch['source_BS'].size + batch['target_BT1'][:, 1:].size
    np.testing.assert_allclose(pairs.padding_share(ENCODED, [one_bucket]), 1 - tokens / places)


def test_pairs_that_are_too_long_are_left_out_and_counted():
    longest = np.maximum(ENCODED.source_lengths, ENCODED.target_lengths)
    buckets = buckets_of(context_length=15)
    rows = np.concatenate([bucket.rows for bucket in buckets])
    assert sorted(rows) == list(np.flatnonzero(longest <= 15))
    assert pairs.num_too_long(ENCODED, 15) == len(TEXTS) - len(rows) > 0
    with pytest.raises(DataError, match=r'no pair of validation fits into model\.context_length=1'):
        buckets_of(context_length=1)
    with pytest.raises(DataError, match=r'tokens_per_batch=30: too few for 8 pairs of'):
        buckets_of(tokens_per_batch=30, multiple=8)
