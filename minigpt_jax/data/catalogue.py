"""The TFDS catalogue: data sets by name, also where there is no TensorFlow and no network.

TFDS itself needs no TensorFlow, but many of its builders open what they download with
`tf.io.gfile`, and use nothing else of TensorFlow. Where that is not installed, they are given
Python's own functions in its place.
"""

import contextlib
import difflib
import errno
import glob
import importlib
import importlib.util
import logging
import os
import pathlib
import re
import sys
import types
import urllib.error
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import downloader

from minigpt_jax.data import DataError

_PACKAGES_OF_TEXTS = (
    'question_answering', 'summarization', 'text', 'text_simplification', 'translate'
)  # fmt: skip


def open_builder(name: str, data_dir: pathlib.Path) -> tfds.core.DatasetBuilder:
    """Returns the builder of 'NAME' or 'NAME/CONFIG', whether it is prepared or not.

    Raises:
        DataError: the catalogue has no such data set or configuration, or there is no text in it.
    """
    name, _, config = name.partition('/')
    builder_class = _builder_class(name)
    configs = list(builder_class.builder_configs)
    if config and config not in configs:
        raise DataError(
            f'data.corpus: tfds:{name} has no configuration {config!r}; '
            + (_choices(config, configs) if configs else f'it has none: use tfds:{name}')
        )
    with _explained(f'tfds:{name}'):
        builder = builder_class(data_dir=data_dir, config=config or None)
        text_features(builder)
        return builder


def _builder_class(name: str) -> type[tfds.core.DatasetBuilder]:
    # TFDS imports its older builders as far as the first that lacks a package, such as h5py.
    for package in _PACKAGES_OF_TEXTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(f'tensorflow_datasets.{package}')
    names = tfds.list_builders(with_community_datasets=False)
    if name not in names:
        raise DataError(f'data.corpus: no tfds:{name} in the catalogue; {_choices(name, names)}')
    with _explained(f'tfds:{name}'):
        return tfds.builder_cls(name)


def _choices(name: str, names: Iterable[str]) -> str:
    names = sorted(set(names))
    if near := difflib.get_close_matches(name, names, n=3):
        return f'did you mean {" or ".join(near)}?'
    if len(names) > 20:
        return 'see https://www.tensorflow.org/datasets/catalog/overview'
    return f'choose from {", ".join(names)}'


def text_features(builder: tfds.core.DatasetBuilder) -> list[str]:
    """Returns the names of a record's texts: 'text' if there is one, then the others in order.

    Raises:
        DataError: no feature is a text.
    """
    features = dict(builder.info.features.items())
    texts = [key for key, value in features.items() if isinstance(value, tfds.features.Text)]
    if not texts:
        kinds = ', '.join(f'{key} ({type(value).__name__})' for key, value in features.items())
        raise DataError(f'data.corpus: tfds:{builder.name} has no text, only {kinds}')
    return sorted(texts, key=lambda name: name != 'text')


def prepare(builder: tfds.core.DatasetBuilder) -> None:
    """Downloads a data set and writes its records.

    Raises:
        DataError: it needs TensorFlow, another package, the network or a file by hand, and there
            is none.
    """
    # What TFDS offers as prepared is in a format that only TensorFlow reads.
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    with (
        _explained(f'tfds:{builder.name}', builder),
        _few_retries(),
        _own_files_for_tensorflow(type(builder)),
    ):
        builder.download_and_prepare(download_config=config, file_format='array_record')


def read(builder: tfds.core.DatasetBuilder) -> dict[str, Sequence[dict[str, Any]]]:
    """Returns the records of each split of a prepared data set.

    Raises:
        DataError: the data set was prepared, not by this project, in a format of TensorFlow.
    """
    formats = builder.info.available_file_formats()
    if not formats & tfds.core.FileFormat.with_random_access():
        raise DataError(
            f'data.corpus: tfds:{builder.name} is in {builder.data_dir} in a format that cannot be '
            f'read here ({", ".join(f.value for f in formats)}): remove that directory, or set the '
            'environment variable TFDS_DATA_DIR to another one'
        )
    return builder.as_data_source()


@contextlib.contextmanager
def _few_retries() -> Iterator[None]:
    """Lets a download fail after seconds; TFDS would try ten times and wait for minutes."""
    urllib3 = logging.getLogger('urllib3')  # reports each try
    level = urllib3.level
    urllib3.setLevel(logging.ERROR)
    try:
        with tfds.core.utils.temporary_assignment(downloader, 'MAX_RETRIES', 3):
            yield
    finally:
        urllib3.setLevel(level)


