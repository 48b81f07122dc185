"""The pure functions of training: initial state, train step, evaluation.

A *call* is one dispatch: `steps_per_call` (K) steps by `lax.scan`, for one seed or, with a leading
axis E on state and batch, for several seeds by `lax.map` or `jax.vmap`. Tensor names: B batch,
T length, K steps, E seeds, N batches.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec
from ml_collections import FrozenConfigDict

from minigpt_jax.model.transformer import MODELS, unstack_layers
from minigpt_jax.training import sharding
from minigpt_jax.training.losses import next_token_loss
from minigpt_jax.training.optim import make_optimizer, make_schedule, parameter_name


class TrainState(NamedTuple):
    """All that a run is at a step. `finite` is False once a loss or gradient was not."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array
    seed: jax.Array
    finite: jax.Array


def build_model(config, vocab_size):
    """The static half of a model: merge it with parameters by `nnx.merge`. Allocates nothing."""
    return _abstract_model(FrozenConfigDict(config.model), vocab_size)[0]


def abstract_params(config, vocab_size):
    """Shapes and dtypes of the parameters. Allocates nothing."""
    return _abstract_model(FrozenConfigDict(config.model), vocab_size)[1]


@functools.lru_cache(64)  # half a second each, and asked for again and again
def _abstract_model(model, vocab_size):
    return nnx.split(nnx.eval_shape(lambda: _new_model(model, vocab_size, jax.random.key(0))))


def _new_model(model, vocab_size, key):
    """`vocab_size` is a pair, of source and target, for an encoder-decoder."""
    return MODELS[model.family](model, vocab_size, rngs=nnx.Rngs(params=key))


def make_init(config, vocab_size):
    """A jitted function seed -> TrainState at step 0; eager NNX initialisation takes seconds."""

    @jax.jit
    def init(seed):
        params = nnx.split(_new_model(config.model, vocab_size, seed_keys(seed)[0]))[1]
        return start_state(config, params, seed)

    return init


def start_state(config, params, seed):
    """The `TrainState` before the first step."""
    return TrainState(
        params=params,
        opt_state=make_optimizer(config.optim, config.train.steps).init(params),
        step=jnp.int32(0),
        seed=jnp.asarray(seed, jnp.uint32),
        finite=jnp.bool_(True),
    )


def make_train_step(config, model, losses):
    """(state, batch) -> (state, metrics): one optimizer step on a batch that `losses` reads.

    A step whose loss or gradient is not finite leaves the state as it was but for `finite`, and so
    do all steps after it: the host finds the state that met the batch. Dropout draws from
    fold_in(seed, step), so that nothing but the state decides a step.
    """
    optimizer = make_optimizer(config.optim, config.train.steps)
    schedule = make_schedule(config.optim, config.train.steps)

    losses = training_losses(config, model, losses)

    def train_step(state, batch):
        loss, grads = loss_and_gradient(
            losses,
            state.params,
            batch,
            dropout_key(config, state),
            config.train.accumulation_steps,
        )
        grad_norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        finite = state.finite & jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        stepped = state._replace(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
        )
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), stepped, state)
        metrics = {
            'train_loss': loss,
            'grad_norm': grad_norm,
            'learning_rate': schedule(state.step),
        }
        if config.train.log_layer_norms:
            metrics |= layer_norms(grads)
        return kept._replace(finite=finite), metrics

    return train_step


def token_losses(params, batch, key, *, model, smoothing=0.0):
    """(sum of next-token losses in nats, number of targets) of a batch.

    `batch` holds tokens_BT1 and, where some targets do not count, mask_BT; of packed documents also
    segment_ids_BT.
    """
    tokens_BT1 = batch['tokens_BT1']
    logits_BTV = nnx.merge(model, params)(
        tokens_BT1[:, :-1], segment_ids_BT=batch.get('segment_ids_BT'), dropout_key=key
    )
    return next_token_loss(logits_BTV, tokens_BT1[:, 1:], batch.get('mask_BT'), smoothing)


def pair_losses(params, batch, key, *, model, smoothing=0.0):
    """(sum of losses in nats, number of targets) of pairs, each target token given those before.

    `batch` holds source_BS with source_lengths_B, and target_BT1, from BOS to EOS, with the number
    of its targets, target_lengths_B. A row of padding alone has lengths of 0.
    """
    target_BT1 = batch['target_BT1']
    logits_BTV = nnx.merge(model, params)(
        batch['source_BS'], batch['source_lengths_B'], target_BT1[:, :-1], dropout_key=key
    )
    mask_BT = jnp.arange(logits_BTV.shape[1]) < batch['target_lengths_B'][:, None]
    return next_token_loss(logits_BTV, target_BT1[:, 1:], mask_BT, smoothing)


def masked_losses(params, batch, key, *, model, smoothing=0.0):
    """(sum of losses in nats, number of targets) of the tokens to be guessed.

    `batch` holds tokens_BT, some hidden, targets_BT and mask_BT: see `data.batches.hide_tokens`.
    """
    logits_BTV = nnx.merge(model, params)(batch['tokens_BT'], dropout_key=key)
    return next_token_loss(logits_BTV, batch['targets_BT'], batch['mask_BT'], smoothing)


