"""Attention taken apart, for looking at it and for changing it: scores, weights, and values weighted by given weights.

The same grids and the same integers as in `attention`, of whole rows instead of tiles, since here a row is the result.
H query heads, N kv heads, G = H // N, S keys, of which the last T are the queries' own.
"""
from collections.abc import Sequence

import numpy as np

from refkernels.exact.attention import KV, SUM_BITS, grouped, hide_future, probabilities
from refkernels.exact.elementary import LOG2E
from refkernels.exact.reduce import l1_bound, matmul, power_below

_LN2 = 0.6931471805599453


def attention_pattern(q: np.ndarray, runs: Sequence[KV], start: int) -> tuple[np.ndarray, np.ndarray]:
    """What ``attention(q, runs, start)`` weighs values with. (T, H, D) -> scores and weights, (H, T, S) float32 twice.

    Scores are q k^T / sqrt(D), -inf where masked; weights are their softmax, before the grid for the values.
    """
    t, h, _ = q.shape
    n = runs[0].k.shape[0]
    q = grouped(q, n)                                         # (N, T * G, D)
    scores, weights = np.empty((2, h, t, start + t), np.float32)          # (H, T, S)
    rows = np.empty((1, t * (h // n), start + t))             # (1, T * G, S), in units of log 2
    for head in range(n):
        some = slice(head, head + 1)
        for a, b, run in _clipped(runs, start + t):
            matmul(q[some], run.k[some, :b - a].swapaxes(1, 2), out=rows[..., a:b])
        hide_future(rows, t, h // n)
        own = slice(head * (h // n), (head + 1) * (h // n))   # the kv head's query heads
        scores[own] = (rows * _LN2).reshape(t, h // n, -1).swapaxes(0, 1)
        total = probabilities(rows)                           # (1, T * G, 1)
        weights[own] = (rows / total).reshape(t, h // n, -1).swapaxes(0, 1)
    return scores, weights


def softmax(scores: np.ndarray) -> np.ndarray:
    """The weights of given scores. (H, T, S) float32, -inf where masked -> (H, T, S) float32."""
    rows = scores.astype(np.float64) * float(LOG2E)           # (H, T, S)
    total = probabilities(rows)
    return (rows / total).astype(np.float32)


def weighted_values(weights: np.ndarray, runs: Sequence[KV]) -> np.ndarray:
    """weights v, of any weights. (H, T, S) float32 -> (T, H * D) float32.

    Each row of weights goes on a grid on which its steps sum to at most 2^29, as in `attention`.
    """
    h, t, s = weights.shape
    n, _, d = runs[0].v.shape
    out = np.empty((t, h, d), np.float32)                     # (T, H, D)
    for head in range(h):
        kv = head // (h // n)
        step = np.concatenate([run.v_step[kv] for _, _, run in _clipped(runs, s)])[:s]    # (S,)
        rows = weights[head] * step                           # (T, S) float64: a power of two times a float32
        grid = power_below(l1_bound(rows)) / float(1 << SUM_BITS - 1)     # (T, 1)
        grid[grid == 0] = 1.0                                 # a row of zeros
        rows /= grid
        np.rint(rows, out=rows)
        acc = np.zeros((t, d))                                # (T, D)
        for a, b, run in _clipped(runs, s):
            acc += matmul(rows[:, a:b], run.v[kv, :b - a])
        acc *= grid
        out[:, head] = acc
    return out.reshape(t, h * d)


def _clipped(runs: Sequence[KV], keys: int) -> list[tuple[int, int, KV]]:
    """(from, to, stretch) of the stretches that hold the first ``keys`` positions."""
    clipped, a = [], 0
    for run in runs:
        b = min(keys, a + run.k.shape[1])
        if b > a:
            clipped.append((a, b, run))
        a += run.k.shape[1]
    return clipped
