"""Optimizers and learning-rate schedules, from the `optim` group of a configuration."""

import math
import re

import jax
import jax.numpy as jnp
import optax

OPTIMIZERS = ('adamw', 'adam', 'sgd', 'muon')
SCHEDULES = ('cosine', 'linear', 'constant', 'inverse_sqrt')
RULED = ('weight_decay', 'learning_rate')


def make_schedule(optim, total_steps):
    """Learning rate against the number t of updates made, as an optax schedule.

    `warmup_steps` rise linearly from 0 to `learning_rate`, whatever follows:

    - constant: it stays.
    - cosine: it falls by half a cosine to `final_learning_rate` at `total_steps` (Loshchilov and
      Hutter 2017).
    - linear: it falls in a straight line to `final_learning_rate` at `total_steps`.
    - inverse_sqrt: learning_rate · √(warmup_steps / t). The paper's rate is d_model^-½ · min(t^-½,
      t · warmup_steps^-3/2): the same curve with a peak of (d_model · warmup_steps)^-½ as
      `learning_rate` (Vaswani et al. 2017, section 5.3).
    """
    peak, warmup = optim.learning_rate, optim.warmup_steps
    if optim.schedule == 'constant':
        if not warmup:  # optax would stay at the start of a rise of no length: at 0
            return optax.constant_schedule(peak)
        return optax.warmup_constant_schedule(0.0, peak, warmup)
    if optim.schedule == 'inverse_sqrt':
        return lambda t: peak * jnp.minimum(t / warmup, jnp.sqrt(warmup / jnp.maximum(t, 1)))
    if optim.schedule == 'linear':
        rise = optax.linear_schedule(0.0, peak, warmup)
        fall = optax.linear_schedule(peak, optim.final_learning_rate, total_steps - warmup)
        return optax.join_schedules([rise, fall], [warmup])
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=total_steps,
        end_value=optim.final_learning_rate,
    )


def make_optimizer(optim, total_steps):
    """AdamW, Adam, SGD with momentum or Muon, behind clipping by the global norm.

    With g the clipped gradient, p the parameter and λ `weight_decay`:

    - adamw: -rate · (m̂ / (√v̂ + 1e-8) + λ p), decay apart from the gradient (Loshchilov and Hutter
      2019, algorithm 2).
    - adam: -rate · m̂ / (√v̂ + 1e-8), where g + λ p takes the place of g: decay as an L2 penalty
      (Kingma and Ba 2015; Loshchilov and Hutter 2019, algorithm 2).
    - sgd: -rate · m with m ← b1 · m + g + λ p: momentum (Polyak 1964), not Nesterov's; no part for
      b2 (Loshchilov and Hutter 2019, algorithm 1).
    - muon: the matrices of the blocks move by -rate · (0.2 √(max(in, out)) · O + λ p), where O is
      the matrix next to their Nesterov momentum (0.95) whose singular values are about 1; all else
      by adamw. The factor gives both the same size of a step, so that one rate serves (Jordan et
      al. 2024; Liu et al. 2025, section 2.2).

    `optim.rules` may multiply the rate and the decay of a parameter (see `rule_factor`). A
    `clip_norm` of 0 switches clipping off.
    """

    def decay(path, update, parameter):
        return update + optim.weight_decay * _factor('weight_decay', path) * parameter

    def scale(path, update):
        return update * _factor('learning_rate', path)

    def _factor(setting, path):
        return rule_factor(optim.rules, setting, parameter_name(path))

    by_path = jax.tree_util.tree_map_with_path
    add_decay = optax.stateless(lambda updates, params: by_path(decay, updates, params))
    if optim.name == 'sgd':
        direction = optax.trace(decay=optim.b1)
    elif optim.name == 'muon':
        direction = _muon_direction(optim)
    else:
        direction = optax.scale_by_adam(b1=optim.b1, b2=optim.b2)
    decays_apart = optim.name in ('adamw', 'muon')
    return optax.chain(
        optax.clip_by_global_norm(optim.clip_norm) if optim.clip_norm else optax.identity(),
        *((direction, add_decay) if decays_apart else (add_decay, direction)),
        optax.stateless(lambda updates, params: by_path(scale, updates)),
        optax.scale_by_learning_rate(make_schedule(optim, total_steps)),
    )


def _muon_direction(optim):
    """Muon for matrices and Adam for the rest, without rate and decay."""

    def axes(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: matrix_axes(parameter_name(path), x.ndim), params
        )

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: 'muon' if matrix_axes(parameter_name(path), x.ndim) else 'adam', params
        )

    muon = optax.contrib.muon(1.0, consistent_rms=0.2, muon_weight_dimension_numbers=axes)
    # muon descends by itself, and the end of the chain does so once more.
    return optax.partition(
        {
            'muon': optax.chain(muon, optax.scale(-1.0)),
            'adam': optax.scale_by_adam(b1=optim.b1, b2=optim.b2),
        },
        labels,
    )


def matrix_axes(name, num_axes):
    """Which axes of a parameter are the matrix that Muon takes it for; None if it is not one.

    Kernels of blocks are (in, *out), with an axis of layers before it in `scan_layers`. Those of
    attention are (in, heads, d_head), or (in, 3, heads, d_head): q, k and v are three matrices.
    """
    if not re.search(r'(^|\.)blocks\.', name) or not name.endswith('.kernel'):
        return None
    first = 0 if re.search(r'blocks\.\d', name) else 1
    outputs = range(max(first + 1, num_axes - 2), num_axes)
    return optax.contrib.MuonDimensionNumbers(reduction_axis=first, output_axis=tuple(outputs))


def rule_factor(rules, setting, name):
    """What `optim.rules` multiply a setting of the parameter `name` by; 1 where none speaks of it.

    A rule is (pattern, setting, factor): a regular expression that must match the whole path of a
    parameter, `weight_decay` or `learning_rate`, and a number. The last rule that matches counts.
    """
    factor = 1.0
    for pattern, ruled, value in rules:
        if ruled == setting and re.fullmatch(pattern, name):
            factor = value
    return factor


def check_rules(rules):
    """The complaint about the structure of `optim.rules`, or None."""
    for rule in rules:
        if not (isinstance(rule, tuple | list) and len(rule) == 3 and isinstance(rule[0], str)):
            return f"{rule!r} is not a rule; a rule is ('.*bias', 'weight_decay', 0.0)"
        pattern, setting, factor = rule
        if setting not in RULED:
            return f'{setting!r}: a rule is about {" or ".join(RULED)}'
        if type(factor) not in (int, float) or not math.isfinite(factor) or factor < 0:
            return f'{factor!r}: the factor of a rule is a number, 0 or more'
        try:
            re.compile(pattern)
        except re.error as error:
            return f'{pattern!r} is not a regular expression: {error}'
    return None


def check_rules_match(rules, names):
    """The complaint about a rule that matches none of the parameters `names`, or None."""
    for pattern, *_ in rules:
        if not any(re.fullmatch(pattern, name) for name in names):
            return (
                f'{pattern!r} matches no parameter as a whole; '
                f'parameters are named like {", ".join(names[:3])}'
            )
    return None


def parameter_name(path):
    """A parameter's path in the tree as text: `blocks.0.attention.qkv.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator='.').removesuffix('.value')
