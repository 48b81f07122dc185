"""What attention and an LSTM cost: the formulas, the crossings, the compiler's memory."""

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx

from experiments import cost_curve
from experiments.cost_curve import BLOCKWISE, LSTM, PLAIN, compile_pass, memory_bytes
from minigpt_jax import experiment
from minigpt_jax.report import figures


def test_operations_are_equal_at_twice_the_width():
    d = cost_curve.WIDTH
    plain, lstm = (cost_curve.multiply_adds(form, 2 * d) for form in (PLAIN, LSTM))
    assert plain == lstm == 16 * d**3
    assert cost_curve.multiply_adds(PLAIN, d) == 0.75 * cost_curve.multiply_adds(LSTM, d)


@pytest.mark.parametrize('form', cost_curve.FORMS)
def test_the_formulas_are_what_the_programs_do(form):
    for n in (7, 128, 512):
        assert cost_curve.counted_multiply_adds(form, n) == cost_curve.multiply_adds(form, n)


def test_the_parameters_are_those_of_the_formulas():
    d = cost_curve.WIDTH
    for form, matrices in ((PLAIN, 4), (BLOCKWISE, 4), (LSTM, 8)):
        state = nnx.state(nnx.eval_shape(lambda form=form: cost_curve.make_layer(form)))
        kernels = [x.size for x in jax.tree.leaves(state) if len(x.shape) > 1]
        assert sum(kernels) == matrices * d**2


def test_a_crossing_lies_on_the_line_between_two_lengths():
    lengths = [128, 512]
    assert cost_curve.crossing(lengths, [1, 4], [2, 2]) == pytest.approx(256)
    assert cost_curve.crossing(lengths, [1, 4], [8, 8]) is None
    memory = [row[1] for row in cost_curve.THEIRS.values()]
    plain, _, lstm = zip(*memory, strict=True)
    theirs = cost_curve.crossing(list(cost_curve.THEIRS), plain, lstm)
    assert theirs == pytest.approx(268, abs=3)


@pytest.mark.parametrize(
    ('plain', 'lstm', 'text'),
    [
        ([1, 4], [2, 2], 'from n = 256 on'),
        ([1, 1], [2, 2], 'at no length'),
        ([3, 3], [2, 2], 'at every length'),
        ([4, 1], [2, 2], 'at some'),
    ],
)
def test_where_one_costs_more_than_the_other(plain, lstm, text):
    assert cost_curve.place([128, 512], plain, lstm) == text
    assert cost_curve.place([], [], []) == 'at no length at which both ran'


def test_plain_and_blockwise_layers_compute_the_same():
    x_BTD = np.random.default_rng(0).standard_normal((1, 24, 32)).astype(np.float32)
    plain, blockwise = (
        cost_curve.make_layer(form, width=32, num_heads=4)(x_BTD) for form in (PLAIN, BLOCKWISE)
    )
    np.testing.assert_allclose(plain, blockwise, atol=1e-5)


def measured(**changes):
    """What `measure` finds, with figures of our own."""
    lengths = list(cost_curve.LENGTHS)
    results = {
        'batch': cost_curve.BATCH,
        'lengths': lengths,
        'seconds': {PLAIN: [[2.0 * n] for n in lengths], BLOCKWISE: [[1.0 * n] for n in lengths],
                    LSTM: [[4.0 * n] for n in lengths]},
        'memory_bytes': {PLAIN: [n**2 for n in lengths], BLOCKWISE: [100 * n for n in lengths],
                         LSTM: [300 * n for n in lengths]},
        'temporary_ratio_without_projections': 25.0,
        'blockwise_differences': {'128': 1e-6},
    } | changes  # fmt: skip
    return results | {'crossings': cost_curve.crossings(results)}


def test_only_the_whole_measurement_is_judged():
    whole, part = (
        [claim.verdict for claim in cost_curve.judge(measured(**changes))]
        for changes in ({}, {'batch': 1})
    )
    assert whole == ['does not hold', 'does not hold', *['holds'] * 4]
    assert part == ['does not hold', *['not decided'] * 4, 'holds']


def test_one_length_with_a_slower_kernel_is_a_condition():
    results = measured()
    results['seconds'][BLOCKWISE][0] = [2.2 * 128]
    claims = cost_curve.judge(results)
    assert claims[-2].verdict == 'holds under a condition'
    assert claims[-2].ours.startswith('median ratio of times, blockwise by plain: 1.10 at n = 128')


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cost_curve, 'QUICK_LENGTHS', (8, 32))
    flags.FLAGS.mark_as_parsed()


@pytest.mark.slow
def test_a_form_that_does_not_fit_is_skipped_and_said_so(small, tmp_path, monkeypatch, capsys):
    free = memory_bytes(compile_pass(LSTM, 32, cost_curve.QUICK_BATCH)) - 1
    monkeypatch.setattr(cost_curve, 'device_memory', lambda: (2**33, free))
    outcome = cost_curve.measure(experiment.Setting(True, tmp_path, tmp_path))
    assert f'n = 32, {LSTM}: not run, needs' in capsys.readouterr().out
    assert outcome.numbers['seconds'][LSTM][1] is None
    assert len(outcome.numbers['seconds'][PLAIN][1]) == cost_curve.QUICK_ROUNDS
    ((_, _, rows), *_) = outcome.tables
    assert rows[1][3] == 'does not fit'
    assert all(x < 1e-5 for x in outcome.numbers['blockwise_differences'].values())
    assert figures.png(outcome.figure)


@pytest.mark.slow
def test_where_nothing_fits_memory_is_still_shown(small, tmp_path, monkeypatch):
    monkeypatch.setattr(cost_curve, 'device_memory', lambda: (2**33, 0))
    outcome = cost_curve.measure(experiment.Setting(True, tmp_path, tmp_path))
    assert outcome.tables[2][2][1] == ['time', 'at no length at which both ran']
    assert figures.png(outcome.figure)


@pytest.mark.parametrize('lengths', [['128', 'long'], ['0'], ['-4'], ['1.5'], [], ['1000000000']])
@flagsaver.flagsaver
def test_lengths_are_whole_numbers_of_tokens(small, lengths):
    with pytest.raises(flags.IllegalFlagValueError, match='lengths are whole numbers of tokens'):
        flags.FLAGS.seq_lens = lengths


@pytest.mark.slow
def test_only_the_memory_of_plain_attention_grows_with_the_square():
    grown = {
        form: memory_bytes(compile_pass(form, 4096, 1)) / memory_bytes(compile_pass(form, 1024, 1))
        for form in cost_curve.FORMS
    }
    assert grown[PLAIN] > 10
    assert grown[BLOCKWISE] < 4.2
    assert grown[LSTM] < 4.2
