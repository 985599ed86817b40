"""All three sets compute the functions that they are named after, to an error derived from their number format and the
lengths of the sums. And the control: what test_kernels_exact.py shows of the exact set, that a row does not depend on the
rows beside it, can be seen to fail for the native set. Floor 9.

The plain loops below use float64 and math.fsum (one rounding for a whole sum). u is half the spacing of a format above 1; a
sum of n rounded terms is off by at most n u / (1 - n u) of the sum of the magnitudes (Higham 2002, lemma 3.1).
"""
import math

import numpy as np
import pytest

from digest import CORES, elsewhere, missing
from refengine.rope import Rope
from refkernels import SETS, arithmetic

every_set = pytest.mark.parametrize("name", SETS)
U64 = 2.0**-53


def unit(op) -> float:
    return float(np.finfo(op.DTYPE).eps) / 2


def gamma(n: int, u: float) -> float:
    """Relative to the sum of the magnitudes: the error of n roundings in a set, and those of the loop in float64."""
    return n * u / (1 - n * u) + n * U64 / (1 - n * U64)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Float32 values, which every set can hold."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def within(got: np.ndarray, want, bound, name: str) -> None:
    """Each |got - want| <= its bound; else the place, and by how much."""
    want, bound = np.asarray(want, np.float64), np.asarray(bound, np.float64)
    assert got.shape == want.shape, name
    excess = np.abs(got.astype(np.float64) - want) / np.broadcast_to(bound, want.shape)
    at = np.unravel_index(np.argmax(excess), excess.shape)
    where = f"{name}{list(map(int, at))}"
    assert excess[at] <= 1, f"{where} = {got[at]!r}, but should be {want[at]!r}: {excess[at]:.3g} of the bound"


@every_set
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_the_sum_of_products(name, biased):
    op, (t, k, n) = arithmetic(name), (5, 300, 7)
    x, w, bias = normal(t, k), normal(n, k, seed=1), normal(n, seed=2) * biased
    got = op.linear(x.astype(op.DTYPE), op.pack_linear((n, k), [w[:3], w[3:]], bias if biased else None))
    assert got.dtype == op.DTYPE
    x, w = x.astype(np.float64), w.astype(np.float64)
    want = [[math.fsum([*(a * b for a, b in zip(row, out)), extra]) for out, extra in zip(w, bias)] for row in x]
    magnitude = np.abs(x) @ np.abs(w).T + np.abs(bias)
    if name == "exact":  # x on a grid of half its last bit at the row's maximum; w on one of 2^-28 of its L1 norm, or finer
        grids = (np.abs(x).max(axis=1, keepdims=True) * 2.0**-24 * np.abs(w).sum(axis=1)
                 + np.abs(x).sum(axis=1, keepdims=True) * np.abs(w).sum(axis=1) * 2.0**-28)
        bound = grids * (1 + 2.0**-20) + gamma(2, unit(op)) * np.abs(want)
    else:
        bound = gamma(k + 1, unit(op)) * magnitude
    within(got, want, bound, f"{name}.linear")


