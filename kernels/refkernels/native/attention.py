"""Causal grouped-query attention over a cache of keys and values.

N kv heads, G = H // N query heads for each, S = start + T keys.
"""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_CONTEXT = 2**31
_BLOCK = 2**18   # scores in work at once: they stay in the L2 cache
_ONE_BY_ONE = 2  # rows for which a matrix times vectors is quicker: the BLAS then copies no keys and values
_FEW = 16        # rows for which keys times queries is quicker than queries times keys, which it copies


class KV(NamedTuple):
    """Keys and values of some positions, head first."""

    k: np.ndarray        # (N, T, D)
    v: np.ndarray        # (N, T, D)


def kv_fields(head_dim: int, dtype=np.float32) -> dict[str, tuple[tuple[int, ...], type]]:
    """Name -> (shape for one position and head, dtype) of what ``pack_kv`` makes."""
    return {"k": ((head_dim,), dtype), "v": ((head_dim,), dtype)}


def pack_kv(k: np.ndarray, v: np.ndarray) -> KV:
    """Keys (after norm and rotation) and values as the cache stores them. (T, N, D) twice."""
    return KV(k.swapaxes(0, 1), v.swapaxes(0, 1))


def unpack_kv(kv: KV) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values as attention uses them. -> copies, (T, N, D) twice."""
    return kv.k.swapaxes(0, 1).copy(), kv.v.swapaxes(0, 1).copy()


def attention(q: np.ndarray, runs: Sequence[KV], start: int) -> np.ndarray:
    """softmax(q k^T / sqrt(D), causal) v. q: (T, H, D) at positions start..start+T-1 -> (T, H * D).

    runs: the packed positions 0..start+T-1 in order, as one or more stretches.
    """
    t, h, d = q.shape
    n = runs[0].k.shape[0]
    g = h // n
    q = grouped(q, n)                                         # (N, T * G, D)
    out = np.empty((n, t * g, d), q.dtype)                    # (N, T * G, D)
    queries = max(1, min(t, _BLOCK // (g * (start + t))))
    heads = max(1, min(n, _BLOCK // (g * (start + t) * queries)))
    for head in range(0, n, heads):
        some = slice(head, head + heads)
        for first in range(0, t, queries):
            last = min(t, first + queries)
            rows = slice(first * g, last * g)
            out[some, rows] = _attend(q[some, rows], [(run.k[some], run.v[some]) for run in runs], start + last,
                                      last - first, g)
    return out.reshape(n, t, g, d).swapaxes(0, 1).reshape(t, h * d)


def grouped(q: np.ndarray, n: int) -> np.ndarray:
    """Scaled queries, those of a kv head together. (T, H, D) -> (N, T * G, D)."""
    t, h, d = q.shape
    return (q * q.dtype.type(1 / d**0.5)).reshape(t, n, h // n, d).swapaxes(0, 1).reshape(n, t * (h // n), d)


def hide_future(scores: np.ndarray, queries: int, g: int) -> None:
    """A query sees no key after its own: the last R are theirs. scores: (n, R * G, S), changed in place."""
    if queries > 1:
        own = scores.reshape(len(scores), queries, g, -1)[..., -queries:]
        np.copyto(own, -np.inf, where=~np.tri(queries, dtype=bool)[:, None])


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Turns scores into e^score relative to a row's largest, 0 where masked. -> their sums (n, R * G, 1)."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return scores.sum(axis=-1, keepdims=True)


def _attend(q, runs, keys, queries, g):
    """One block. q: (n, R * G, D); the last R of the keys are the queries' own."""
    n, rows, d = q.shape
    scores = np.empty((n, rows, keys), q.dtype)               # (n, R * G, S)
    pieces, a = [], 0
    for k, v in runs:
        b = min(keys, a + k.shape[1])
        if b > a:
            pieces.append((a, b, v[:, :b - a]))
            k = k[:, :b - a]
            _products(q, k, scores[..., a:b])
        a = b
    hide_future(scores, queries, g)
    total = probabilities(scores)                             # (n, R * G, 1)
    acc = np.zeros((n, rows, d), q.dtype)                     # (n, R * G, D)
    for a, b, v in pieces:
        if rows <= _ONE_BY_ONE:
            acc += np.matmul(v.swapaxes(1, 2)[:, None], scores[..., a:b, None])[..., 0]
        else:
            acc += scores[..., a:b] @ v
    acc /= total
    return acc


def _products(q, k, out):
    """out = q k^T. (n, R * G, D), (n, S, D) -> (n, R * G, S)."""
    if q.shape[1] <= _ONE_BY_ONE:
        np.matmul(k[:, None], q[..., None], out=out[..., None])
    elif q.shape[1] < _FEW:
        out[...] = np.matmul(k, q.swapaxes(1, 2)).swapaxes(1, 2)
    else:
        np.matmul(q, k.swapaxes(1, 2), out=out)
