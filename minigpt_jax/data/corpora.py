"""Corpora: where the text comes from, as documents split into training and validation.

Each corpus is a TFDS builder. It is prepared once, as ArrayRecord files below `TFDS_DATA_DIR`
(TFDS's own variable; `~/tensorflow_datasets` without it), and read from there ever after. The
name of a prepared data set carries the sha256 of its source and its split settings: a source
that changes gets a new data set, and an old one is never read in its place. No TensorFlow is
needed.

To add a corpus, derive from `_CorpusBuilder`, say how to read its files and how to make documents
of them, and name the class in `CORPORA`. A data set of the TFDS catalogue needs none of its own: it
is the corpus `tfds:NAME` (see `Catalogue`).
"""

import ast
import contextlib
import dataclasses
import datetime
import difflib
import glob
import gzip
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import random
import re
import shutil
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import babel
import babel.dates
import filelock
import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from minigpt_jax.data import DataError, catalogue

T = TypeVar('T')
# In the order in which their documents are read: their contents; of the catalogue, splits of texts.
Files = dict[pathlib.Path, bytes | Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The documents of a corpus, read from disk when they are asked for: texts, or pairs of them.

    Attributes:
        name: `data.corpus` of the configuration.
        sha256: hex digest of the source's bytes; of a single file it is what `sha256sum` prints. Of
            the catalogue it is that of the texts, whatever files they came from.
        train: documents to learn from.
        validation: documents to measure on; no document of `train` is among them.
        directory: of the prepared data set; what is derived from it is cached here.
    """

    name: str
    sha256: str
    train: Sequence[str] | Sequence[tuple[str, str]]
    validation: Sequence[str] | Sequence[tuple[str, str]]
    directory: pathlib.Path


def load_corpus(data: Any) -> Corpus:
    """Prepares a corpus if this was not done before, and opens it.

    Args:
        data: the group `data` of a configuration: `corpus`, `validation_fraction` (of the
            characters, of dates the days, between 0 and 1), for files `path`, for texts
            `document_separator`, and for pairs `source_language` and `target_language`.

    Raises:
        DataError: the corpus is unknown, its source cannot be read, a split would be empty, or
            the prepared data set cannot be written.
    """
    builder_class = _builder_class(data.corpus)
    fraction = float(data.validation_fraction)
    if not 0 < fraction < 1:
        raise DataError(f'data.validation_fraction is {fraction}: it must be between 0 and 1')
    try:
        files = builder_class.read(data)
    except OSError as error:
        raise DataError(f'cannot read {error.filename}: {error.strerror}') from error
    sha256 = builder_class.sha256(files)
    options = builder_class.options(data)
    name = f'{sha256[:16]}-validation-{fraction}'
    if options:
        name += f'-{_sha256([json.dumps(options).encode()])[:8]}'
    config = SplitConfig(name=name, files=files, validation_fraction=fraction, options=options)
    builder = _prepared(
        lambda: builder_class(data_dir=_data_dir(), config=config, file_format='array_record'),
        f'preparing {data.corpus}',
    )
    with _quiet_tfds():
        sources = builder.as_data_source()
    return Corpus(
        name=data.corpus,
        sha256=sha256,
        train=builder_class.records(sources['train']),
        validation=builder_class.records(sources['validation']),
        directory=pathlib.Path(builder.data_dir),
    )


def _builder_class(name: str) -> 'type[_CorpusBuilder]':
    if name.startswith('tfds:'):
        return Catalogue
    return choose(CORPORA | {'tfds:NAME': Catalogue}, name, 'data.corpus')


def choose(table: Mapping[str, T], name: str, key: str) -> T:
    """Returns `table[name]`; else raises a DataError naming `key` and the valid choices."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f' (did you mean {near[0]!r}?)' if near else ''
    raise DataError(f'{key} is {name!r}: choose from {", ".join(map(repr, table))}{hint}')


@contextlib.contextmanager
def writing_to(directory: pathlib.Path) -> Iterator[None]:
    """Turns a failure to write below `directory` into a DataError that says what to set."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f'cannot write prepared data to {directory} ({error.strerror or error}): set the '
            'environment variable TFDS_DATA_DIR to a directory that can be written'
        ) from error


# The corpora.


@dataclasses.dataclass(eq=False)
class SplitConfig(tfds.core.BuilderConfig):
    """What a builder makes its documents of, and how it splits them."""

    # Not in the repr, since TFDS formats a configuration to log it.
    files: Files = dataclasses.field(default_factory=dict, repr=False)
    validation_fraction: float = 0.1
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of `documents`


class _CorpusBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes the documents of a corpus, a record each, to the splits 'train' and 'validation'.

    It is not registered with `tfds.load`, which has no place for the source's bytes.

    `VERSION` says how documents are made and split: raise it when that changes, so that data
    sets prepared before are not read again.
    """

    content = 'text'  # of a document: text; pairs, (source, target); images, (pixels, class)

    @staticmethod
    def records(source: Any) -> Sequence[Any]:
        """Returns the documents of a TFDS data source."""
        return _Documents(source)

    @staticmethod
    def read(data: Any) -> Files:
        """Reads the source; quick, since each start does it to compute the sha256.

        Raises:
            OSError: a file cannot be read.
            DataError: there is none.
        """
        raise NotImplementedError

    @staticmethod
    def options(data: Any) -> dict[str, str]:
        """Returns what else `documents` depends on, as its keywords."""
        return {}

    @staticmethod
    def documents(files: Files, **options: str) -> Iterable[str]:
        """Makes documents of the source; may be slow, since it is done once."""
        raise NotImplementedError

    @classmethod
    def sha256(cls, files: Files) -> str:
        """Returns the hex digest of the source; quick."""
        return _sha256(files.values())

    @classmethod
    def splits(
        cls, files: Files, validation_fraction: float, **options: str
    ) -> tuple[list[str], list[str]]:
        """Returns the documents of training and validation.

        Raises:
            DataError: one of them would be empty.
        """
        return split_documents(cls.documents(files, **options), validation_fraction)

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({'text': tfds.features.Text()}),
            disable_shuffling=True,  # records stay in the order of the source
        )

    def _split_generators(self, dl_manager):
        config = self.builder_config
        train, validation = self.splits(config.files, config.validation_fraction, **config.options)
        return {
            'train': self._generate_examples(train),
            'validation': self._generate_examples(validation),
        }

    def _generate_examples(self, documents):
        for key, text in enumerate(documents):
            yield key, {'text': text}


