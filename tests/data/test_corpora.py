import ast
import hashlib
import inspect
import json
import pathlib
import subprocess
import sys
import sysconfig
import textwrap
import time

import ml_collections
import pytest

from minigpt_jax.data import corpora

ROOT = pathlib.Path(__file__).parents[2]
SHAKESPEARE = ROOT.parent / 'shared/data/tinyshakespeare.txt'


@pytest.fixture(autouse=True)
def data_dir(monkeypatch, tmp_path):
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'tfds'))
    return tmp_path / 'tfds'


def text_data(path, validation_fraction=0.1):
    return ml_collections.ConfigDict(
        {
            'corpus': 'text',
            'path': None if path is None else str(path),
            'validation_fraction': validation_fraction,
        }
    )


def docs_data():
    return ml_collections.ConfigDict(
        {'corpus': 'python_docs', 'path': None, 'validation_fraction': 0.1}
    )


def write(directory, files):
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return directory


# python_docs, as this Python has it: prepared once for the tests that look at it.


@pytest.fixture(scope='module')
def python_docs(tmp_path_factory):
    directory = tmp_path_factory.mktemp('python_docs')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TFDS_DATA_DIR', str(directory))
        corpus = corpora.load_corpus(docs_data())
        train, validation = list(corpus.train), list(corpus.validation)
        # What was prepared is found without a look at the sources' syntax.
        patch.setattr(ast, 'parse', None)
        again = corpora.load_corpus(docs_data())
    assert again.sha256 == corpus.sha256
    assert again.directory == corpus.directory
    assert again.train[-1] == train[-1]
    return train, validation


def test_python_docs_splits_share_no_paragraph(python_docs):
    def long_paragraphs(documents):
        paragraphs = (' '.join(p.split()) for d in documents for p in d.split('\n\n'))
        return {p for p in paragraphs if len(p) >= 80}

    train, validation = map(long_paragraphs, python_docs)
    assert len(validation) > 500
    assert not train & validation


def test_python_docs_has_the_promised_size_and_share_of_validation(python_docs):
    train, validation = (sum(map(len, documents)) for documents in python_docs)
    assert 1_500_000 < train + validation < 2_600_000
    assert 0.095 < validation / (train + validation) <= 0.1


def test_python_docs_holds_topics_and_docstrings(python_docs):
    documents = python_docs[0] + python_docs[1]
    assert any(d.startswith('The "assert" statement\n***') for d in documents)
    summary = inspect.getdoc(json.dumps).split('\n\n')[0]
    assert any(d.startswith(summary) for d in documents)


# The extraction, on a small standard library.


@pytest.fixture
def library(monkeypatch, tmp_path):
    library = write(
        tmp_path / 'lib',
        {
            'first.py': '''
                """A module with a paragraph.

                   Words that
                occur twice.
                """
                raise SystemExit('imported')
                try:
                    class Outer:
                        def method(self):
                            """
                            Dedented:
                                an example

                            Words that occur   twice.
                            """
                except* ValueError:
                    async def handler(): "Of the handler."
                ''',
            'pydoc_data/topics.py': "topics = {'if': 'The if statement', 'del': 'Del.'}\n",
            'unittest/case.py': '"""Kept, although the name ends in test."""',
            'json/tests/test_json.py': '"""A test."""',
            'test/support.py': '"""A test."""',
            'idlelib/idle_test/mock.py': '"""A test."""',
            'site-packages/numpy.py': '"""Installed."""',
            '_sysconfigdata__linux.py': '"""Of this build."""',
        },
    )
    first = library / 'first.py'
    first.write_text(textwrap.dedent(first.read_text()))
    monkeypatch.setattr(sysconfig, 'get_path', lambda name: str(library))
    return library


def test_docstrings_are_dedented_parsed_not_imported_and_freed_of_repeated_paragraphs(library):
    files = corpora.PythonDocs.read(docs_data())
    assert list(corpora.PythonDocs.documents(files)) == [
        'A module with a paragraph.\n\n   Words that\noccur twice.',
        'Dedented:\n    an example',
        'Of the handler.',
        'The if statement',
        'Del.',
        'Kept, although the name ends in test.',
    ]


def test_python_docs_depends_on_the_library_alone(library):
    before = corpora.load_corpus(docs_data())
    write(library, {'site-packages/scipy.py': '"""More."""', 'test/more.py': '"""More."""'})
    assert corpora.load_corpus(docs_data()).directory == before.directory
    write(library, {'more.py': '"""More."""'})
    after = corpora.load_corpus(docs_data())
    assert after.sha256 != before.sha256
    assert 'More.' in [*after.train, *after.validation]


