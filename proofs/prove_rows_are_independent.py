"""THEOREM. In the exact set, a row's result does not depend on the other rows, their number or their order.

Statement: for every function of the set that works on rows, and any M rows, any subset of them in any order gives, row by
row, the bits that each row gives by itself; attention, for any cut of the queries into calls and of the keys into runs.

Argument: a row's grid comes from the row alone. On it, every sum is a sum of integers below 2^53 in float64, which has no
rounding (prove_reductions_are_exact), so the way a BLAS blocks and threads M rows cannot show. All else is elementwise.

Not shown: more than 80 rows at a time. The control: `native` fails this, on most cores, at once.
"""
import numpy as np
from hypothesis import given, strategies as st
import pytest

from refkernels import arithmetic, exact

K, N = 96, 40


def _values(seed: int, *shape: int) -> np.ndarray:
    """Bell-shaped, with outliers, tiny rows and zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, (*shape[:-1], 1))
    x[..., ::11] *= 400
    x[rng.random(shape[:-1]) < 0.05] = 0
    return x.astype(np.float32)


def _functions(op, seed: int):
    """Name -> a function of (M, K) rows."""
    w = op.pack_linear((N, K), [_values(seed, N, K)], _values(seed + 1, 1, N)[0])
    gain = op.pack_norm(_values(seed + 2, 1, K)[0])
    cos, sin = op.rope_table(np.array([[2**60 + 12345, 7], [2**50, 1], [3**30, 0]] * 4, np.uint64), 1.0, 0, 1)
    return {"linear": lambda x: op.linear(x, w), "rms_norm": lambda x: op.rms_norm(x, gain, 1e-6), "swiglu": op.swiglu,
            "rotate": lambda x: op.rotate(x.reshape(len(x), 4, 24), np.repeat(cos, len(x), 0), np.repeat(sin, len(x), 0)),
            "pack_kv": lambda x: np.concatenate([f.swapaxes(0, 1).reshape(len(x), -1) for f in op.pack_kv(
                x.reshape(len(x), 2, 48), x.reshape(len(x), 2, 48))], axis=1)}


NAMES = ("linear", "rms_norm", "swiglu", "rotate", "pack_kv")


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 80), data=st.data())
def prove_a_row_is_the_same_among_any_others(name, seed, rows, data):
    function, x = _functions(exact, seed)[name], _values(seed + 3, rows, K)
    some = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=80))
    together = function(x[some])
    for place, row in enumerate(some):
        assert together[place].tobytes() == function(x[row:row + 1])[0].tobytes(), f"row {row} at place {place} of {len(some)}"


@given(seed=st.integers(0, 2**16), data=st.data())
def prove_attention_is_the_same_for_any_cut_of_queries_and_keys(seed, data):
    s = data.draw(st.integers(1, 40))
    cuts = st.lists(st.integers(1, max(1, s - 1)), max_size=4).map(lambda at: [0, *sorted({i for i in at if i < s}), s])
    q, k, v = _values(seed, s, 4, 16), _values(seed + 1, s, 2, 16), _values(seed + 2, s, 2, 16)
    kv = exact.pack_kv(k, v)
    runs, calls = data.draw(cuts), data.draw(cuts)
    got = [exact.attention(q[a:b], [exact.KV(*(f[:, c:min(d, b)] for f in kv)) for c, d in zip(runs, runs[1:]) if c < b], a)
           for a, b in zip(calls, calls[1:])]
    assert np.concatenate(got).tobytes() == exact.attention(q, [kv], 0).tobytes()


def prove_the_control_can_fail():
    """The same property, asked of plain float32: some row shows how many others were computed with it."""
    native = arithmetic("native")
    for seed in range(8):
        function, x = _functions(native, seed)["linear"], _values(seed + 3, 80, K)
        if any(function(x[:m]).tobytes() != function(x)[:m].tobytes() for m in range(1, 80)):
            return
    pytest.skip("this BLAS computes rows of these shapes alike; prove_the_same_bits_everywhere shows others that do not")
