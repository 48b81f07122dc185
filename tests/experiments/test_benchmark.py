"""The benchmark: what is computed from times, and that both sides compute the same."""

import sys
import types

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx

from configs import shakespeare_speedrun
from experiments import benchmark, cost_curve, workloads
from experiments.benchmark import COMPILED, EAGER, OURS, Comparison
from minigpt_jax import experiment
from minigpt_jax.report import figures
from minigpt_jax.training.config import resolve
from minigpt_jax.training.steps import abstract_params

SECONDS = {
    OURS: np.array([1.0, 2.0, 1.0, 1.0]),
    EAGER: np.array([2.0, 3.0, 1.62, 1.8]),
    COMPILED: np.array([2.0, 9.0, 1.5, 1.5]),
}


@pytest.fixture
def torch_models():
    pytest.importorskip('torch', reason='PyTorch is not installed: pip install -e .[bench]')
    from experiments import torch_models

    return torch_models


@pytest.fixture
def setting(tmp_path):
    flags.FLAGS.mark_as_parsed()
    return experiment.Setting(quick=True, out=tmp_path, workdir=tmp_path / 'runs')


# What is made of times.


def test_a_ratio_is_of_the_times_of_one_round():
    comparison = Comparison('x', benchmark.ratios(SECONDS, EAGER, OURS))
    np.testing.assert_allclose(comparison.values, [2.0, 1.5, 1.62, 1.8])
    np.testing.assert_allclose(comparison.quartiles, [1.59, 1.71, 1.85])
    assert f'{comparison}' == '1.71 (1.59 to 1.85)'


def test_the_faster_of_eager_and_compiled_counts():
    assert benchmark.fastest(SECONDS, (EAGER, COMPILED)) == COMPILED
    assert benchmark.fastest({OURS: SECONDS[OURS]}, (EAGER, COMPILED)) is None


@pytest.mark.parametrize(
    ('bound', 'at_most', 'verdict', 'asked'),
    [
        (1.3, False, 'holds', '≥ 1.3'),
        (1.7, False, 'holds', '≥ 1.7'),
        (1.8, False, 'does not hold', '≥ 1.8'),
        (1.8, True, 'holds', '≤ 1.8'),
        (0.6, True, 'does not hold', '≤ 0.6'),
        (None, False, None, ''),
    ],
)
def test_a_verdict_is_of_the_median_against_the_bound(bound, at_most, verdict, asked):
    comparison = Comparison('x', np.array([1.5, 1.7, 9.0]), bound, at_most)
    assert (comparison.verdict, comparison.asked) == (verdict, asked)


def test_what_has_no_bound_is_not_judged_and_nothing_quick_is():
    comparisons = [Comparison('a', np.array([2.0]), 1.0), Comparison('b', np.array([2.0]))]
    (claim,) = benchmark.judge(comparisons, quick=False)
    assert (claim.text, claim.theirs, claim.verdict) == ('a', '≥ 1', 'holds')
    (claim,) = benchmark.judge(comparisons, quick=True)
    assert claim.verdict == 'not decided'
    assert figures.png(benchmark.draw(comparisons))


def test_bfloat16_is_timed_where_the_processor_has_units_for_it(monkeypatch, capsys):
    for half, dtypes in ((1.1, ('float32',)), (0.2, ('float32', 'bfloat16'))):
        seconds = {('float32', 'JAX'): np.array([1.0]), ('bfloat16', 'JAX'): np.array([half])}
        monkeypatch.setattr(benchmark, 'make_products', lambda *_: {})
        monkeypatch.setattr(benchmark.experiment, 'interleaved_times', lambda *_, s=seconds: s)
        assert benchmark.dtypes_worth_timing(False, None) == dtypes
        assert ('not timed' in capsys.readouterr().out) == (half > 1)


def test_bfloat16_is_held_to_its_bound_where_it_was_timed():
    names = ('baby, float32', 'baby, bfloat16')
    seconds = {name: {OURS: np.array([x])} for name, x in zip(names, (3.0, 2.0), strict=True)}
    (comparison,) = benchmark.compare_training(seconds)
    assert (comparison.values, comparison.bound) == (1.5, 1.5)
    assert not benchmark.compare_training({names[0]: seconds[names[0]]})


