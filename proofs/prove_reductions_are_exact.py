"""THEOREM. The exact set's reductions have no rounding, hence no order.

Statement: on numbers whose bits keep the budget (bits + bits + log2(length) <= 53), `matmul` and `row_sum` equal Python's
integers, for every length, in every order, at the largest magnitudes that the budget allows; one bit more is refused.

Argument: each product is an integer of at most b1 + b2 bits, each partial sum one of at most b1 + b2 + log2(length) <= 53
bits, and float64 holds every such integer. An addition whose true result is representable returns it (IEEE 754), fused
with a multiplication or not.

Not shown: BLAS libraries that do something else than multiply and add (`refengine doctor` refuses them).
"""
import numpy as np
from hypothesis import given, strategies as st
import pytest

from refkernels import BoundError
from refkernels.exact.reduce import BITS, bit_budget, log2_ceil, matmul, row_sum, snap


@given(length=st.integers(1, 3000), other=st.integers(12, 24), m=st.integers(1, 9), n=st.integers(1, 9), seed=st.integers(0, 2**32),
       signs=st.booleans())
def prove_a_product_equals_pythons_integers(length, other, m, n, seed, signs):
    bits = bit_budget(length, other, 28, 1, "here")
    rng = np.random.default_rng(seed)

    def extreme(b, *shape):
        """Integers of b bits, most of them as large as they come."""
        x = 2**b - rng.integers(0, 3, shape)
        return x * rng.choice((-1, 1), shape) if signs else x

    a, b = extreme(bits, m, length), extreme(other, length, n)
    want = [[sum(int(x) * int(y) for x, y in zip(row, column)) for column in b.T] for row in a]
    order = rng.permutation(length)
    for left, right in ((a, b), (a[:, order], b[order])):
        got = matmul(left.astype(np.float64), right.astype(np.float64))
        assert [[int(value) for value in row] for row in got] == want


@given(length=st.integers(1, 5000), seed=st.integers(0, 2**32))
def prove_a_sum_equals_pythons_integers_in_any_order(length, seed):
    rng = np.random.default_rng(seed)
    x = 2 ** (BITS - log2_ceil(length)) - rng.integers(0, 2, length)
    for order in (np.arange(length), rng.permutation(length)):
        assert int(row_sum(x[order].astype(np.float64)[None])[0, 0]) == sum(map(int, x))


@given(st.integers(1, 2**30), st.integers(1, 40))
def prove_the_budget_is_kept_and_not_wasted(length, other):
    try:
        bits = bit_budget(length, other, 99, 1, "here")
    except BoundError:
        assert 2**other * length * 2 > 2**BITS
        return
    assert 2**bits * 2**other * length <= 2**BITS < 2 ** (bits + 1) * 2**other * 2 * length


def prove_one_bit_more_is_refused():
    assert bit_budget(128, 24, 24, 22, "scores") == 22
    with pytest.raises(BoundError, match="scores: 129 products leave 21 bits"):
        bit_budget(129, 24, 24, 22, "scores")


def prove_beyond_the_bound_the_order_does_show():
    """The control: the budget is needed. With three bits more, the same sum has two values."""
    x = np.array([2.0**53, 1.0, 1.0, -(2.0**53)])
    assert row_sum(x[None, [0, 3, 1, 2]])[0, 0] == 2.0 != ((x[0] + x[1]) + x[2]) + x[3]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50), st.integers(2, 24))
def prove_snapping_gives_whole_steps_within_the_bits(values, bits):
    """Subnormals, zeros of either sign and outliers included."""
    x = np.array([values], np.float32)
    y = snap(x, bits)
    top = np.abs(x).max()
    step = np.ldexp(1.0, int(np.frexp(top)[1]) - bits)
    assert (y / step == np.rint(y / step)).all() and (np.abs(y / step) <= 2.0**bits).all()
    assert (np.abs(y - x) <= step / 2).all() and not np.signbit(y[y == 0]).any()