# TensorFlow.


class _NoTensorFlow(types.SimpleNamespace):
    """Some of TensorFlow; asked for the rest, it says that TensorFlow is missing."""

    def __getattr__(self, name):
        raise ModuleNotFoundError("No module named 'tensorflow'", name='tensorflow')


def _open_as_gfile(path, mode='r'):
    """`tf.io.gfile.GFile`: UTF-8 whatever the locale, and lines that end in '\\n' alone."""
    text = {} if 'b' in mode else {'encoding': 'utf-8', 'newline': '\n'}
    return open(path, mode, **text)


_FILES_ALONE = _NoTensorFlow(
    io=_NoTensorFlow(
        gfile=_NoTensorFlow(
            GFile=_open_as_gfile,
            exists=os.path.exists,
            isdir=os.path.isdir,
            listdir=os.listdir,
            glob=lambda pattern: sorted(glob.glob(os.fspath(pattern))),
            walk=os.walk,
        )
    )
)


@contextlib.contextmanager
def _own_files_for_tensorflow(builder_class: type) -> Iterator[None]:
    """Where TensorFlow is not installed, puts `_FILES_ALONE` in its place in a builder's modules.

    TFDS's own modules below `core` keep theirs, which is imported when it is used, and fails.
    """
    modules = {sys.modules[base.__module__] for base in builder_class.__mro__}
    with contextlib.ExitStack() as stack:
        for module in modules if importlib.util.find_spec('tensorflow') is None else ():
            if hasattr(module, 'tf') and not module.__name__.startswith('tensorflow_datasets.core'):
                stack.enter_context(
                    tfds.core.utils.temporary_assignment(module, 'tf', _FILES_ALONE)
                )
        yield


# Errors.

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
_NETWORK = (urllib.error.URLError, tfds.download.DownloadError, TimeoutError, ConnectionError)


@contextlib.contextmanager
def _explained(corpus: str, builder: tfds.core.DatasetBuilder | None = None) -> Iterator[None]:
    """Turns what a builder raises, which may be anything, into a DataError that says what to do."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        causes = list(_causes(error))
        if any(isinstance(cause, OSError) and cause.errno in _DISK for cause in causes):
            raise  # its reader knows what the disk needs
        raise DataError(f'data.corpus: {corpus} {_reason(causes, builder)}') from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_TITLES = {'tensorflow': 'TensorFlow', 'apache-beam': 'Apache Beam'}
_OR_PASS_A_TEXT = 'or pass a text with --config.data.corpus=text --config.data.path=FILE'


def _reason(causes: list[BaseException], builder: tfds.core.DatasetBuilder | None) -> str:
    for cause in causes:
        if isinstance(cause, ImportError):
            # An error that TFDS has raised again has lost its attribute.
            missing = cause.name or re.search("module named '(.*?)'|$", str(cause))[1] or str(cause)
            package = missing.partition('.')[0].replace('_', '-')
            return (
                f'needs {_TITLES.get(package, package)}, which is not installed: '
                f'pip install {package}, {_OR_PASS_A_TEXT}'
            )
        if failure := _network_failure(cause):
            return (
                f'cannot be downloaded ({failure}): connect to the network'
                f'{_by_hand(builder)}, {_OR_PASS_A_TEXT}'
            )
    return f'cannot be prepared: {type(causes[0]).__name__}: {_one_line(causes[0])}'


def _network_failure(error: BaseException) -> str | None:
    import requests  # by TFDS as well by now; imported above it would make every start wait

    request = getattr(error, 'request', None)
    if isinstance(error, requests.exceptions.ConnectionError) and request is not None:
        return f'no connection to {urllib.parse.urlsplit(request.url).hostname}'
    if isinstance(error, (requests.exceptions.RequestException, *_NETWORK)):
        return _one_line(error)
    return None


def _by_hand(builder: tfds.core.DatasetBuilder | None) -> str:
    """Where TFDS finds a file that was downloaded elsewhere, if it knows what it is called."""
    urls = builder.url_infos if builder else {}
    if len(urls) != 1:
        return ''
    ((url, info),) = urls.items()
    if not info.filename:
        return ''
    folder = pathlib.Path(builder.data_dir_root) / 'downloads' / 'manual'
    return f', put {url} into {folder} as {info.filename}'


def _one_line(error: BaseException) -> str:
    text = ' '.join(str(error).split())
    return text if len(text) <= 300 else f'{text[:300]} …'
