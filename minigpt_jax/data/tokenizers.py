"""Tokenizers: text to ids and back.

A tokenizer is learned on the training split alone, is equal to another with the same vocabulary,
and travels as JSON (`to_dict`, `tokenizer_from_dict`). To add a kind, write a class like
`CharTokenizer` and name it in `TOKENIZERS`.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from minigpt_jax.data.corpora import choose

_SPECIAL = ('<pad>', '<bos>', '<eos>', '<unk>')


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One id for each character of the training text, behind the four special tokens.

    Characters are Unicode code points. One that is not in the vocabulary becomes `<unk>`.

    Attributes:
        characters: the vocabulary, sorted, each character once.
    """

    characters: str

    kind: ClassVar[str] = 'char'
    settings: ClassVar[tuple[str, ...]] = ()  # keys of the group `data` that `train` takes
    pad_id: ClassVar[int] = _SPECIAL.index('<pad>')
    bos_id: ClassVar[int] = _SPECIAL.index('<bos>')
    eos_id: ClassVar[int] = _SPECIAL.index('<eos>')
    unk_id: ClassVar[int] = _SPECIAL.index('<unk>')

    @classmethod
    def train(cls, documents: Iterable[str]) -> 'CharTokenizer':
        """Takes every character that occurs in `documents`."""
        return cls(''.join(sorted(set().union(*documents))))

    @property
    def vocab_size(self) -> int:
        """Number of ids, the special tokens included."""
        return len(_SPECIAL) + len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32, one a character; adds no BOS and no EOS."""
        return self._id_of_code_point[_code_points(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; special tokens are written out, such as '<eos>'."""
        return ''.join(self._symbols[i] for i in np.asarray(ids).tolist())

    def unknown_symbols(self, text: str) -> list[str]:
        """Returns the characters of `text` that are not in the vocabulary, each once."""
        known = set(self.characters)
        return [character for character in dict.fromkeys(text) if character not in known]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `tokenizer_from_dict` needs, ready for JSON."""
        return {'kind': self.kind, 'characters': self.characters}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> 'CharTokenizer':
        """Undoes `to_dict`."""
        return cls(d['characters'])

    @functools.cached_property
    def _symbols(self) -> tuple[str, ...]:
        return _SPECIAL + tuple(self.characters)

    @functools.cached_property
    def _id_of_code_point(self) -> np.ndarray:
        # One look-up for all of Unicode (4 MB) encodes a million characters in milliseconds.
        table = np.full(0x110000, self.unk_id, np.int32)
        table[_code_points(self.characters)] = np.arange(len(_SPECIAL), self.vocab_size)
        return table


def _code_points(text: str) -> np.ndarray:
    # A lone surrogate can come from a command line: it is an unknown character like others.
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), np.uint32)


TOKENIZERS = {tokenizer.kind: tokenizer for tokenizer in (CharTokenizer,)}


def train_tokenizer(data: Any, documents: Iterable[str]):
    """Learns a tokenizer of the kind `data.tokenizer` from the documents of the training split.

    Raises:
        DataError: the kind is unknown.
    """
    kind = choose(TOKENIZERS, data.tokenizer, 'data.tokenizer')
    return kind.train(documents, **{key: getattr(data, key) for key in kind.settings})


def tokenizer_key(data: Any) -> str:
    """Returns a part of a file name that two settings share only if they learn the same."""
    kind = choose(TOKENIZERS, data.tokenizer, 'data.tokenizer')
    return '-'.join([kind.kind, *(str(getattr(data, key)) for key in kind.settings)])


def tokenizer_from_dict(d: dict[str, Any]):
    """Returns the tokenizer that `to_dict` described.

    Raises:
        DataError: its kind is unknown.
    """
    return choose(TOKENIZERS, d['kind'], 'the kind of the tokenizer').from_dict(d)
