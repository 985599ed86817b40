"""Causal grouped-query attention over a cache of packed keys and values.

A key is used by itself (one score needs one key), so each key keeps a grid of its own. Values are summed ACROSS
positions, so they are kept as integers beside their step, and each row of probabilities is put on one common grid for
all of them. N kv heads, G = H // N query heads for each, S = start + T keys.
"""
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from refkernels.exact.elementary import LOG2E, exp2
from refkernels.exact.reduce import bit_budget, integers, matmul, power_below, row_max, row_sum, running_max, snap

Q_BITS = 24
V_BITS = 23
P_BITS = 30      # probabilities, relative to the row's largest
SUM_BITS = 29    # the steps of a row of weights sum to 2^29 plus rounding, however long the context
MAX_CONTEXT = 2**22  # P_BITS + log2(S) <= 52
_ZERO = np.array(0.0)
_P_ONE = np.array(2.0**P_BITS, np.float32)
_BLOCK = 2**18   # scores of one product, ...
_ROWS = 128      # ... and rows: enough for the BLAS, and few masked scores are computed
_TILE = 2**15    # scores in elementwise work at once: they stay in the L2 cache


class KV(NamedTuple):
    """Packed keys and values of some positions, one array a field, head first."""

    k: np.ndarray        # (N, T, D) float64, each row on its own grid
    v: np.ndarray        # (N, T, D) float64, integers
    v_step: np.ndarray   # (N, T) float64, a power of two: the value is v * v_step


def _k_bits(head_dim: int) -> int:
    return bit_budget(head_dim, Q_BITS, 24, 12, "attention scores")


