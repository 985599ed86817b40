"""Linear layers, and the gate of SwiGLU."""
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from refkernels.errors import BoundError, NonFiniteError
from refkernels.exact.elementary import LOG2E, exp2
from refkernels.exact.reduce import BITS, l1_bound, matmul, snap

X_BITS = 25  # an activation keeps all its 24 bits down to half of the largest of its row
W_BITS = 28  # the steps of one output's weights sum to at most 2^28: X_BITS + W_BITS = 53


_ZERO = np.array(0.0)
_ONE, _HUGE, _MINUS_LOG2E = np.array(1.0, np.float32), np.array(126.0, np.float32), -LOG2E


class Linear(NamedTuple):
    """A packed weight. weight: (K, N) float64, column n on a grid of its own; bias: (N,) float64 or None."""

    weight: np.ndarray
    bias: np.ndarray | None


def pack_linear(shape: tuple[int, int], blocks: Iterable[np.ndarray], bias: np.ndarray | None = None) -> Linear:
    """Pack an (N, K) weight that comes as float32 blocks of rows, so that two copies never exist.

    Each row gets a grid from its L1 norm, not its maximum: with activations of 25 bits, no dot product passes 2^53.
    Stored transposed, which is the faster way round for float64 products of few rows.
    Raises BoundError when the row is too long for that, NonFiniteError (row of the weight) on an infinity or a NaN.
    """
    n, k = shape
    packed = np.empty((k, n), np.float64)                     # (K, N)
    step = max(1, 65536 // k)                                 # rows at a time: they stay in the L2 cache
    row = 0
    for block in blocks:
        for i in range(0, len(block), step):
            part = block[i:i + step]
            try:
                packed[:, row + i:row + i + len(part)] = _on_grid(part).T
            except NonFiniteError as error:
                raise NonFiniteError(row + i + error.row) from None
        row += len(block)
    if row != n:
        raise ValueError(f"blocks hold {row} rows of a weight of {n}")
    return Linear(packed, None if bias is None else bias.astype(np.float64) + 0.0)


def _on_grid(w: np.ndarray) -> np.ndarray:
    """Each row rounded to steps of which its weights together count at most 2^28. (n, K) float32 -> (n, K) float64."""
    l1, rounding = l1_bound(w), w.shape[1] / 2                # (n, 1); each weight may be rounded up by half a step
    e = np.frexp(l1)[1] - np.int32(W_BITS)
    e += np.ldexp(l1, -e) + rounding > 2.0**W_BITS
    if (np.ldexp(l1, -e) + rounding > 2.0**(BITS - X_BITS)).any():
        raise BoundError(f"a row of {w.shape[1]} weights can count more steps than the 2^{BITS - X_BITS} that are allowed")
    y = w * np.ldexp(1.0, -e)                                 # (n, K) float64
    np.rint(y, out=y)
    y *= np.ldexp(1.0, e)
    return y


def linear(x: np.ndarray, w: Linear) -> np.ndarray:
    """x @ W.T + b. (..., K) float32 -> (..., N) float32. The product is exact; the bias is added in float64."""
    y = matmul(snap(x, X_BITS), w.weight)                     # (..., N)
    y += _ZERO if w.bias is None else w.bias                  # + 0.0: no -0.0 left by the BLAS
    return y.astype(np.float32)


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, gate and up side by side. (T, 2F) float32 -> (T, F) float32. Shazeer 2020."""
    width = gate_up.shape[-1] // 2
    y = np.empty((len(gate_up), width), np.float32)           # (T, F)
    rows = max(1, 65536 // width)                             # a block of both halves stays in the L2 cache
    for i in range(0, len(y), rows):
        gate, up = gate_up[i:i + rows, :width], gate_up[i:i + rows, width:]
        e = exp2(np.minimum(gate * _MINUS_LOG2E, _HUGE))
        e += _ONE
        np.divide(gate, e, out=e)
        np.multiply(e, up, out=y[i:i + rows])
    return y
