"""How far logits are from the reference. Raw logits, float64; KL in nats, of softmaxed rows."""
from __future__ import annotations

from typing import Any

import numpy as np

TOP = 5


def compare(want: np.ndarray, got: np.ndarray) -> dict[str, Any]:
    """(T, V) twice -> figures. KL "forward" is of the reference from the backend, sum p log(p / q); "backward" the other way.

    by_position: the root mean square of a row's difference over that of the reference's row; nmse is its square over all.
    """
    want, got = want.astype(np.float64), got.astype(np.float64)
    difference = got - want
    rows = np.sqrt((difference**2).mean(axis=1)) / np.sqrt((want**2).mean(axis=1))      # (T,)
    p, q = _log_softmax(want), _log_softmax(got)
    top = np.argsort(-want, axis=1, kind="stable")[:, :TOP], np.argsort(-got, axis=1, kind="stable")[:, :TOP]
    parted = np.flatnonzero(top[0][:, 0] != top[1][:, 0])
    return {"largest": float(np.abs(difference).max()), "nmse": float((difference**2).sum() / (want**2).sum()),
            "kl_forward": float((np.exp(p) * (p - q)).sum(axis=1).mean()), "kl_backward": float((np.exp(q) * (q - p)).sum(axis=1).mean()),
            "log_probability": float(np.abs(p - q)[np.arange(len(p)), top[0][:, 0]].max()),
            "top_1": float((top[0][:, 0] == top[1][:, 0]).mean()), "top_5_order": float((top[0] == top[1]).all(axis=1).mean()),
            "top_5": float(np.mean([len(set(a) & set(b)) / TOP for a, b in zip(*top)])),
            "first_parted": int(parted[0]) if len(parted) else None, "by_position": rows.tolist()}


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def relative(want: np.ndarray, got: np.ndarray) -> float:
    """Root mean square of the difference over that of what is wanted; of finite numbers, as scores are masked."""
    finite = np.isfinite(want) & (want > -1e30)
    size = np.sqrt((want[finite].astype(np.float64)**2).mean()) if finite.any() else 0.0
    difference = np.sqrt(((got[finite].astype(np.float64) - want[finite])**2).mean()) if finite.any() else 0.0
    return float(difference / size) if size else float(difference > 0)
