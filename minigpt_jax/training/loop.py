"""One run, or the runs of several seeds in one program: train, evaluate, save, resume, sample."""

import contextlib
import functools
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from minigpt_jax.data.batches import Share
from minigpt_jax.model.transformer import flops_per_token
from minigpt_jax.report.writers import Progress, RunWriter, read_lines
from minigpt_jax.training import checkpoint, preemption, processes, sharding, steps
from minigpt_jax.training.config import DamagedError, write_json
from minigpt_jax.training.optim import parameter_name
from minigpt_jax.training.tasks import TASKS


class Program:
    """Everything compiled for a configuration and a number of seeds; runs of any seed share it.

    Attributes:
      task: what the model's family learns, see `tasks`.
      compile_s: seconds that this took.
      peak_memory_mb: what the compiler reserves for a train call, per device and per seed, in MiB:
        arguments + outputs − aliased + temporaries.
      train_calls: the compiled train call for each shape that a batch can have.
    """

    compiler_options = None

    def __init__(self, config, corpus, num_seeds=1):
        self.config, self.corpus, self.num_seeds = config, corpus, num_seeds
        self.task = TASKS[config.model.family](config, corpus)
        self.mode = 'separate' if num_seeds == 1 else seed_mode(config)
        self.mesh = sharding.make_mesh(config.mesh, num_seeds=num_seeds)
        self.vocab_size = corpus.tokenizer.vocab_size
        self.model = steps.build_model(config, self.vocab_size)
        init = steps.make_init(config, self.vocab_size)
        self.abstract_state = jax.eval_shape(init, 0)
        # Of one seed, and of all of them, with an axis E in front where there are several.
        self.seed_sharding = sharding.state_sharding(self.mesh, self.abstract_state)
        self.state_sharding = sharding.state_sharding(
            self.mesh, self.abstract_state, of_seeds=num_seeds > 1
        )
        self.batch_sharding = sharding.batch_sharding(
            self.mesh, leading_axes=1 + (num_seeds > 1), of_seeds=num_seeds > 1
        )
        self.init = jax.jit(init, out_shardings=self.seed_sharding)
        self._compile()

    def _compile(self):
        started = time.monotonic()
        self._compile_training()
        self._compile_evaluation()
        self.compile_s = time.monotonic() - started

    def of_all_seeds(self, tree):
        """Shapes and types of arrays of one seed, with an axis E where there are several."""
        leading = () if self.num_seeds == 1 else (self.num_seeds,)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*leading, *x.shape), x.dtype), tree)

    @property
    def _figure_sharding(self):
        """Of numbers that each seed has one of."""
        return sharding.seed_sharding(self.mesh, of_seeds=self.num_seeds > 1)

    def _compile_training(self):
        train_call = jax.jit(
            steps.make_train_call(self.config, self.model, self.mode, self.task.losses, self.mesh),
            in_shardings=(self.state_sharding, self.batch_sharding),
            out_shardings=(self.state_sharding, self._figure_sharding),
            donate_argnums=0,
        )
        state = self.of_all_seeds(self.abstract_state)
        shapes = {_shape(x): x for x in map(self.of_all_seeds, self.task.abstract_batches())}
        self.train_calls = {
            shape: train_call.lower(state, x).compile(self.compiler_options)
            for shape, x in shapes.items()
        }
        seeds_a_device = self.num_seeds // self.mesh.shape['seed']
        self.peak_memory_mb = max(
            _peak_memory(call.memory_analysis(), seeds_a_device, self.mode)
            for call in self.train_calls.values()
        )

    def _compile_evaluation(self):
        rows = sharding.batch_sharding(self.mesh, leading_axes=1)
        evaluate = jax.jit(
            steps.make_evaluate(self.model, self.mode, self.task.losses, self.mesh),
            in_shardings=(self.state_sharding.params, rows),
            out_shardings=self._figure_sharding,
        )
        params = self.of_all_seeds(self.abstract_state.params)
        validation = self.task.validation()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), validation)
        self._evaluates = [evaluate.lower(params, x).compile() for x in shapes]
        self._validation = jax.tree.map(
            lambda x: processes.place(x, rows, x.shape, whole=True), validation
        )

    def train_call(self, state, batches):
        """(state, metrics) after the steps of a call; see `steps.make_train_call`."""
        return self.train_calls[_shape(batches)](state, batches)

    def evaluate(self, params):
        """(sum of losses, number of targets) of the validation split; see `make_evaluate`."""
        parts = [f(params, x) for f, x in zip(self._evaluates, self._validation, strict=True)]
        return jax.tree.map(lambda *x: sum(x), *parts)

    def batches(self, seeds, first_step):
        """What each call from `first_step` on trains on, on the devices.

        Of several seeds with a leading axis E. A process reads only the rows, and the seeds, that
        its own devices train on.
        """
        parts = math.prod(self.mesh.shape[axis] for axis in sharding.ROWS)
        leading = () if self.num_seeds == 1 else (self.num_seeds,)
        *of_seeds, _, (first, last) = processes.own_parts(
            self.batch_sharding, (*leading, self.config.train.steps_per_call, parts)
        )
        share = Share(first, last, parts)
        own = seeds[slice(*of_seeds[0])] if leading else seeds
        streams = [self.task.batches(seed, first_step, share) for seed in own]

        def join(*of_each):  # (K, b, …) each, of B = b · parts / (last - first) rows
            K, b = of_each[0].shape[:2]
            shape = (*leading, K, b * parts // (last - first), *of_each[0].shape[2:])
            part = np.stack(of_each) if leading else of_each[0]
            return processes.place(part, self.batch_sharding, shape)

        return (jax.tree.map(join, *own) for own in zip(*streams, strict=True))

    def start(self, states):
        """One state on the devices, from a state for each seed."""
        # Copies in any case: the train call gives the buffers of its argument away.
        join = jnp.copy if self.num_seeds == 1 else lambda *seeds: jnp.stack(seeds)
        together = jax.jit(
            lambda *states: jax.tree.map(join, *states), out_shardings=self.state_sharding
        )
        return together(*states)

    def of_seed(self, state, index):
        """The state of the seed at `index`."""
        return state if self.num_seeds == 1 else self._of_seed(state, index)

    @functools.cached_property
    def _of_seed(self):
        return jax.jit(
            lambda state, index: jax.tree.map(lambda x: x[index], state),
            out_shardings=self.seed_sharding,
        )


def _shape(batches):
    """What tells the batches of one program from those of another."""
    return tuple(x.shape for x in jax.tree.leaves(batches))


def seed_mode(config):
    """How the seeds of a point train together: `train.seeds`, with `auto` decided.

    One after the other in one program on a CPU, where batching brings nothing; at once elsewhere.
    Apart where batches have several shapes: the seeds would need one and the same in each step.
    """
    if config.train.seeds == 'auto' and config.data.num_buckets > 1:
        return 'separate'
    if config.train.seeds != 'auto':
        return config.train.seeds
    return 'map' if jax.default_backend() == 'cpu' else 'vmap'


def _peak_memory(analysis, num_seeds, mode):
    # Mapped seeds take turns: each has a state of its own, and all of the temporaries.
    held = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    temporary = analysis.temp_size_in_bytes / (num_seeds if mode == 'vmap' else 1)
    return (held / num_seeds + temporary) / 2**20


def train(program, seeds, run_dirs, identity, name, profile=None):
    """Trains the runs of some seeds to their end, from their newest checkpoint where there is one.

    Leaves in each of `run_dirs` all files of a run; `config.json` is there already. `identity` is
    the start of every summary: the point that these runs belong to. `name` stands before each line
    of progress. `profile` is (first, last) step to trace, into `profile/` of the first run.

    Returns:
      a summary for each seed: what stands in its `summary.json`; of several processes the leader
      alone has them, and writes those files.

    Raises:
      DamagedError: if there are checkpoints, but no readable one.
    """
    config, leads = program.config, processes.is_leader()
    # Also when the loop ends in an error: a save that is under way is finished, not torn.
    with contextlib.ExitStack() as stack:
        checkpoints = []
        for run_dir in run_dirs:
            checkpoints.append(
                checkpoint.Checkpoints(run_dir, config.train.keep, config.train.checkpoint_every)
            )
            stack.callback(checkpoints[-1].close)
        begin, states = checkpoint.restore_newest(
            checkpoints, program.abstract_state, program.seed_sharding
        )
        if begin and leads:
            print(f'{name}: continues at step {begin:,} of {config.train.steps:,}', flush=True)
        checkpoint.check_space(run_dirs[0])
        for run_dir, saved in zip(run_dirs, checkpoints, strict=True):
            saved.delete_after(begin)
            if leads:
                checkpoint.write_tokenizer(run_dir, program.corpus.tokenizer)
        writers = [RunWriter(run_dir, begin) for run_dir in run_dirs if leads]
        for writer in writers:
            stack.callback(writer.close)
        progress = Progress(name, begin, config.train.steps, shown=leads)
        stack.callback(progress.close)
        state = program.start(states or [program.init(seed) for seed in seeds])
        batches = program.batches(seeds, begin)
        trace = profile and (*profile, run_dirs[0] / 'profile')
        state = _loop(program, state, begin, batches, checkpoints, writers, progress, trace)
        states = [processes.to_one_device(program.of_seed(state, e)) for e in range(len(seeds))]

    summaries = []
    for own, seed, run_dir in zip(states, seeds, run_dirs, strict=True) if leads else ():
        final = _final_metrics(run_dir, program.task.judged) if own.finite else {}
        if not own.finite:
            outcome = {'status': 'diverged', 'error': diagnose(program, own)}
        elif not math.isfinite(final['val_loss']):
            # The loss of a step is taken before its update: the last update is judged here.
            outcome = {'status': 'diverged', 'error': f'validation loss {final["val_loss"]}'}
        else:
            text = program.task.sample(program.model, own.params)
            (run_dir / 'samples.txt').write_text(text + '\n', encoding='utf-8')
            outcome = {'status': 'ok', 'error': None, **final}
        outcome = {**identity, 'seed': seed, 'steps': int(own.step), **outcome}
        summaries.append(summarize(program, run_dir, outcome))
    return summaries


def _loop(program, state, begin, batches, checkpoints, writers, progress, trace):
    """The state after the last step, or after the call in which the last seed diverged."""
    config = program.config
    total, per_call, num_seeds = config.train.steps, config.train.steps_per_call, program.num_seeds
    finite, losses, tracing = [True] * num_seeds, {}, False
    window_start, window_wait, window_step = time.monotonic(), 0.0, begin
    for step in range(begin + per_call, total + 1, per_call):
        if trace and not tracing and step - per_call < trace[1] and trace[0] <= step:
            jax.profiler.start_trace(str(trace[2]))
            tracing = True
        waiting = time.monotonic()
        batch = next(batches)
        window_wait += time.monotonic() - waiting
        state, metrics = program.train_call(state, batch)
        if tracing and trace[1] <= step:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            trace = tracing = None
        logs, evaluates, saves = (
            step % every == 0 or step == total
            for every in (
                config.train.log_every,
                config.eval.every,
                config.train.checkpoint_every,
            )
        )
        stops = preemption.is_asked(step) and step < total
        if not (logs or evaluates or saves or stops):
            continue
        metrics, now_finite = processes.to_host((metrics, state.finite))  # waits for the call
        seconds = time.monotonic() - window_start
        now_finite = list(np.atleast_1d(now_finite))
        values = [{} for _ in range(num_seeds)]
        if logs:
            values = [_log_values(metrics, e) for e in range(num_seeds)]
            losses['loss'] = np.mean([value['train_loss'] for value in values])
        if evaluates:
            for e, (value, val_loss) in enumerate(
                zip(values, evaluate(program, state), strict=True)
            ):
                value['val_loss'] = val_loss
                params = processes.to_one_device(program.of_seed(state, e).params)
                value |= program.task.judge(program.model, params)
            for name in ('val_loss', *program.task.judged):
                if name in values[0]:
                    losses[name] = np.mean([value[name] for value in values])
        timing = _timing(program, seconds, window_wait, step - window_step)
        for e, writer in enumerate(writers):
            if finite[e] and now_finite[e]:
                if values[e]:
                    writer.write('metrics', step, values[e])
                writer.write('timing', step, timing)
        finite = now_finite
        progress.update(
            step,
            **{label: f'{value:.3f}' for label, value in losses.items()},
            **{'tokens/s': f'{timing["tokens_per_second"]:,.0f}'},
        )
        if not any(finite):
            if tracing:
                jax.profiler.stop_trace()
            break
        for e, saved in enumerate(checkpoints):
            saved.seal()
            if saves or stops:
                saved.save(step, program.of_seed(state, e))
        if stops:
            raise preemption.Preempted
        window_start, window_wait, window_step = time.monotonic(), 0.0, step
    return state


def _timing(program, seconds, wait, num_steps):
    """A line of timing.jsonl: shares of one seed, but tokens/s of the whole program."""
    num_seeds, tokens = program.num_seeds, num_steps * program.task.tokens_per_step()
    return {
        'seconds': seconds / num_seeds,
        'step_ms': 1e3 * seconds / num_seeds / num_steps,
        'tokens_per_second': num_seeds * tokens / seconds,
        'data_wait_s': wait / num_seeds,
    }


def _log_values(metrics, e):
    """What is logged of the call of a seed: its mean loss, the rest (rate, norms) at its end."""
    own = {name: np.atleast_2d(values_EK)[e] for name, values_EK in metrics.items()}
    return {
        name: float(values_K.mean() if name == 'train_loss' else values_K[-1])
        for name, values_K in own.items()
    }


def evaluate(program, state):
    """Mean loss over the whole validation split for each seed, every token once, nats a token."""
    total, count = processes.to_host(program.evaluate(state.params))
    return [float(x) for x in np.atleast_1d(total / count)]


def _final_metrics(run_dir, judged):
    path = run_dir / 'metrics.jsonl'
    found = {}
    for line in read_lines(path):
        found |= {key: line[key] for key in ('train_loss', 'val_loss', *judged) if key in line}
    if not {'train_loss', 'val_loss'} <= set(found):
        raise DamagedError(f'{path}: its lines are gone; remove {run_dir} to train this run again')
    return found


def summarize(program, run_dir, outcome):
    """Writes and returns `summary.json`: the run's row of results.csv, from what came of it."""
    config, task = program.config, program.task
    timing = read_lines(run_dir / 'timing.jsonl')
    val_loss = outcome.get('val_loss')
    summary = {
        **model_columns(config),
        'num_params': sum(
            x.size for x in jax.tree.leaves(steps.abstract_params(config, program.vocab_size))
        ),
        'tokens_seen': outcome['steps'] * task.tokens_per_step(),
        # Beyond exp(700) a float overflows, and the number says no more than that.
        'val_perplexity': None if val_loss is None or val_loss > 700 else math.exp(val_loss),
        **task.columns(val_loss),
        'tokens_per_second': _median(timing, 'tokens_per_second'),
        'step_ms': _median(timing, 'step_ms'),
        'flops_per_token': flops_per_token(config.model, task.output_size),
        'peak_memory_mb': program.peak_memory_mb,
        'compile_s': program.compile_s / program.num_seeds,
        'train_s': sum(line['seconds'] for line in timing),
        **outcome,
    }
    write_json(run_dir / 'summary.json', summary)
    return summary


def model_columns(config):
    """The columns of results.csv that a configuration gives."""
    model = config.model
    names = ('num_heads', 'd_model', 'num_layers', 'norm_placement', 'positions')
    return {name: model[name] for name in names} | {'d_head': model.d_model // model.num_heads}


def _median(lines, key):
    return statistics.median(line[key] for line in lines) if lines else None


def diagnose(program, state):
    """Why a run diverged: the step, the first parameter group that is not finite, the batch.

    The state is the one that met the batch (see `steps.make_train_step`).
    """
    config, step = program.config, int(state.step)
    batch = program.task.batch(int(state.seed), step)
    key = steps.dropout_key(config, state)
    loss, grads = steps.loss_and_gradient(
        steps.training_losses(config, program.model, program.task.losses),
        state.params,
        jax.tree.map(jnp.asarray, batch),
        key,
        config.train.accumulation_steps,
    )
    broken = [
        parameter_name(path)
        for path, grad in jax.tree_util.tree_leaves_with_path(grads)
        if not jnp.isfinite(grad).all()
    ]
    return (
        f'step {step + 1}: loss {float(loss):.4g}; first gradient that is not finite: '
        f'{broken[0] if broken else "none alone, but their norm"}; '
        f'first text of the batch: {program.task.first_text(batch)[:80]!r}'
    )
