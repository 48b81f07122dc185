"""Kernels: the numbers of `lax.dot_general` and of plain attention, by other programs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from minigpt_jax.model.attention import dot_product_attention
from minigpt_jax.model.kernels import blockwise_attention, dense_product, dot_general, product

SHAPES = {
    'matrix': ((5, 6), (6, 7), ((1,), (0,))),
    'tokens': ((2, 3, 6), (6, 7), ((2,), (0,))),
    'heads out': ((2, 3, 6), (6, 3, 2, 4), ((2,), (0,))),
    'heads in': ((2, 3, 4, 5), (4, 5, 7), ((2, 3), (0, 1))),
}


@pytest.mark.parametrize(('x_shape', 'w_shape', 'axes'), SHAPES.values(), ids=SHAPES)
def test_equals_lax_with_gradients(x_shape, w_shape, axes):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (x_shape, w_shape))

    def loss(product):
        return lambda x, w: (product(x, w, (axes, ((), ()))) ** 2).sum()

    ours, lax_s = (
        jax.jit(jax.value_and_grad(loss(product), (0, 1)))
        for product in (dot_general, lax.dot_general)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), ours(x, w), lax_s(x, w)
    )


def gradient_program(product, sizes=(6, 7)):
    """The program of a weight's gradient, before XLA optimises it, as text."""
    x, w = np.ones((8, 4, sizes[0]), np.float32), np.ones(sizes, np.float32)
    loss = lambda w: product(x, w, (((2,), (0,)), ((), ()))).sum()  # noqa: E731
    return jax.jit(jax.grad(loss)).lower(w)


def test_the_weight_gradient_needs_no_transpose():
    assert 'transpose' in gradient_program(lax.dot_general).as_text()
    assert 'transpose' not in gradient_program(dot_general).as_text()


def products_of(program):
    """{shape of the result} of the products in a program that XLA has optimised."""
    return set(re.findall(r'= (\w+\[[\d,]+\])\{[\d,]*\} dot\(', program.compile().as_text()))


def test_the_longer_axis_of_a_weight_gradient_stands_last():
    assert products_of(gradient_program(dot_general, (6, 7))) == {'f32[6,7]'}
    assert products_of(gradient_program(dot_general, (7, 6))) == {'f32[6,7]'}


@pytest.mark.parametrize('sizes', [(32, 64), (64, 32)])
def test_bfloat16_weight_gradients_are_not_multiplied_in_float32(sizes):
    # A product of float32 has its operands converted before; XLA fuses that, or names it.
    program = gradient_program(dense_product('bfloat16'), sizes).compile().as_text()
    (product,) = re.findall(r'.* dot\(.*', program)
    operands = re.findall(r'%([\w.]+)', product.split(' dot(')[1].split(')')[0])
    for name in operands:
        (dtype,) = re.findall(rf'%{re.escape(name)} = (\w+)\[', program)
        assert dtype == 'bf16'


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('sizes', [(6, 7), (7, 6)])
def test_weight_gradients_under_vmap_and_twice(sizes, dtype):
    rng = np.random.default_rng(0)
    x_EMI = rng.standard_normal((3, 8, sizes[0])).astype(np.float32)
    w_EIO = rng.standard_normal((3, *sizes)).astype(np.float32)

    def loss(product):
        return lambda x, w: (product(x, w, (((1,), (0,)), ((), ()))) ** 3).sum()

    def both(product):
        gradient = jax.grad(loss(product), 1)
        twice = jax.grad(lambda x, w: (gradient(x, w) ** 2).sum(), 1)
        return jax.jit(jax.vmap(lambda x, w: (gradient(x, w), twice(x, w))))(x_EMI, w_EIO)

    tolerance = 1e-4 if dtype == 'float32' else 0.05
    for ours, theirs in zip(both(dense_product(dtype)), both(lax.dot_general), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


def test_other_contractions_are_refused():
    x, w = np.ones((4, 6)), np.ones((7, 6))
    with pytest.raises(ValueError, match='last axes of x with the first axes of w'):
        dot_general(x, w, (((1,), (1,)), ((), ())))
    with pytest.raises(ValueError, match='results are float32'):
        dot_general(x, x.T, (((1,), (0,)), ((), ())), preferred_element_type='bfloat16')


def rounded(x):
    """To the eight bits of bfloat16, as float64."""
    return np.float64(np.asarray(x).astype(jnp.bfloat16))


SPECS = {
    'scores': ('BTHK,BSHK->BHTS', (2, 5, 3, 4), (2, 6, 3, 4)),
    'sums': ('BHTS,BSHK->BTHK', (2, 3, 5, 6), (2, 6, 3, 4)),
    'relative': ('BTHK,TSK->BHTS', (2, 5, 3, 4), (5, 6, 4)),
    'logits': ('BTD,VD->BTV', (2, 5, 8), (7, 8)),
    'dense': ('BTD,DF->BTF', (2, 5, 8), (8, 9)),
}


@pytest.mark.parametrize(('spec', 'a_shape', 'b_shape'), SPECS.values(), ids=SPECS)
def test_bfloat16_products_round_operands_alone(spec, a_shape, b_shape):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in (a_shape, b_shape))

    def multiply(a, b):
        if spec == 'BTD,DF->BTF':
            return dense_product('bfloat16')(a, b, (((2,), (0,)), ((), ())))
        return product(spec, a, b, 'bfloat16')

    y, backward = jax.vjp(multiply, a, b)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    da, db = backward(dy)
    assert {x.dtype for x in (y, da, db)} == {np.dtype('float32')}
    left, right, result = spec.replace('->', ',').split(',')
    terms = {left: rounded(a), right: rounded(b), result: rounded(dy)}
    for value, target in ((y, result), (da, left), (db, right)):
        names = [name for name in terms if name != target]
        equation = f'{",".join(names)}->{target}'
        expected = np.einsum(equation, *(terms[name] for name in names))
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    exact = np.einsum(spec, np.float64(a), np.float64(b))
    assert np.abs(y - exact).max() > 1e-3


