"""Batches: the tokens of a corpus, cached on disk, and windows into them.

Dimensions: K steps in one call, N validation batches, B windows in a batch, T positions in a
window; T1 is T + 1, since the targets are the inputs moved by one.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import grain
import numpy as np

from minigpt_jax.data import corpora, tokenizers


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizedCorpus:
    """A corpus as ids.

    Attributes:
        tokenizer: learned on the training split.
        train_tokens, validation_tokens: one-dimensional, of the smallest unsigned type that holds
            the vocabulary, memory-mapped. EOS stands between documents.
        validation_bytes: length of the validation text in UTF-8, without EOS. Bits per byte are the
            bits of all validation tokens but the first, which nothing predicts, over these bytes.
            The EOS between documents are among those tokens, in every tokenizer alike.
        unknown_share: share of `<unk>` among the validation tokens, 0 to 1.
        sha256, name: of the corpus.
    """

    tokenizer: Any
    train_tokens: np.ndarray
    validation_tokens: np.ndarray
    validation_bytes: int
    unknown_share: float
    sha256: str
    name: str


def load_tokenized(data: Any) -> TokenizedCorpus:
    """Returns the corpus and tokenizer that a configuration asks for.

    Tokenizer and tokens are cached beside the prepared data set. The first call for a corpus
    takes seconds, later ones read a few kilobytes.

    Args:
        data: the group `data` of a configuration: what `load_corpus` reads, `tokenizer`, and what
            that tokenizer needs.

    Raises:
        DataError: see `load_corpus` and `train_tokenizer`.
    """
    key = tokenizers.tokenizer_key(data)  # first: a mistyped name should not prepare a corpus
    corpus = corpora.load_corpus(data)
    about_path = corpus.directory / f'tokens-{key}.json'
    paths = {
        split: corpus.directory / f'tokens-{key}-{split}.npy' for split in ('train', 'validation')
    }
    # Written last and read first: if it is there, so are the tokens.
    if not about_path.exists():
        with corpora.writing_to(corpus.directory):
            _write_tokens(data, corpus, about_path, paths)
    about = json.loads(about_path.read_text(encoding='utf-8'))
    return TokenizedCorpus(
        tokenizer=tokenizers.tokenizer_from_dict(about['tokenizer']),
        train_tokens=np.load(paths['train'], mmap_mode='r'),
        validation_tokens=np.load(paths['validation'], mmap_mode='r'),
        validation_bytes=about['validation_bytes'],
        unknown_share=about['unknown_share'],
        sha256=corpus.sha256,
        name=corpus.name,
    )


def _write_tokens(data, corpus, about_path, paths):
    train, validation = list(corpus.train), list(corpus.validation)
    tokenizer = tokenizers.train_tokenizer(data, train)
    validation_tokens = _concatenate(tokenizer, validation)
    for path, tokens in (
        (paths['train'], _concatenate(tokenizer, train)),
        (paths['validation'], validation_tokens),
    ):
        with replacing(path) as file:
            np.save(file, tokens)
    about = {
        'tokenizer': tokenizer.to_dict(),
        'validation_bytes': sum(len(text.encode('utf-8')) for text in validation),
        'unknown_share': float(np.mean(validation_tokens == tokenizer.unk_id)),
    }
    with replacing(about_path) as file:
        file.write(json.dumps(about).encode('utf-8'))


def _concatenate(tokenizer, documents: Iterable[str]) -> np.ndarray:
    """Encodes documents into one array, EOS between them."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    eos = np.array([tokenizer.eos_id], dtype)
    pieces = []
    for text in documents:
        pieces += [eos, tokenizer.encode(text).astype(dtype)]
    return np.concatenate(pieces[1:])


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[Any]:
    """Opens a file for writing that appears under its name only when it is whole."""
    temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    with open(temporary, 'wb') as file:
        yield file
    os.replace(temporary, path)


