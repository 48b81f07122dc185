"""A Vision Transformer on handwritten digits: patches of an image in the place of tokens.

    python -m minigpt_jax.train --config=configs/vit_digits.py

The 1,797 images of scikit-learn, 8 × 8 grey pixels, are sixteen patches of 2 × 2 each; one image
in five is held out. Under two minutes on two cores. Expected: accuracy 0.967 on validation.
"""

from configs import minigpt


def get_config(variant=''):
    if variant:
        raise ValueError(f'configs/vit_digits.py has no variant {variant!r}; it takes none')
    c = minigpt.get_config()
    c.data.corpus = 'digits'
    c.data.batch_size = 64
    c.data.validation_fraction = 0.2
    c.model.family = 'image'
    c.model.d_model = 64
    c.model.context_length = 16
    c.model.dropout_rate = 0.1
    c.train.steps = 1000
    c.train.checkpoint_every = c.eval.every = 200
    c.eval.batch_size = 64
    return c
