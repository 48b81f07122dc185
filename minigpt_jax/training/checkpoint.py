"""Checkpoints of a run, and the one door to a trained run."""

import contextlib
import errno
import hashlib
import io
import itertools
import json
import shutil
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from minigpt_jax.data.tokenizers import tokenizer_from_dict
from minigpt_jax.model.attention import DEVICE_OBSTACLES
from minigpt_jax.report.tables import write_atomically
from minigpt_jax.training import processes, steps
from minigpt_jax.training.config import (
    KEYS,
    ConfigError,
    DamagedError,
    RunError,
    flatten,
    read_config,
    read_json,
    resolve,
    write_json,
)
from minigpt_jax.training.optim import parameter_name

# Free space that a save asks for beyond the size of the state: metadata, metrics, events.
_SPARE_BYTES = 4 * 2**20
MANIFEST = 'manifest.sha256'
# What Orbax says of a sound checkpoint whose arrays have other shapes or other names.
_OF_OTHER_SHAPES = ('not compatible with the stored shape', 'tree structures do not match')


def check_space(directory, size=0):
    """Raises OSError if there is no room for `size` bytes and a little more.

    Asked before every save, since the threads of Orbax and TensorBoard would meet a full disk each
    in its own way.
    """
    free = shutil.disk_usage(directory).free
    if free < size + _SPARE_BYTES:
        raise OSError(
            errno.ENOSPC,
            f'disk full: {free / 2**20:.1f} MiB are free, {(size + _SPARE_BYTES) / 2**20:.1f} MiB '
            'are needed; make room, then run the same command again',
            str(directory),
        )


class Checkpoints:
    """The checkpoints of one run, `run_dir/checkpoints/<step>/`, by Orbax.

    A save goes on in the background and appears whole or not at all. It counts from when it is
    sealed: when the hashes of its files stand in a manifest beside them. The `keep` newest stay,
    and until there is a newer one, a checkpoint between the multiples of `every`, where a run was
    asked to stop.
    """

    def __init__(self, run_dir, keep=None, every=1):
        self._keep, self._every = keep, every
        self._directory = run_dir.resolve() / 'checkpoints'
        if self._directory.exists() and not self._directory.is_dir():
            raise DamagedError(f'{self._directory}: a file where a directory belongs; remove it')
        options = ocp.CheckpointManagerOptions(create=keep is not None)
        # Named here, since Orbax would infer it from the newest directory, which may be damaged.
        self._manager = ocp.CheckpointManager(
            self._directory, options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    def steps(self):
        """Steps with a finished checkpoint, newest first."""
        return [step for step in self._saved() if self._manifest(step).exists()]

    def unsealed(self):
        """What a process left that was killed before its checkpoint was whole."""
        return [self._directory / str(x) for x in self._saved() if not self._manifest(x).exists()]

    def _saved(self):
        if not self._directory.exists():
            return []
        return sorted(self._manager.all_steps(), reverse=True)

    def _manifest(self, step):
        return self._directory / str(step) / MANIFEST

    def seal(self):
        """Writes the manifest of a save that has ended; without waiting for one that has not."""
        if self._manager.is_saving_in_progress() or not processes.is_leader():
            return
        for step in self._saved():
            if not self._manifest(step).exists():
                write_atomically(self._manifest(step), _hash_files(self._directory / str(step)))

    def save(self, step, state):
        """Begins to save a state; `state` may be donated as soon as this returns."""
        # The next train call overwrites the buffers of `state` in place, while this save still
        # reads: hand Orbax a copy of its own.
        copies = jax.tree.map(jnp.copy, _named(state))
        check_space(self._directory, sum(x.nbytes for x in copies.values()))
        with self._naming_failures():
            self._manager.wait_until_finished()
            self.seal()
            self._retire()
            self._manager.save(step, args=ocp.args.StandardSave(copies), force=True)
            if jax.process_count() > 1:
                # Processes wait for each other within a save: two at once, or a save beside a step,
                # may do so in another order on each.
                self._manager.wait_until_finished()
                self.seal()

    def restore(self, step, abstract_state, shardings=None):
        """The state saved at `step`, in the structure of `abstract_state`.

        It lies as `shardings`, a tree like it, say, or on the first device: whatever it lay on
        when it was saved.

        Raises:
          DamagedError: if it cannot be read.
          RunError: if it can, but is of a model of other shapes.
        """
        leaves, tree = jax.tree.flatten(abstract_state)
        names = list(_named(abstract_state))
        # Without a sharding of our own, Orbax wants the devices that the state was saved on.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        own = [here] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
        targets = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
            for x, where in zip(leaves, own, strict=True)
        ]
        args = ocp.args.StandardRestore(dict(zip(names, targets, strict=True)))
        self._verify(step)
        # When one array cannot be read, the reads of the others end in tracebacks on stderr.
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                restored = self._manager.restore(step, args=args)
            # A damaged checkpoint shows as any of a dozen types, from KeyError to XlaRuntimeError.
            except Exception as error:
                time.sleep(0.2)  # until those other reads have ended
                if any(words in str(error) for words in _OF_OTHER_SHAPES):
                    raise RunError(
                        f'{self._directory / str(step)}: of another model than config.json and '
                        'tokenizer.json beside it describe; restore those'
                    ) from error
                raise DamagedError(
                    f'{self._directory / str(step)}: unreadable checkpoint: {_reason(error)}'
                ) from error
        return jax.tree.unflatten(tree, [restored[name] for name in names])

    def _verify(self, step):
        """Raises DamagedError if a file is not what it was when the checkpoint was sealed."""
        directory, damaged = self._directory / str(step), None
        if processes.is_leader():
            known, found = self._manifest(step).read_text(errors='replace'), _hash_files(directory)
            if known != found:
                lines = sorted(set(known.splitlines()) ^ set(found.splitlines()))
                damaged = lines[0].partition('  ')[2] if lines else MANIFEST
        damaged = processes.agree(damaged)
        if damaged is not None:
            raise DamagedError(f'{directory}: unreadable checkpoint: {damaged} is damaged')

    def delete_after(self, step):
        """Removes checkpoints newer than `step`: a resumed run will write them again."""
        for newer in self._saved():
            if newer > step:
                self._manager.delete(newer)

    def _retire(self):
        """Removes what is not to be kept."""
        newest, *older = self._saved() or [None]
        regular = [step for step in (newest, *older) if step == newest or step % self._every == 0]
        for step in older:
            if step not in regular[: self._keep]:
                self._manager.delete(step)

    def close(self):
        """Waits for a save that is under way."""
        with self._naming_failures():
            self._manager.wait_until_finished()
            if self._keep is not None:
                self.seal()
                self._retire()
            self._manager.close()

    @contextlib.contextmanager
    def _naming_failures(self):
        """Orbax reports a failed write as whatever its threads raised, some of it much later."""
        try:
            yield
        except Exception as error:
            raise RunError(
                f'{self._directory}: cannot save a checkpoint: {_reason(error)}; '
                'mend it, then run the same command again'
            ) from error