@every_set
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_rms_norm_divides_by_the_root_of_the_mean_square(name, scale):
    op, (t, k), eps = arithmetic(name), (4, 200), 1e-6
    x, gain = normal(t, k) * np.float32(scale), normal(k, seed=1)
    got = op.rms_norm(x.astype(op.DTYPE), op.pack_norm(gain), eps)
    assert got.dtype == op.DTYPE
    want = [[v / math.sqrt(math.fsum(float(a) ** 2 for a in row) / k + eps) * g for v, g in zip(row.tolist(), gain.tolist())]
            for row in x]
    relative = gamma(k + 8, unit(op))             # squares, their sum, mean, eps, root, quotient, gain
    if name == "exact":                           # the squares' factors are off by up to 2^-b of the row's maximum
        off = np.abs(x).max(axis=1, keepdims=True) * 2.0 ** -((52 - (k - 1).bit_length()) // 2)
        grid = 2 * off * np.abs(x).sum(axis=1, keepdims=True) + k * off**2
        relative = gamma(8, unit(op)) + grid / (x.astype(np.float64) ** 2).sum(axis=1, keepdims=True)
    within(got, want, relative * np.abs(want), f"{name}.rms_norm")


@every_set
def test_swiglu_is_gate_times_sigmoid_of_gate_times_up(name):
    op = arithmetic(name)
    gate, up = np.linspace(-60, 60, 600, dtype=np.float32), normal(600)
    got = op.swiglu(np.concatenate([gate, up])[None].astype(op.DTYPE))[0]
    assert got.dtype == op.DTYPE
    want = np.array([g / (1 + math.exp(-g)) * u for g, u in zip(gate.tolist(), up.tolist())])
    # NumPy's exp is within 4 units in the last place; ours has 1.1e-7 and an argument rounded twice. Three more roundings.
    exp = 1.1e-7 + np.abs(gate) * 2.2 * unit(op) if name == "exact" else 8 * unit(op)
    within(got, want, (exp + gamma(6, unit(op))) * np.abs(want), f"{name}.swiglu")


@every_set
def test_rotate_turns_each_pair_by_its_angle(name):
    op, (t, h, d), start = arithmetic(name), (6, 3, 8), 1000
    x, rope = normal(t, h, d), Rope(10000.0)
    turns = rope.turns(d)
    cos, sin = op.rope_table(turns, 1.0, start, start + t)
    got = op.rotate(x.astype(op.DTYPE), cos, sin)
    assert got.dtype == cos.dtype == sin.dtype == op.DTYPE
    want = np.empty((t, h, d))
    for p in range(t):
        for i in range(d // 2):
            angle = (start + p) * 10000.0 ** (-2 * i / d)
            a, b = x[p, :, i].astype(np.float64), x[p, :, i + d // 2].astype(np.float64)
            want[p, :, i] = a * math.cos(angle) - b * math.sin(angle)
            want[p, :, i + d // 2] = b * math.cos(angle) + a * math.sin(angle)
    pair = np.abs(x[..., :d // 2]) + np.abs(x[..., d // 2:])
    # The angle (frequencies are at most 1) is off by 3 u in float64 here and by 5 u there; table, product and sum round.
    within(got, want, np.concatenate([pair, pair], axis=-1) * (gamma(3, unit(op)) + 8 * (start + t) * U64), f"{name}.rotate")


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int) -> np.ndarray:
    """One key and one query at a time. q: (T, H, D), k and v: (S, N, D) -> (T, H, D) float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    t, h, d = q.shape
    out = np.zeros((t, h, d))
    for i in range(t):
        for head in range(h):
            kv = head * k.shape[1] // h
            scores = [math.fsum(a * b for a, b in zip(q[i, head], k[s, kv])) / math.sqrt(d) for s in range(start + i + 1)]
            weights = [math.exp(score - max(scores)) for score in scores]
            for j in range(d):
                out[i, head, j] = math.fsum(w * v[s, kv, j] for s, w in enumerate(weights)) / math.fsum(weights)
    return out


@every_set
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (3, 1)])
@pytest.mark.parametrize("start, t", [(0, 9), (30, 3), (40, 2), (50, 1)])
def test_attention_is_a_softmax_average_of_the_values(name, heads, kv_heads, start, t):
    op, d, s = arithmetic(name), 16, start + t
    q, k, v = normal(t, heads, d), normal(s, kv_heads, d, seed=1), normal(s, kv_heads, d, seed=2)
    kv = op.pack_kv(k.astype(op.DTYPE), v.astype(op.DTYPE))
    halves = [op.KV(*(field[:, a:b] for field in kv)) for a, b in ((0, s // 2), (s // 2, s)) if b > a]
    got = op.attention(q.astype(op.DTYPE), halves, start).reshape(t, heads, d)
    assert got.dtype == op.DTYPE
    # An error e of all scores changes weights by a factor of exp(2 e), numerator and denominator alike.
    u = unit(op)
    size = np.abs(q).sum(axis=-1).max() * np.abs(k).max() / math.sqrt(d)       # no score is larger
    if name == "exact":
        # q and k are off by 2^-24 of their row's maximum; log2 e, its quotient, their product and scores' differences round.
        grids = 2 * 2.0**-24 * d * np.abs(q).max() * np.abs(k).max() / math.sqrt(d)
        # Weights are rounded to 2^-30, then to steps of up to 2^-28 of all of them together; values to 2^-23 of the largest.
        score, exp, rest = grids + 5 * size * u, 1.1e-7, s * (2.0**-30 + 2.0**-28) + 2.0**-23 + 2 * u
    else:                # exp is within 4 units in the last place in NumPy
        score, exp, rest = gamma(d + 3, u) * size + 2 * size * u, 8 * u, 2 * gamma(s + 2, u) + 2 * u
    bound = np.abs(v).max() * (math.expm1(2 * score) + 2 * exp + rest)
    within(got, plain_attention(q, k, v, start), bound, f"{name}.attention")


@every_set
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_token_weights_are_the_softmax_in_units_of_two_to_the_minus_30(name, temperature):
    op = arithmetic(name)
    logits = 5 * normal(200)
    x = [(float(logit) - float(logits.max())) / temperature for logit in logits]
    want = np.exp(x) * 2.0**30
    # The exponent meets up to five roundings; then exp (1.1e-7, or 4 units in the last place), then half a unit.
    relative = np.expm1(np.abs(x) * gamma(5, unit(op))) + (1.1e-7 if name == "exact" else 8 * unit(op))
    within(op.token_weights(logits.astype(op.DTYPE), temperature), want, 0.5 + want * relative, f"{name}.token_weights")
    assert op.argmax(np.array([1, 3, 3, 2], op.DTYPE)) == 1


# The control

@pytest.mark.parametrize("k", [256, 1024])
def test_on_haswell_native_rows_depend_on_their_number_and_exact_rows_do_not(k):
    if reason := missing("Haswell"):
        pytest.skip(reason)
    wanted = f"describe()['blas_core'], rows_that_differ('native', {k}), rows_that_differ('exact', {k})"
    used, native, exact = elsewhere(wanted, OPENBLAS_CORETYPE="Haswell", OPENBLAS_NUM_THREADS="1")
    assert exact == []
    if used not in CORES["Haswell"][1]:
        pytest.skip(f"OpenBLAS uses {used} when told Haswell")
    assert native != [], "the control found no M for which native rows differ"
