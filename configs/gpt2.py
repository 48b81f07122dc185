"""GPT-2 of 124 M parameters, for many devices.

    python -m minigpt_jax.train --config=configs/gpt2.py --config.data.path=FILES --config.mesh.fsdp=-1 --config.mesh.data=1

FILES is text enough to learn 50,257 byte pairs from: gigabytes. What it takes on a machine says

    python -m minigpt_jax.train --config=configs/gpt2.py --plan --devices=64 --config.mesh.fsdp=64 --config.mesh.data=1

Half a million tokens a step, the rates of nanoGPT for this size. **Not trained yet**: planned only.
"""  # noqa: E501

from configs import minigpt


def get_config(variant=''):
    if variant:
        raise ValueError(f'configs/gpt2.py has no variant {variant!r}; it takes none')
    c = minigpt.get_config()
    c.data.corpus = 'text'
    c.data.tokenizer = 'sentencepiece'
    c.data.vocab_size = 50_257
    c.data.batch_size = 512
    c.data.validation_fraction = 0.001
    c.model.d_model = 768
    c.model.num_heads = 12
    c.model.num_layers = 12
    c.model.context_length = 1024
    c.model.use_bias = True
    c.model.dtype = 'bfloat16'
    c.model.scan_layers = True  # compiles in a twelfth of the program
    c.model.remat = True
    c.optim.learning_rate = 6e-4
    c.optim.warmup_steps = 2000
    c.optim.final_learning_rate = 6e-5
    c.optim.b2 = 0.95
    c.train.steps = 100_000
    c.train.checkpoint_every = 1000
    c.eval.every = 1000
    c.eval.batch_size = 64
    return c
