"""Tokenizers: text to ids and back.

A tokenizer is learned on the training split alone, is equal to another with the same vocabulary,
and travels as JSON (`to_dict`, `tokenizer_from_dict`). Ids can be decoded from anywhere to
anywhere: the text of a sequence is the text of its parts, put together, but for a character of
which only some bytes are there. To add a kind, write a class like `CharTokenizer` and name it in
`TOKENIZERS`.
"""

import base64
import dataclasses
import functools
import io
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import sentencepiece

from minigpt_jax.data import DataError
from minigpt_jax.data.corpora import choose

_SPECIAL = ('<pad>', '<bos>', '<eos>', '<unk>')


class _SpecialTokens:
    """The first four ids, which are the same in every tokenizer."""

    pad_id: ClassVar[int] = _SPECIAL.index('<pad>')
    bos_id: ClassVar[int] = _SPECIAL.index('<bos>')
    eos_id: ClassVar[int] = _SPECIAL.index('<eos>')
    unk_id: ClassVar[int] = _SPECIAL.index('<unk>')
    mask_id: ClassVar[int] = pad_id  # hides a token of a running text, which has no padding

    first_id: ClassVar[int] = len(_SPECIAL)  # of the vocabulary itself

    settings: ClassVar[tuple[str, ...]] = ()  # keys of the group `data` that `train` takes


@dataclasses.dataclass(frozen=True)
class CharTokenizer(_SpecialTokens):
    """One id for each character of the training text, behind the four special tokens.

    Characters are Unicode code points. One that is not in the vocabulary becomes `<unk>`.

    Attributes:
        characters: the vocabulary, sorted, each character once.
    """

    characters: str

    kind: ClassVar[str] = 'char'

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


class _OfBytes(_SpecialTokens):
    """What is common to tokenizers whose every id stands for some bytes of UTF-8.

    Bytes that are no character, such as one that was cut in two, are decoded to U+FFFD.
    """

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; special tokens are written out, such as '<eos>'."""
        table = self._bytes_of_id
        return b''.join(table[i] for i in np.asarray(ids).tolist()).decode('utf-8', 'replace')

    def unknown_symbols(self, text: str) -> list[str]:
        """Returns nothing for text: only half a surrogate pair cannot be written as UTF-8."""
        return [c for c in dict.fromkeys(text) if '\ud800' <= c <= '\udfff']


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(_OfBytes):
    """One id for each of the 256 bytes of UTF-8, behind the four special tokens.

    Nothing is learned and nothing is unknown; a Korean syllable is three tokens.
    """

    kind: ClassVar[str] = 'byte'
    vocab_size: ClassVar[int] = len(_SPECIAL) + 256

    @classmethod
    def train(cls, documents: Iterable[str]) -> 'ByteTokenizer':
        """Learns nothing from `documents`."""
        return cls()

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32, one a byte; adds no BOS and no EOS."""
        return _byte_ids(text)

    def to_dict(self) -> dict[str, Any]:
        """Returns what `tokenizer_from_dict` needs, ready for JSON."""
        return {'kind': self.kind}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> 'ByteTokenizer':
        """Undoes `to_dict`."""
        return cls()

    @property
    def _bytes_of_id(self) -> list[bytes]:
        return _SPECIAL_AND_BYTES


_SPECIAL_AND_BYTES = [token.encode() for token in _SPECIAL] + [bytes([i]) for i in range(256)]


def _byte_ids(text: str) -> np.ndarray:
    return np.frombuffer(_utf8(text), np.uint8).astype(np.int32) + len(_SPECIAL)


def _utf8(text: str) -> bytes:
    return text.encode('utf-8', 'replace')  # half a surrogate pair becomes a question mark


# As which SentencePiece writes a space; the character itself it would take for one.
_SPACE = '▁'


