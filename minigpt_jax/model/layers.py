"""What all layers are made of: dense layers and their initialisation, norms and where they stand.

Tensor names end in their dimensions: B batch, T length, D model width.
"""

import math

import jax
from flax import nnx
from ml_collections import ConfigDict

from minigpt_jax.model.kernels import dense_product

EMBEDDING_INIT = nnx.initializers.normal(0.02)  # tables of tokens and of positions, whatever `init`


# How a dense layer starts: (fan_in, fan_out) -> (initializer of W, initializer of b).


def _gpt2(fan_in, fan_out):
    """W ~ N(0, 0.02²), b = 0. Radford et al. 2019 (GPT-2) and its code."""
    return nnx.initializers.normal(0.02), nnx.initializers.zeros


def _xavier(fan_in, fan_out):
    """W ~ U(±√(6 / (fan_in + fan_out))), b = 0. Glorot and Bengio 2010, equation 16."""
    return _uniform((6 / (fan_in + fan_out)) ** 0.5), nnx.initializers.zeros


def _torch(fan_in, fan_out):
    """W and b ~ U(±1/√fan_in): the default of PyTorch's `nn.Linear`; LeCun et al. 1998."""
    return _uniform(fan_in**-0.5), _uniform(fan_in**-0.5)


def _uniform(bound):
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


INITS = {'gpt2': _gpt2, 'xavier': _xavier, 'torch': _torch}


def dense(config, d_in, d_out, *, rngs, gain=1.0, fan_out=None):
    """A dense layer x W + b, d_in -> d_out; b only with `use_bias`, W and b drawn as `init` says.

    gain: multiplies W at the start; broadcasts to d_out. fan_out: outputs of the matrix that this
    layer is a part of or is made of, where Glorot's rule should see that one; d_out otherwise.
    """
    outputs = d_out if isinstance(d_out, tuple) else (d_out,)
    init_w, init_b = INITS[config.init](d_in, fan_out or math.prod(outputs))

    def init_scaled_w(key, shape, dtype):
        w = init_w(key, shape, dtype)
        return (w.reshape(d_in, *outputs) * gain).reshape(shape)

    return nnx.LinearGeneral(
        d_in,
        d_out,
        use_bias=config.use_bias,
        kernel_init=init_scaled_w,
        bias_init=init_b,
        dot_general=dense_product(config.dtype),
        rngs=rngs,
    )


def residual_output(config, d_in, *, rngs):
    """The last dense layer of a residual branch, d_in -> D.

    In `init` gpt2 its σ is 0.02/√(branches): the residual stream is a sum of two branches a layer,
    of three with encoder-decoder attention, and the division keeps its variance from growing with
    depth (Radford et al. 2019, section 2.3). DeepNorm has its own factor instead.
    """
    gain = branch_gain(config)
    if config.init == 'gpt2' and config.norm_placement != 'deepnorm':
        gain = num_branches(config) ** -0.5
    return dense(config, d_in, config.d_model, rngs=rngs, gain=gain)


def layer_norm(config, width, *, rngs):
    """(x - mean) / √(variance + 1e-5) over the last axis, times a scale, plus a bias (`use_bias`).

    Source: Ba et al. 2016.
    """
    return nnx.LayerNorm(width, epsilon=1e-5, use_bias=config.use_bias, rngs=rngs)


def rms_norm(config, width, *, rngs):
    """x / √(mean(x²) + 1e-5) over the last axis, times a scale; nothing is centred, no bias.

    Source: Zhang and Sennrich 2019.
    """
    del config
    return nnx.RMSNorm(width, epsilon=1e-5, rngs=rngs)


NORMS = {'layer': layer_norm, 'rms': rms_norm}


def make_norm(config, width, *, rngs):
    """The norm that `config.norm` names, over an axis of `width`."""
    return NORMS[config.norm](config, width, rngs=rngs)


class Residual(nnx.Module):
    """A residual branch around a part of a block; which norms it has, and where, is a subclass.

    Called as `residual(x_BTD, branch)`, where branch(x_BTD) is (y_BTD, anything else); returns
    (x_BTD, that else). With `config.residual` off the sum x + y is y alone. A new placement is a
    subclass and a line in `NORM_PLACEMENTS`.
    """

    needs_final_norm = False  # of the last block's output, before the logits

    def __init__(self, config, *, rngs):
        del rngs
        self.residual = config.residual

    def add(self, x_BTD, y_BTD):
        return x_BTD + y_BTD if self.residual else y_BTD

    @staticmethod
    def branch_gain(config):
        """What multiplies feed-forward, value and output projections at the start."""
        del config
        return 1.0