def kv_fields(head_dim: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Name -> (shape for one position and head, dtype) of what ``pack_kv`` makes. Raises BoundError."""
    _k_bits(head_dim)
    return {"k": ((head_dim,), np.float64), "v": ((head_dim,), np.float64), "v_step": ((), np.float64)}


def pack_kv(k: np.ndarray, v: np.ndarray) -> KV:
    """Keys (after norm and rotation) and values as the cache stores them. (T, N, D) float32 twice."""
    v_int, step = integers(v.swapaxes(0, 1), V_BITS)          # (N, T, D), (N, T, 1)
    return KV(snap(k.swapaxes(0, 1), _k_bits(k.shape[-1])), v_int, step[..., 0])


def unpack_kv(kv: KV) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values as attention uses them. -> (T, N, D) float32 twice."""
    v = kv.v * kv.v_step[..., None]                           # (N, T, D)
    return kv.k.swapaxes(0, 1).astype(np.float32), v.swapaxes(0, 1).astype(np.float32)


def attention(q: np.ndarray, runs: Sequence[KV], start: int) -> np.ndarray:
    """softmax(q k^T / sqrt(D), causal) v. q: (T, H, D) float32 at positions start..start+T-1 -> (T, H * D) float32.

    runs: the packed positions 0..start+T-1 in order, as one or more stretches.
    """
    t, h, d = q.shape
    n = runs[0].k.shape[0]
    g = h // n
    q = grouped(q, n)                                         # (N, T * G, D)
    step = runs[0].v_step if len(runs) == 1 else np.concatenate([run.v_step for run in runs], axis=1)  # (N, S)
    step_max = running_max(step[:, start:])                   # (N, T): up to each query's position
    if start:
        np.maximum(step_max, row_max(step[:, :start]), out=step_max)
    step_max = step_max.repeat(g, axis=1)[..., None]          # (N, T * G, 1)
    out = np.empty((n, t * g, d), np.float32)                 # (N, T * G, D)
    memory = np.empty(min(n * t * g, max(_BLOCK // (start + t), g)) * (start + t))
    for heads, rows in _blocks(n, t * g, start + t, g, _BLOCK):
        keys = start + rows.stop // g                         # the last query of the block sees so many
        out[heads, rows] = _attend(q[heads, rows], _clip(runs, heads, keys), step[heads, None, :keys], step_max[heads, rows], g,
                                   memory)
    return out.reshape(n, t, g, d).swapaxes(0, 1).reshape(t, h * d)


def grouped(q: np.ndarray, n: int) -> np.ndarray:
    """Scaled queries on their grids, those of a kv head together. (T, H, D) float32 -> (N, T * G, D) float64.

    Their products with keys are scores in units of log 2.
    """
    t, h, d = q.shape
    q = snap(q * np.float32(LOG2E / np.sqrt(np.float64(d))), Q_BITS)      # (T, H, D)
    return q.reshape(t, n, h // n, d).swapaxes(0, 1).reshape(n, t * (h // n), d)


def hide_future(scores: np.ndarray, queries: int, g: int) -> None:
    """A query sees no key after its own: the last R are theirs. scores: (n, R * G, S), changed in place."""
    if queries > 1:
        own = scores.reshape(len(scores), queries, g, -1)[..., -queries:]
        np.copyto(own, -np.inf, where=~np.tri(queries, dtype=bool)[:, None])


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Turns scores in units of log 2 into integers, 2^30 for a row's largest and 0 where masked. -> their sums (n, R, 1)."""
    scores -= row_max(scores)
    p = exp2(scores.astype(np.float32))                       # (n, R, S) in (0, 1]; 2^-126 where masked
    p *= _P_ONE
    np.rint(p, out=scores)
    return row_sum(scores)


def _blocks(n: int, rows: int, s: int, g: int, size: int) -> Iterator[tuple[slice, slice]]:
    """(kv heads, rows) of blocks that hold at most ``size`` scores, or the ``g`` rows of one query."""
    height = max(g, min(rows, _ROWS, size // s) // g * g)
    heads = max(1, min(n, size // (s * height)))
    for a in range(0, n, heads):
        for first in range(0, rows, height):
            yield slice(a, min(n, a + heads)), slice(first, min(rows, first + height))


def _clip(runs: Sequence[KV], heads: slice, keys: int) -> list[tuple[int, int, KV]]:
    """(from, to, stretch) of the stretches that hold the first ``keys`` positions, for some heads."""
    clipped, a = [], 0
    for run in runs:
        b = min(keys, a + run.k.shape[1])
        if b > a:
            clipped.append((a, b, KV(run.k[heads, :b - a], run.v[heads, :b - a], run.v_step)))
        a = b
    return clipped


def _attend(q, runs, step, step_max, g, memory):
    """One block of queries and the keys they see. q: (n, R * G, D); step: (n, 1, S); step_max: (n, R * G, 1)."""
    n, rows, d = q.shape
    keys, queries = step.shape[-1], rows // g
    scores = memory[:n * rows * keys].reshape(n, rows, keys)  # (n, R * G, S), in units of log 2
    for a, b, run in runs:
        matmul(q, run.k.swapaxes(1, 2), out=scores[..., a:b])
    hide_future(scores, queries, g)
    if scores.size <= _TILE:
        total, grid = _weigh(scores, step, step_max)
    else:
        total, grid = np.empty((2, n, rows, 1))
        for heads, part in _blocks(n, rows, keys, 1, _TILE):
            total[heads, part], grid[heads, part] = _weigh(scores[heads, part], step[heads], step_max[heads, part])
    a, b, run = runs[0]
    acc = matmul(scores[..., a:b], run.v)                     # (n, R * G, D)
    acc += _ZERO                                              # no -0.0 left by the BLAS
    for a, b, run in runs[1:]:
        acc += matmul(scores[..., a:b], run.v)
    acc *= grid
    acc /= total
    return acc


def _weigh(scores, step, step_max):
    """Turns scores into the weights of the values, integers on one grid for all positions alike. -> total, grid (n, R, 1)."""
    total = probabilities(scores)                             # (n, R, 1)
    grid = power_below(total * step_max)
    grid /= float(1 << SUM_BITS - 1)
    scores *= step
    scores *= 1.0 / grid
    np.rint(scores, out=scores)                               # steps of it
    return total, grid
