"""Optimizers and learning-rate schedules, from the `optim` group of a configuration."""

import jax
import optax

SCHEDULES = ('cosine', 'constant')
DECAYED = ('kernel', 'embedding', 'table')


def make_schedule(optim, total_steps):
    """Learning rate against the number of updates made, as an optax schedule.

    `warmup_steps` rise linearly from 0 to `learning_rate`; then it stays (`constant`) or falls by
    half a cosine to `final_learning_rate` at `total_steps` (`cosine`; Loshchilov and Hutter 2017).
    """
    if optim.schedule == 'constant':
        return optax.warmup_constant_schedule(0.0, optim.learning_rate, optim.warmup_steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=optim.learning_rate,
        warmup_steps=optim.warmup_steps,
        decay_steps=total_steps,
        end_value=optim.final_learning_rate,
    )


def make_optimizer(optim, total_steps):
    """AdamW (Loshchilov and Hutter 2019) behind clipping by the global norm.

    Weight decay acts on matrices and tables, not on biases and scales of norms. `clip_norm` of 0
    switches clipping off.
    """
    adamw = optax.adamw(
        make_schedule(optim, total_steps),
        b1=optim.b1,
        b2=optim.b2,
        weight_decay=optim.weight_decay,
        mask=lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: parameter_name(path).rsplit('.', 1)[-1] in DECAYED, params
        ),
    )
    if not optim.clip_norm:
        return adamw
    return optax.chain(optax.clip_by_global_norm(optim.clip_norm), adamw)


def parameter_name(path):
    """A parameter's path in the tree as text: `blocks.0.attention.qkv.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator='.').removesuffix('.value')
