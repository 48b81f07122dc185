"""Images: their patches, and batches of them.

Dimensions: B images in a batch, T patches of an image, P values of a patch, K steps in one call,
N validation batches.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from minigpt_jax.data import DataError, corpora, tokenizers
from minigpt_jax.data.batches import WHOLE, Share, prefetched, shuffled

Batch = dict[str, np.ndarray]  # patches_BTP, labels_B; of validation also mask_B


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedImages:
    """A corpus of images as patches.

    Attributes:
        tokenizer: cuts images into patches.
        train, validation: all images of a split as one batch.
        sha256, name: of the corpus.
    """

    tokenizer: tokenizers.PatchTokenizer
    train: Batch
    validation: Batch
    sha256: str
    name: str

    unknown_share: ClassVar[None] = None  # pixels have no unknown symbols


def load_images(data: Any) -> EncodedImages:
    """Returns the images that a configuration asks for.

    Args:
        data: the group `data` of a configuration: that of `load_corpus`, and `patch_size`.

    Raises:
        DataError: see `load_corpus`; or patches do not fill the images.
    """
    builder = corpora.CORPORA[data.corpus]
    height, width = builder.height, builder.width
    if height % data.patch_size or width % data.patch_size:
        raise DataError(
            f'data.patch_size={data.patch_size}: images of {height} × {width} pixels are not cut '
            'evenly into such patches'
        )
    tokenizer = tokenizers.PatchTokenizer(
        height, width, data.patch_size, builder.num_classes, builder.white
    )
    corpus = corpora.load_corpus(data)
    splits = []
    for split in (corpus.train, corpus.validation):
        images, labels = map(np.stack, zip(*split, strict=True))
        patches_BTP = tokenizer.encode(images)
        splits.append({'patches_BTP': patches_BTP, 'labels_B': labels.astype(np.int32)})
    return EncodedImages(tokenizer, *splits, sha256=corpus.sha256, name=corpus.name)


def training_images(
    images: Batch,
    *,
    batch_size: int,
    seed: int,
    steps_per_call: int = 1,
    first_step: int = 0,
    share: Share = WHOLE,
) -> Iterator[Batch]:
    """Yields the batches of training, for ever, with a leading axis K, prepared ahead.

    The batch of a step depends on `seed` and the step alone. An epoch takes every image once, in
    an order that depends on the seed and the epoch, and may end within a batch. Of each batch only
    the rows of `share` are read.
    """
    return prefetched(_batches(images, batch_size, seed, share), steps_per_call, first_step)


def training_image_batch(images: Batch, *, batch_size: int, seed: int, step: int) -> Batch:
    """Returns the one batch that `training_images` gives for `step`."""
    return _batches(images, batch_size, seed)[step]


def _batches(images, batch_size, seed, share=WHOLE):
    own = share.slice(batch_size)
    return shuffled(len(images['labels_B']), batch_size, seed).map(
        lambda rows_B: {name: x[rows_B[own]] for name, x in images.items()}
    )


def validation_images(images: Batch, *, batch_size: int) -> Batch:
    """Every image once, with a leading axis N; mask_B is False of what fills the last batch."""
    count = len(images['labels_B'])
    num_batches = -(-count // batch_size)
    rows = np.arange(num_batches * batch_size)
    batches = {name: x[np.minimum(rows, count - 1)] for name, x in images.items()}
    batches['mask_B'] = rows < count
    return {name: x.reshape(num_batches, batch_size, *x.shape[1:]) for name, x in batches.items()}
