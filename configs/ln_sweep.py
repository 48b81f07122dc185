"""Who needs warm-up? The norm behind the sums or before the branches, at three depths.

    python -m minigpt_jax.train --config=configs/ln_sweep.py

Two placements × 2, 4 and 6 layers × no warm-up or 200 steps of it × two learning rates × three
seeds: 72 runs, 20 minutes on two cores. Adam without clipping and decay, Glorot's
initialisation, as in the original Transformer: clipping and smaller weights do part of what
warm-up does.

Expected: val_loss of 2.5 (2 layers) to 2.8 (6) where a run learns; 3.28, what the frequencies of
characters give, where it does not: Post-LN without warm-up at the higher rate, now and then with 2
layers and always from 4 on, and mostly with 6 layers at the lower rate; with warm-up only with 6
layers at the higher rate. Pre-LN learns at every point.
`python -m experiments.norm_training` judges it, with a map. `:quick`, six runs of two layers in
under a minute, shows that it runs and finds nothing. Further placements are
`--config.sweep="(('model.norm_placement', ('sandwich', 'deepnorm', 'none')), …)"`.

Source: Xiong et al. 2020, On layer normalization in the Transformer architecture, section 4.
"""

from configs import minigpt


def get_config(variant=''):
    if variant not in ('', 'quick'):
        raise ValueError(f'configs/ln_sweep.py has no variant {variant!r}; it takes quick')
    c = minigpt.get_config()
    c.data.batch_size = 8
    c.data.validation_fraction = 0.02
    c.model.d_model = 64
    c.model.context_length = 32
    c.model.init = 'xavier'
    c.model.use_bias = True
    c.model.scan_layers = True  # 24 programs: to compile them would take longer than to run them
    c.optim.name = 'adam'
    c.optim.b2 = 0.98
    c.optim.weight_decay = 0.0
    c.optim.rules = ()
    c.optim.clip_norm = 0.0
    c.optim.final_learning_rate = 0.0
    c.train.steps = c.train.checkpoint_every = 500
    c.eval.every = 100
    c.eval.sample_tokens = 100
    c.sweep = (
        ('model.norm_placement', ('post', 'pre')),
        ('model.num_layers', (2, 4, 6)),
        ('optim.warmup_steps', (0, 200)),
        ('optim.learning_rate', (1e-3, 4e-3)),
        ('seed', (0, 1, 2)),
    )
    if variant == 'quick':
        c.train.steps = c.train.checkpoint_every = c.eval.every = 40
        c.eval.sample_tokens = 20
        c.sweep = (
            ('model.norm_placement', ('post', 'pre')),
            ('model.num_layers', (2,)),
            ('optim.warmup_steps', (0,)),
            ('optim.learning_rate', (4e-3,)),
            ('seed', (0, 1, 2)),
        )
    return c