# Blockwise attention against the plain one. The lengths leave a last block that is not full.

B, T, S, H, K = 2, 21, 21, 3, 4
KEYS = 34  # of another text
LENGTHS = np.array([17, 0])  # of the second row, every query sees nothing
IDS = np.repeat(np.array([[0, 1, 2], [4, 4, 5]]), 7, axis=1)


def random_mask(*shape):
    mask = np.random.default_rng(3).random(shape) < 0.6
    mask[..., 5, :] = False  # a query that sees nothing
    return mask


def random_bias(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


CONDITIONS = {
    'nothing': {},
    'causal': dict(causal=True),
    'causal, lengths': dict(causal=True, kv_lengths_B=LENGTHS),
    'lengths': dict(kv_lengths_B=LENGTHS),
    'segments': dict(segment_ids=IDS),
    'causal segments': dict(causal=True, segment_ids=IDS),
    'mask': dict(mask=random_mask(B, H, T, S)),
    'mask of all heads': dict(mask=random_mask(T, S), causal=True),
    'mask of keys': dict(mask=np.arange(S) % 3 > 0),
    'bias': dict(bias=random_bias(B, H, T, S)),
    'bias of all rows': dict(bias=random_bias(H, T, S), causal=True),
    'bias of keys': dict(bias=random_bias(B, 1, 1, S)),
    'bias that masks': dict(
        bias=np.where(random_mask(1, H, T, S), random_bias(B, 1, T, S), -np.inf)
    ),
    'all of them': dict(
        causal=True,
        kv_lengths_B=LENGTHS,
        segment_ids=IDS,
        mask=random_mask(B, 1, T, S),
        bias=random_bias(H, T, S),
    ),
    'another text': dict(keys=KEYS),
    'another text, lengths': dict(keys=KEYS, kv_lengths_B=np.array([30, 3])),
    'another text, segments': dict(
        keys=KEYS, segment_ids=(IDS, np.arange(B * KEYS).reshape(B, -1) % 6)
    ),
    'behind a cache': dict(keys=KEYS, causal=True, q_offset=9),
    'behind a cache, bias': dict(keys=KEYS, causal=True, q_offset=13, bias=random_bias(T, KEYS)),
    'a short text': dict(keys=3),
}


def attention_inputs(conditions, dtype='float32', seed=0):
    """(q, k, v, dy) and the other arguments of a case."""
    arguments = dict(conditions)
    num_keys = arguments.pop('keys', S)
    rng = np.random.default_rng(seed)
    shapes = ((B, T, H, K), (B, num_keys, H, K), (B, num_keys, H, K))
    qkv = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    return qkv, jnp.asarray(rng.standard_normal(shapes[0]), jnp.float32), arguments


def with_gradients(attention, qkv, dy, bias, **arguments):
    """y, and what y · dy leaves at q, k, v and the bias, if there is one."""
    inputs = (*qkv,) if bias is None else (*qkv, bias)

    def apply(q, k, v, bias=None):
        return attention(q, k, v, bias=bias, **arguments)

    @jax.jit
    def both(inputs, dy):
        y, backward = jax.vjp(apply, *inputs)
        return y, *backward(dy)

    return both(inputs, dy)


# (conditions, dtype, block): blocks of 8 are three of queries, of 16 two, of 64 one, and of 2 are
# eleven: stages of two blocks, and the last one of one that is not full.
CASES = [
    *((name, 'float32', 8) for name in CONDITIONS),
    *((name, 'float32', block) for name in ('causal', 'all of them') for block in (2, 16, 64)),
    ('behind a cache, bias', 'float32', 2),
    *((name, 'bfloat16', 8) for name in ('nothing', 'all of them', 'behind a cache, bias')),
]


@pytest.mark.parametrize(('name', 'dtype', 'block'), CASES)
def test_blockwise_attention_equals_the_plain_one_with_gradients(name, dtype, block):
    qkv, dy, arguments = attention_inputs(CONDITIONS[name], dtype)
    bias = arguments.pop('bias', None)
    plain_attention = functools.partial(dot_product_attention, implementation='plain')
    plain = with_gradients(plain_attention, qkv, dy, bias, **arguments)
    attention = functools.partial(blockwise_attention, block=block)
    ours = with_gradients(attention, qkv, dy, bias, **arguments)
    tolerance = dict(atol=5e-6) if dtype == 'float32' else dict(atol=0.06, rtol=0.03)
    for a, b in zip(ours, plain, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.float32(a), np.float32(b), **tolerance)


def test_what_fills_up_the_last_block_leaves_no_gradient():
    """With the logarithm of a sum of 0 its weights would be infinite."""
    qkv, dy, _ = attention_inputs({})
    bias = random_bias(B, 1, 1, S) + 100
    plain, ours = (
        with_gradients(attention, qkv, dy, bias)
        for attention in (
            functools.partial(dot_product_attention, implementation='plain'),
            functools.partial(blockwise_attention, block=8),
        )
    )
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_query_that_sees_nothing_gives_zeros_and_leaves_no_gradient():
    qkv, dy, arguments = attention_inputs(dict(mask=random_mask(T, S)))
    y, dq, dk, _ = with_gradients(
        functools.partial(blockwise_attention, block=8), qkv, dy, None, **arguments
    )
    assert (np.asarray(y)[:, 5] == 0).all()
    assert (np.asarray(dq)[:, 5] == 0).all()
    assert np.isfinite(dk).all()


def test_large_scores_do_not_overflow():
    qkv, dy, _ = attention_inputs({})
    qkv[0] = qkv[0] * 1e3
    ours = with_gradients(functools.partial(blockwise_attention, block=8), qkv, dy, None)
    plain = with_gradients(dot_product_attention, qkv, dy, None)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)


