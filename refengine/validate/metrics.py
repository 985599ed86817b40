"""How far logits are from the reference. Raw logits, float64; KL in nats, of softmaxed rows."""
from __future__ import annotations

from typing import Any

import numpy as np

TOP = 5


def compare(want: np.ndarray, got: np.ndarray, known: np.ndarray | None = None) -> dict[str, Any]:
    """(T, V) twice -> figures. KL "forward" is of the reference from the backend, sum p log(p / q); "backward" the other way.

    known: (T, V) of bool, when both are log-probabilities and ``got`` has only these. What is not known is one event more to
    KL, and nothing to the other figures. by_position: the root mean square of a row's difference over that of the reference's
    row; nmse is its square over all.
    """
    want, got = want.astype(np.float64), got.astype(np.float64)
    if not (partial := known is not None):
        known, p, q = np.ones(want.shape, bool), log_softmax(want), log_softmax(got)
    else:
        want, got = (np.where(known, x, -np.inf) for x in (want, got))
        p, q = (log_softmax(np.concatenate([x, _rest(x)], axis=1)) for x in (want, got))  # rounded, they do not sum to 1
    difference, size = (np.where(known, x, 0.0) for x in (got, want))
    difference = difference - size
    rows = np.sqrt((difference**2).sum(axis=1) / (size**2).sum(axis=1))      # (T,)
    top = np.argsort(-want, axis=1, kind="stable")[:, :TOP], np.argsort(-got, axis=1, kind="stable")[:, :TOP]
    parted = np.flatnonzero(top[0][:, 0] != top[1][:, 0])
    return {"largest": float(np.abs(difference).max()), "nmse": float((difference**2).sum() / (size**2).sum()),
            "kl_forward": _kl(p, q), "kl_backward": _kl(q, p),
            "log_probability": float(np.abs(difference if partial else p - q)[np.arange(len(p)), top[0][:, 0]].max()),
            "top_1": float((top[0][:, 0] == top[1][:, 0]).mean()), "top_5_order": float((top[0] == top[1]).all(axis=1).mean()),
            "top_5": float(np.mean([len(set(a) & set(b)) / TOP for a, b in zip(*top)])),
            "first_parted": int(parted[0]) if len(parted) else None, "by_position": rows.tolist()}


def _kl(p: np.ndarray, q: np.ndarray) -> float:
    """Of log-probabilities, over all rows on average. What has none on either side adds nothing."""
    told = np.isfinite(p) & np.isfinite(q)
    return float(np.where(told, np.exp(p) * (np.where(told, p, 0) - np.where(told, q, 0)), 0).sum(axis=1).mean())


def _rest(x: np.ndarray) -> np.ndarray:
    """(T, 1): the log-probability of all that is minus infinity; minus infinity where that is but rounding."""
    rest = 1 - np.exp(x).sum(axis=1, keepdims=True)
    return np.log(np.where(rest > 1e-5, rest, 1.0)) + np.where(rest > 1e-5, 0.0, -np.inf)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def relative(want: np.ndarray, got: np.ndarray) -> float:
    """Root mean square of the difference over that of what is wanted; of finite numbers, as scores are masked."""
    finite = np.isfinite(want) & (want > -1e30)
    size = np.sqrt((want[finite].astype(np.float64)**2).mean()) if finite.any() else 0.0
    difference = np.sqrt(((got[finite].astype(np.float64) - want[finite])**2).mean()) if finite.any() else 0.0
    return float(difference / size) if size else float(difference > 0)
