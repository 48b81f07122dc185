"""Corpora of the TFDS catalogue, with its real builders and with small ones made here."""

import errno
import json
import pathlib
import shutil
import socket
import sys

import ml_collections
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils.lazy_imports_utils import tensorflow as tf

from minigpt_jax.data import DataError, batches, corpora


@pytest.fixture(autouse=True)
def data_dir(monkeypatch, tmp_path):
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
    return tmp_path


@pytest.fixture
def no_network(monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror(-2, 'Name or service not known')

    monkeypatch.setattr(socket, 'getaddrinfo', fail)
    for name in ('http_proxy', 'https_proxy', 'all_proxy'):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def load(name, validation_fraction=0.1):
    return corpora.load_corpus(
        ml_collections.ConfigDict(
            {'corpus': name, 'path': None, 'validation_fraction': validation_fraction}
        )
    )


def lists(corpus):
    return list(corpus.train), list(corpus.validation)


def one_line(name, match):
    with pytest.raises(DataError, match=match) as caught:
        load(name)
    assert '\n' not in str(caught.value)
    return str(caught.value)


# A real builder.


def test_tiny_shakespeare_is_built_by_tfds_without_tensorflow(
    shared_data, data_dir, no_network, capsys
):
    manual = data_dir / 'downloads/manual'  # where TFDS looks for what was downloaded by hand
    manual.mkdir(parents=True)
    shutil.copy(shared_data / 'tinyshakespeare.txt', manual / 'input.txt')
    text = (shared_data / 'tinyshakespeare.txt').read_text()

    data = ml_collections.ConfigDict(
        {'corpus': 'tfds:tiny_shakespeare', 'tokenizer': 'byte', 'validation_fraction': 0.1}
    )
    corpus = batches.load_tokenized(data)
    train_end = int(0.9 * len(text))
    validation_end = train_end + (len(text) - train_end) // 2  # the rest is for a test
    assert corpus.name == 'tfds:tiny_shakespeare'
    assert corpus.tokenizer.decode(corpus.train_tokens) == text[:train_end]
    assert corpus.tokenizer.decode(corpus.validation_tokens) == text[train_end:validation_end]
    assert 'tensorflow' not in sys.modules
    assert capsys.readouterr().out.splitlines() == [
        'fetching tfds:tiny_shakespeare (once)',
        'preparing tfds:tiny_shakespeare (once)',
    ]

    shutil.rmtree(data_dir / 'downloads')
    assert batches.load_tokenized(data).sha256 == corpus.sha256
    assert capsys.readouterr().out == ''


def test_a_file_that_is_not_the_one_that_tfds_knows_is_refused(data_dir, no_network):
    manual = data_dir / 'downloads/manual'
    manual.mkdir(parents=True)
    (manual / 'input.txt').write_text('another text')
    one_line('tfds:tiny_shakespeare', 'manual/input.txt, has wrong checksum')


def test_without_a_network_one_line_after_seconds_says_what_to_do(data_dir, no_network, capfd):
    line = one_line('tfds:imdb_reviews', 'no connection to ai.stanford.edu')
    url = 'http://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz'
    assert f'put {url} into {data_dir}/downloads/manual as aclImdb_v1.tar.gz' in line
    assert '--config.data.corpus=text --config.data.path=FILE' in line
    assert capfd.readouterr() == ('fetching tfds:imdb_reviews (once)\n', '')


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'apache_beam', None)
    one_line('tfds:wiki40b', 'needs Apache Beam, which is not installed: pip install apache-beam')


