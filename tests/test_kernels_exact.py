"""The exact set does what its name says: its sums equal integer arithmetic, each operation rounds as it states, and a row's
result depends on nothing but the row: not on the other rows, nor on how keys, queries or blocks are cut, nor on the order of
a sum. The numbers are the worst we could think of. How far it is from the true functions: test_kernels_native.py. Floor 9.
"""
import importlib
import math
from decimal import Decimal, localcontext
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from helpers import same_bits
from refengine.rope import Rope
from refkernels import BoundError, NonFiniteError, exact
from refkernels.exact import elementary, mlp, norm, reduce

attention_module = importlib.import_module("refkernels.exact.attention")  # the package's name of it is the function
MAX32 = float(np.finfo(np.float32).max)
ONE_LESS = 1 - 2.0**-24                     # the largest float32 below 1: all 24 bits set

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Bell-shaped float32, the second row with a 400-fold outlier."""
    x = np.random.default_rng(seed).standard_normal(shape) * scale
    x.reshape(-1, shape[-1])[1:2, ::7] *= 400
    return x.astype(np.float32)


# Integer arithmetic to compare with: Python's fractions, rounded by Python's round(), which is to nearest, ties to even

def round_to_float32(value: Fraction) -> float:
    """The nearest float32; one rounding, subnormals and overflow as IEEE has them."""
    if not value:
        return 0.0
    size = abs(value)
    e = size.numerator.bit_length() - size.denominator.bit_length()
    e -= size < Fraction(2) ** e                              # 2^e <= size < 2^(e + 1)
    unit = max(e - 23, -149)
    rounded = round(size / Fraction(2) ** unit) * Fraction(2) ** unit
    return math.copysign(math.inf if rounded >= 2**128 else float(rounded), value)


def on_grid(row: np.ndarray, bits: int) -> list[Fraction]:
    """The row in steps of 2^-bits of the power of two above its largest magnitude, each number rounded to a step."""
    values = [Fraction(float(v)) for v in row]
    step = Fraction(2) ** (math.frexp(float(max(map(abs, values))))[1] - bits)
    return [round(v / step) * step for v in values]


def dot(a, b) -> Fraction:
    return sum((Fraction(x) * Fraction(y) for x, y in zip(a, b)), Fraction(0))


def fractions(row: np.ndarray) -> list[Fraction]:
    return [Fraction(float(v)) for v in row]


def hostile_activations(k: int) -> np.ndarray:
    """Rows of K that strain the grid, the accumulator or the range. (R, K) float32."""
    full, signs = np.full(k, ONE_LESS), np.where(np.arange(k) % 2, -1, 1)
    rng = np.random.default_rng(k)
    bell, rising = rng.standard_normal(k), np.arange(1.0, k + 1)
    outlier = bell.copy()
    outlier[::7] *= 400
    first, middle = np.arange(k) == 0, np.arange(k) == k // 2
    rows = [full, full * signs, -full, bell, outlier, bell * 2.0**-140, rising * 2.0**-149, bell * 2.0**126 / 5, np.zeros(k),
            np.full(k, -0.0), np.where(middle, 2.0**-149, -0.0), np.where(first, 1, 2.0**-25 * signs),
            np.where(first, 1, 1.5 * 2.0**-24), 2.0 ** rng.integers(-140, 120, k) * signs, full * MAX32]
    return np.array(rows).astype(np.float32)


def hostile_weights(k: int) -> np.ndarray:
    """Rows whose steps count as much as they can, and others. (N, K) float32."""
    full, signs = np.full(k, ONE_LESS), np.where(np.arange(k) % 2, -1, 1)
    rng = np.random.default_rng(k + 1)
    bell = rng.standard_normal(k)
    spike = np.where(np.arange(k) == 1, 1.0, bell * 2.0**-13)
    rows = [full, full * signs, -full, bell, spike, bell * 2.0**-140, np.full(k, 2.0**-149), bell * 2.0**100, np.zeros(k),
            np.full(k, -0.0), np.where(np.arange(k) == k // 2, -1.0, 0.0)]
    return np.array(rows).astype(np.float32)


# Grids and budgets

@given(arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=finite32), st.integers(2, 24))
def test_snap_and_integers_round_to_the_nearest_step_of_the_rows_grid(x, bits):
    ints, step = reduce.integers(x, bits)
    for row, snapped, steps, unit in zip(x, reduce.snap(x, bits), ints, step):
        want = on_grid(row, bits)
        assert fractions(snapped) == want
        assert [Fraction(n) * Fraction(float(unit[0])) for n in steps] == want
        assert np.abs(steps).max() <= 2**bits


@given(st.integers(1, 2**40), st.integers(1, 40), st.integers(1, 40))
def test_a_bit_budget_never_lets_a_sum_pass_two_to_the_53(length, other, most):
    try:
        bits = reduce.bit_budget(length, other, most, 1, "a test")
    except BoundError:
        assert 2**other * 2 * length > 2**53                  # not even one bit fits
    else:
        assert bits <= most and 2**other * 2**bits * length <= 2**53
        assert bits == most or 2**other * 2**(bits + 1) * 2**(length - 1).bit_length() > 2**53


def test_the_longest_head_and_norm_are_accepted_and_longer_ones_refused():
    assert exact.kv_fields(2**17)["k"] == ((2**17,), np.float64)
    with pytest.raises(BoundError, match="attention scores"):
        exact.kv_fields(2**17 + 1)
    assert norm._bits(2**28) == 12
    with pytest.raises(BoundError, match="RMSNorm"):
        exact.pack_norm(np.broadcast_to(np.float32(1), 2**28 + 1))


def test_attention_stays_below_two_to_the_53_at_the_longest_context():
    # Scores: bit_budget. Denominator: S weights of up to 2^30. Numerator: the steps of a row of weights sum to 2^29 and half
    # a step of rounding for each position, times integers of up to 2^23.
    a, s = attention_module, exact.MAX_CONTEXT
    assert s * 2**a.P_BITS <= 2**53
    assert (2**a.SUM_BITS + s // 2) * 2**a.V_BITS <= 2**53
    assert a._k_bits(128) + a.Q_BITS + 7 <= 53


@given(arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=finite32))
def test_the_bound_of_the_l1_norm_is_one_and_is_close(w):
    for row, bound in zip(w, reduce.l1_bound(w)):
        l1 = sum(map(abs, fractions(row)), Fraction(0))
        assert l1 <= Fraction(float(bound[0])) <= l1 + len(row) * max(map(abs, fractions(row))) * Fraction(2) ** -39


@given(arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=finite32))
def test_packed_weights_are_the_weights_to_half_a_step_and_their_steps_fit(w):
    packed = exact.pack_linear(w.shape, [w]).weight.T         # (N, K)
    for row, got in zip(w, packed):
        l1 = sum(map(abs, fractions(row)), Fraction(0))
        step = 2 * l1 * Fraction(2) ** -mlp.W_BITS * (1 + Fraction(2) ** -20)  # at most: from the power of two above l1
        assert all(abs(a - b) <= step / 2 for a, b in zip(fractions(got), fractions(row)))
        if l1:
            unit = Fraction(2) ** (math.frexp(float(l1))[1] - mlp.W_BITS)
            assert sum(map(abs, fractions(got))) / unit <= 2**mlp.W_BITS + len(row)
            assert all((v / unit).denominator == 1 for v in fractions(got))


def test_a_row_that_could_round_past_the_bound_gets_a_coarser_grid_and_beyond_it_is_refused():
    assert mlp.X_BITS + mlp.W_BITS == 53
    within = np.float32([[ONE_LESS, 2.0**-27]])               # 2^28 - 14 steps, and half a step of rounding for each of two
    beyond = np.float32([[ONE_LESS, 2.0**-24 - 2.0**-29]])    # 2^28 - 1/2 steps and the same
    x = np.float32([[ONE_LESS, ONE_LESS], [ONE_LESS, -ONE_LESS]])
    for w, step in ((within, 2.0**-28), (beyond, 2.0**-27)):
        packed = exact.pack_linear((1, 2), [w])
        assert (packed.weight % step == 0).all() and np.abs(packed.weight).sum() / step <= 2**28
        for row, got in zip(x, exact.linear(x, packed)):
            assert got[0] == round_to_float32(dot(fractions(row), fractions(packed.weight[:, 0])))
    with patch.object(mlp, "X_BITS", 26), pytest.raises(BoundError, match="a row of 2 weights"):
        exact.pack_linear((1, 2), [within])


# Sums against integer arithmetic

@pytest.mark.parametrize("k", [1, 2, 31, 256, 1000])
def test_linear_is_integer_arithmetic_rounded_once(k):
    x, w = hostile_activations(k), hostile_weights(k)
    packed = exact.pack_linear(w.shape, [w])
    columns = [fractions(column) for column in packed.weight.T]
    with np.errstate(over="ignore"):
        got = exact.linear(x, packed)
    want = [[round_to_float32(dot(row, column)) for column in columns] for row in (on_grid(row, mlp.X_BITS) for row in x)]
    same_bits(got, np.array(want, np.float32), name="linear")


@given(st.integers(1, 12).flatmap(lambda k: st.tuples(arrays(np.float32, (2, k), elements=finite32),
                                                      arrays(np.float32, (3, k), elements=finite32))))
def test_linear_of_anything_is_integer_arithmetic_rounded_once(pair):
    x, w = pair
    packed = exact.pack_linear(w.shape, [w])
    with np.errstate(over="ignore"):
        got = exact.linear(x, packed)
    want = [[round_to_float32(dot(on_grid(row, mlp.X_BITS), fractions(column))) for column in packed.weight.T] for row in x]
    same_bits(got, np.array(want, np.float32), name="linear")


def test_a_bias_is_added_in_float64():
    x, w, bias = normal(3, 40), normal(5, 40, seed=1), normal(5, seed=2)
    packed = exact.pack_linear(w.shape, [w], bias)
    sums = np.array([[float(dot(on_grid(row, mlp.X_BITS), fractions(column))) for column in packed.weight.T] for row in x])
    same_bits(exact.linear(x, packed), (sums + bias).astype(np.float32), name="linear")


def test_scores_at_the_edge_of_the_budget_are_integer_arithmetic():
    d, rng = 128, np.random.default_rng(5)
    bits = attention_module._k_bits(d)
    assert bits + 24 + 7 == 53                                # the sums of the first row and column reach 2^53 but for a few
    q = 2.0**24 - 1 - rng.integers(0, 50, (6, d)) * np.arange(6)[:, None]
    k = 2.0**bits - rng.integers(0, 50, (5, d)) * np.arange(5)[:, None]
    k[1::2] *= rng.choice([-1, 1], d)
    got = reduce.matmul(q, k.T)
    assert got.astype(np.int64).tolist() == [[sum(int(a) * int(b) for a, b in zip(row, key)) for key in k] for row in q]


def attention_in_integers(q: np.ndarray, keys: exact.KV, head: int) -> np.ndarray:
    """One query head over all keys of a kv head. q: (D,) float32 -> (D,) float32. Only exp2 is taken from the set."""
    a = attention_module
    k, v, step = keys.k[head], keys.v[head], fractions(keys.v_step[head])
    q = on_grid(q * np.float32(float(elementary.LOG2E) / math.sqrt(len(q))), a.Q_BITS)
    scores = [dot(q, fractions(key)) for key in k]
    assert [Fraction(float(s)) for s in scores] == scores     # the budget: float64 holds each
    top = float(max(scores))
    p = elementary.exp2(np.array([float(s) - top for s in scores], np.float32))
    weights = [round(w * 2**a.P_BITS) for w in fractions(p)]
    grid = math.frexp(float(sum(weights) * max(step)))[1] - a.SUM_BITS
    steps = [round(w * s / Fraction(2) ** grid) for w, s in zip(weights, step)]
    sums = [sum(n * int(value) for n, value in zip(steps, column)) for column in v.T]
    assert max(map(abs, sums)) < 2**53 and sum(weights) < 2**53
    return np.array([float(s) * 2.0**grid / float(sum(weights)) for s in sums]).astype(np.float32)


@pytest.mark.parametrize("keys, scale_k, scale_v",
                         [(1, 1, 1), (5, 1, 1), (200, 0.01, 1), (200, 3, 2.0**100), (37, 1, 2.0**-149)])
def test_attention_is_integer_arithmetic(keys, scale_k, scale_v):
    q, k = normal(1, 4, 16, seed=3), normal(keys, 2, 16, seed=4, scale=scale_k)
    v = (np.ceil(normal(keys, 2, 16, seed=5)) * scale_v).astype(np.float32)
    v[:, 1] = abs(v[:, 1])
    packed = exact.pack_kv(k, v)
    want = [attention_in_integers(q[0, head], packed, head // 2) for head in range(4)]
    same_bits(exact.attention(q, [packed], keys - 1), np.concatenate(want)[None], name="heads")


def test_attention_over_many_equal_keys_and_full_values_is_integer_arithmetic():
    # All weights are 1 and all values have all bits set: the numerator comes as near to 2^52 as the grids let it.
    keys = 3000
    packed = exact.pack_kv(np.ones((keys, 1, 4), np.float32), np.full((keys, 1, 4), ONE_LESS, np.float32))
    q = normal(1, 1, 4)
    same_bits(exact.attention(q, [packed], keys - 1)[0], attention_in_integers(q[0, 0], packed, 0), name="heads")


@pytest.mark.parametrize("k", [1, 31, 256, 1000])
def test_rms_norm_sums_squares_in_integers(k):
    x, gain = hostile_activations(k), normal(k, seed=9)
    got = exact.rms_norm(x, exact.pack_norm(gain), 1e-6)
    for i, row in enumerate(x):
        snapped = on_grid(row, norm._bits(k))
        total = dot(snapped, snapped)
        assert Fraction(float(total)) == total
        r = 1 / math.sqrt(float(total) / k + 1e-6)
        same_bits(got[i], (row.astype(np.float64) * r * gain).astype(np.float32), name=f"row {i}")


# Rows do not depend on each other (case D8), and a sum has no order

def by_rows(name: str):
    """(function of rows, 33 rows) of an operation."""
    if name == "rms_norm":
        gain = exact.pack_norm(normal(300, seed=1))
        return lambda x: exact.rms_norm(x, gain, 1e-6), normal(33, 300)
    if name == "swiglu":
        return exact.swiglu, normal(33, 2 * 5000, scale=3)   # several blocks
    k, n = {"linear, small": (64, 96), "linear": (1000, 130)}[name]
    packed = exact.pack_linear((n, k), [normal(n, k, seed=1)], normal(n, seed=2))
    return lambda x: exact.linear(x, packed), normal(33, k)


@pytest.mark.parametrize("name", ["linear", "linear, small", "rms_norm", "swiglu"])
def test_a_row_does_not_depend_on_the_rows_beside_it(name):
    function, x = by_rows(name)
    singles = np.concatenate([function(x[i:i + 1]) for i in range(33)])
    for m in range(1, 34):
        same_bits(function(x[:m]), singles[:m], name=f"{name} of {m} rows")
    order = np.random.default_rng(3).permutation(33)
    same_bits(function(x[order]), singles[order], name=f"{name} of shuffled rows")
    same_bits(function(np.asfortranarray(x)), singles, name=f"{name} of rows stored by columns")
    if name != "swiglu":
        same_bits(function(x.reshape(3, 11, -1)), singles.reshape(3, 11, -1), name=f"{name} of rows in three dimensions")


@given(st.randoms(use_true_random=False))
def test_a_sum_has_no_order(random):
    order = random.sample(range(300), 300)
    x, w, gain = normal(5, 300), normal(7, 300, seed=1), normal(300, seed=2)
    same_bits(exact.linear(x[:, order], exact.pack_linear(w.shape, [w[:, order]])),
              exact.linear(x, exact.pack_linear(w.shape, [w])))
    same_bits(exact.rms_norm(x[:, order], exact.pack_norm(gain[order]), 1e-6),
              exact.rms_norm(x, exact.pack_norm(gain), 1e-6)[:, order])
    keys, order = 40, [i for i in order if i < 40]           # the newest query sees all keys, wherever they are
    q, k, v = normal(1, 4, 16), normal(keys, 2, 16, seed=1), normal(keys, 2, 16, seed=2)
    same_bits(exact.attention(q, [exact.pack_kv(k[order], v[order])], keys - 1),
              exact.attention(q, [exact.pack_kv(k, v)], keys - 1))


def test_weights_may_come_in_any_blocks_of_rows():
    w = normal(50, 2000, seed=1)                             # more than the 65,536 weights that are packed at a time
    whole = exact.pack_linear(w.shape, [w]).weight
    for cuts in ([1], [33, 34], range(1, 50)):
        same_bits(exact.pack_linear(w.shape, np.split(w, cuts)).weight, whole, name="weight")
    for wrong in ([w[:49]], []):
        with pytest.raises(ValueError, match="of a weight of 50"):
            exact.pack_linear(w.shape, wrong)


# Attention

S, H, N, D = 40, 6, 2, 16
cuts = st.lists(st.integers(1, S - 1), max_size=6).map(lambda at: [0, *sorted(set(at)), S])


def a_sequence(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q (S, H, D), k and v (S, N, D), v of very different sizes from position to position."""
    sizes = np.float32(2.0) ** np.random.default_rng(seed).integers(-12, 12, (S, N, 1)).astype(np.float32)
    return normal(S, H, D, seed=seed), normal(S, N, D, seed=seed + 1), normal(S, N, D, seed=seed + 2) * sizes


