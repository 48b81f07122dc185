"""Optimizers and learning-rate schedules, from the `optim` group of a configuration."""

import math
import re

import jax
import optax

SCHEDULES = ('cosine', 'constant')
RULED = ('weight_decay', 'learning_rate')


def make_schedule(optim, total_steps):
    """Learning rate against the number of updates made, as an optax schedule.

    `warmup_steps` rise linearly from 0 to `learning_rate`; then it stays (`constant`) or falls by
    half a cosine to `final_learning_rate` at `total_steps` (`cosine`; Loshchilov and Hutter 2017).
    """
    if optim.schedule == 'constant':
        if not optim.warmup_steps:  # optax would stay at the start of a rise of no length: at 0
            return optax.constant_schedule(optim.learning_rate)
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

    update = -rate · (m̂ / (√v̂ + 1e-8) + weight_decay · parameter), where `optim.rules` may multiply
    the rate and the decay of a parameter (see `rule_factor`). `clip_norm` of 0 switches clipping
    off.
    """

    def decay(path, update, parameter):
        return update + optim.weight_decay * _factor('weight_decay', path) * parameter

    def scale(path, update):
        return update * _factor('learning_rate', path)

    def _factor(setting, path):
        return rule_factor(optim.rules, setting, parameter_name(path))

    by_path = jax.tree_util.tree_map_with_path
    return optax.chain(
        optax.clip_by_global_norm(optim.clip_norm) if optim.clip_norm else optax.identity(),
        optax.scale_by_adam(b1=optim.b1, b2=optim.b2),
        optax.stateless(lambda updates, params: by_path(decay, updates, params)),
        optax.stateless(lambda updates, params: by_path(scale, updates)),
        optax.scale_by_learning_rate(make_schedule(optim, total_steps)),
    )


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