@pytest.mark.parametrize(
    ('name', 'line'),
    [
        ('tfds:tiny_shakspeare', 'did you mean tiny_shakespeare?'),
        ('tfds:gigawort', 'did you mean gigaword?'),  # one of TFDS's older builders
        ('tfds:xqzv', 'see https://www.tensorflow.org/datasets/catalog'),
        ('tfds:imdb_reviews/plain', "no configuration 'plain'; did you mean plain_text?"),
        ('tfds:opus/x', 'choose from IT, '),
        ('tfds:tiny_shakespeare/x', 'it has none: use tfds:tiny_shakespeare'),
        ('tfds:mnist', r'tfds:mnist has no text, only image \(Image\), label \(ClassLabel\)'),
        ('tfd:tiny_shakespeare', "'tfds:NAME'"),
    ],
)
def test_a_name_that_is_wrong_gets_one_line_and_nothing_is_fetched(name, line, data_dir):
    one_line(name, line)
    assert not list(data_dir.iterdir())


# Builders made here, which the catalogue holds as soon as they are defined.


class MadeHere(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('1.0.0')
    KEYS: tuple[str, ...] = ('text',)
    TEXTS: dict[str, list[str]] = {'train': [f'text {i}' for i in range(20)]}  # noqa: RUF012

    def _info(self):
        features = {key: tfds.features.Text() for key in self.KEYS}
        features |= {'label': tfds.features.ClassLabel(num_classes=2)}
        features |= {'answers': tfds.features.Sequence({'text': tfds.features.Text()})}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(texts) for split, texts in self.TEXTS.items()}

    def _generate_examples(self, texts):
        for i, text in enumerate(texts):
            values = {key: f'{key}: {text}' if key != 'text' else text for key in self.KEYS}
            yield i, values | {'label': 0, 'answers': [{'text': 'no'}]}


class MadeHerePlain(MadeHere):
    """Only training."""


class MadeHereSplit(MadeHere):
    TEXTS = {  # noqa: RUF012
        'train': ['a', 'b', '', 'c', 'd', 'b', '가'],
        'test': ['t'],
        'validation': ['c', 'v', 'v', ''],
    }


class MadeHereTested(MadeHere):
    TEXTS = {'train': ['a', 'b'], 'test': ['t']}  # noqa: RUF012


class MadeHereOverlapping(MadeHere):
    TEXTS = {'train': ['a', 'b'], 'test': ['b', 'a', 'c']}  # noqa: RUF012


class MadeHereUntrained(MadeHere):
    TEXTS = {'validation': ['a'], 'other': ['b']}  # noqa: RUF012


class MadeHereNews(MadeHere):
    KEYS = ('story', 'headline')


class MadeHereNewsOfText(MadeHere):
    KEYS = ('headline', 'text')


class MadeHereWithFiles(MadeHere):
    """Uses what most of TFDS's builders use of TensorFlow."""

    TEXTS = {'train': []}  # noqa: RUF012

    def _generate_examples(self, texts):
        path = pathlib.Path(self.data_dir_root, 'files')
        assert tf.io.gfile.isdir(path)
        assert not tf.io.gfile.exists(path / 'nothing')
        assert sorted(tf.io.gfile.listdir(path)) == ['a.txt', 'b.txt']
        assert [sorted(names) for *_, names in tf.io.gfile.walk(path)] == [['a.txt', 'b.txt']]
        for name in tf.io.gfile.glob(f'{path}/*.txt'):
            with tf.io.gfile.GFile(name, 'rb') as file:
                assert isinstance(file.read(1), bytes)
            with tf.io.gfile.GFile(name) as file:
                for key, values in super()._generate_examples(file):
                    yield f'{name}-{key}', values


class MadeHereWithTensors(MadeHere):
    def _generate_examples(self, texts):
        yield 0, {'text': tf.strings.lower('A')}


class MadeHereBroken(MadeHere):
    def _generate_examples(self, texts):
        yield 0, {'text': 1 / 0}


class MadeHereTooLarge(MadeHere):
    def _generate_examples(self, texts):
        raise OSError(errno.ENOSPC, 'No space left on device')


