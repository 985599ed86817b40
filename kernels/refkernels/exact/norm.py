"""RMSNorm."""
import numpy as np

from refkernels.exact.reduce import bit_budget, log2_ceil, row_sum, snap


def _bits(length: int) -> int:
    half = (52 - log2_ceil(length)) // 2
    return bit_budget(length, half, half, 12, "RMSNorm")


def pack_norm(weight: np.ndarray) -> np.ndarray:
    """The gain as the set wants it. (K,) float32 -> (K,) float64. Raises BoundError when K is too long."""
    _bits(weight.shape[-1])
    return weight.astype(np.float64)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. (..., K) float32 -> (..., K) float32.

    Zhang and Sennrich 2019, as Llama and Qwen3 use it.
    """
    length = x.shape[-1]
    y = snap(x, _bits(length))                               # (..., K)
    y *= y
    r = row_sum(y)                                           # (..., 1)
    r /= length
    r += eps
    np.sqrt(r, out=r)
    np.divide(1.0, r, out=r)
    np.multiply(x, r, out=y)
    y *= weight
    return y.astype(np.float32)
