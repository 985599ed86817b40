"""RMSNorm."""
import numpy as np


def pack_norm(weight: np.ndarray, dtype=np.float32) -> np.ndarray:
    """The gain as the set wants it. (K,) -> (K,)."""
    return weight.astype(dtype)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. (..., K) -> (..., K)."""
    mean = np.mean(x * x, axis=-1, keepdims=True)             # (..., 1)
    return x / np.sqrt(mean + x.dtype.type(eps)) * weight