def test_a_python_without_sources_is_told_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, 'get_path', lambda name: str(tmp_path))
    with pytest.raises(corpora.DataError, match=r'--config\.data\.corpus=text'):
        corpora.load_corpus(docs_data())


# text


def test_a_single_file_is_cut_by_characters_and_loses_none(tmp_path):
    text = '민지는 책을 다 읽고\r\n그것을 가방에 넣었다.\r\n\n\tend \r' * 20
    path = write(tmp_path, {'a.txt': '\ufeff' + text}) / 'a.txt'
    corpus = corpora.load_corpus(text_data(path, 0.25))
    assert corpus.name == 'text'
    assert len(corpus.train) == len(corpus.validation) == 1
    assert corpus.train[0] + corpus.validation[0] == text
    assert len(corpus.validation[0]) == round(len(text) / 4)
    assert corpus.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f'{SHAKESPEARE} is not there')
def test_tiny_shakespeare_has_its_known_lengths():
    corpus = corpora.load_corpus(text_data(SHAKESPEARE))
    assert len(corpus.train[0]) + len(corpus.validation[0]) == 1_115_394
    assert len(corpus.validation[0]) in (111_539, 111_540)


def test_several_files_are_split_whole_and_in_order(tmp_path):
    texts = {f'{i:02}.txt': f'document {i} ' * (1 + i % 3) for i in range(30)}
    write(tmp_path / 'texts', texts | {'99.txt': texts['07.txt'], 'notes.md': 'not text'})
    corpus = corpora.load_corpus(text_data(tmp_path / 'texts', 0.2))
    train, validation = list(corpus.train), list(corpus.validation)
    assert sorted(train + validation) == sorted(texts.values())  # the copy was taken once
    assert train == [text for text in texts.values() if text in train]
    assert 0.15 < sum(map(len, validation)) / sum(map(len, texts.values())) <= 0.2
    assert corpus.train[-1:] == train[-1:]


def test_paths_are_a_file_a_directory_a_glob_or_a_list(tmp_path):
    names = ['a.txt', 'b.txt', 'deep/c.txt', 'd[1].txt', 'e,f.txt', 'g.text']
    write(tmp_path, {name: name for name in names})

    def read(path):
        files = corpora.TextFiles.read(text_data(path))
        return [str(found.relative_to(tmp_path)) for found in files]

    assert read(tmp_path) == ['a.txt', 'b.txt', 'd[1].txt', 'deep/c.txt', 'e,f.txt']
    assert read(tmp_path / '*.t*xt') == ['a.txt', 'b.txt', 'd[1].txt', 'e,f.txt', 'g.text']
    assert read(tmp_path / 'd[1].txt') == ['d[1].txt']
    assert read(tmp_path / 'e,f.txt') == ['e,f.txt']
    assert read(f'{tmp_path}/g.text, {tmp_path}/[ab].txt,{tmp_path}/a.txt,') == [
        'g.text',
        'a.txt',
        'b.txt',
    ]


