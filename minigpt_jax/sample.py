"""Command: generate text from a trained decoder.

python -m minigpt_jax.sample --workdir=runs/minigpt --prompt='The '
"""

import math

from absl import flags

from minigpt_jax import cli
from minigpt_jax.inference.decoding import continue_text

_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of a trained run.', required=True)
_PROMPT = flags.DEFINE_string('prompt', None, 'Text to continue.', required=True)
_NUM_TOKENS = flags.DEFINE_integer(
    'num_tokens', 300, 'Tokens to generate.', lower_bound=1, upper_bound=10**6
)
_TEMPERATURE = flags.DEFINE_float(
    'temperature', 0.8, '0: greedy; 1: as trained.', lower_bound=0, upper_bound=1000
)
_TOP_K = flags.DEFINE_integer(
    'top_k', 0, 'Draw from the k likeliest; 0: all.', lower_bound=0, upper_bound=2**31 - 1
)
_TOP_P = flags.DEFINE_float(
    'top_p', 1.0, 'Draw from the likeliest that sum to p.', lower_bound=0, upper_bound=1
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the draw.', lower_bound=0, upper_bound=2**31 - 1)
for _name in ('temperature', 'top_p'):  # a bound lets NaN pass
    flags.register_validator(_name, math.isfinite, f'--{_name} must be a finite number')
_NUM_SAMPLES = flags.DEFINE_integer(
    'num_samples', 1, 'Continuations.', lower_bound=1, upper_bound=10**4
)


def main():
    cli.use_compilation_cache()
    run = cli.load_run_of('decoder', cli.directory('workdir', _WORKDIR.value))
    context = run.config.model.context_length
    length = len(run.tokenizer.encode(_PROMPT.value))
    texts = continue_text(
        run.model,
        run.params,
        run.tokenizer,
        context,
        _PROMPT.value,
        num_tokens=_NUM_TOKENS.value,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        seed=_SEED.value,
        num_samples=_NUM_SAMPLES.value,
    )
    print(f'\n{"-" * 80}\n'.join(texts))
    if length + _NUM_TOKENS.value - 1 > context:  # nothing is drawn given the last token
        print(
            f'({length} + {_NUM_TOKENS.value} tokens are more than the context of {context}: the '
            f'window slid; once it was full, each token saw {min(context, context // 2 + 1)} to '
            f'{context} tokens before it)'
        )
    return 0


if __name__ == '__main__':
    cli.run_command(main)