class Share(NamedTuple):
    """What a host reads of every batch: from part `first` up to `last` of `of` equal parts."""

    first: int = 0
    last: int = 1
    of: int = 1

    def slice(self, batch_size: int) -> slice:
        """Its rows of a batch."""
        return slice(batch_size * self.first // self.of, batch_size * self.last // self.of)


WHOLE = Share()


def training_batches(
    tokens: np.ndarray,
    *,
    context_length: int,
    batch_size: int,
    seed: int,
    steps_per_call: int = 1,
    first_step: int = 0,
    share: Share = WHOLE,
) -> Iterator[np.ndarray]:
    """Yields the batches of training, for ever, prepared ahead by a background thread.

    A window may start anywhere in `tokens`. An epoch takes every start once, in an order that
    depends on `seed` and the epoch, and may end within a batch. The batch of a step depends on
    `seed` and the step alone, so that a run that continues at `first_step` sees what it would
    have seen without the break, whatever its `steps_per_call`.

    Args:
        tokens: one-dimensional ids.
        context_length: T, tokens that a model reads at once.
        batch_size: B, windows of one step.
        seed: from 0 to 2**31 - 1.
        steps_per_call: K, steps of one element.
        first_step: step of the first element's first batch.
        share: of the rows of each batch; only those are read.

    Returns:
        An iterator of tokens_KBT1, int32, of shape (K, B, T + 1), B being that of the share.

    Raises:
        DataError: there are fewer than T + 1 tokens. It is raised here, not by the iterator.
    """
    steps = _windows(tokens, context_length, batch_size, seed, share)
    return prefetched(steps, steps_per_call, first_step)


def prefetched(steps: grain.MapDataset, steps_per_call: int, first_step: int) -> Iterator[Any]:
    """The elements of a data set from `first_step` on, K together, made in the background."""
    calls = steps[first_step:].batch(steps_per_call)
    return iter(calls.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def shuffled(count: int, batch_size: int, seed: int) -> grain.MapDataset:
    """Numbers from 0 to count - 1 in batches, for ever: an epoch takes each once, in its order."""
    # As good as for ever; Grain's own "for ever" overflows when it is cut into batches of one.
    numbers = grain.MapDataset.range(count).seed(seed).shuffle().repeat(2**62 // count)
    return numbers.batch(batch_size)


def training_batch(
    tokens: np.ndarray, *, context_length: int, batch_size: int, seed: int, step: int
) -> np.ndarray:
    """Returns tokens_BT1, the one batch that `training_batches` gives for `step`."""
    return _windows(tokens, context_length, batch_size, seed)[step]


def _windows(
    tokens: np.ndarray, context_length: int, batch_size: int, seed: int, share: Share = WHOLE
) -> grain.MapDataset:
    """The infinite data set whose element at `step` is tokens_BT1."""
    check_length(tokens, context_length, 'training')
    tokens = np.asarray(tokens)  # plain indexing; a memory map is not copied
    offsets_T1, own = np.arange(context_length + 1), share.slice(batch_size)

    # Grain permutes the starts, one number each; the windows of a batch are gathered in one go.
    return shuffled(len(tokens) - context_length, batch_size, seed).map(
        lambda starts_B: tokens[starts_B[own, None] + offsets_T1].astype(np.int32)
    )


def validation_batches(
    tokens: np.ndarray, *, context_length: int, batch_size: int, pad_id: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts tokens into windows that follow each other.

    Every token but the first is a target exactly once: the last token of a window is the first
    of the next.

    Args:
        tokens: one-dimensional ids.
        context_length: T.
        batch_size: B.
        pad_id: fills the rest of the last window and of the last batch. The mask leaves it out,
            so that its value matters only to a reader.

    Returns:
        tokens_NBT1, int32, and mask_NBT, which is True where the target, tokens_NBT1[..., 1:], is
        a token of the text.

    Raises:
        DataError: there are fewer than T + 1 tokens.
    """
    check_length(tokens, context_length, 'validation')
    num_targets = len(tokens) - 1
    num_batches = math.ceil(num_targets / (context_length * batch_size))
    shape_NBT = (num_batches, batch_size, context_length)

    padded = np.full(math.prod(shape_NBT) + 1, pad_id, np.int32)
    padded[: len(tokens)] = tokens
    inputs_NBT, targets_NBT = padded[:-1].reshape(shape_NBT), padded[1:].reshape(shape_NBT)
    tokens_NBT1 = np.concatenate([inputs_NBT, targets_NBT[..., -1:]], axis=-1)
    mask_NBT = (np.arange(math.prod(shape_NBT)) < num_targets).reshape(shape_NBT)
    return tokens_NBT1, mask_NBT


def document_segments(tokens_BT1: np.ndarray, *, eos_id: int) -> dict[str, np.ndarray]:
    """Tells the documents in windows apart, by the EOS that ends each.

    Args:
        tokens_BT1: windows, with any axes before T.
        eos_id: EOS of the tokenizer, which stands in no document.

    Returns:
        segment_ids_BT, int32: how many documents of the window end before an input token; the EOS
        is of the document that it ends. mask_BT: True where input and target are of one document.
        The first token of a document has no context to be predicted from.
    """
    ends_BT = tokens_BT1[..., :-1] == eos_id
    return {
        'segment_ids_BT': np.cumsum(ends_BT, axis=-1, dtype=np.int32) - ends_BT,
        'mask_BT': ~ends_BT,
    }


def check_length(tokens: np.ndarray, context_length: int, split: str) -> None:
    """Raises a DataError if a split, called `split` in the message, has not one whole window."""
    if len(tokens) < context_length + 1:
        raise corpora.DataError(
            f'the {split} split has {len(tokens)} tokens, but a context of {context_length} needs '
            f'at least {context_length + 1}: use more text or a smaller model.context_length'
        )


def hide_tokens(
    tokens: np.ndarray,
    *,
    rate: float,
    tokenizer: Any,
    rng: np.random.Generator,
    share: Share = WHOLE,
) -> dict[str, np.ndarray]:
    """Chooses tokens to be guessed, and hides most of them in the text.

    Of the chosen, 80 % become `mask_id`, 10 % a random token of the vocabulary, and 10 % stay, so
    that the model cannot trust what it sees.

    Args:
        tokens: ids, of any shape.
        rate: share of the tokens to choose, between 0 and 1.
        tokenizer: whose ids they are.
        rng: what the choice draws from.
        share: what `tokens` are of a batch; what is hidden in them does not depend on it.

    Returns:
        tokens_BT with hidden tokens, targets_BT as they were, and mask_BT, True where chosen.

    Source: Devlin et al. 2019 (BERT), section 3.1 and appendix A.1.
    """
    batch_size = len(tokens) * share.of // (share.last - share.first)
    shape, own = (batch_size, *tokens.shape[1:]), share.slice(batch_size)
    chosen, how = (rng.random(shape) < rate)[own], rng.random(shape)[own]
    others = rng.integers(tokenizer.first_id, tokenizer.vocab_size, shape, np.int32)[own]
    hidden = np.where(how < 0.8, tokenizer.mask_id, np.where(how < 0.9, others, tokens))
    return {
        'tokens_BT': np.where(chosen, hidden, tokens).astype(np.int32),
        'targets_BT': tokens,
        'mask_BT': chosen,
    }
