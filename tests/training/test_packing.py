"""Packed documents: each has the losses that it has alone, in training and in evaluation."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.model.positions import POSITIONS, positions_in_segments
from minigpt_jax.training import loop, sharding, steps, sweep, tasks
from minigpt_jax.training.config import ConfigError, resolve
from tests.conftest import tiny_config

PACKED = {
    'data.document_separator': '.\n',
    'data.pack_documents': True,
    'model.context_length': 64,  # two documents and a part of a third
    'model.num_layers': 2,
}


def packed_task(text_file, **values):
    config = resolve(tiny_config(text_file, **PACKED | values))
    return tasks.ContinueText(config, tasks.ContinueText.load(config.data))


def model_and_params(task):
    vocab_size = task.corpus.tokenizer.vocab_size
    params = steps.make_init(task.config, vocab_size)(0).params
    # Larger than at the start, where tokens hardly attend to one rather than another.
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, params)
    return steps.build_model(task.config, vocab_size), params


def documents(tokens_T1, eos_id):
    """The stretches of a window, each with the EOS that ends it."""
    ends = np.flatnonzero(tokens_T1 == eos_id) + 1
    return [part for part in np.split(tokens_T1, ends) if len(part) > 1]


def losses_alone(model, params, batch, eos_id):
    """The naive version: one document at a time, as a window of its own."""
    total = count = 0.0
    for window in np.asarray(batch['tokens_BT1']):
        for document in documents(window, eos_id):
            alone = {'tokens_BT1': jnp.asarray(document)[None]}
            loss, targets = steps.token_losses(params, alone, None, model=model)
            total, count = total + loss, count + targets
    return total, count


# The naive version compiles nothing, and takes its time.
SLOW = [p for p in POSITIONS if p not in ('learned', 'rotary')]


@pytest.mark.parametrize(
    ('positions', 'attention'),
    [
        *((p, 'plain') if p not in SLOW else pytest.param(p, 'plain', marks=pytest.mark.slow)
          for p in POSITIONS),
        ('learned', 'blockwise'),
    ],
)  # fmt: skip
def test_a_pack_has_the_losses_of_its_documents_alone_with_gradients(
    text_file, positions, attention
):
    changed = {'model.positions': positions, 'model.attention': attention, 'data.batch_size': 2}
    task = packed_task(text_file, **changed)
    model, params = model_and_params(task)
    batch = task.batch(seed=0, step=3)
    eos_id = task.corpus.tokenizer.eos_id
    assert batch['segment_ids_BT'].max() >= 2

    def packed(params):
        return steps.token_losses(params, jax.tree.map(jnp.asarray, batch), None, model=model)

    def alone(params):
        return losses_alone(model, params, batch, eos_id)

    (loss, count), gradients = jax.value_and_grad(packed, has_aux=True)(params)
    (naive, naive_count), naive_gradients = jax.value_and_grad(alone, has_aux=True)(params)
    assert count == naive_count
    np.testing.assert_allclose(loss, naive, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (gradients, naive_gradients)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())
    unmarked = {name: batch[name] for name in ('tokens_BT1', 'mask_BT')}
    assert abs(steps.token_losses(params, unmarked, None, model=model)[0] - loss) > 1e-3 * loss


def test_what_stands_in_a_document_changes_nothing_in_another(text_file):
    task = packed_task(text_file)
    model, params = model_and_params(task)
    batch = task.batch(seed=0, step=0)
    ids_BT = jnp.asarray(batch['segment_ids_BT'])

    def second(x_BTD):
        """The outputs of the second document alone, given embeddings."""
        module = nnx.merge(model, params)
        module.embed = lambda tokens: x_BTD
        y_BTD, _ = module.hidden(jnp.asarray(batch['tokens_BT1'][:, :-1]), segment_ids_BT=ids_BT)
        return jnp.where((ids_BT == 1)[..., None], y_BTD, 0).sum()

    x_BTD = jnp.ones((*ids_BT.shape, task.config.model.d_model)) + 0.1 * jax.random.normal(
        jax.random.key(0), (*ids_BT.shape, task.config.model.d_model)
    )
    gradient_BT = np.abs(jax.grad(second)(x_BTD)).max(-1)
    assert (gradient_BT[ids_BT != 1] == 0).all()
    assert (gradient_BT[ids_BT == 1] > 0).mean() > 0.9


def test_positions_start_again_in_each_document():
    ids_BT = jnp.array([[0, 0, 0, 1, 2, 2], [4, 4, 4, 4, 4, 4], [0, 1, 2, 3, 3, 0]])
    np.testing.assert_array_equal(
        positions_in_segments(ids_BT), [[0, 1, 2, 0, 0, 1], range(6), [0, 0, 0, 0, 1, 0]]
    )


def test_batches_are_those_of_unpacked_windows_with_their_documents(text_file):
    packed = packed_task(text_file)
    plain = packed_task(text_file, **{'data.pack_documents': False})
    for step, call in zip((0, 2, 4), packed.batches(5, 0), strict=False):
        for k in range(2):
            alone = packed.batch(5, step + k)
            assert set(alone) == {'tokens_BT1', 'segment_ids_BT', 'mask_BT'}
            jax.tree.map(np.testing.assert_array_equal, {n: x[k] for n, x in call.items()}, alone)
            np.testing.assert_array_equal(
                alone['tokens_BT1'], plain.batch(5, step + k)['tokens_BT1']
            )
        (shapes,) = packed.abstract_batches()
        assert {n: (x.shape, x.dtype) for n, x in call.items()} == {
            n: (x.shape, x.dtype) for n, x in shapes.items()
        }


def test_validation_counts_every_token_but_the_first_of_each_document(text_file):
    task = packed_task(text_file)
    (batch,) = task.validation()
    tokens, eos_id = task.corpus.validation_tokens, task.corpus.tokenizer.eos_id
    assert batch['mask_BT'].sum() == sum(
        len(document) - 1 for document in documents(np.asarray(tokens), eos_id)
    )
    assert task.columns(2.0) == {'bits_per_byte': None}  # the first tokens have no bits


def test_one_document_cannot_be_packed(text_file):
    task = packed_task(text_file, **{'data.document_separator': None})
    with pytest.raises(ConfigError, match=r'one document; .* data\.document_separator'):
        task.check(sharding.make_mesh(task.config.mesh))


@pytest.mark.slow
def test_a_killed_packed_run_resumes_to_the_same_bits(text_file, tmp_path, monkeypatch):
    config = tiny_config(text_file, **PACKED)
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    assert sweep.run(config, whole) == 0
    call, calls = loop.Program.train_call, []

    def fails_in_the_fourth_call(self, state, batches):
        calls.append(batches)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return call(self, state, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Program, 'train_call', fails_in_the_fourth_call)
        with pytest.raises(KeyboardInterrupt):
            sweep.run(config, killed)
    assert sweep.run(config, killed) == 0
    metrics = [(run / 'metrics.jsonl').read_text() for run in (whole, killed)]
    assert metrics[0] == metrics[1]
    assert json.loads((killed / 'summary.json').read_text())['status'] == 'ok'