def test_the_peak_is_of_the_fastest_round_of_each_library():
    times = {
        ('float32', 'JAX'): np.array([2.0, 1.0]),
        ('float32', 'PyTorch'): np.array([0.5, 3.0]),
        ('bfloat16', 'JAX'): np.array([0.1]),
    }
    flops = 2 * benchmark.product_size(quick=True) ** 3
    peaks = benchmark.peak_flops(times, 'float32', quick=True)
    assert peaks == {'JAX': flops, 'PyTorch': 2 * flops}


# Our side.


def small(**changes):
    c = workloads.shrunk(workloads.small())
    c.update_from_flattened_dict(changes)
    return workloads.make_workload('small', c, 11)


def tiny_translator():
    c = workloads.shrunk(workloads.transformer_tiny())
    return workloads.make_workload('translator', c, (13, 13))


def test_the_models_are_those_of_the_table():
    models = {
        workload.name: workload.config
        for group in benchmark.training_groups(False, ('float32', 'bfloat16'))
        for workload in group
    }
    shapes = {
        name: (
            c.model.num_layers, c.model.num_heads, c.model.d_model, c.data.batch_size,
            c.model.context_length,
        )
        for name, c in models.items()
    }  # fmt: skip
    assert shapes == {
        'small, float32': (4, 4, 128, 12, 64),
        'baby, float32': (6, 6, 384, 16, 256),
        'baby, bfloat16': (6, 6, 384, 16, 256),
        'Transformer-Tiny, float32': (4, 4, 128, 128, 20),
    }
    assert {c.optim.name for c in models.values()} == {'adamw'}
    assert {c.optim.clip_norm for c in models.values()} == {1.0}
    assert {c.model.dropout_rate for c in models.values()} == {0.0}


@pytest.mark.parametrize('make_workload', [small, tiny_translator])
def test_calls_go_on_training_and_count_all_their_tokens(make_workload):
    workload = make_workload()
    train = workloads.Training(workloads.make_program(workload), [0])
    losses = [float(train()) for _ in range(3)]
    assert int(train.state.step) == 3 * workload.config.train.steps_per_call
    assert losses[2] < losses[0]
    name = 'target_BT1' if 'target_BT1' in train.batches else 'tokens_BT1'
    assert train.batches[name][..., 1:].size == workload.tokens_per_call
    if 'target_BT1' in train.batches:  # nothing is padding
        length = workload.config.model.context_length
        assert (train.batches['source_lengths_B'] == length).all()
        assert (train.batches['target_lengths_B'] == length).all()


def test_attention_counts_six_products_whoever_computes_it():
    B, T, H, K = shape_BTHK = (2, 16, 2, 8)
    assert workloads.attention_flops(shape_BTHK) == 2 * 6 * B * H * T**2 * K
    auto, plain = (workloads.make_attention(name, shape_BTHK)() for name in ('auto', 'plain'))
    for x, y in zip(jax.tree.leaves(auto), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


# PyTorch's side.


def sides(workload, torch_models):
    ours = workloads.Training(workloads.make_program(workload), [0])
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(ours.program.init(0).params))
    module = torch_models.MODELS[workload.config.model.family](
        workload.config.model, workload.vocab_size
    )
    module.load(params)
    return ours, params, module


@pytest.mark.parametrize('make_workload', [small, tiny_translator])
def test_both_sides_train_to_the_same_losses(make_workload, torch_models):
    calls = benchmark.make_sides(make_workload(), torch_models)
    losses = {side: [float(calls[side]()) for _ in range(4)] for side in (OURS, EAGER)}
    np.testing.assert_allclose(losses[OURS], losses[EAGER], rtol=1e-4)
    assert losses[OURS][-1] < losses[OURS][0]


def test_in_bfloat16_they_do_but_for_rounding(torch_models):
    calls = benchmark.make_sides(small(**{'model.dtype': 'bfloat16'}), torch_models)
    losses = [float(calls[side]()) for side in (OURS, EAGER)]
    np.testing.assert_allclose(*losses, rtol=2e-2)


