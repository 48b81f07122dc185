"""Images: patches, splits and batches."""

import itertools

import numpy as np
import pytest
from ml_collections import ConfigDict

from minigpt_jax.data import DataError, tokenizers
from minigpt_jax.data.images import (
    load_images,
    training_image_batch,
    training_images,
    validation_images,
)

DATA = ConfigDict({'corpus': 'digits', 'path': None, 'validation_fraction': 0.2, 'patch_size': 2})


@pytest.fixture(scope='module')
def digits():
    return load_images(DATA)


def test_patches_are_those_of_a_naive_loop_and_give_the_image_back():
    tokenizer = tokenizers.PatchTokenizer(4, 6, 2, num_classes=3, white=255)
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 6)).astype(np.uint8)
    expected = [
        [
            [image[2 * row + i, 2 * column + j] / 255 for i in range(2) for j in range(2)]
            for row in range(2)
            for column in range(3)
        ]
        for image in images
    ]
    patches = tokenizer.encode(images)
    assert patches.dtype == np.float32
    np.testing.assert_allclose(patches, expected, rtol=1e-6)
    np.testing.assert_array_equal(tokenizer.decode(patches), images)
    assert tokenizers.tokenizer_from_dict(tokenizer.to_dict()) == tokenizer


def test_all_images_of_scikit_learn_are_there_in_one_split(digits):
    from sklearn.datasets import load_digits

    expected = load_digits()
    both = (digits.train, digits.validation)
    patches = np.concatenate([split['patches_BTP'] for split in both])
    labels = np.concatenate([split['labels_B'] for split in both])
    found = sorted(
        (image.tobytes(), label)
        for image, label in zip(digits.tokenizer.decode(patches), labels, strict=True)
    )
    assert found == sorted(
        (image.astype(np.uint8).tobytes(), label)
        for image, label in zip(expected.images, expected.target, strict=True)
    )
    assert len(digits.validation['labels_B']) == round(0.2 * len(labels))
    sides = [{patches.tobytes() for patches in split['patches_BTP']} for split in both]
    assert not sides[0] & sides[1]


def test_an_epoch_takes_every_image_once_and_a_step_stands_for_itself(digits):
    count = len(digits.train['labels_B'])
    calls = itertools.islice(
        training_images(digits.train, batch_size=1, seed=3, steps_per_call=100), count // 100 + 1
    )
    patches = np.concatenate([call['patches_BTP'] for call in calls]).reshape(-1, 16, 4)
    assert len({image.tobytes() for image in patches[:count]}) == len(
        {image.tobytes() for image in digits.train['patches_BTP']}
    )
    later = next(
        training_images(digits.train, batch_size=8, seed=3, steps_per_call=2, first_step=5)
    )
    for k in range(2):
        alone = training_image_batch(digits.train, batch_size=8, seed=3, step=5 + k)
        np.testing.assert_array_equal(later['patches_BTP'][k], alone['patches_BTP'])
        np.testing.assert_array_equal(later['labels_B'][k], alone['labels_B'])
    other = training_image_batch(digits.train, batch_size=8, seed=4, step=5)
    assert (other['patches_BTP'] != later['patches_BTP'][0]).any()


def test_validation_holds_every_image_once(digits):
    batches = validation_images(digits.validation, batch_size=50)
    assert batches['mask_B'].shape == (8, 50)
    counted = batches['mask_B'].reshape(-1)
    for name, x in digits.validation.items():
        np.testing.assert_array_equal(batches[name].reshape(-1, *x.shape[1:])[counted], x)


def test_patches_that_do_not_fill_an_image_are_refused():
    with pytest.raises(DataError, match=r'data.patch_size=3: images of 8 × 8 pixels'):
        load_images(ConfigDict(DATA.to_dict() | {'patch_size': 3}))
