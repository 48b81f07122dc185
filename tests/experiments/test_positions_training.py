"""Position encodings trained and read beyond their length: evaluation and verdicts."""

import jax
import numpy as np
import pytest

from experiments import positions_training
from minigpt_jax.data.batches import load_tokenized
from minigpt_jax.training import steps
from minigpt_jax.training.config import resolve
from tests.conftest import tiny_config


def losses(changes=None):
    """{(family, positions, factor): three seeds}, as a run of the experiment might find them."""
    noise = np.array([-0.01, 0.0, 0.01])
    means = {
        ('causal', 'learned', 1): 2.40,
        ('causal', 'sinusoidal', 1): 2.40,
        ('causal', 'sinusoidal', 4): 2.90,
        ('causal', 'none', 1): 2.41,
        ('bidirectional', 'none', 1): 3.0,
        ('bidirectional', 'rotary', 1): 2.2,
    }
    return {
        key: list(mean + noise * (-1) ** i)
        for i, (key, mean) in enumerate((means | (changes or {})).items())
    }


def verdicts(found, lost=(0.1, 0.11, 0.12)):
    return [claim.verdict for claim in positions_training.judge(found, {'none': list(lost)})]


def test_verdicts_follow_the_differences():
    assert verdicts(losses()) == ['holds', 'holds under a condition', 'does not hold']
    assert verdicts(losses(), lost=(-0.1, 0.0, 0.1))[1] == 'holds'
    changes = {('causal', 'learned', 1): 2.0, ('causal', 'sinusoidal', 4): 2.4}
    assert verdicts(losses(changes)) == ['does not hold', 'holds under a condition', 'holds']


def test_what_was_not_trained_is_not_judged():
    assert verdicts({('causal', 'learned', 1): [1, 1, 1], ('causal', 'alibi', 1): [1, 1, 1]}) == []


def test_shuffling_costs_a_model_that_knows_order_alone(text_file):
    config = resolve(tiny_config(text_file, **{'model.positions': 'none', 'model.num_layers': 1}))
    vocab_size = load_tokenized(config.data).tokenizer.vocab_size
    params = steps.make_init(config, vocab_size)(0).params
    lost = positions_training.loss_by_shuffling(config)(params)
    assert abs(lost) < 1e-6  # one layer without positions: its last query sees a bag
    config.model.positions = 'rotary'
    params = jax.tree.map(lambda x: 8 * x, steps.make_init(config, vocab_size)(0).params)
    assert abs(positions_training.loss_by_shuffling(config)(params)) > 1e-3


@pytest.mark.parametrize('positions', ['learned', 'rotary'])
def test_the_same_text_is_read_in_longer_windows(text_file, positions):
    config = resolve(tiny_config(text_file, **{'model.positions': positions}))
    length = config.model.context_length
    evaluated = positions_training.evaluate(config, 2 * length)
    if positions == 'learned':
        assert evaluated is None
        return
    vocab_size = load_tokenized(config.data).tokenizer.vocab_size
    params = steps.make_init(config, vocab_size)(0).params
    for own in (positions_training.evaluate(config, length), evaluated):
        assert own(params) == pytest.approx(np.log(vocab_size), abs=0.3)