def cut(kv: exact.KV, a: int, b: int) -> exact.KV:
    return exact.KV(*(field[:, a:b] for field in kv))


@given(queries=cuts, keys=cuts, packing=cuts, block=st.sampled_from([1, 7, 100, 1000, 2**17]))
def test_how_queries_keys_packing_and_blocks_are_cut_does_not_show(queries, keys, packing, block):
    q, k, v = a_sequence()
    kv = exact.pack_kv(k, v)
    whole = exact.attention(q, [kv], 0)
    pieces = [exact.pack_kv(k[a:b], v[a:b]) for a, b in zip(packing, packing[1:])]
    for name, field, parts in zip(kv._fields, kv, zip(*pieces)):
        same_bits(np.concatenate(parts, axis=1), field, name=name)
    with patch.object(attention_module, "_BLOCK", block):
        for start, stop in zip(queries, queries[1:]):
            runs = [cut(kv, a, min(b, stop)) for a, b in zip(keys, keys[1:]) if a < stop]
            same_bits(exact.attention(q[start:stop], runs, start), whole[start:stop], f"queries {start}..{stop}", "heads")


def test_an_earlier_query_does_not_see_later_keys_however_large():
    q, k, v = a_sequence()
    before = exact.attention(q[:20], [exact.pack_kv(k[:20], v[:20])], 0)
    for size in (MAX32, -MAX32, 2.0**-149):
        k[20:], v[20:] = size, size
        with np.errstate(over="ignore"):                     # in the later rows
            got = exact.attention(q, [exact.pack_kv(k, v)], 0)
        same_bits(got[:20], before, f"then keys of {size}", "heads")


