"""Dates from English to Korean: the smallest translation that an encoder-decoder learns whole.

    python -m minigpt_jax.train --config=configs/translate_dates.py

"Monday, November 30, 2026" becomes "2026년 11월 30일 월요일": the parts in another order, each
copied or looked up. Trains 0.9 M parameters on fifty years of days, one in fifty held out, in three
lengths; two minutes on two cores. Expected: exact_match at least 0.995 on the days held out. Any
pair of CLDR locales works: `--config.data.target_language=fr --workdir=runs/dates_fr`.
"""

from configs import minigpt


def get_config(variant=''):
    if variant:
        raise ValueError(f'configs/translate_dates.py has no variant {variant!r}; it takes none')
    c = minigpt.get_config()
    c.data.corpus = 'dates'
    c.data.batch_size = 64
    c.data.validation_fraction = 0.02
    c.model.family = 'encoder_decoder'
    c.model.num_layers = 2
    c.model.context_length = 64
    c.train.steps = 600
    c.train.checkpoint_every = 600
    c.eval.every = 200
    c.eval.batch_size = 64
    c.eval.decoded_pairs = 1200
    return c