class PreNorm(Residual):
    """x + branch(norm(x)): the stream is never normalised. Xiong et al. 2020; GPT-2."""

    needs_final_norm = True

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.norm = make_norm(config, config.d_model, rngs=rngs)

    def __call__(self, x_BTD, branch):
        y_BTD, rest = branch(self.norm(x_BTD))
        return self.add(x_BTD, y_BTD), rest


class PostNorm(Residual):
    """norm(x + branch(x)): as in the original paper. Vaswani et al. 2017, section 3.1."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.norm = make_norm(config, config.d_model, rngs=rngs)

    def __call__(self, x_BTD, branch):
        y_BTD, rest = branch(x_BTD)
        return self.norm(self.add(x_BTD, y_BTD)), rest


class SandwichNorm(Residual):
    """x + after(branch(before(x))): a pre-norm whose branch cannot grow.

    Source: Ding et al. 2021 (CogView), section 2.4, "Sandwich-LN".
    """

    needs_final_norm = True

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.before = make_norm(config, config.d_model, rngs=rngs)
        self.after = make_norm(config, config.d_model, rngs=rngs)

    def __call__(self, x_BTD, branch):
        y_BTD, rest = branch(self.before(x_BTD))
        return self.add(x_BTD, self.after(y_BTD)), rest


class DeepNorm(PostNorm):
    """norm(α x + branch(x)), and branches that start smaller, by β.

    - a stack of M layers alone: α = (2M)^¼, β = (8M)^-¼;
    - an encoder of N layers under a decoder of M: α = 0.81 (N⁴M)^¹⁄₁₆, β = 0.87 (N⁴M)^-¹⁄₁₆;
    - that decoder: α = (3M)^¼, β = (12M)^-¼.

    Source: Wang et al. 2022 (DeepNet), figure 2.
    """

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.alpha = deepnorm_factors(config)[0]

    def add(self, x_BTD, y_BTD):
        return self.alpha * x_BTD + y_BTD

    @staticmethod
    def branch_gain(config):
        return deepnorm_factors(config)[1]


def deepnorm_factors(config):
    """(α, β) of the stack that `config` is for: see `DeepNorm`."""
    M = config.num_layers
    if stack_of(config) == 'decoder':
        return (3 * M) ** 0.25, (12 * M) ** -0.25
    if stack_of(config) == 'encoder':
        depth = config.encoder_layers**4 * M
        return 0.81 * depth ** (1 / 16), 0.87 * depth ** (-1 / 16)
    return (2 * M) ** 0.25, (8 * M) ** -0.25


def stack_of(config):
    """Which stack of layers `config` is for: 'encoder' or 'decoder' of the two, else 'alone'."""
    return config.get('stack', 'alone')


def num_branches(config):
    """Residual branches of the stack that `config` is for."""
    if stack_of(config) == 'encoder':
        return 2 * config.encoder_layers
    return (3 if stack_of(config) == 'decoder' else 2) * config.num_layers


def for_stack(config, stack):
    """A copy of the group `model` for one stack of an encoder-decoder, 'encoder' or 'decoder'."""
    return ConfigDict({**config, 'stack': stack})


class NoNorm(Residual):
    """x + branch(x), without any norm in the model but those of queries and keys (`qk_norm`)."""

    def __call__(self, x_BTD, branch):
        y_BTD, rest = branch(x_BTD)
        return self.add(x_BTD, y_BTD), rest


NORM_PLACEMENTS = {
    'pre': PreNorm,
    'post': PostNorm,
    'sandwich': SandwichNorm,
    'deepnorm': DeepNorm,
    'none': NoNorm,
}


def branch_gain(config):
    """What the norm placement multiplies a branch's weights by at the start: DeepNorm's β, or 1."""
    return NORM_PLACEMENTS[config.norm_placement].branch_gain(config)


def dropout(x, rate, key):
    """Zeroes entries with probability `rate`, scales the rest by 1/(1 - rate); off without a key.

    Source: Srivastava et al. 2014.
    """
    return nnx.Dropout(rate)(x, deterministic=key is None, rngs=key)


def split_key(key, count):
    """`count` independent keys; `None` (dropout off) stays `None`."""
    return (None,) * count if key is None else jax.random.split(key, count)


class Tap:
    """Where intermediates leave a layer: `x = tap('block_outputs', x)` is x, noted if asked for.

    One is made for each layer and trace; what it noted, `values`, becomes an output of the traced
    function. Asked for nothing, it leaves no mark on the program.
    """

    def __init__(self, names=()):
        self.names, self.values = frozenset(names), {}

    def wants(self, name):
        return name in self.names

    def __call__(self, name, value):
        if self.wants(name):
            self.values[name] = value
        return value


NO_TAP = Tap()
