"""Pairs of texts: their tokens, cached on disk, and batches of them in few shapes.

Dimensions: K steps in one call, N validation batches, B pairs in a batch, S and T the most tokens
of a source and of a target in a batch; T1 is T + 1, since a target begins with BOS.

A source is its tokens and EOS; a target is BOS, its tokens and EOS, of which all but BOS are
predicted. Lengths count EOS and not BOS. Masks follow from lengths alone, whatever pads the rest.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from minigpt_jax.data import DataError, corpora, tokenizers
from minigpt_jax.data.batches import WHOLE, Share, prefetched, replacing

Batch = dict[str, np.ndarray]  # source_BS, source_lengths_B, target_BT1, target_lengths_B


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedPairs:
    """The pairs of a split as ids.

    Attributes:
        source, target: ids of all texts, one behind the other, each with EOS.
        source_starts, target_starts: where each text starts, and where the last one ends.
    """

    source: np.ndarray
    target: np.ndarray
    source_starts: np.ndarray
    target_starts: np.ndarray

    @property
    def source_lengths(self) -> np.ndarray:
        """Tokens of each source, EOS included."""
        return np.diff(self.source_starts)

    @property
    def target_lengths(self) -> np.ndarray:
        """Tokens of each target, EOS included."""
        return np.diff(self.target_starts)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizedPairs:
    """A corpus of pairs as ids.

    Attributes:
        tokenizer: a `PairTokenizer`, learned on the training split.
        train, validation: the pairs.
        unknown_share: share of `<unk>` among the tokens of validation, 0 to 1.
        sha256, name: of the corpus.
    """

    tokenizer: tokenizers.PairTokenizer
    train: EncodedPairs
    validation: EncodedPairs
    unknown_share: float
    sha256: str
    name: str


def load_pairs(data: Any) -> TokenizedPairs:
    """Returns the pairs and tokenizers that a configuration asks for, cached as text is.

    Raises:
        DataError: see `load_corpus` and `train_tokenizer`.
    """
    key = f'{tokenizers.tokenizer_key(data)}{"-joint" if data.joint_vocabulary else ""}'
    corpus = corpora.load_corpus(data)
    about_path = corpus.directory / f'pairs-{key}.json'
    paths = {
        split: corpus.directory / f'pairs-{key}-{split}.npz' for split in ('train', 'validation')
    }
    # Written last and read first: if it is there, so are the tokens.
    if not about_path.exists():
        with corpora.writing_to(corpus.directory):
            texts = {split: list(getattr(corpus, split)) for split in paths}
            tokenizer = tokenizers.train_pair_tokenizer(data, texts['train'])
            for split, path in paths.items():
                encoded = encode_pairs(tokenizer, texts[split])
                with replacing(path) as file:
                    np.savez(file, **dataclasses.asdict(encoded))
            with replacing(about_path) as file:
                file.write(json.dumps(tokenizer.to_dict()).encode('utf-8'))
    tokenizer = tokenizers.tokenizer_from_dict(json.loads(about_path.read_text('utf-8')))
    train, validation = (EncodedPairs(**np.load(paths[split])) for split in paths)
    return TokenizedPairs(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        unknown_share=float(
            np.mean(np.concatenate([validation.source, validation.target]) == tokenizer.unk_id)
        ),
        sha256=corpus.sha256,
        name=corpus.name,
    )


def encode_pairs(
    tokenizer: tokenizers.PairTokenizer, pairs: Sequence[tuple[str, str]]
) -> EncodedPairs:
    """Returns the ids of pairs of texts."""
    sources, targets = zip(*pairs, strict=True)
    source, source_starts = _joined(tokenizer.source, sources)
    target, target_starts = _joined(tokenizer.target, targets)
    return EncodedPairs(source, target, source_starts, target_starts)


def _joined(tokenizer, texts):
    eos = np.array([tokenizer.eos_id], np.int32)
    pieces = [np.concatenate([tokenizer.encode(text), eos]) for text in texts]
    return np.concatenate(pieces), np.cumsum([0, *map(len, pieces)])


# Shapes.


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Pairs of like length, which share a shape.

    Attributes:
        S, T: the most tokens of a source and of a target.
        batch_size: B.
        rows: numbers of its pairs.
    """

    S: int
    T: int
    batch_size: int
    rows: np.ndarray

    @property
    def num_batches(self) -> int:
        """Batches that hold every pair once, the last one maybe with rows of padding alone."""
        return -(-len(self.rows) // self.batch_size)


def make_buckets(
    pairs: EncodedPairs,
    *,
    context_length: int,
    num_buckets: int,
    batch_size: int,
    tokens_per_batch: int | None = None,
    multiple: int = 1,
    split: str = 'validation',
) -> list[Bucket]:
    """Sorts pairs by length into buckets, cut where it costs least padding.

    Each is a shape to compile.

    Args:
        pairs: of a split.
        context_length: a pair with a longer source or target is left out (see `num_too_long`).
        num_buckets: the most buckets; there are fewer where there are fewer lengths.
        batch_size: pairs in a batch, unless `tokens_per_batch` is given.
        tokens_per_batch: tokens of the longer side, padding included; batches of short pairs hold
            more of them.
        multiple: what `tokens_per_batch` makes batch sizes a multiple of, so that devices share.
        split: what the pairs are, for an error.

    Raises:
        DataError: no pair is short enough, or `tokens_per_batch` holds not one batch.
    """
    longest = np.maximum(pairs.source_lengths, pairs.target_lengths)
    rows = np.flatnonzero(longest <= context_length)
    if not len(rows):
        raise DataError(
            f'no pair of {split} fits into model.context_length={context_length}: the shortest '
            f'has {longest.min()} tokens'
        )
    rows = rows[np.argsort(longest[rows], kind='stable')]
    needed = multiple * int(longest[rows[-1]])
    if tokens_per_batch is not None and tokens_per_batch < needed:
        raise DataError(
            f'data.tokens_per_batch={tokens_per_batch}: too few for {multiple} pairs of '
            f'{longest[rows[-1]]} tokens; give at least {needed}'
        )
    buckets = []
    for own in np.split(rows, _cuts(longest[rows], num_buckets)):
        S, T = int(pairs.source_lengths[own].max()), int(pairs.target_lengths[own].max())
        size = batch_size
        if tokens_per_batch is not None:
            size = tokens_per_batch // max(S, T) // multiple * multiple
        buckets.append(Bucket(S, T, size, own))
    return buckets


def _cuts(lengths, num_buckets):
    """Where to cut sorted lengths into at most so many parts, so that there is least padding.

    cost[j] is the least number of places for the first j different lengths, each padded to the
    longest of its part, in one part more in each round.
    """
    widths, firsts = np.unique(lengths, return_index=True)
    starts = np.append(firsts, len(lengths))
    cost = np.append(0, np.full(len(widths), np.inf))
    chosen = []
    for _ in range(min(num_buckets, len(widths))):
        # places[i, j]: the first i lengths as before, i to j - 1 in one part more.
        places = cost[:, None] + (starts - starts[:, None]) * np.append(0, widths)
        places = np.where(np.tri(len(starts), k=-1).T, places, np.inf)
        chosen.append(places.argmin(axis=0))
        cost = places.min(axis=0)
    cuts, end = [], len(widths)
    for before in reversed(chosen):
        end = before[end]
        cuts.append(starts[end])
    return sorted(cuts)[1:]


def num_too_long(pairs: EncodedPairs, context_length: int) -> int:
    """Number of pairs with a source or a target of more than `context_length` tokens."""
    longest = np.maximum(pairs.source_lengths, pairs.target_lengths)
    return int((longest > context_length).sum())


def padding_share(pairs: EncodedPairs, buckets: Sequence[Bucket]) -> float:
    """Share of padding, 0 to 1, among all places for tokens of an epoch."""
    rows = np.concatenate([bucket.rows for bucket in buckets])
    tokens = pairs.source_lengths[rows].sum() + pairs.target_lengths[rows].sum()
    places = sum(b.num_batches * b.batch_size * (b.S + b.T) for b in buckets)
    return float(1 - tokens / places)


def gather(pairs: EncodedPairs, rows: np.ndarray, S: int, T: int) -> Batch:
    """Returns the pairs `rows` as one batch; a row of -1 is padding alone, of lengths 0."""
    tokenizer = tokenizers.PairTokenizer

    def padded(tokens, starts, lengths, width):
        inside = np.arange(width) < lengths[:, None]
        where = np.where(inside, starts[rows][:, None] + np.arange(width), 0)
        return np.where(inside, tokens[where], tokenizer.pad_id).astype(np.int32)

    source_lengths = np.where(rows < 0, 0, pairs.source_lengths[rows]).astype(np.int32)
    target_lengths = np.where(rows < 0, 0, pairs.target_lengths[rows]).astype(np.int32)
    bos = np.full((len(rows), 1), tokenizer.bos_id, np.int32)
    target = padded(pairs.target, pairs.target_starts, target_lengths, T)
    return {
        'source_BS': padded(pairs.source, pairs.source_starts, source_lengths, S),
        'source_lengths_B': source_lengths,
        'target_BT1': np.concatenate([bos, target], axis=1),
        'target_lengths_B': target_lengths,
    }


# Batches.


class PairBatches:
    """The batch of each step, `batches[step]`: a function of the pairs, buckets, seed and step.

    An epoch takes every pair once, in batches of one bucket each, whose pairs and whose order
    depend on the seed and the epoch. The last batch of a bucket is filled with rows of padding. Of
    each batch only the rows of `share` are read.
    """

    def __init__(
        self, pairs: EncodedPairs, buckets: Sequence[Bucket], seed: int, share: Share = WHOLE
    ):
        self._pairs, self._buckets, self._seed, self._share = pairs, buckets, seed, share
        self.epoch_length = sum(bucket.num_batches for bucket in buckets)
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def __len__(self) -> int:
        return 2**62  # as good as for ever

    def __getitem__(self, step: int) -> Batch:
        epoch, index = divmod(step, self.epoch_length)
        bucket, rows = self._epoch(epoch)[index]
        own = rows[self._share.slice(len(rows))]
        return gather(self._pairs, own, bucket.S, bucket.T)

    def _make_epoch(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        rng = np.random.default_rng([self._seed, epoch])
        batches = [
            (bucket, rows)
            for bucket in self._buckets
            for rows in _cut(rng.permutation(bucket.rows), bucket)
        ]
        return [batches[i] for i in rng.permutation(len(batches))]


def _cut(rows, bucket):
    """Rows in batches, the last filled with -1."""
    filled = np.full(bucket.num_batches * bucket.batch_size, -1)
    filled[: len(rows)] = rows
    return filled.reshape(bucket.num_batches, bucket.batch_size)


def training_pairs(
    pairs: EncodedPairs,
    buckets: Sequence[Bucket],
    *,
    seed: int,
    steps_per_call: int = 1,
    first_step: int = 0,
    share: Share = WHOLE,
) -> Iterator[Batch]:
    """Yields the batches of training, for ever, with a leading axis K, prepared ahead.

    The batch of a step depends on `seed` and the step alone: see `PairBatches`. With
    `steps_per_call` above 1 all buckets must have one shape.
    """
    steps = grain.MapDataset.source(PairBatches(pairs, buckets, seed, share))
    return prefetched(steps, steps_per_call, first_step)


def validation_pairs(pairs: EncodedPairs, buckets: Sequence[Bucket]) -> list[Batch]:
    """Every pair once: for each bucket its batches, with a leading axis N."""
    stacked = []
    for bucket in buckets:
        own = [gather(pairs, rows, bucket.S, bucket.T) for rows in _cut(bucket.rows, bucket)]
        stacked.append({name: np.stack([batch[name] for batch in own]) for name in own[0]})
    return stacked
