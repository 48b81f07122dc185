"""Array kernels whose fast form differs from what autodiff or the compiler would write."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax


def product(spec, a, b, dtype):
    """`jnp.einsum` of two arrays with operands in `dtype` and a float32 result.

    So it is in the gradient as well, where the arriving cotangent is cast to `dtype`: bfloat16
    units multiply, float32 adds up, and what is kept for the backward pass is of half the size.
    Every index stands in two of the three terms at least, as in any product of matrices.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return jnp.einsum(spec, a, b)  # JAX's own gradient does all that
    return _product((spec, dtype, None, a.dtype, b.dtype), a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static, a, b):
    spec, dtype, precision, *_ = static
    if dtype != 'float32' and _rounds_instead(spec):
        bits = jnp.finfo(dtype)
        a, b = (lax.reduce_precision(x.astype(jnp.float32), bits.nexp, bits.nmant) for x in (a, b))
    else:
        a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _rounds_instead(spec):
    """Whether operands are only rounded to `dtype`, and multiplied in float32: the same numbers.

    XLA's CPU compiler (jax 0.10 to 0.12) has fast bfloat16 products of matrices only where the
    last axes of the left one are contracted. Others it multiplies in float32 itself, or rearranges
    into what it cannot run: "Unsupported element type for DotThunk".
    """
    terms, result = spec.split('->')
    left, right = terms.split(',')
    contracted = ''.join(axis for axis in left if axis not in result)
    has_batch_axes = bool(set(left) & set(right) & set(result))
    is_fast = left.endswith(contracted) and not has_batch_axes
    return jax.default_backend() == 'cpu' and not is_fast


def _product_forward(static, a, b):
    dtype = static[1]
    return _product(static, a, b), (a.astype(dtype), b.astype(dtype))


def _product_backward(static, operands, dy):
    spec, dtype, precision, a_dtype, b_dtype = static
    terms, result = spec.split('->')
    left, right = terms.split(',')
    a, b = operands
    own = (dtype, precision, dy.dtype, dtype)
    da = _product((f'{result},{right}->{left}', *own), dy, b)
    db = _product((f'{left},{result}->{right}', *own), a, dy)
    return da.astype(a_dtype), db.astype(b_dtype)


_product.defvjp(_product_forward, _product_backward)


@functools.cache
def dense_product(dtype):
    """`dot_general` with its operands in `dtype`; the same object whenever it is asked for."""
    return functools.partial(dot_general, dtype=dtype)


def dot_general(
    x,
    w,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    dtype='float32',
):
    """`lax.dot_general` for dense layers, with a weight gradient the CPU compiler likes.

    Equation: y = x · w, contracting the last axes of `x` with the first axes of `w`;
    dx = dy · wᵀ and dw = Σ_tokens x ⊗ dy. Operands in `dtype`, results in float32 (see `product`).

    JAX's transpose rule writes dw as (out, in) and transposes it. XLA's CPU compiler then copies
    the whole residual chain behind `x` into a transposed operand: 2.4 times the step time of a
    small GPT. Contracting the token axes of both operands gives (in, out) directly.

    Shapes: x (*tokens, *in), w (*in, *out) -> (*tokens, *out). Pass it to `nnx.Linear` or
    `nnx.LinearGeneral` as `dot_general`.

    Raises:
      ValueError: if the contraction is not "last axes of x with first axes of w", or another type
        of result is asked for.
    """
    (x_axes, w_axes), batch_axes = dimension_numbers
    n = len(w_axes)
    dense = tuple(x_axes) == tuple(range(x.ndim - n, x.ndim)) and tuple(w_axes) == tuple(range(n))
    if not dense or any(batch_axes) or out_sharding is not None:
        raise ValueError(
            'dot_general: this kernel contracts the last axes of x with the first axes of w, '
            f'without batch axes or out_sharding; got {dimension_numbers}'
        )
    if preferred_element_type not in (None, jnp.float32):
        raise ValueError(f'dot_general: results are float32, not {preferred_element_type}')
    tokens_shape, out_shape = x.shape[: x.ndim - n], w.shape[n:]
    # Matrices only from here on: with several token axes to contract, the compiler would first
    # move them together, by the very copies that this is about. M tokens, I in, O out.
    x_MI = x.reshape(-1, math.prod(w.shape[:n]))
    w_IO = w.reshape(x_MI.shape[1], -1)
    y_MO = _product(('MI,IO->MO', dtype, precision, x.dtype, w.dtype), x_MI, w_IO)
    return y_MO.reshape(*tokens_shape, *out_shape)
