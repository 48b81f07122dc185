"""The mesh of devices that every step runs on, also when it is one device, and what lies where.

Four axes: `data` and `fsdp` share the rows of a batch; `fsdp` also splits parameters and their
optimizer state, which are put together where they are used; `tensor` splits attention by heads,
feed-forward layers by hidden width and embeddings by vocabulary; `seed` holds the seeds of a point.
The compiler makes the program of each device from this (GSPMD: Xu et al. 2021).
"""

import math
import re

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from minigpt_jax.training.config import ConfigError
from minigpt_jax.training.optim import parameter_name

AXES = ('seed', 'data', 'fsdp', 'tensor')
ROWS = ('data', 'fsdp')  # what shares the rows of a batch

# On which axis of the mesh each axis of a parameter lies, by the end of its path: the first line
# that matches counts, and what none matches (norms, small biases) is whole on every device. Scanned
# layers have an axis of layers in front. Optimizer state lies as its parameters do.
LAYOUT = (
    (r'embed\.embedding', ('tensor', 'fsdp')),  # (V, D)
    (r'embed\.kernel', (None, 'fsdp')),  # (P, D), patches of an image
    (r'positions\.table', (None, 'fsdp')),  # (T, D)
    (r'(qkv|key_value)\.kernel', ('fsdp', None, 'tensor', None)),  # (D, 3, H, K)
    (r'(qkv|key_value)\.bias', (None, 'tensor', None)),  # (3, H, K)
    (r'cross_attention\.query\.kernel', ('fsdp', 'tensor', None)),  # (D, H, K)
    (r'cross_attention\.query\.bias', ('tensor', None)),  # (H, K)
    (r'heads\.\d+\.\w+\.kernel', ('fsdp', None)),  # (D, K), a head as in a textbook
    (
        r'(attention|cross_attention|feed_forward)\.out\.kernel',
        ('tensor', 'fsdp'),
    ),  # (H · K, D), (F, D)
    (r'feed_forward\.(hidden|gate)\.kernel', ('fsdp', 'tensor')),  # (D, F)
    (r'feed_forward\.(hidden|gate)\.bias', ('tensor',)),  # (F,)
    (r'unembed\.kernel', ('fsdp', 'tensor')),  # (D, V)
    (r'unembed\.bias', ('tensor',)),  # (V,)
    (r'classes\.kernel', ('fsdp', None)),  # (D, C)
)


