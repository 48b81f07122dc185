"""Every test runs offline on 8 host devices, and compiles each program once for the whole suite."""

import os
import pathlib

os.environ['JAX_PLATFORMS'] = 'cpu'
# Most of the suite's time is compiling tiny programs, whose speed does not matter.
os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '')
    + ' --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
)

import jax
import pytest

from configs import minigpt

ROOT = pathlib.Path(__file__).parent.parent
DATA = ROOT.parent / 'shared' / 'data'


@pytest.fixture(scope='session')
def shared_data():
    """The folder with tiny Shakespeare; a test that needs it is skipped where there is none."""
    if not DATA.is_dir():
        if os.environ.get('MINIGPT_REQUIRE_DATA'):
            pytest.fail(f'{DATA} is missing, and MINIGPT_REQUIRE_DATA is set')
        pytest.skip(f'{DATA} is missing')
    return DATA


@pytest.fixture(scope='session', autouse=True)
def _own_caches(tmp_path_factory):
    """No test reads or writes the user's data sets and compiled programs."""
    root = tmp_path_factory.mktemp('caches')
    os.environ['TFDS_DATA_DIR'] = str(root / 'tfds')
    os.environ['JAX_COMPILATION_CACHE_DIR'] = str(root / 'xla')
    jax.config.update('jax_compilation_cache_dir', str(root / 'xla'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


@pytest.fixture(scope='session')
def text_file(tmp_path_factory):
    """About 6,000 characters of text that a tiny model can learn a little of."""
    path = tmp_path_factory.mktemp('text') / 'text.txt'
    lines = [f'{i} and {i + 1} make {2 * i + 1}; the next is {i + 2}.\n' for i in range(150)]
    path.write_text(''.join(lines))
    return path


def tiny_config(path=None, **values):
    """The smallest configuration that exercises everything; `values` by dotted key."""
    c = minigpt.get_config()
    c.data.corpus, c.data.path = 'text', None if path is None else str(path)
    c.data.batch_size = 8
    c.model.d_model, c.model.num_heads, c.model.num_layers = 16, 2, 1
    c.model.context_length = 8
    c.optim.warmup_steps = 2
    c.train.steps, c.train.steps_per_call, c.train.log_every = 12, 2, 2
    c.train.checkpoint_every = c.eval.every = 4
    c.eval.batch_size, c.eval.sample_tokens = 16, 12
    c.mesh.data = 1
    c.update_from_flattened_dict(values)
    return c