class PythonDocs(_CorpusBuilder, skip_registration=True):
    """English prose that every CPython carries.

    A document is a topic of the language reference or a docstring of the standard library. The
    sources are parsed, never imported. Tests are left out, and so is what is installed beside
    the standard library. A paragraph that occurs more than once is kept where it occurs first,
    so that no paragraph is in both splits.
    """

    name = 'python_docs'
    VERSION = tfds.core.Version('1.0.0')

    @staticmethod
    def read(data: Any) -> Files:
        root = pathlib.Path(sysconfig.get_path('stdlib'))
        paths = sorted(_library_files(root))
        if not paths:
            raise DataError(
                f'the sources of the standard library are not in {root}: this Python comes '
                'without them; pass a text with --config.data.corpus=text --config.data.path=FILE'
            )
        return {path: path.read_bytes() for path in paths}

    @staticmethod
    def documents(files: Files) -> Iterator[str]:
        seen = set()
        for path, content in files.items():
            module = ast.parse(content)
            texts = _topics(module) if path.match(_TOPICS) else _docstrings(module)
            for text in texts:
                new = []
                for paragraph in re.split(r'\n(?:[ \t]*\n)+', text):
                    # Two paragraphs that differ in line breaks or indentation alone are the same.
                    words = ' '.join(paragraph.split())
                    if words and words not in seen:
                        seen.add(words)
                        new.append(paragraph.rstrip())
                if new:
                    yield '\n\n'.join(new)


_TOPICS = 'pydoc_data/topics.py'


def _library_files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """The sources below `root` that every copy of this Python version has, tests left out."""
    for directory, subdirectories, names in os.walk(root):
        # In place: os.walk then does not enter them, which matters for a large site-packages.
        subdirectories[:] = [
            name
            for name in subdirectories
            if name not in ('test', 'tests', 'idle_test', 'site-packages', 'dist-packages')
            and not name.startswith('config-')  # written when this very Python was built
        ]
        for name in names:
            if name.endswith('.py') and not name.startswith(('_sysconfigdata', 'sitecustomize')):
                yield pathlib.Path(directory, name)


