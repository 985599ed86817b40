"""Attention taken apart, for looking at it and for changing it: scores, weights, and values weighted by given weights.

H query heads, N kv heads, G = H // N, S keys, of which the last T are the queries' own.
"""
from collections.abc import Sequence

import numpy as np

from refkernels.native.attention import KV, grouped, hide_future, probabilities


def attention_pattern(q: np.ndarray, runs: Sequence[KV], start: int) -> tuple[np.ndarray, np.ndarray]:
    """What ``attention(q, runs, start)`` weighs values with. (T, H, D) -> scores and weights, (H, T, S) twice.

    Scores are q k^T / sqrt(D), -inf where masked; weights are their softmax.
    """
    t, h, _ = q.shape
    n = runs[0].k.shape[0]
    k = np.concatenate([run.k for run in runs], axis=1)[:, :start + t]    # (N, S, D)
    scores = grouped(q, n) @ k.swapaxes(1, 2)                 # (N, T * G, S)
    hide_future(scores, t, h // n)
    weights = scores.copy()
    weights /= probabilities(weights)
    return tuple(x.reshape(n, t, h // n, -1).swapaxes(1, 2).reshape(h, t, -1) for x in (scores, weights))


def softmax(scores: np.ndarray) -> np.ndarray:
    """The weights of given scores. (H, T, S), -inf where masked -> (H, T, S)."""
    weights = scores.copy()
    weights /= probabilities(weights)
    return weights


def weighted_values(weights: np.ndarray, runs: Sequence[KV]) -> np.ndarray:
    """weights v, of any weights. (H, T, S) -> (T, H * D)."""
    h, t, s = weights.shape
    v = np.concatenate([run.v for run in runs], axis=1)[:, :s].repeat(h // runs[0].v.shape[0], axis=0)    # (H, S, D)
    return (weights @ v).swapaxes(0, 1).reshape(t, -1)
