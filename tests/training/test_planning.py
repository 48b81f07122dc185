"""Planning says what training would take, and takes nothing itself."""

import os

import jax
import pytest

from configs import gpt2
from minigpt_jax.training import planning, sharding, steps, sweep
from minigpt_jax.training.config import ConfigError, resolve, with_values
from minigpt_jax.training.loop import Program
from minigpt_jax.training.tasks import TASKS
from tests.conftest import tiny_config
from tests.test_commands import TINY, run


def test_the_plan_of_a_run_is_the_memory_that_it_reports(text_file):
    config = resolve(tiny_config(text_file, **{'mesh.data': 2, 'mesh.fsdp': 4}))
    program = Program(config, TASKS['decoder'].load(config.data))
    planned = planning.plan(config)
    assert planned.memory['all'] / 2**20 == pytest.approx(program.peak_memory_mb)
    parts = {name: size for name, size in planned.memory.items() if name != 'all'}
    assert sum(parts.values()) == planned.memory['all']
    assert min(parts.values()) > 0
    text = planning.describe(planned)
    for expected in ('embed.embedding', '8 devices (data 2 × fsdp 4)', 'CPU compiler', 'jaxlib'):
        assert expected in text


def test_the_longest_context_fits_and_the_next_does_not(text_file):
    config = resolve(tiny_config(text_file))
    at = {
        length: planning.plan(with_values(config, {'model.context_length': length})).memory['all']
        for length in (8, 16, 24, 32)
    }
    assert at[8] < at[16] < at[24] < at[32]
    for num_bytes, expected in (
        (at[24], (24, 32)),
        (at[24] - 1, (16, 24)),
        (at[8] - 1, (None, 8)),
    ):
        assert planning.longest_context(config, num_bytes) == expected
    text = planning.describe(planning.plan(config), at[24])
    assert text.splitlines()[-1].startswith('longest context: 24 tokens fit into')


def test_where_the_vocabulary_has_a_size_no_text_is_read():
    values = {'data.tokenizer': 'byte', 'data.path': '/nowhere'}
    program = planning.plan(resolve(tiny_config(**values)))
    assert program.vocab_size == 260
    values = {'data.tokenizer': 'sentencepiece', 'data.vocab_size': 300, 'data.path': '/nowhere'}
    assert planning.plan(resolve(tiny_config(**values))).vocab_size == 300


def test_gpt2_is_held_in_parts_by_arithmetic():
    """The sizes of GPT-2, written out by hand: what each of eight devices holds of it."""
    config = resolve(gpt2.get_config())
    corpus = planning.load(config.data, 'decoder')
    state = jax.eval_shape(steps.make_init(config, corpus.tokenizer.vocab_size), 0)
    V, T, D, N = 50_257, 1024, 768, 12
    matrices = V * D + T * D + N * (3 * D * D + D * D + 4 * D * D + 4 * D * D)
    vectors = N * (3 * D + D + 4 * D + D + 2 * D + 2 * D) + 2 * D
    assert matrices + vectors == 124_439_808
    mesh = sharding.make_mesh(with_values(config, {'mesh.data': 1, 'mesh.fsdp': 8}).mesh)
    own = sharding.state_sharding(mesh, state)
    held = matrices // 8 + vectors
    assert sharding.bytes_held(state.params, own.params) == 4 * held
    moments_and_count = 2 * 4 * held + 2 * 4  # Adam's and the schedule's number of the step
    assert sharding.bytes_held(state.opt_state, own.opt_state) == moments_and_count


def test_a_sweep_is_planned_point_by_point(text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config(text_file, sweep=(('model.num_heads', (1, 2, 3)),))
    assert sweep.plan(config) == 1  # 3 does not divide 16
    printed = capsys.readouterr().out
    assert '== num_heads-2' in printed
    assert 'impossible: model.num_heads=3' in printed
    assert printed.count('compiled in') == 2
    assert sweep.plan(config, only_point=1) == 0
    with pytest.raises(ConfigError, match='points go from 0 to 2'):
        sweep.plan(config, only_point=3)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_more_devices_than_there_are_can_be_imagined(text_file, tmp_path):
    common = ('--config=configs/minigpt.py', *TINY, f'--config.data.path={text_file}')
    common += ('--config.data.batch_size=32', '--config.eval.batch_size=32')
    workdir = tmp_path / 'run'
    done = run('train', *common, '--plan', '--devices=16', '--config.mesh.data=16',
               '--memory_gb=0.001', f'--workdir={workdir}')  # fmt: skip
    assert '16 devices (data 16)' in done.stdout
    assert 'longest context: ' in done.stdout.splitlines()[-1]
    assert not workdir.exists()
    for flags, line in (
        (['--devices=16'], 'error: --devices=16: is of --plan'),
        (['--plan', '--devices=0'], 'error: flag --devices=0'),
        (['--plan', '--devices=4', '--config.mesh.fsdp=8'], 'error: mesh.fsdp=8: there are 4'),
        (['--plan', '--devices=64', '--config.mesh.data=64'], 'error: data.batch_size=32: 64 dev'),
        (['--plan', '--memory_gb=-1'], 'error: flag --memory_gb=-1'),
    ):
        done = run('train', *common, *flags, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(line), done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_device_holds_the_rows_not_the_width_of_activations(text_file):
    """Under fsdp the temporaries are those of so many rows, as with data alone."""
    values = {'data.batch_size': 64, 'model.context_length': 32}
    sizes = {
        axis: planning.plan(
            resolve(tiny_config(text_file, **values | {'mesh.data': 1, f'mesh.{axis}': 8}))
        ).memory['activations, gradients and other temporaries']
        for axis in ('data', 'fsdp')
    }
    assert sizes['fsdp'] < 1.5 * sizes['data']