def _topics(module: ast.Module) -> Iterator[str]:
    """The values of the one dictionary of `pydoc_data.topics`, the language reference."""
    for node in module.body:
        if isinstance(node, ast.Assign):
            yield from ast.literal_eval(node.value).values()


def _docstrings(node: ast.AST) -> Iterator[str]:
    """The docstrings of a module and all that is defined in it, from top to bottom."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ''  # dedented by inspect.cleandoc
    for child in ast.iter_child_nodes(node):
        # Expressions hold no definitions, and are most of a syntax tree.
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _docstrings(child)


class TextFiles(_CorpusBuilder, skip_registration=True):
    """UTF-8 text files of the user, their line ends as they are.

    A document is a whole file, or with `data.document_separator` what stands between two of it, if
    that is more than white space.
    """

    name = 'text'
    VERSION = tfds.core.Version('1.0.0')

    @staticmethod
    def read(data: Any) -> Files:
        return {path: path.read_bytes() for path in _text_paths(data.path)}

    @staticmethod
    def options(data: Any) -> dict[str, str]:
        separator = data.get('document_separator')
        return {} if separator is None else {'document_separator': separator}

    @staticmethod
    def documents(files: Files, document_separator: str | None = None) -> Iterator[str]:
        for path, content in files.items():
            text = decode_utf8(path, content)
            texts = [text] if document_separator is None else text.split(document_separator)
            texts = [text for text in texts if text.strip()]
            if not texts:
                raise DataError(f'{path} is empty: there is no text to learn from')
            yield from texts


def decode_utf8(path: pathlib.Path | str, content: bytes) -> str:
    """Returns the text of a file's bytes, without a byte order mark.

    Raises:
        DataError: they are not UTF-8; `path` says whose they are.
    """
    try:
        return content.decode('utf-8').removeprefix('\ufeff')
    except UnicodeDecodeError as error:
        raise DataError(
            f'{path} is not UTF-8 text: byte 0x{content[error.start]:02x} at offset '
            f'{error.start} (iconv -f ENCODING -t UTF-8 converts it)'
        ) from error


def _text_paths(path: str | None) -> list[pathlib.Path]:
    """Files named by a file, a directory of .txt, a glob, or several of them between commas."""
    if not path:
        raise DataError("the corpus 'text' needs a file: pass --config.data.path=FILE")
    found = {}  # a dictionary, since a file that is named twice is read once
    parts = [path] if os.path.exists(path) else filter(None, map(str.strip, path.split(',')))
    for part in parts:
        here = pathlib.Path(os.path.expanduser(part))  # leaves a user that is unknown
        if here.is_dir():
            matches = sorted(here.rglob('*.txt'))
            if not matches:
                raise DataError(f'the directory {here} has no file that ends in .txt')
        elif here.exists():  # before it is read as a glob: names may contain brackets
            matches = [here]
        else:
            matches = sorted(map(pathlib.Path, glob.glob(str(here), recursive=True)))
        matches = [match for match in matches if match.is_file()]
        if not matches:
            raise DataError(f'no such file: {here}{_suggestion(here)}')
        found |= dict.fromkeys(matches)
    if not found:
        raise DataError(f'data.path={path!r} names no file: pass --config.data.path=FILE')
    return list(found)


def _suggestion(path: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
        if near:
            return f' (did you mean {path.with_name(near[0])}?)'
    return f' (looked from {pathlib.Path.cwd()}; set --config.data.path)'


class _PairBuilder(_CorpusBuilder, skip_registration=True):
    """Writes pairs of texts, (source, target), to the splits 'train' and 'validation'."""

    content = 'pairs'

    @staticmethod
    def records(source: Any) -> Sequence[Any]:
        return _Pairs(source)

    def _info(self):
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({'source': text, 'target': text}),
            disable_shuffling=True,
        )

    def _generate_examples(self, documents):
        for key, (source, target) in enumerate(documents):
            yield key, {'source': source, 'target': target}


FIRST_DAY, LAST_DAY = datetime.date(1990, 1, 1), datetime.date(2039, 12, 31)
DATE_FORMATS = ('full', 'long', 'medium')


class Dates(_PairBuilder, skip_registration=True):
    """Every day of fifty years in one language and another, in three lengths, by Babel's CLDR.

    The target has the length of the source: a shorter source lacks the weekday, which a model would
    have to compute. Days are split, not pairs: no day of validation is in training in any length.
    Where two lengths read the same in the source, the longer one is taken.
    """

    name = 'dates'
    VERSION = tfds.core.Version('1.0.0')

    @staticmethod
    def read(data: Any) -> Files:
        for key in ('source_language', 'target_language'):
            try:
                babel.Locale.parse(getattr(data, key))
            except (ValueError, TypeError, babel.UnknownLocaleError) as error:
                raise DataError(
                    f'data.{key}={getattr(data, key)!r}: no locale of Unicode CLDR; '
                    'for example en, ko, de, pt_BR'
                ) from error
        # All that the text depends on, in place of the text, which takes seconds to write.
        days = str(FIRST_DAY), str(LAST_DAY)
        made_of = [data.source_language, data.target_language, babel.__version__, *days]
        return {pathlib.Path('dates'): json.dumps(made_of).encode()}

    @classmethod
    def splits(cls, files: Files, validation_fraction: float) -> tuple[list[Any], list[Any]]:
        (made_of,) = files.values()
        source, target, *_ = json.loads(made_of)
        count = (LAST_DAY - FIRST_DAY).days + 1
        days = [FIRST_DAY + datetime.timedelta(days=i) for i in range(count)]
        held_out = _held_out(map(str, days), validation_fraction)
        splits = [], []
        for day in days:
            pairs = {}
            for length in DATE_FORMATS:
                text = babel.dates.format_date(day, length, locale=source)
                pairs.setdefault(text, babel.dates.format_date(day, length, locale=target))
            splits[str(day) in held_out].extend(pairs.items())
        return splits


class _Letters(_PairBuilder, skip_registration=True):
    """Random words of letters, the same every time, and what `translated` makes of each."""

    @staticmethod
    def translated(word: str) -> str:
        raise NotImplementedError

    @staticmethod
    def read(data: Any) -> Files:
        return {pathlib.Path('letters'): json.dumps([_ALPHABET, _LETTERS, _WORDS]).encode()}

    @classmethod
    def splits(cls, files: Files, validation_fraction: float) -> tuple[list[Any], list[Any]]:
        rng = random.Random(0)
        words = dict.fromkeys(
            ''.join(rng.choices(_ALPHABET, k=rng.randint(*_LETTERS))) for _ in range(_WORDS)
        )
        held_out = _held_out(words, validation_fraction)
        splits = [], []
        for word in words:
            splits[word in held_out].append((word, cls.translated(word)))
        return splits


_ALPHABET, _LETTERS, _WORDS = 'abcdefgh', (3, 8), 8_000


class Copy(_Letters, skip_registration=True):
    """Words of three to eight letters, translated into themselves."""

    name = 'copy'
    VERSION = tfds.core.Version('1.0.0')

    @staticmethod
    def translated(word: str) -> str:
        return word


class Reverse(_Letters, skip_registration=True):
    """Words of three to eight letters, translated into their reverse."""

    name = 'reverse'
    VERSION = tfds.core.Version('1.0.0')

    @staticmethod
    def translated(word: str) -> str:
        return word[::-1]


class Parallel(_PairBuilder, skip_registration=True):
    """Two aligned texts of the user, a sentence a line, UTF-8, plain or .gz.

    A directory holds train.SOURCE and train.TARGET, and may hold val.SOURCE and val.TARGET, where
    the ends are the languages: the names of Multi30k. Without val, or of two files, sentences are
    held out by their source. A pair of which one side is empty is left out, and counted. A source
    of validation is in no pair of training.
    """

    name = 'parallel'
    VERSION = tfds.core.Version('1.0.0')

    @staticmethod
    def read(data: Any) -> Files:
        files = {path: _read_plain(path) for path in _parallel_paths(data)}
        splits = _aligned([*files.items()])
        pairs = [pair for split in splits for pair in zip(*split, strict=True)]
        if empty := sum(not all(pair) for pair in pairs):
            print(f'parallel: {empty} pairs left out, of which a side is empty')
        return files

    @classmethod
    def splits(cls, files: Files, validation_fraction: float) -> tuple[list[Any], list[Any]]:
        train, *given = (
            [pair for pair in zip(*split, strict=True) if all(pair)]
            for split in _aligned([*files.items()])
        )
        if given:
            (validation,) = given
            held_out = {source for source, _ in validation}
        else:
            held_out = _held_out((source for source, _ in train), validation_fraction)
            validation = [pair for pair in train if pair[0] in held_out]
        train = [pair for pair in train if pair[0] not in held_out]
        if not train or not validation:
            split = 'validation' if train else 'training'
            why = (
                'its pairs lack a side, or all of its sources are in validation as well'
                if given
                else f'{len(held_out)} different sources of validation leave no other: use more'
                if held_out
                else 'too few different sources: use more'
            )
            raise DataError(f'{", ".join(map(str, files))}: the {split} split is empty: {why}')
        return train, validation


def read_parallel(source: str, target: str) -> list[tuple[str, str]]:
    """Returns the pairs of two aligned files, plain or .gz, of which no side is empty.

    Raises:
        DataError: they are not UTF-8, of different length, or there is no pair.
        OSError: one cannot be read.
    """
    paths = [pathlib.Path(path) for path in (source, target)]
    ((one, other),) = _aligned([(path, _read_plain(path)) for path in paths])
    pairs = [pair for pair in zip(one, other, strict=True) if all(pair)]
    if not pairs:
        raise DataError(f'{source} and {target} have no pair of lines that are not empty')
    return pairs


def _aligned(
    files: Sequence[tuple[pathlib.Path, bytes]],
) -> Iterator[tuple[list[str], list[str]]]:
    """The lines of each two files, as many in the one as in the other."""
    for (one, source), (other, target) in zip(files[::2], files[1::2], strict=True):
        sources = split_lines(decode_utf8(one, source))
        targets = split_lines(decode_utf8(other, target))
        if len(sources) != len(targets):
            raise DataError(
                f'{one} has {len(sources)} lines and {other} has {len(targets)}: '
                'aligned texts have as many'
            )
        yield sources, targets


def _parallel_paths(data: Any) -> list[pathlib.Path]:
    """[source, target] of training, and where there are some, [source, target] of validation."""
    ends = data.source_language, data.target_language
    if not data.path:
        raise DataError(
            "the corpus 'parallel' needs --config.data.path=DIRECTORY or "
            '--config.data.path=SOURCE_FILE,TARGET_FILE'
        )
    root = pathlib.Path(data.path).expanduser()
    if not root.is_dir():
        paths = [pathlib.Path(part.strip()).expanduser() for part in data.path.split(',')]
        if len(set(paths)) != 2 or len(paths) != 2:
            raise DataError(
                f'data.path={data.path}: no such directory, nor two files with a comma between '
                'them (a file whose name has a comma: rename it)'
            )
        return paths
    if ends[0] == ends[1]:
        raise DataError(f'data.source_language and data.target_language are both {ends[0]!r}')
    found = []
    for split in ('train', 'val'):
        by_end = [
            [
                path
                for path in (root / f'{split}.{end}', root / f'{split}.{end}.gz')
                if path.is_file()
            ]
            for end in ends
        ]
        if [len(paths) for paths in by_end] == [1, 1]:
            found += [path for paths in by_end for path in paths]
        elif split == 'train' or any(by_end):
            faults = [
                f'no {split}.{end}' if not paths else f'both {split}.{end} and {split}.{end}.gz'
                for end, paths in zip(ends, by_end, strict=True)
                if len(paths) != 1
            ]
            raise DataError(
                f'{root} has {" and ".join(faults)}: it takes {split}.{ends[0]} and '
                f'{split}.{ends[1]}, plain or .gz, the ends being data.source_language and '
                'data.target_language'
            )
    return found


def _read_plain(path: pathlib.Path) -> bytes:
    content = path.read_bytes()
    if path.suffix != '.gz':
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f'{path} is no whole gzip file: {error}') from error


def split_lines(text: str) -> list[str]:
    """Returns the lines of a text, without spaces at their ends; of an empty one there is none."""
    return [line.strip() for line in text.removesuffix('\n').split('\n')] if text else []


class Digits(_CorpusBuilder, skip_registration=True):
    """Grey images of handwritten digits, 8 × 8 pixels from 0 to 16, that come with scikit-learn.

    Source: Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI; its test set
    of 1,797 images.
    """

    name = 'digits'
    VERSION = tfds.core.Version('1.0.0')
    content = 'images'
    height, width, white, num_classes = 8, 8, 16, 10

    @staticmethod
    def records(source: Any) -> Sequence[Any]:
        return _Images(source)

    @staticmethod
    def read(data: Any) -> Files:
        package = importlib.util.find_spec('sklearn')  # not imported, which takes a second
        if package is None:
            raise DataError("the corpus 'digits' comes with scikit-learn: pip install scikit-learn")
        path = pathlib.Path(package.origin).parent / 'datasets' / 'data' / 'digits.csv.gz'
        return {path: path.read_bytes()}

    @classmethod
    def splits(cls, files: Files, validation_fraction: float) -> tuple[list[Any], list[Any]]:
        (content,) = files.values()
        rows = np.loadtxt(io.BytesIO(gzip.decompress(content)), np.uint8, delimiter=',')
        # Held out by their pixels: the same image twice would be in one split.
        held_out = _held_out((row[:-1].tobytes().hex() for row in rows), validation_fraction)
        splits = [], []
        for row in rows:
            image = row[:-1].reshape(cls.height, cls.width)
            splits[row[:-1].tobytes().hex() in held_out].append((image, row[-1]))
        return splits

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(
                {
                    'image': tfds.features.Tensor(shape=(self.height, self.width), dtype=np.uint8),
                    'label': tfds.features.Scalar(dtype=np.uint8),
                }
            ),
            disable_shuffling=True,
        )

    def _generate_examples(self, documents):
        for key, (image, label) in enumerate(documents):
            yield key, {'image': image, 'label': label}


_BUILDERS = (PythonDocs, TextFiles, Dates, Parallel, Copy, Reverse, Digits)
CORPORA = {builder.name: builder for builder in _BUILDERS}


class Catalogue(_CorpusBuilder, skip_registration=True):
    """The texts of a data set of the TFDS catalogue, `tfds:NAME` or `tfds:NAME/CONFIG`.

    A document is the feature 'text' of a record or, where none has that name, its first text.
    Where the data set brings a split 'validation', or else 'test', that is the validation split,
    and training leaves out what is in it; otherwise 'train' is split like the other corpora.
    """

    name = 'tfds'
    VERSION = tfds.core.Version('1.0.0')

    @staticmethod
    def read(data: Any) -> Files:
        builder = _prepared(
            lambda: catalogue.open_builder(data.corpus.removeprefix('tfds:'), _data_dir()),
            f'fetching {data.corpus}',
            catalogue.prepare,
        )
        with _quiet_tfds():
            sources = catalogue.read(builder)
        if 'train' not in sources:
            raise DataError(
                f"{data.corpus} has no split 'train' to learn from, only {', '.join(sources)}"
            )
        held_out = [split for split in ('validation', 'test') if split in sources][:1]
        feature, *others = catalogue.text_features(builder)
        if others and feature != 'text':
            print(f'{data.corpus}: reads {feature} of each record, not {", ".join(others)}')
        return {
            pathlib.Path(builder.data_dir, split): _Documents(sources[split], feature)
            for split in ['train', *held_out]
        }

    @classmethod
    def sha256(cls, files: Files) -> str:
        # Kept beside the records, and gone with them; to read them all may take minutes.
        kept = next(iter(files)).with_name(f'minigpt_jax-{cls.VERSION}.sha256')
        if not kept.exists():
            splits = [_sha256(text.encode() for text in texts) for texts in files.values()]
            with writing_to(kept.parent):
                temporary = kept.with_name(f'{kept.name}.{os.getpid()}.tmp')
                temporary.write_text(_sha256(digest.encode() for digest in splits))
                os.replace(temporary, kept)
        return kept.read_text()

    @classmethod
    def splits(cls, files: Files, validation_fraction: float) -> tuple[list[str], list[str]]:
        train, *held_out = ([text for text in texts if text] for texts in files.values())
        if not held_out:
            return split_documents(train, validation_fraction)
        (validation,) = held_out
        in_validation = set(validation)
        train = [text for text in train if text not in in_validation]
        if not train or not validation:
            split = 'validation' if train else 'training'
            raise DataError(
                f'the {split} split would be empty: its documents are, or occur in both'
            )
        return train, validation


# What they share.


def split_documents(
    documents: Iterable[str], validation_fraction: float
) -> tuple[list[str], list[str]]:
    """Splits documents into training and validation, the same way each time.

    A single document is cut in two, its end for validation. Of several, validation gets whole
    ones, in an order given by their sha256, as far as they fit into its share of the characters.
    A document that is there twice is taken once, so that it cannot be in both splits.

    Raises:
        DataError: a split would be empty.
    """
    documents = list(dict.fromkeys(documents))
    total = sum(map(len, documents))
    budget = round(total * validation_fraction)
    if len(documents) == 1:
        text = documents[0]
        train, validation = [text[: total - budget]], [text[total - budget :]]
    else:
        chosen, used = set(), 0
        for text in sorted(documents, key=lambda text: _sha256([text.encode()])):
            if used + len(text) <= budget:
                chosen.add(text)
                used += len(text)
        train = [text for text in documents if text not in chosen]
        validation = [text for text in documents if text in chosen]
    for split, texts in (('training', train), ('validation', validation)):
        if not any(texts):
            why = (
                f'{total} characters are too few'
                if len(documents) == 1
                else f'none of {len(documents)} documents fits into its share of {total} characters'
            )
            raise DataError(
                f'the {split} split would be empty: {why}; use more text, another '
                f'data.validation_fraction ({validation_fraction}) or one file instead of several'
            )
    return train, validation


def _held_out(names: Iterable[str], fraction: float) -> set[str]:
    """A share of some names, rounded, at least one and not all: those whose sha256 come first.

    Raises:
        DataError: there are fewer than two.
    """
    ordered = sorted(set(names), key=lambda name: _sha256([name.encode()]))
    if len(ordered) < 2:
        raise DataError('the training split would be empty: use more sentences')
    return set(ordered[: min(max(1, round(len(ordered) * fraction)), len(ordered) - 1)])


class _Pairs(Sequence):
    """The pairs of a TFDS data source, as tuples of strings."""

    def __init__(self, source):
        self._source = source

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        return self._pair(self._source[range(len(self))[index]])

    def __iter__(self):
        # All at once: read one by one, records of so few bytes take six times as long.
        return map(self._pair, self._source.__getitems__(list(range(len(self)))))

    @staticmethod
    def _pair(record):
        return record['source'].decode('utf-8'), record['target'].decode('utf-8')


class _Images(_Pairs):
    """The images of a TFDS data source, as tuples of an array and its class."""

    @staticmethod
    def _pair(record):
        return record['image'], record['label']


class _Documents(Sequence):
    """One feature of a TFDS data source, bytes in UTF-8, as a sequence of strings."""

    def __init__(self, source, feature='text'):
        self._source, self._feature = source, feature

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._source[range(len(self))[index]][self._feature].decode('utf-8')


def _data_dir() -> pathlib.Path:
    # Read each time: TFDS itself looks at the variable only when it is imported.
    root = os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
    return pathlib.Path(os.path.expanduser(root))


def _prepared(
    make_builder: Callable[[], tfds.core.DatasetBuilder],
    doing: str,
    prepare: Callable[[tfds.core.DatasetBuilder], None] = (
        tfds.core.DatasetBuilder.download_and_prepare
    ),
) -> tfds.core.DatasetBuilder:
    """Builds a data set unless it is there, saying so; safe in several processes at once."""

    def build():
        with _quiet_tfds():
            return make_builder()

    builder = build()
    directory = pathlib.Path(builder.data_dir)
    # TFDS writes to a directory 'incomplete.*' and renames it at the end: if the final one
    # exists, it is whole.
    if directory.exists():
        return builder
    with writing_to(_data_dir()):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f'{directory.parent}.lock'):
            if not directory.exists():  # another process may have prepared it meanwhile
                for leftover in directory.parent.glob('incomplete.*'):  # of a killed process
                    shutil.rmtree(leftover)
                print(f'{doing} (once)', flush=True)
                with _quiet_tfds():
                    prepare(builder)
    return build()  # anew, since a builder reads what is on disk when it is made


@contextlib.contextmanager
def _quiet_tfds() -> Iterator[None]:
    """Keeps TFDS from talking, mostly about downloads where there are none."""
    tfds.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def _sha256(contents: Iterable[bytes]) -> str:
    """Of one content its digest; of several the digest of their digests, so that order counts."""
    digests = [hashlib.sha256(content) for content in contents]
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b''.join(digest.digest() for digest in digests)).hexdigest()
