"""One run, or the runs of several seeds in one program: train, evaluate, save, resume, sample."""

import contextlib
import functools
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from minigpt_jax.data.batches import training_batch, training_batches, validation_batches
from minigpt_jax.inference.decoding import continue_text
from minigpt_jax.model.transformer import flops_per_token
from minigpt_jax.report.writers import Progress, RunWriter, read_lines
from minigpt_jax.training import checkpoint, sharding, steps
from minigpt_jax.training.config import ConfigError, DamagedError, write_json
from minigpt_jax.training.optim import parameter_name

SAMPLE_TEMPERATURE = 0.8


class Program:
    """Everything compiled for a configuration and a number of seeds; runs of any seed share it.

    Attributes:
      train_call, evaluate: compiled; see `steps.make_train_call`, `steps.make_evaluate`.
      compile_s: seconds that this took.
      peak_memory_mb: what the compiler reserves for a train call, per device and per seed, in MiB:
        arguments + outputs − aliased + temporaries.
    """

    def __init__(self, config, corpus, num_seeds=1):
        self.config, self.corpus, self.num_seeds = config, corpus, num_seeds
        self.mode = 'separate' if num_seeds == 1 else seed_mode(config)
        self.mesh = sharding.make_mesh(config.mesh)
        self.vocab_size = corpus.tokenizer.vocab_size
        self.model = steps.build_model(config, self.vocab_size)
        self.init = steps.make_init(config, self.vocab_size)
        self.abstract_state = jax.eval_shape(self.init, 0)
        self.validation = validation_batches(
            corpus.validation_tokens,
            context_length=config.model.context_length,
            batch_size=config.eval.batch_size,
        )
        self._compile()

    def _compile(self):
        config = self.config
        everywhere = sharding.replicated(self.mesh)
        seeds = () if self.num_seeds == 1 else (self.num_seeds,)
        batch = sharding.batch_sharding(self.mesh, leading_axes=1 + len(seeds))
        rows = sharding.batch_sharding(self.mesh, leading_axes=1)
        self.state_sharding, self.batch_sharding = everywhere, batch

        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*seeds, *x.shape), x.dtype),
            self.abstract_state,
        )
        tokens = jax.ShapeDtypeStruct(
            (
                *seeds,
                config.train.steps_per_call,
                config.data.batch_size,
                config.model.context_length + 1,
            ),
            jnp.int32,
        )
        started = time.monotonic()
        train_call = jax.jit(
            steps.make_train_call(config, self.model, self.mode),
            in_shardings=(everywhere, batch),
            out_shardings=(everywhere, everywhere),
            donate_argnums=0,
        )
        self.train_call = train_call.lower(state, tokens).compile()
        evaluate = jax.jit(
            steps.make_evaluate(self.model, self.mode),
            in_shardings=(everywhere, rows, rows),
            out_shardings=everywhere,
        )
        self.evaluate = evaluate.lower(state.params, *self.validation).compile()
        self.compile_s = time.monotonic() - started
        self.peak_memory_mb = _peak_memory(
            self.train_call.memory_analysis(), self.num_seeds, self.mode
        )
        self.validation = jax.device_put(self.validation, rows)

    def start(self, states):
        """One state on the devices, from a state for each seed."""
        # Copies in any case: the train call gives the buffers of its argument away.
        join = jnp.copy if self.num_seeds == 1 else lambda *seeds: jnp.stack(seeds)
        return jax.device_put(jax.tree.map(join, *states), self.state_sharding)

    def of_seed(self, tree, index):
        """The part of a state, or of metrics, that belongs to the seed at `index`."""
        return tree if self.num_seeds == 1 else jax.tree.map(lambda x: x[index], tree)