def mesh_sizes(mesh, num_devices):
    """{axis: devices} of the `mesh` group of a configuration; -1 is what the others leave.

    Raises:
      ConfigError: if the axes need more devices than there are, or two axes are to take the rest.
    """
    sizes = {axis: mesh.get(axis, 1) for axis in AXES}
    rest = [axis for axis, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ConfigError(
            f'mesh.{rest[1]}=-1: mesh.{rest[0]} takes the rest already; one axis alone can'
        )
    named = math.prod(size for size in sizes.values() if size != -1)
    if named > num_devices:
        product = ' · '.join(f'mesh.{axis}={n}' for axis, n in sizes.items() if n not in (-1, 1))
        raise ConfigError(
            f'{product}: there are {num_devices} devices; use at most that, or -1 for all that '
            'are left'
        )
    return sizes | {axis: num_devices // named for axis in rest}


def make_mesh(mesh, devices=None, num_seeds=1):
    """The mesh that a `mesh` group asks for, of the first devices that it needs.

    Of `mesh.seed` devices so many are used as share the seeds evenly: none is idle half the time.

    Raises:
      ConfigError: see `mesh_sizes`.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(mesh, len(devices))
    sizes['seed'] = max(n for n in range(1, sizes['seed'] + 1) if num_seeds % n == 0)
    shape = tuple(sizes.values())
    if jax.process_count() > 1 and math.prod(shape) < len(devices):
        raise ConfigError(
            f'mesh: {math.prod(shape)} of {len(devices)} devices, but several processes train '
            'together with all that they have; set one of its axes to -1'
        )
    return jax.make_mesh(
        shape, AXES, (AxisType.Auto,) * len(AXES), devices=devices[: math.prod(shape)]
    )


def devices_for_cores(cores, batch_sizes):
    """How many devices a CPU of so many cores should be, for these numbers of rows a step.

    The compiler keeps the cores of one device busy only within an operation, and those of a small
    model are too small for that: as two devices, two cores take three quarters of the time. It is
    the largest number that divides every batch into four rows or more.
    """
    return max(
        n
        for n in range(1, cores + 1)
        if n == 1 or all(B % n == 0 and 4 * n <= B for B in batch_sizes)
    )


def replicated(mesh):
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh, leading_axes, of_seeds=False):
    """Rows of a batch over `data` and `fsdp`; they stand behind `leading_axes` axes (seeds, steps).

    With `of_seeds` the first of those axes lies on `seed`.
    """
    leading = ['seed' if of_seeds and i == 0 else None for i in range(leading_axes)]
    return NamedSharding(mesh, PartitionSpec(*leading, ROWS))


def seed_sharding(mesh, of_seeds):
    """Of numbers such as metrics: with `of_seeds` those of each seed lie where it does."""
    return NamedSharding(mesh, PartitionSpec('seed') if of_seeds else PartitionSpec())


def layout(name, shape, mesh):
    """Where the array of a path lies: a PartitionSpec, and the axes that it could not be cut at.

    A dimension that the mesh does not divide is whole on every device.

    Returns:
      (spec, complaints): complaints are texts such as '3 of mesh.tensor=2'.
    """
    axes = next((axes for pattern, axes in LAYOUT if re.search(rf'\b{pattern}$', name)), ())
    if re.search(r'\bblocks\.(?!\d)', name):  # scanned layers
        axes = (None, *axes)
    spec, complaints = [], []
    for axis, size in zip(axes, shape, strict=bool(axes) and len(axes) == len(shape)):
        count = 1 if axis is None else mesh.shape[axis]
        if size % count:
            complaints.append(f'{size} of mesh.{axis}={count}')
        spec.append(axis if count > 1 and size % count == 0 else None)
    return PartitionSpec(*spec), complaints


def put_together(params, mesh):
    """The parameters as a step uses them: whole along `fsdp`, so that it is rows that are shared.

    Left to itself, the compiler would rather split every activation as the parameters are.
    """
    if mesh is None or mesh.shape['fsdp'] == 1:
        return params
    here = jax.sharding.get_abstract_mesh()  # within a program of one seed of several
    here = mesh if here.empty else here

    def whole(path, x):
        spec, _ = layout(parameter_name(path), x.shape, mesh)
        kept = PartitionSpec(*(None if axis == 'fsdp' else axis for axis in spec))
        return jax.lax.with_sharding_constraint(x, NamedSharding(here, kept))

    return jax.tree_util.tree_map_with_path(whole, params)


def state_sharding(mesh, abstract_state, of_seeds=False):
    """A NamedSharding for each array of a state, parameters and optimizer state alike.

    With `of_seeds` every array has an axis of seeds in front, which lies on `seed`; the shapes of
    `abstract_state` are without it.
    """
    leading = ('seed',) if of_seeds else ()
    return jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(
            mesh, PartitionSpec(*leading, *layout(parameter_name(path), x.shape, mesh)[0])
        ),
        abstract_state,
    )


def describe_split(name, shape, mesh):
    """(how many numbers of a parameter a device holds, a text on how it is split or nothing)."""
    spec, complaints = layout(name, shape, mesh)
    count = math.prod(NamedSharding(mesh, spec).shard_shape(shape))
    text = ' × '.join(axis or '–' for axis in spec) if any(spec) else ''
    if complaints:
        text = f'{text or "whole"} ({", ".join(complaints)}: not even)'
    return count, text


def describe_mesh(mesh, abstract_state):
    """A line on what each device holds of a state."""
    axes = ' × '.join(f'{axis} {size}' for axis, size in mesh.shape.items() if size > 1)
    shardings = state_sharding(mesh, abstract_state)
    parts = [
        (bytes_held(tree, own) / 2**20, bytes_held(tree, replicated(mesh)) / 2**20)
        for tree, own in (
            (abstract_state.params, shardings.params),
            (abstract_state.opt_state, shardings.opt_state),
        )
    ]
    (params, all_params), (optimizer, all_optimizer) = parts
    return (
        f'{mesh.size} devices ({axes or "one"}); each holds {params:,.1f} of {all_params:,.1f} MiB '
        f'of parameters and {optimizer:,.1f} of {all_optimizer:,.1f} MiB of optimizer state'
        + (', of a seed' if mesh.shape['seed'] > 1 else '')
    )


def bytes_held(tree, shardings):
    """Bytes of a tree of arrays, or of their shapes, on one device."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    sizes = jax.tree.map(
        lambda x, own: math.prod(own.shard_shape(x.shape)) * x.dtype.itemsize, tree, shardings
    )
    return sum(jax.tree.leaves(sizes))


def check_batch_size(key, batch_size, mesh, parts=1):
    """Raises ConfigError, naming `key`, if the mesh cannot share a batch out evenly.

    Each device takes its rows in `parts` of one size (gradient accumulation).
    """
    devices = math.prod(mesh.shape[axis] for axis in ROWS)
    if batch_size % (devices * parts):
        in_parts = f', each in {parts} accumulation steps,' if parts > 1 else ''
        raise ConfigError(
            f'{key}={batch_size}: {devices} devices{in_parts} need a multiple of '
            f'{devices * parts}, or --config.mesh.data=1 for one device'
        )
