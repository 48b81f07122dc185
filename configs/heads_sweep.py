"""How many heads, and what do they cost? The same MiniGPT at every head count.

    python -m minigpt_jax.train --config=configs/heads_sweep.py

The width is fixed, so that every point has the same parameters: more heads are narrower heads.
Fifteen runs, five minutes on two idle cores; val_loss from 2.26 (one head) to 2.39 (16 heads).
Variants: `:quick`, under a minute; `:shakespeare`, on `--config.data.path=FILE`; `:fixed_d_head`,
where the width grows with the heads; `:accelerator`, a larger model for a GPU or TPU.
"""

from configs import minigpt


def get_config(variant=''):
    c = minigpt.get_config()
    # Small enough for fifteen runs in ten minutes on two cores, and tuned for four heads.
    c.data.batch_size = 8
    c.data.validation_fraction = 0.02
    c.model.num_layers = 2
    c.optim.learning_rate = 4e-3
    c.optim.final_learning_rate = 4e-4
    c.train.steps = 660
    c.train.checkpoint_every = 660
    c.eval.every = 220
    c.sweep = (('model.num_heads', (1, 2, 4, 8, 16)), ('seed', (0, 1, 2)))
    if variant not in VARIANTS:
        raise ValueError(
            f'no variant {variant!r} of heads_sweep.py: {", ".join(filter(None, VARIANTS))}'
        )
    VARIANTS[variant](c)
    return c


def quick(c):
    c.model.d_model = 32
    c.model.context_length = 32
    c.train.steps = 200
    c.train.checkpoint_every = 200
    c.optim.warmup_steps = 20
    c.eval.every = 100
    c.eval.sample_tokens = 100
    c.sweep = (('model.num_heads', (1, 4)), ('seed', (0, 1, 2)))


def shakespeare(c):
    c.data.corpus = 'text'
    c.data.validation_fraction = 0.1


def fixed_d_head(c):
    """Heads of 16 dimensions, as many as the width holds."""
    heads = (2, 4, 8, 12)
    c.sweep = (
        (('model.num_heads', 'model.d_model'), tuple((h, 16 * h) for h in heads)),
        ('seed', (0, 1, 2)),
    )


def accelerator(c):
    c.data.batch_size = 64
    c.data.validation_fraction = 0.1
    c.model.d_model = 384
    c.model.num_layers = 6
    c.model.context_length = 256
    c.model.dropout_rate = 0.2
    c.optim.learning_rate = 1e-3
    c.optim.final_learning_rate = 1e-4
    c.train.steps = 5000
    c.train.steps_per_call = 50
    c.train.log_every = 50
    c.train.checkpoint_every = 1000
    c.eval.every = 500
    c.sweep = (('model.num_heads', (1, 2, 3, 6, 12, 24, 48)), ('seed', (0, 1, 2)))


VARIANTS = {'': lambda c: None} | {
    f.__name__: f for f in (quick, shakespeare, fixed_d_head, accelerator)
}