def seed_mode(config):
    """How the seeds of a point train together: `train.seeds`, with `auto` decided.

    One after the other in one program on a CPU, where batching brings nothing; at once elsewhere.
    """
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
      a summary for each seed: what stands in its `summary.json`.

    Raises:
      DamagedError: if there are checkpoints, but no readable one.
    """
    config = program.config
    # Also when the loop ends in an error: a save that is under way is finished, not torn.
    with contextlib.ExitStack() as stack:
        checkpoints = []
        for run_dir in run_dirs:
            checkpoints.append(checkpoint.Checkpoints(run_dir, config.train.keep))
            stack.callback(checkpoints[-1].close)
        begin, states = checkpoint.restore_newest(checkpoints, program.abstract_state)
        if begin:
            print(f'{name}: continues at step {begin:,} of {config.train.steps:,}', flush=True)
        checkpoint.check_space(run_dirs[0])
        for run_dir, saved in zip(run_dirs, checkpoints, strict=True):
            saved.delete_after(begin)
            checkpoint.write_tokenizer(run_dir, program.corpus.tokenizer)
        writers = [RunWriter(run_dir, begin) for run_dir in run_dirs]
        for writer in writers:
            stack.callback(writer.close)
        progress = Progress(name, begin, config.train.steps)
        stack.callback(progress.close)
        state = program.start(states or [program.init(seed) for seed in seeds])
        batches = _batches(program, seeds, begin)
        trace = profile and (*profile, run_dirs[0] / 'profile')
        state = _loop(program, state, begin, batches, checkpoints, writers, progress, trace)

    summaries = []
    for e, (seed, run_dir) in enumerate(zip(seeds, run_dirs, strict=True)):
        own = program.of_seed(state, e)
        final = _final_metrics(run_dir) if own.finite else {}
        if not own.finite:
            outcome = {'status': 'diverged', 'error': diagnose(program, own)}
        elif not math.isfinite(final['val_loss']):
            # The loss of a step is taken before its update: the last update is judged here.
            outcome = {'status': 'diverged', 'error': f'validation loss {final["val_loss"]}'}
        else:
            write_sample(program, own.params, run_dir)
            outcome = {'status': 'ok', 'error': None, **final}
        outcome = {**identity, 'seed': seed, 'steps': int(own.step), **outcome}
        summaries.append(summarize(program, run_dir, outcome))
    return summaries


def _loop(program, state, begin, batches, checkpoints, writers, progress, trace):
    """The state after the last step, or after the call in which the last seed diverged."""
    config = program.config
    total, per_call, num_seeds = config.train.steps, config.train.steps_per_call, len(writers)
    finite, losses, tracing = [True] * num_seeds, {}, False
    window_start, window_wait, window_step = time.monotonic(), 0.0, begin
    for step in range(begin + per_call, total + 1, per_call):
        if trace and not tracing and step - per_call < trace[1] and trace[0] <= step:
            jax.profiler.start_trace(str(trace[2]))
            tracing = True
        waiting = time.monotonic()
        batch = jax.device_put(next(batches), program.batch_sharding)
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
        if not (logs or evaluates or saves):
            continue
        metrics, now_finite = jax.device_get((metrics, state.finite))  # waits for the call
        seconds = time.monotonic() - window_start
        now_finite = list(np.atleast_1d(now_finite))
        values = [{} for _ in writers]
        if logs:
            values = [_log_values(program.of_seed(metrics, e)) for e in range(num_seeds)]
            losses['loss'] = np.mean([value['train_loss'] for value in values])
        if evaluates:
            for value, val_loss in zip(values, evaluate(program, state), strict=True):
                value['val_loss'] = val_loss
            losses['val_loss'] = np.mean([value['val_loss'] for value in values])
        timing = _timing(config, seconds, window_wait, step - window_step, num_seeds)
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
        if saves:
            for e, saved in enumerate(checkpoints):
                saved.save(step, program.of_seed(state, e))
        window_start, window_wait, window_step = time.monotonic(), 0.0, step
    return state


def _timing(config, seconds, wait, num_steps, num_seeds):
    """A line of timing.jsonl: shares of one seed, but tokens/s of the whole program."""
    return {
        'seconds': seconds / num_seeds,
        'step_ms': 1e3 * seconds / num_seeds / num_steps,
        'tokens_per_second': num_seeds * num_steps * tokens_per_step(config) / seconds,
        'data_wait_s': wait / num_seeds,
    }


def _batches(program, seeds, first_step):
    """tokens_KBT1, or tokens_EKBT1 of several seeds, for each call from `first_step` on."""
    config = program.config
    streams = [
        training_batches(
            program.corpus.train_tokens,
            context_length=config.model.context_length,
            batch_size=config.data.batch_size,
            seed=seed,
            steps_per_call=config.train.steps_per_call,
            first_step=first_step,
        )
        for seed in seeds
    ]
    return streams[0] if len(streams) == 1 else map(np.stack, zip(*streams, strict=True))


def tokens_per_step(config):
    """Tokens that one optimizer step trains on."""
    return config.data.batch_size * config.model.context_length


def _log_values(metrics_K):
    """A logged line of a call: its mean loss, and the rest (rate, norms) at its last step."""
    return {
        name: float(values_K.mean() if name == 'train_loss' else values_K[-1])
        for name, values_K in metrics_K.items()
    }


def evaluate(program, state):
    """Mean loss over the whole validation split for each seed, every token once, nats a token."""
    total, count = jax.device_get(program.evaluate(state.params, *program.validation))
    return [float(x) for x in np.atleast_1d(total / count)]


def write_sample(program, params, run_dir):
    """Writes `samples.txt`: the same prompt and key for every run of a sweep."""
    config = program.config
    text = continue_text(
        program.model,
        params,
        program.corpus.tokenizer,
        config.model.context_length,
        sample_prompt(config, program.corpus),
        num_tokens=config.eval.sample_tokens,
        temperature=SAMPLE_TEMPERATURE,
    )[0]
    (run_dir / 'samples.txt').write_text(text + '\n', encoding='utf-8')


def sample_prompt(config, corpus):
    """`eval.sample_prompt`, or the first words of the validation text, within its first line.

    Raises:
      ConfigError: if it is empty, or the tokenizer does not know one of its symbols.
    """
    prompt = config.eval.sample_prompt
    if prompt is None:
        # A token may be part of a character: of the last one there may be too few.
        text = corpus.tokenizer.decode(corpus.validation_tokens[:200]).rstrip('\ufffd')
        known = [line for line in text.splitlines() if line.strip() and '<' not in line]
        prompt = ' '.join((known or [text])[0].split()[:3])[:24]
    if not prompt:
        raise ConfigError('eval.sample_prompt is empty: give at least one symbol')
    if unknown := corpus.tokenizer.unknown_symbols(prompt):
        raise ConfigError(
            f'eval.sample_prompt={prompt!r}: unknown symbols {" ".join(map(repr, unknown))}'
        )
    return prompt


def _final_metrics(run_dir):
    path = run_dir / 'metrics.jsonl'
    found = {}
    for line in read_lines(path):
        found |= {key: line[key] for key in ('train_loss', 'val_loss') if key in line}
    if len(found) < 2:
        raise DamagedError(f'{path}: its lines are gone; remove {run_dir} to train this run again')
    return found


def summarize(program, run_dir, outcome):
    """Writes and returns `summary.json`: the run's row of results.csv, from what came of it."""
    config, corpus = program.config, program.corpus
    timing = read_lines(run_dir / 'timing.jsonl')
    val_loss = outcome.get('val_loss')
    bits = None
    if val_loss is not None and not corpus.unknown_share:
        nats = val_loss * (len(corpus.validation_tokens) - 1)
        bits = nats / math.log(2) / corpus.validation_bytes
    summary = {
        **model_columns(config),
        'num_params': sum(
            x.size for x in jax.tree.leaves(steps.abstract_params(config, program.vocab_size))
        ),
        'tokens_seen': outcome['steps'] * tokens_per_step(config),
        # Beyond exp(700) a float overflows, and the number says no more than that.
        'val_perplexity': None if val_loss is None or val_loss > 700 else math.exp(val_loss),
        'bits_per_byte': bits,
        'tokens_per_second': _median(timing, 'tokens_per_second'),
        'step_ms': _median(timing, 'step_ms'),
        'flops_per_token': flops_per_token(config.model, program.vocab_size),
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
    config, corpus = program.config, program.corpus
    step = int(state.step)
    tokens_BT1 = training_batch(
        corpus.train_tokens,
        context_length=config.model.context_length,
        batch_size=config.data.batch_size,
        seed=int(state.seed),
        step=step,
    )
    key = steps.dropout_key(config, state)
    loss, grads = steps.loss_and_gradient(
        functools.partial(steps.token_losses, model=program.model),
        state.params,
        {'tokens_BT1': jnp.asarray(tokens_BT1)},
        key,
        config.train.accumulation_steps,
    )
    broken = [
        parameter_name(path)
        for path, grad in jax.tree_util.tree_leaves_with_path(grads)
        if not jnp.isfinite(grad).all()
    ]
    text = corpus.tokenizer.decode(tokens_BT1[0])
    return (
        f'step {step + 1}: loss {float(loss):.4g}; first gradient that is not finite: '
        f'{broken[0] if broken else "none alone, but their norm"}; '
        f'first text of the batch: {text[:80]!r}'
    )
