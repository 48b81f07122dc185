"""The mesh of devices that every step runs on, also when it is one device."""

import math

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from minigpt_jax.training.config import ConfigError


def make_mesh(mesh, devices=None):
    """A mesh with one axis, `data`, of `mesh.data` devices (-1: all of them).

    Raises:
      ConfigError: if there are fewer devices than asked for.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices) if mesh.data == -1 else mesh.data
    if count > len(devices):
        raise ConfigError(
            f'mesh.data={count}: there are {len(devices)} devices; use at most that, or -1 for all'
        )
    return jax.make_mesh((count,), ('data',), (AxisType.Auto,), devices=devices[:count])


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


def batch_sharding(mesh, leading_axes):
    """Rows of a batch over `data`; they stand behind `leading_axes` axes (seeds, steps)."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading_axes, 'data'))


def check_batch_size(key, batch_size, mesh, parts=1):
    """Raises ConfigError, naming `key`, if the mesh cannot share a batch out evenly.

    Each device takes its rows in `parts` of one size (gradient accumulation).
    """
    devices = math.prod(mesh.shape.values())
    if batch_size % (devices * parts):
        in_parts = f', each in {parts} accumulation steps,' if parts > 1 else ''
        raise ConfigError(
            f'{key}={batch_size}: {devices} devices{in_parts} need a multiple of '
            f'{devices * parts}, or --config.mesh.data=1 for one device'
        )