def image_losses(params, batch, key, *, model, smoothing=0.0):
    """(sum of losses in nats, number of images) of the classes of images.

    `batch` holds patches_BTP and labels_B and, where some images do not count, mask_B.
    """
    logits_BC = nnx.merge(model, params)(batch['patches_BTP'], dropout_key=key)
    return next_token_loss(logits_BC, batch['labels_B'], batch.get('mask_B'), smoothing)


def training_losses(config, model, losses):
    """(params, batch, key) -> (sum of losses, number of targets), with label smoothing."""
    return functools.partial(losses, model=model, smoothing=config.train.label_smoothing)


def loss_and_gradient(losses, params, batch, key, parts=1):
    """(mean loss, its gradient) of a batch, taken in `parts` one after the other to save memory.

    The parts are weighted by their number of targets: Σ loss / Σ count, not the mean of means, so
    that the result is that of the whole batch however the padding falls.

    Args:
      losses: (params, batch, key) -> (sum of losses, number of targets).
      batch: a dict of arrays whose first axis, B, `parts` divides.
    """
    if parts == 1:
        total, backward, count = jax.vjp(lambda p: losses(p, batch, key), params, has_aux=True)
        scale = 1 / jnp.maximum(count, 1)  # a batch of padding alone has a loss of 0
        (grads,) = backward(scale)  # at its start: a division of the gradient reads all of it anew
        return total * scale, grads

    # Part p takes rows p, p + parts, …: each device keeps its own rows.
    gradient = jax.value_and_grad(losses, has_aux=True)
    split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(sums, part):
        index, rows = part
        part_key = None if key is None else jax.random.fold_in(key, index)
        (total, count), grads = gradient(params, rows, part_key)
        return jax.tree.map(jnp.add, sums, (total, count, grads)), None

    zeros = (jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    (total, count, grads), _ = jax.lax.scan(add, zeros, (jnp.arange(parts), split))
    scale = 1 / jnp.maximum(count, 1)
    return jax.tree.map(lambda x: x * scale, (total, grads))


def layer_norms(grads):
    """{'grad_norm/blocks.0': …}: the gradient's norm in each layer, and in each part outside."""
    grads = nnx.to_pure_dict(grads)
    stacks = {'': grads} if 'blocks' in grads else {f'{name}.': x for name, x in grads.items()}
    groups = {}
    for stack, own in stacks.items():
        if not isinstance(next(iter(own['blocks'])), int):  # `scan_layers`
            own = unstack_layers(own)
        for path, grad in jax.tree_util.tree_leaves_with_path(own):
            names = parameter_name(path).split('.')
            group = '.'.join(names[:2] if names[0] == 'blocks' else names[:1])
            groups.setdefault(f'grad_norm/{stack}{group}', []).append(grad)
    return {group: optax.tree.norm(leaves) for group, leaves in groups.items()}


def dropout_key(config, state):
    """The key of this step's dropout, or None where the configuration has none."""
    if not config.model.dropout_rate:
        return None
    return jax.random.fold_in(seed_keys(state.seed)[1], state.step)


def seed_keys(seed):
    """Two keys of a seed, of initialisation and of dropout: each folds numbers into its own."""
    return jax.random.split(jax.random.key(seed))


def make_train_call(config, model, seeds='separate', losses=token_losses, mesh=None):
    """(state, batches) -> (state, metrics of shape K): `steps_per_call` steps in one dispatch.

    `batches` are those of `make_train_step` with a leading axis K.

    `seeds`: `separate` for one seed; `map` or `vmap` for a leading seed axis on everything. `map`
    runs the seeds one after the other with the bits of separate runs; `vmap` runs them at once,
    equal but for rounding, which pays on an accelerator. Either way the seeds are shared out over
    the axis `seed` of `mesh`, where it has one.
    """
    step = make_train_step(config, model, _on_whole_parameters(losses, mesh))
    return over_seeds(functools.partial(jax.lax.scan, step), seeds, mesh)


def make_evaluate(model, seeds='separate', losses=token_losses, mesh=None):
    """(params, batches) -> (sum of losses, number of targets), in one dispatch.

    `batches` are those that `losses` reads, with a leading axis N.
    """

    losses = _on_whole_parameters(losses, mesh)

    def evaluate(params, batches):
        def add(total, batch):
            return jax.tree.map(jnp.add, total, losses(params, batch, None, model=model)), None

        return jax.lax.scan(add, (jnp.float32(0), jnp.float32(0)), batches)[0]

    if seeds == 'separate':
        return evaluate
    # All seeds share the batches, which are no argument of what is mapped.
    return lambda params, batches: over_seeds(lambda p: evaluate(p, batches), seeds, mesh)(params)


def _on_whole_parameters(losses, mesh):
    """`losses`, of parameters that lie in parts on a mesh."""

    def on_whole(params, *args, **kwargs):
        return losses(sharding.put_together(params, mesh), *args, **kwargs)

    return on_whole


def over_seeds(function, seeds, mesh=None):
    """`function` itself (`separate`), or over a leading seed axis of all of its arguments.

    Devices along the axis `seed` of `mesh` have seeds of their own, and nothing to say to each
    other.
    """
    if seeds == 'separate':
        return function
    if seeds == 'vmap':
        mapped = jax.vmap(function)
    else:
        mapped = lambda *args: jax.lax.map(lambda x: function(*x), args)  # noqa: E731
    if mesh is None or mesh.shape['seed'] == 1:
        return mapped
    spec = PartitionSpec('seed')
    return jax.shard_map(
        mapped, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={'seed'}, check_vma=False
    )