@pytest.mark.parametrize('changes', [{}, {'model.use_bias': True, 'model.init': 'torch'}])
def test_every_parameter_is_taken_over(changes, torch_models):
    _, params, module = sides(small(**changes), torch_models)
    assert torch_models.num_parameters(module) == sum(x.size for x in jax.tree.leaves(params))
    norms = [sum(float((x**2).sum()) for x in own) for own in (
        jax.tree.leaves(params), (x.detach() for x in module.parameters())
    )]  # fmt: skip
    np.testing.assert_allclose(*norms, rtol=1e-5)


@pytest.mark.parametrize('num_tokens', [5, 20])  # within the context of 8, and far beyond it
def test_both_sides_write_the_same_text(num_tokens, torch_models):
    ours = workloads.Generation(small(), batch_size=2, num_tokens=num_tokens)
    # At the start a model says but little: with large embeddings its likeliest token varies.
    ours.params = jax.tree.map(lambda x: 8 * x, ours.params)
    gpt = torch_models.GPT(small().config.model, 11)
    gpt.load(jax.tree.map(np.asarray, nnx.to_pure_dict(ours.params)))
    arguments = (gpt.last_logits, gpt, torch_models.torch.zeros(2, 1).long(), num_tokens)
    cached_BN = torch_models.generate_cached(*arguments, temperature=0)
    np.testing.assert_array_equal(ours(temperature=0), cached_BN)
    if num_tokens < 8:
        anew_BN = torch_models.generate(*arguments, temperature=0)
        np.testing.assert_array_equal(anew_BN, cached_BN)


def test_attention_is_the_same_function(torch_models):
    shape_BTHK = (2, 16, 2, 8)
    y_BTHK, gradients = workloads.make_attention('plain', shape_BTHK)()
    assert y_BTHK.shape == shape_BTHK
    found = torch_models.make_attention(shape_BTHK)()
    assert [tuple(x.shape) for x in found] == [x.shape for x in gradients]


# The command.


@flagsaver.flagsaver
def test_a_part_that_is_unknown_is_refused_in_one_line(setting):
    with pytest.raises(flags.IllegalFlagValueError, match='choose from train, attention'):
        flags.FLAGS.part = ['train', 'gpx']


@flagsaver.flagsaver(part=['attention'], vs='torch')
def test_without_pytorch_the_extra_is_named(setting, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'torch', None)
    monkeypatch.delitem(sys.modules, 'experiments.torch_models', raising=False)
    monkeypatch.setitem(benchmark.PARTS, 'attention', None)  # nothing may be run
    with pytest.raises(SystemExit) as ended:
        benchmark.measure(setting)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == 'error: --vs=torch: PyTorch is not installed; pip install -e .[bench]'


@flagsaver.flagsaver(part=['train', 'gpu'])
def test_without_a_gpu_its_part_is_refused_before_anything_is_run(setting, monkeypatch, capsys):
    monkeypatch.setitem(benchmark.PARTS, 'train', None)
    with pytest.raises(SystemExit) as ended:
        benchmark.measure(setting)
    assert ended.value.code == 2
    assert capsys.readouterr().err == 'error: --part=gpu: jax sees no GPU here, only cpu\n'