@pytest.mark.parametrize("block", [1, 2**17])
def test_a_chunk_of_three_after_five_attends_to_six_seven_and_eight(block):
    # Case A15. Value s is the s-th unit vector, so the output shows the weights; equal keys make them equal.
    kv = exact.pack_kv(np.zeros((8, 1, 8), np.float32), np.eye(8, dtype=np.float32)[:, None])
    with patch.object(attention_module, "_BLOCK", block):
        got = exact.attention(np.ones((3, 1, 8), np.float32), [kv], 5)
    for row, seen in zip(got, (6, 7, 8)):
        same_bits(row, np.float32([round_to_float32(Fraction(1, seen))] * seen + [0] * (8 - seen)), name="weights")


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 2), (4, 1), (4, 4)])
def test_neighbouring_query_heads_share_a_kv_head(heads, kv_heads):
    # Case J6. With so few keys the rounding of the weights is far below half a unit of 1.0 in float32.
    values = np.repeat(np.arange(1, kv_heads + 1, dtype=np.float32)[:, None], D, axis=1)          # (N, D): 1, 2, ...
    kv = exact.pack_kv(normal(9, kv_heads, D), np.broadcast_to(values, (9, kv_heads, D)))
    got = exact.attention(normal(9, heads, D, seed=1), [kv], 0).reshape(9, heads, D)
    want = np.repeat(values, heads // kv_heads, axis=0)                                           # (H, D): 1, 1, 2, 2
    same_bits(got, np.ascontiguousarray(np.broadcast_to(want, got.shape)), name="heads")


# exp2, cos and sin

def test_exp2_is_within_its_stated_error_never_falls_and_is_exact_at_whole_numbers():
    fine = np.arange(-3 * 2**20, 3 * 2**20 + 1) * 2.0**-22    # beyond both ends of the polynomial's range [-1/2, 1/2]
    coarse = np.linspace(-126, 126, 10**6)
    for t in (fine.astype(np.float32), coarse.astype(np.float32)):
        got = elementary.exp2(t)
        assert np.abs(got / np.exp2(t.astype(np.float64)) - 1).max() < 1.1e-7
        assert (np.diff(got) >= 0).all()
    whole = np.arange(-126, 127, dtype=np.float32)
    same_bits(elementary.exp2(whole), np.ldexp(np.float32(1), whole.astype(np.int32)), name="exp2")
    same_bits(elementary.exp2(np.float32([-126.5, -1e30, -np.inf])), np.full(3, 2.0**-126, np.float32), name="exp2")


def test_exp2_leaves_its_argument_alone():
    t = np.linspace(-3, 3, 50, dtype=np.float32)
    before = t.copy()
    elementary.exp2(t)
    same_bits(t, before, name="t")


def decimal_cos_sin(turns: Fraction) -> tuple[Decimal, Decimal]:
    """cos and sin of an angle given in turns, to 40 digits, by their power series."""
    with localcontext(prec=60):
        two_pi = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
        x = Decimal(turns.numerator) / Decimal(turns.denominator) * two_pi
        term, sums = Decimal(1), [Decimal(0), Decimal(0)]
        for i in range(60):                                   # 6.3^60 / 60! is below 1e-33
            sums[i % 2] += term if i % 4 < 2 else -term
            term *= x / (i + 1)
        return sums[0], sums[1]


def test_cos_and_sin_are_within_1e_15_all_around_the_circle():
    corners = [n * 2**61 + d for n in range(8) for d in (-2**40, -1, 0, 1, 2**40)]
    around = [i * 0x9E3779B97F4A7C15 for i in range(300)]     # the golden ratio spreads them
    turns = [t % 2**64 for t in corners + around]
    got = elementary.cos_sin_turns(np.array(turns, np.uint64))
    for t, *pair in zip(turns, *got):
        for value, true in zip(pair, decimal_cos_sin(Fraction(t, 2**64))):
            assert abs(Decimal(float(value)) - true) < Decimal("1e-15"), t


def test_quarter_turns_are_exact():
    cos, sin = elementary.cos_sin_turns(np.arange(4, dtype=np.uint64) << np.uint64(62))
    assert cos.tolist() == [1, 0, -1, 0] and sin.tolist() == [0, 1, 0, -1]


@pytest.mark.parametrize("start", [0, 999_999, 1_000_000, 2**31 - 4])
@pytest.mark.parametrize("theta, factor", [(10000.0, 1.0), (1e6, 1.138629436111989)])
def test_the_rope_table_is_a_decimal_computation_rounded_to_float32(start, theta, factor):
    dim = 16
    cos, sin = exact.rope_table(Rope(theta).turns(dim), factor, start, start + 4)
    with localcontext(prec=60):
        two_pi = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
        turns = [[Fraction(p * (-Decimal(theta).ln() * 2 * i / dim).exp() / two_pi) % 1 for i in range(dim // 2)]
                 for p in range(start, start + 4)]
    want = np.array([[[round_to_float32(Fraction(value) * Fraction(factor)) for value in decimal_cos_sin(t)] for t in row]
                     for row in turns], np.float32)           # (4, D/2, 2)
    same_bits(cos, np.ascontiguousarray(want[..., 0]), name="cos")
    same_bits(sin, np.ascontiguousarray(want[..., 1]), name="sin")


def test_a_row_of_the_rope_table_does_not_depend_on_the_table():
    turns = Rope(10000.0).turns(16)
    for whole, part in zip(exact.rope_table(turns, 1.0, 0, 100), exact.rope_table(turns, 1.0, 37, 41)):
        same_bits(part, whole[37:41], name="table")


# Infinities, NaN, zeros

BAD = [np.inf, -np.inf, np.nan]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", BAD)
def test_a_row_with_an_infinity_or_a_nan_becomes_nan_and_no_other_row_does(bad):
    x = normal(5, 3, 16)
    x[2, 1, 4] = x[4, 0, 0] = bad
    kv = exact.pack_kv(normal(5, 3, 16), normal(5, 3, 16))
    packed = exact.pack_linear((2, 16), [np.ones((2, 16), np.float32)])
    gain = exact.pack_norm(np.ones(16, np.float32))
    rows = np.zeros((5, 3), bool)
    rows[2, 1] = rows[4, 0] = True
    for y in (exact.linear(x, packed), exact.rms_norm(x, gain, 1e-6), exact.attention(x, [kv], 0).reshape(5, 3, 16)):
        assert np.isnan(y[rows]).all() and np.isfinite(y[~rows]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_key_or_value_with_an_infinity_or_a_nan_shows_in_every_query_that_sees_it(bad, which):
    """So a forward that went wrong in the middle of a chunk cannot look right at its end."""
    k, v, q = normal(9, 2, 16), normal(9, 2, 16), normal(9, 4, 16)
    (k if which == "k" else v)[5, 1, 3] = bad
    heads = exact.attention(q, [exact.pack_kv(k, v)], 0).reshape(9, 4, 16)
    wrong = ~np.isfinite(heads).all(axis=2)
    assert wrong[5:, 2:].all() and not wrong[:, :2].any()


@pytest.mark.parametrize("bad", BAD)
def test_a_weight_with_an_infinity_or_a_nan_is_refused_with_its_row_whatever_the_blocks(bad):
    w = normal(50, 2000)
    w[41, 3] = bad
    for blocks in ([w], [w[:40], w[40:]], np.split(w, 50)):
        with pytest.raises(NonFiniteError, match="row 41 ") as error:
            exact.pack_linear(w.shape, blocks)
        assert error.value.row == 41


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("column", [0, 1], ids=["gate", "up"])
def test_swiglu_does_not_hide_an_infinity_or_a_nan(bad, column):
    for other in (-100.0, -1.0, 0.0, 1.0, 100.0):
        pair = np.full((1, 2), other, np.float32)
        pair[0, column] = bad
        assert not np.isfinite(exact.swiglu(pair)).any(), pair


def test_a_sum_that_is_zero_is_plus_zero_whatever_sign_the_blas_leaves():
    # The sign of a zero is the one thing in an exact sum that depends on where a BLAS starts.
    def other_zeros(a, b, out=None):
        y = np.matmul(a, b, out=out)
        y[y == 0] = -0.0
        return y

    x = np.float32([[0, 0], [-0.0, -0.0], [1, -1], [-1, 1], [-0.0, 1], [1, -0.0]])
    w = np.float32([[1, 1], [-1, -1], [0, 0], [-0.0, -0.0], [-0.0, 0]])
    for bias in (None, np.full(5, -0.0, np.float32)):
        packed = exact.pack_linear(w.shape, [w], bias)
        got = exact.linear(x, packed)
        assert not np.signbit(got[got == 0]).any()
        assert (got == 0).sum() == 6 * 3 + 4 * 2              # zero weights; then rows of zeros or opposites
        with patch.object(mlp, "matmul", other_zeros):
            same_bits(exact.linear(x, packed), got, name="linear")
    kv = exact.pack_kv(np.zeros((2, 2, 2), np.float32), np.float32([[[1, -0.0], [-0.0, 0]], [[-1, -0.0], [-0.0, -0.0]]]))
    for matmul in (np.matmul, other_zeros):
        with patch.object(attention_module, "matmul", matmul):
            got = exact.attention(np.ones((1, 2, 2), np.float32), [kv], 1)
        same_bits(got, np.zeros((1, 4), np.float32), name="heads")


# From logits to a choice

@given(arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([-1.0, 0.0, 0.5, 0.5 + 2.0**-24])))
def test_argmax_ties_go_to_the_lowest_index(logits):
    values = logits.tolist()
    assert exact.argmax(logits) == values.index(max(values))


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-2.0**99, 2.0**99, width=32)),
       st.sampled_from([1e-40, 1e-3, 0.7, 1.0, 50.0]))
def test_token_weights_rise_with_the_logits_to_two_to_the_30(logits, temperature):
    weights = exact.token_weights(logits, temperature)
    assert weights.dtype == np.int64
    assert weights.min() >= 0 and weights[exact.argmax(logits)] == weights.max() == 2**30
    pairs = sorted(set(zip(logits.tolist(), weights.tolist())))
    assert [logit for logit, _ in pairs] == sorted(set(logits.tolist()))       # equal logits have equal weights
    assert [weight for _, weight in pairs] == sorted(weight for _, weight in pairs)


@pytest.mark.parametrize("temperature", [1e-46, 1e-300, 5e-324])
def test_a_temperature_too_small_for_float32_leaves_only_the_largest_logits(temperature):
    assert exact.token_weights(np.float32([1, 3, 3, 2]), temperature).tolist() == [0, 2**30, 2**30, 0]