def _hash_files(directory):
    """The sha256 of every file below a directory, as `sha256sum` writes and checks them."""
    lines = []
    for path in sorted(directory.rglob('*')):
        if path.is_file() and path.name != MANIFEST:
            with path.open('rb') as file:
                digest = hashlib.file_digest(file, 'sha256').hexdigest()
            lines.append(f'{digest}  {path.relative_to(directory)}\n')
    return ''.join(lines)


def _reason(error):
    """What a library says is wrong, in one line and without its addresses in brackets."""
    return ' '.join(str(error).split(' [')[0].split())[:300]


def _named(state):
    """{'params.blocks.0.…': array}: names that do not depend on the classes of the tree."""
    return {parameter_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


class Run(NamedTuple):
    """A trained run: its configuration, tokenizer, and the two halves of its model."""

    config: ConfigDict
    tokenizer: Any
    model: Any
    params: Any
    step: int


def write_tokenizer(run_dir, tokenizer):
    """Writes `tokenizer.json`; a run is complete without its corpus."""
    write_json(run_dir / 'tokenizer.json', {'tokenizer': tokenizer.to_dict()})


def _read_tokenizer(path):
    described = read_json(path, 'tokenizer')
    try:
        tokenizer = tokenizer_from_dict(described)
        _ = tokenizer.vocab_size  # SentencePiece reads its model when first asked
        return tokenizer
    except Exception as error:  # whatever a library says of what it cannot read
        raise DamagedError(f'{path}: damaged ({type(error).__name__}: {_reason(error)})') from error


def load_run(workdir, average=1):
    """The one door to a trained run: its newest readable checkpoint, ready for `nnx.merge`.

    With `average` above 1 its parameters are the mean over that many newest checkpoints (Vaswani et
    al. 2017, section 6.1).

    Raises:
      RunError: if `workdir` holds no run, a whole sweep, a run of an earlier version, no readable
        checkpoint, or fewer than `average`.
    """
    config_file = workdir / 'config.json'
    config = read_config(workdir) if workdir.is_dir() else None
    if config is None:
        raise RunError(
            f'{workdir}: no config.json there; --workdir takes a directory that train wrote'
        )
    groups = {key.split('.')[0] for key in KEYS if '.' in key}
    if broken := [group for group in groups if not isinstance(config.get(group), ConfigDict)]:
        raise DamagedError(f'{config_file}: damaged (no group {broken[0]!r}); restore it')
    if missing := [key for key in KEYS if key not in flatten(config)]:
        raise RunError(
            f'{workdir}: its config.json has no {missing[0]}: trained by an earlier version, and '
            'readable with that one alone'
        )
    if (workdir / 'points').is_dir():
        runs = sorted(path.parent for path in workdir.glob('points/*/seed-*/tokenizer.json'))
        hint = f'for example --workdir={runs[0]}' if runs else 'none has been trained yet'
        raise RunError(f'{workdir}: a sweep; choose one of its runs, {hint}')
    tokenizer_file = workdir / 'tokenizer.json'
    checkpoints = Checkpoints(workdir)
    if not tokenizer_file.exists() or not checkpoints.steps():
        raise RunError(f'{workdir}: no checkpoint yet; train it first, with the same --workdir')
    if config.model.attention in DEVICE_OBSTACLES:
        config.model.attention = 'auto'  # the same function, on whatever device it is read
    try:
        config = resolve(config)
    except ConfigError as error:
        raise DamagedError(f'{config_file}: damaged ({error}); restore it') from error
    tokenizer = _read_tokenizer(tokenizer_file)
    trained_with = read_json(config_file, 'environment').get('vocab_size')
    if json.dumps(tokenizer.vocab_size) != json.dumps(trained_with):
        raise DamagedError(
            f'{tokenizer_file}: of another run: it has {tokenizer.vocab_size} ids, and config.json '
            f'speaks of {trained_with}; restore it'
        )
    state = jax.eval_shape(steps.make_init(config, tokenizer.vocab_size), 0)
    with contextlib.closing(checkpoints):
        restored = itertools.islice(_readable([checkpoints], state), average)
        numbers, states = zip(*restored, strict=True)
    if len(states) < average:
        raise RunError(
            f'{workdir}: its checkpoints are {len(states)}, too few for an average of {average}; '
            f'train with --config.train.keep={average} and a smaller train.checkpoint_every'
        )
    all_params = [state.params for (state,) in states]
    params = jax.tree.map(lambda *x: sum(x) / average, *all_params)
    model = steps.build_model(config, tokenizer.vocab_size)
    return Run(config, tokenizer, model, params, numbers[0])


def restore_newest(all_checkpoints, abstract_state, shardings=None):
    """(step, [state of each]) at the newest step that all of these runs can be read at.

    An unreadable checkpoint is named and skipped. (0, None) where they have none in common.

    Raises:
      DamagedError: if there are checkpoints but none can be read.
    """
    for left in (path for c in all_checkpoints for path in c.unsealed()):
        print(f'{left}: no {MANIFEST}: not finished, passed over', file=sys.stderr, flush=True)
    common = _in_common(all_checkpoints)
    if not common and any(c.steps() for c in all_checkpoints):
        print('seeds without a checkpoint in common: they start again', file=sys.stderr, flush=True)
    return next(_readable(all_checkpoints, abstract_state, shardings), (0, None))


def _in_common(all_checkpoints):
    """Steps that all of these runs have a finished checkpoint of, newest first."""
    common = set.intersection(*(set(c.steps()) for c in all_checkpoints))
    return processes.agree(sorted(common, reverse=True))


def _readable(all_checkpoints, abstract_state, shardings=None):
    """Yields (step, a state for each), newest first; those that cannot be read are named.

    Raises:
      DamagedError: if there are some, and none can be read.
    """
    error, found = None, False
    for step in _in_common(all_checkpoints):
        try:
            states = [c.restore(step, abstract_state, shardings) for c in all_checkpoints]
        except DamagedError as e:
            error = e
            print(f'{e}; trying the one before', file=sys.stderr, flush=True)
        else:
            found = True
            yield step, states
    if error is not None and not found:
        raise DamagedError(f'{error}; none before it is readable: remove them to start again')
