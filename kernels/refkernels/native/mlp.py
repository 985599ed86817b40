"""Linear layers, and the gate of SwiGLU."""
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Linear(NamedTuple):
    """A packed weight. weight: (N, K); bias: (N,) or None."""

    weight: np.ndarray
    bias: np.ndarray | None


def pack_linear(shape: tuple[int, int], blocks: Iterable[np.ndarray], bias: np.ndarray | None = None,
                dtype=np.float32) -> Linear:
    """Pack an (N, K) weight that comes as blocks of rows, so that two copies never exist."""
    packed = np.empty(shape, dtype)                           # (N, K)
    row = 0
    for block in blocks:
        packed[row:row + len(block)] = block
        row += len(block)
    if row != shape[0]:
        raise ValueError(f"blocks hold {row} rows of a weight of {shape[0]}")
    return Linear(packed, None if bias is None else bias.astype(dtype))


def linear(x: np.ndarray, w: Linear) -> np.ndarray:
    """x @ W.T + b. (..., K) -> (..., N)."""
    y = x @ w.weight.T                                        # (..., N)
    return y if w.bias is None else y + w.bias


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, gate and up side by side. (T, 2F) -> (T, F)."""
    width = gate_up.shape[-1] // 2
    y = np.empty((len(gate_up), width), gate_up.dtype)        # (T, F)
    rows = max(1, 65536 // width)                             # a block of both halves stays in the L2 cache
    for i in range(0, len(y), rows):
        gate, up = gate_up[i:i + rows, :width], gate_up[i:i + rows, width:]
        with np.errstate(over="ignore"):                      # exp(-gate) = inf: the gate is shut
            e = np.exp(-gate)
        e += 1
        np.divide(gate, e, out=e)
        np.multiply(e, up, out=y[i:i + rows])
    return y