def test_a_data_set_of_one_split_is_split_like_other_corpora():
    train, validation = lists(load('tfds:made_here_plain', 0.2))
    assert sorted(train + validation) == sorted(MadeHere.TEXTS['train'])
    assert len(validation) in (3, 4)
    assert len(load('tfds:made_here_plain', 0.4).validation) in (7, 8)


def test_its_own_validation_split_is_taken_whole_and_training_leaves_out_what_is_in_it():
    assert lists(load('tfds:made_here_split')) == (['a', 'b', 'd', 'b', '가'], ['c', 'v', 'v'])
    assert lists(load('tfds:made_here_tested')) == (['a', 'b'], ['t'])


@pytest.mark.parametrize(
    ('name', 'text', 'said'),
    [
        ('made_here_plain', 'text 0', None),
        ('made_here_news', 'story: text 0', 'reads story of each record, not headline'),
        ('made_here_news_of_text', 'text 0', None),
    ],
)
def test_the_text_of_a_record_is_the_one_called_text_or_the_first(name, text, said, capsys):
    assert text in load(f'tfds:{name}', 0.5).train[:1] + load(f'tfds:{name}', 0.5).validation[:1]
    *_, line = capsys.readouterr().out.splitlines()
    assert line == f'tfds:{name}: {said}' if said else line.startswith('preparing')


def test_the_sha256_is_of_the_texts_and_of_what_is_prepared_now(monkeypatch, data_dir):
    before = load('tfds:made_here_tested')
    copy = load('tfds:made_here_tested')
    assert copy.sha256 == before.sha256
    assert copy.directory == before.directory

    # The same texts, split elsewhere, are another corpus; so is a data set that was made anew.
    for texts in ({'train': ['a'], 'test': ['b', 't']}, {'train': ['a', 'B'], 'test': ['t']}):
        shutil.rmtree(data_dir / 'made_here_tested')
        monkeypatch.setattr(MadeHereTested, 'TEXTS', texts)
        after = load('tfds:made_here_tested')
        assert after.sha256 != before.sha256
        assert lists(after) == tuple(texts.values())

    shutil.rmtree(data_dir / 'made_here_tested')
    monkeypatch.undo()
    monkeypatch.setenv('TFDS_DATA_DIR', str(data_dir))
    assert load('tfds:made_here_tested').sha256 == before.sha256


def test_builders_open_files_without_tensorflow_as_with_it(monkeypatch, data_dir):
    files = data_dir / 'files'
    files.mkdir()
    (files / 'a.txt').write_bytes('가\r\n'.encode())
    (files / 'b.txt').write_text('b 0\nb 1\nb 2\n')
    before = tf
    corpus = load('tfds:made_here_with_files', 0.4)
    assert {*corpus.train, *corpus.validation} == {'b 0\n', 'b 1\n', 'b 2\n', '가\r\n'}
    assert tf is before


@pytest.mark.parametrize(
    ('name', 'line'),
    [
        ('made_here_with_tensors', 'needs TensorFlow, which is not installed: pip install tensor'),
        ('made_here_broken', 'cannot be prepared: ZeroDivisionError: division by zero'),
        ('made_here_too_large', 'No space left on device.*TFDS_DATA_DIR'),
        ('made_here_untrained', "no split 'train' to learn from, only validation, other"),
        ('made_here_overlapping', 'the training split would be empty'),
    ],
)
def test_what_cannot_be_prepared_gets_one_line_and_leaves_nothing_half_done(name, line, data_dir):
    one_line(f'tfds:{name}', line)
    one_line(f'tfds:{name}', line)
    assert not list(data_dir.glob('**/incomplete*'))


def test_records_in_a_format_of_tensorflow_are_named(data_dir):
    load('tfds:made_here_plain')
    path = data_dir / 'made_here_plain/1.0.0/dataset_info.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'fileFormat': 'tfrecord'}))
    one_line('tfds:made_here_plain', r'made_here_plain/1\.0\.0 in a format .*\(tfrecord\)')