@dataclasses.dataclass(frozen=True)
class SentencePieceTokenizer(_OfBytes):
    """Pieces of words, merged by how often they occur together, behind the four special tokens.

    Byte-pair encoding (Sennrich et al. 2016) by SentencePiece (Kudo and Richardson 2018). The text
    is taken as it is: it is not normalised, each space counts, and what is in no piece is written
    in bytes, whose ids are those of `ByteTokenizer`. A piece is part of one word, with or without
    the space before it, or several spaces.

    Attributes:
        model: SentencePiece's own serialized model.
    """

    model: bytes = dataclasses.field(repr=False)

    kind: ClassVar[str] = 'sentencepiece'
    settings: ClassVar[tuple[str, ...]] = ('vocab_size',)

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> 'SentencePieceTokenizer':
        """Learns exactly `vocab_size` ids, special tokens and the 256 bytes included.

        Raises:
            DataError: the documents give fewer pieces, or have more characters than that.
        """
        model = io.BytesIO()
        # Lines, since SentencePiece learns from no text with these characters, and leaves out
        # sentences of more than 4,192 bytes. All of them are encoded as bytes.
        lines = (line for d in documents for line in re.findall(r'[^\n\r\t\0▁▅]{1,1000}', d))
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines,
                model_writer=model,
                model_type='bpe',
                vocab_size=vocab_size,
                byte_fallback=True,
                normalization_rule_name='identity',
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,  # indentation
                num_threads=1,  # the same model every time
                minloglevel=2,  # errors alone, which are raised as well
                **{f'{name[1:-1]}_id': i for i, name in enumerate(_SPECIAL)},
                **{f'{name[1:-1]}_piece': name for name in _SPECIAL},
            )
        except RuntimeError as error:
            raise DataError(_reason(str(error), vocab_size)) from error
        return cls(model.getvalue())

    @property
    def vocab_size(self) -> int:
        """Number of ids, the special tokens included."""
        return self._processor.get_piece_size()

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32; adds no BOS and no EOS."""
        first, *rest = self._processor.encode(_utf8(text).decode().split(_SPACE))
        for ids in rest:
            first += [*_byte_ids(_SPACE), *ids]
        return np.array(first, np.int32)

    def to_dict(self) -> dict[str, Any]:
        """Returns what `tokenizer_from_dict` needs, ready for JSON."""
        return {'kind': self.kind, 'model': base64.b64encode(self.model).decode('ascii')}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> 'SentencePieceTokenizer':
        """Undoes `to_dict`."""
        return cls(base64.b64decode(d['model']))

    @functools.cached_property
    def _processor(self) -> sentencepiece.SentencePieceProcessor:
        return sentencepiece.SentencePieceProcessor(model_proto=self.model)

    @functools.cached_property
    def _bytes_of_id(self) -> list[bytes]:
        learned = range(len(_SPECIAL_AND_BYTES), self.vocab_size)
        pieces = map(self._processor.id_to_piece, learned)
        return _SPECIAL_AND_BYTES + [piece.replace(_SPACE, ' ').encode() for piece in pieces]


def _reason(message: str, vocab_size: int) -> str:
    """One line for what SentencePiece says when it cannot learn that many pieces."""
    line = f'data.vocab_size={vocab_size}: '
    if most := re.search(r'too high.*<= (\d+)', message):
        return f'{line}the training text gives at most {most[1]} pieces; use that, or more text'
    if least := re.search(r'smaller than required_chars. \d+ vs (\d+)', message):
        return f'{line}must be {least[1]} or more, for the bytes and the characters of the text'
    return f'{line}SentencePiece cannot learn from this text: {message.splitlines()[0]}'


@dataclasses.dataclass(frozen=True)
class PairTokenizer(_SpecialTokens):
    """The tokenizers of source and target; one and the same for a joint vocabulary."""

    source: Any
    target: Any

    kind: ClassVar[str] = 'pair'

    @property
    def vocab_size(self) -> tuple[int, int]:
        """Number of ids of source and target."""
        return self.source.vocab_size, self.target.vocab_size

    def to_dict(self) -> dict[str, Any]:
        """Returns what `tokenizer_from_dict` needs, ready for JSON."""
        return {
            'kind': self.kind,
            'source': self.source.to_dict(),
            'target': self.target.to_dict(),
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> 'PairTokenizer':
        """Undoes `to_dict`."""
        return cls(tokenizer_from_dict(d['source']), tokenizer_from_dict(d['target']))


@dataclasses.dataclass(frozen=True)
class PatchTokenizer:
    """Square patches of grey images, row by row: what an image has in the place of tokens.

    Attributes:
        height, width: of the images, in pixels; multiples of `patch_size`.
        patch_size: pixels on a side.
        num_classes: of the images.
        white: the largest value of a pixel, which becomes 1.
    """

    height: int
    width: int
    patch_size: int
    num_classes: int
    white: int

    kind: ClassVar[str] = 'patches'

    @property
    def num_patches(self) -> int:
        """T, patches of an image."""
        return self.height * self.width // self.patch_size**2

    @property
    def vocab_size(self) -> tuple[int, int]:
        """P, values of a patch, and the number of classes."""
        return self.patch_size**2, self.num_classes

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Returns patches_BTP, float32 from 0 to 1, of images of shape (B, height, width)."""
        side = self.patch_size
        grid = images.reshape(-1, self.height // side, side, self.width // side, side)
        patches = grid.swapaxes(2, 3).reshape(len(images), self.num_patches, side**2)
        return (patches / self.white).astype(np.float32)

    def decode(self, patches: np.ndarray) -> np.ndarray:
        """Undoes `encode`."""
        side = self.patch_size
        grid = patches.reshape(-1, self.height // side, self.width // side, side, side)
        images = grid.swapaxes(2, 3).reshape(-1, self.height, self.width)
        return np.rint(images * self.white).astype(np.uint8)

    def to_dict(self) -> dict[str, Any]:
        """Returns what `tokenizer_from_dict` needs, ready for JSON."""
        return {'kind': self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> 'PatchTokenizer':
        """Undoes `to_dict`."""
        return cls(**{name: value for name, value in d.items() if name != 'kind'})


TOKENIZERS = {
    tokenizer.kind: tokenizer
    for tokenizer in (CharTokenizer, ByteTokenizer, SentencePieceTokenizer)
}


def train_pair_tokenizer(data: Any, pairs: Iterable[tuple[str, str]]) -> PairTokenizer:
    """Learns a tokenizer each of sources and targets, or of both with `data.joint_vocabulary`.

    Raises:
        DataError: see `train_tokenizer`.
    """
    sources, targets = zip(*pairs, strict=True)
    if data.joint_vocabulary:
        joint = train_tokenizer(data, [*sources, *targets])
        return PairTokenizer(joint, joint)
    return PairTokenizer(train_tokenizer(data, sources), train_tokenizer(data, targets))


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
    kinds = TOKENIZERS | {kind.kind: kind for kind in (PairTokenizer, PatchTokenizer)}
    return choose(kinds, d['kind'], 'the kind of the tokenizer').from_dict(d)