@flagsaver.flagsaver(part=['speedrun'], text=None)
def test_a_speedrun_needs_its_text(setting, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.measure(setting)
    assert ended.value.code == 2
    assert '--text=FILE names the file of tiny Shakespeare' in capsys.readouterr().err


@flagsaver.flagsaver(part=['speedrun'], text='shakespeare.txt')
@pytest.mark.parametrize(('loss', 'bound'), [(1.89, 0.4), (1.91, None)])
def test_a_time_to_a_loss_counts_where_the_loss_is_reached(loss, bound, monkeypatch):
    runs = []

    def run(workdir, cache, text, seed, quick):
        runs.append(seed)
        return {'seed': seed, 'train_s': 30.0, 'wall_s': 50.0, 'val_loss': loss}

    monkeypatch.setattr(benchmark, 'run_speedrun', run)
    times = {True: (100.0, 1.9), False: (120.0, 1.9)}
    monkeypatch.setattr(
        benchmark, 'torch_speedrun', lambda models, text, compiled, quick: times[compiled]
    )
    part = benchmark.time_speedrun(False, 'torch')
    assert runs == [0, 0, 1, 2]  # the first compiles
    reached, ratio = part.comparisons
    assert reached.verdict == ('holds' if bound else 'does not hold')
    assert (ratio.bound, list(ratio.values)) == (bound, [0.3] * 3)


def test_the_recipe_of_a_speedrun_is_within_its_limits():
    c = shakespeare_speedrun.get_config()
    config = resolve(c)
    assert config.model.context_length == 64
    sizes = jax.tree.map(lambda x: x.size, abstract_params(config, workloads.CHARACTERS))
    assert sum(jax.tree.leaves(sizes)) <= 900_000
    c.train.steps = 40  # what --quick makes of it
    resolve(c)


def test_a_command_that_fails_is_quoted(tmp_path, capsys):
    workdir = tmp_path / 'run'
    process = benchmark.start_training(workdir, tmp_path / 'cache', '--config=nothing.py')
    assert process.wait() == 2
    with pytest.raises(SystemExit):
        benchmark.fail_as(process, workdir)
    assert 'nothing.py' in capsys.readouterr().err.splitlines()[-1]


@flagsaver.flagsaver(part=['train', 'decode'], vs='torch')
def test_each_choice_of_parts_has_files_of_its_own():
    assert benchmark.options() == {'part': 'train+decode', 'vs': 'torch'}
    flags.FLAGS.part = list(benchmark.DEFAULT_PARTS)
    assert benchmark.options() == {'vs': 'torch'}


@flagsaver.flagsaver(part=['attention', 'decode'])
def test_without_the_other_library_our_own_figures_are_left(setting):
    outcome = benchmark.measure(setting)
    assert list(outcome.numbers['parts']) == ['attention', 'decode']
    assert [x['what'] for x in outcome.numbers['comparisons']] == [
        'attention forward + backward, time of auto / plain'
    ]
    assert [claim.verdict for claim in outcome.claims] == ['not decided']
    assert figures.png(outcome.figure)


@flagsaver.flagsaver(part=['attention'], vs='torch')
def test_both_sides_take_turns(setting, monkeypatch, torch_models):
    taken = []

    def recorded(name):
        return lambda *args: lambda: taken.append(name)

    monkeypatch.setattr(workloads, 'make_attention', lambda name, shape: recorded(name)())
    monkeypatch.setattr(torch_models, 'make_attention', recorded('PyTorch'))
    outcome = benchmark.measure(setting)
    rounds = benchmark.QUICK_WARM_UPS + benchmark.QUICK_ROUNDS
    assert taken == ['auto', 'plain', 'PyTorch'] * rounds
    assert len(outcome.numbers['comparisons']) == 2


def test_the_batch_on_a_gpu_is_the_largest_that_fits(monkeypatch, capsys):
    def make_program(workload):
        return types.SimpleNamespace(peak_memory_mb=100 + 10 * workload.config.data.batch_size)

    monkeypatch.setattr(workloads, 'make_program', make_program)
    monkeypatch.setattr(workloads, 'Training', lambda program, seeds: lambda: None)
    monkeypatch.setattr(cost_curve, 'device_memory', lambda: (None, 200 * 2**20))
    workload, _ = benchmark.largest_that_fits(quick=False)
    assert workload.config.data.batch_size == 8
    assert capsys.readouterr().out.splitlines() == [
        'GPT-2, 124 M, bfloat16, batch 64: not run, needs 740 MiB of 200 free',
        'GPT-2, 124 M, bfloat16, batch 16: not run, needs 260 MiB of 200 free',
    ]
    monkeypatch.setattr(cost_curve, 'device_memory', lambda: (None, 0))
    with pytest.raises(SystemExit):
        benchmark.largest_that_fits(quick=False)
    assert 'not one text of GPT-2 fits' in capsys.readouterr().err