def compiled(implementation, length, batch=1, heads=2):
    """The program of a forward and backward pass, causal, in float32."""

    def step(q, k, v, dy):
        y, backward = jax.vjp(
            functools.partial(dot_product_attention, causal=True, implementation=implementation),
            q, k, v,
        )  # fmt: skip
        return y, backward(dy)

    x_BTHK = jax.ShapeDtypeStruct((batch, length, heads, 64), np.float32)
    return jax.jit(step).lower(*[x_BTHK] * 4).compile()


@pytest.mark.slow
def test_the_memory_of_blockwise_attention_grows_with_the_length_not_its_square():
    plain, blockwise = (
        [
            compiled(implementation, length).memory_analysis().temp_size_in_bytes
            for length in (1024, 4096)
        ]
        for implementation in ('plain', 'blockwise')
    )
    assert plain[1] / plain[0] > 10
    assert blockwise[1] / blockwise[0] < 4.4


def test_at_4096_tokens_blockwise_attention_needs_a_twenty_second_of_the_memory():
    plain, blockwise = (
        compiled(implementation, 4096, batch=8, heads=8).memory_analysis().temp_size_in_bytes
        for implementation in ('plain', 'blockwise')
    )
    assert plain > 22 * blockwise


def test_key_blocks_that_causality_rules_out_are_never_read():
    """What stands there is not a number, and it shows in nothing: not multiplied by 0 either."""
    qkv, dy, _ = attention_inputs(dict(keys=KEYS))
    q, k, v = qkv
    k, v = (
        x.at[:, 24:].set(jnp.nan) for x in (k, v)
    )  # the last block of queries is filled up to 24
    y, dq, *_ = with_gradients(
        functools.partial(blockwise_attention, block=8), (q, k, v), dy, None, causal=True
    )
    assert np.isfinite(y).all()
    assert np.isfinite(dq).all()


def test_blockwise_attention_under_vmap_and_scan():
    cases = [attention_inputs({}, seed=seed)[0] for seed in range(3)]
    stacked = [jnp.stack(x) for x in zip(*cases, strict=True)]
    offsets = jnp.array([0, 2, 5])

    def loss(attention, qkv, offset):
        return (attention(*qkv, causal=True, q_offset=offset) ** 2).sum()

    ours = jax.value_and_grad(
        functools.partial(loss, functools.partial(blockwise_attention, block=8))
    )
    plain = jax.value_and_grad(functools.partial(loss, dot_product_attention))
    expected = jax.vmap(plain)(stacked, offsets)
    scanned = jax.lax.scan(lambda _, x: (None, ours(*x)), None, (stacked, offsets))[1]
    for values in (jax.vmap(ours)(stacked, offsets), scanned):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), values, expected
        )


def test_blockwise_attention_has_no_weights_to_drop_or_to_return():
    qkv, *_ = attention_inputs({})
    for arguments in (
        dict(return_weights=True),
        dict(dropout_rate=0.1, dropout_key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match="choose implementation='plain'"):
            dot_product_attention(*qkv, implementation='blockwise', **arguments)
