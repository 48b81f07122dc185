"""What a function costs, read off its traced program and not off a clock."""

import math

import jax


def multiply_adds(function, *args):
    """Multiply-adds of all matrix products in a function, those in its loops as often as they run.

    `args` may be abstract (`jax.ShapeDtypeStruct`): nothing is computed.
    """
    return _multiply_adds(jax.make_jaxpr(function)(*args).jaxpr)


def _multiply_adds(program):
    total = 0
    for equation in program.eqns:
        if equation.primitive.name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += depth * equation.outvars[0].aval.size
        repeats = equation.params['length'] if equation.primitive.name == 'scan' else 1
        total += repeats * sum(map(_multiply_adds, _inner_programs(equation)))
    return total


def products_in_sequence(function, *args):
    """Matrix products on the longest path from the arguments to a result.

    Each waits for the one before it, so that no number of processors shortens the path. Of the
    branches of a condition and of loops without a fixed length nothing is known: ValueError.
    """
    program = jax.make_jaxpr(function)(*args).jaxpr
    return max(_depths(program, [0] * len(program.invars)))


def _depths(program, inputs):
    """The depth of each result, counted in products, from those of the arguments."""
    known = dict(zip(program.invars, inputs, strict=True))
    for equation in program.eqns:
        # Literals and constants are there from the start.
        starts = [0 if hasattr(x, 'val') else known.get(x, 0) for x in equation.invars]
        known |= zip(equation.outvars, _depths_of_equation(equation, starts), strict=True)
    return [0 if hasattr(x, 'val') else known.get(x, 0) for x in program.outvars]


def _depths_of_equation(equation, starts):
    name, inner = equation.primitive.name, _inner_programs(equation)
    if name in ('cond', 'while'):
        raise ValueError(f'products_in_sequence: a program with `{name}` has no fixed depth')
    if name == 'scan':
        return _depths_of_scan(equation, starts, inner[0])
    if inner:
        return _depths(inner[0], starts)
    return [max(starts, default=0) + (name == 'dot_general')] * len(equation.outvars)


def _depths_of_scan(equation, starts, body):
    # What the loop goes along has an axis more outside; jax's own name for it changes by version.
    def num_stacked(outside, inside):
        return sum(x.aval.ndim > y.aval.ndim for x, y in zip(outside, inside, strict=True))

    num_carry = len(equation.outvars) - num_stacked(equation.outvars, body.outvars)
    num_consts = len(starts) - num_carry - num_stacked(equation.invars, body.invars)
    consts, carry = starts[:num_consts], starts[num_consts : num_consts + num_carry]
    slices = starts[num_consts + num_carry :]
    stacked = [0] * (len(equation.outvars) - num_carry)
    for _ in range(equation.params['length']):
        results = _depths(body, [*consts, *carry, *slices])
        carry = results[:num_carry]
        stacked = list(map(max, stacked, results[num_carry:]))
    return [*carry, *stacked]


def _inner_programs(equation):
    """The programs that an equation calls: functions within functions, bodies of loops."""
    values = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns'))
    programs = (getattr(value, 'jaxpr', value) for value in values)
    return [program for program in programs if hasattr(program, 'eqns')]