def test_a_changed_file_or_split_is_never_read_from_what_was_prepared_before(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_text('before ' * 10)
    before = corpora.load_corpus(text_data(path))
    path.write_text('behind ' * 10)  # of the same length
    after = corpora.load_corpus(text_data(path))
    assert after.train[0].startswith('behind')
    assert before.train[0].startswith('before')
    assert len(corpora.load_corpus(text_data(path, 0.2)).validation[0]) == 14


# Preparation that is disturbed, in processes of its own.

PREPARE = """
import os, pathlib, sys, time
import ml_collections
from minigpt_jax.data import corpora

directory = pathlib.Path(sys.argv[1])
generate = corpora.TextFiles._generate_examples
def disturbed(self, documents):
    for number, example in enumerate(generate(self, documents)):
        yield example
        {disturb}
corpora.TextFiles._generate_examples = disturbed
data = ml_collections.ConfigDict(
    dict(corpus='text', path=str(directory / 'texts'), validation_fraction=0.5)
)
(directory / f'ready-{{os.getpid()}}').touch()
while not (directory / 'go').exists():
    time.sleep(0.01)
corpus = corpora.load_corpus(data)
print(len(corpus.train), len(corpus.validation), sorted([*corpus.train, *corpus.validation]))
assert 'tensorflow' not in sys.modules
"""


def start_preparing(directory, disturb):
    return subprocess.Popen(
        [sys.executable, '-c', PREPARE.format(disturb=disturb), str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_may_prepare_at_once_and_say_one_line(tmp_path):
    write(tmp_path / 'texts', {'a.txt': 'aaaa', 'b.txt': 'bbbb'})
    processes = [start_preparing(tmp_path, 'time.sleep(0.5)') for _ in range(2)]
    while len(list(tmp_path.glob('ready-*'))) < 2:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)
    (tmp_path / 'go').touch()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [line for stdout, _ in outputs for line in stdout.splitlines()]
    assert sorted(lines) == ["1 1 ['aaaa', 'bbbb']"] * 2 + ['preparing text (once)']
    assert [stderr for _, stderr in outputs] == ['', '']


def test_a_killed_preparation_is_started_afresh(tmp_path, data_dir):
    write(tmp_path / 'texts', {'a.txt': 'aaaa', 'b.txt': 'bbbb'})
    (tmp_path / 'go').touch()
    killed = start_preparing(tmp_path, 'os._exit(9)')
    killed.communicate(timeout=60)
    assert killed.returncode == 9
    assert len(list(data_dir.glob('text/*/incomplete.*'))) == 1
    corpus = corpora.load_corpus(text_data(tmp_path / 'texts', 0.5))
    assert sorted([*corpus.train, *corpus.validation]) == ['aaaa', 'bbbb']
    assert not list(data_dir.glob('text/*/incomplete.*'))


# What the user can mend.


@pytest.mark.parametrize(
    ('files', 'path', 'fraction', 'message'),
    [
        ({}, None, 0.1, r'--config\.data\.path=FILE'),
        ({'shakespeare.txt': 'x'}, 'shakspeare.txt', 0.1, r'did you mean .*/shakespeare\.txt\?'),
        ({}, 'shakespeare.txt', 0.1, r'no such file: .*/shakespeare\.txt .*--config\.data\.path'),
        ({'a.txt': 'x'}, 'none/*.txt', 0.1, r'no such file: .*none/\*\.txt'),
        ({'texts/a.md': 'x'}, 'texts', 0.1, r'texts has no file that ends in \.txt'),
        ({'a.txt': ''}, 'a.txt', 0.1, r'a\.txt is empty'),
        ({'a.txt': b'\xef\xbb\xbf \n'}, 'a.txt', 0.1, r'a\.txt is empty'),
        ({'a.txt': b'\xef\xbb\xbfabc\xe9t\xe9'}, 'a.txt', 0.1, r'a\.txt .*byte 0xe9 at offset 6'),
        ({'a.txt': 'abc'}, 'a.txt', 0.1, r'validation split would be empty'),
        ({'a.txt': 'abc'}, 'a.txt', 0.9, r'training split would be empty'),
        ({'t/a.txt': 'abc', 't/b.txt': 'def'}, 't', 0.4, r'validation split would be empty'),
        ({'a.txt': 'abc'}, 'a.txt', 1.0, r'must be between 0 and 1'),
        ({'a.txt': 'abc'}, 'a.txt', 0.0, r'must be between 0 and 1'),
    ],
)
def test_what_is_wrong_with_a_text_is_said_in_one_line(tmp_path, files, path, fraction, message):
    write(tmp_path, files)
    with pytest.raises(corpora.DataError, match=message) as caught:
        corpora.load_corpus(text_data(path and tmp_path / path, fraction))
    assert '\n' not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    path = write(tmp_path, {'a.txt': 'text'}) / 'a.txt'

    def refuse(self):
        raise PermissionError(13, 'Permission denied', str(self))

    monkeypatch.setattr(pathlib.Path, 'read_bytes', refuse)
    with pytest.raises(corpora.DataError, match=r'cannot read .*a\.txt: Permission denied'):
        corpora.load_corpus(text_data(path))


def test_a_data_directory_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    path = write(tmp_path, {'a.txt': 'text ' * 9}) / 'a.txt'
    monkeypatch.setenv('TFDS_DATA_DIR', str(path / 'below a file'))
    with pytest.raises(corpora.DataError, match=r'a\.txt/below a file .*TFDS_DATA_DIR') as caught:
        corpora.load_corpus(text_data(path))
    assert '\n' not in str(caught.value)


def test_an_unknown_corpus_names_the_nearest_and_all():
    data = docs_data()
    data.corpus = 'python_doc'
    message = r"choose from 'python_docs', 'text', .*'tfds:NAME' \(did you mean 'python_docs'\?\)"
    with pytest.raises(corpora.DataError, match=message):
        corpora.load_corpus(data)
