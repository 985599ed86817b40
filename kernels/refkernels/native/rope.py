"""Rotary position embedding, in the half-split layout of Hugging Face checkpoints."""
import numpy as np


def rope_table(turns: np.ndarray, factor: float, start: int, stop: int, dtype=np.float32):
    """cos and sin for positions start..stop-1, times the attention factor. -> two (T, D/2). turns as in the exact set."""
    frequency = (turns[:, 0] * 2.0**-64 + turns[:, 1] * 2.0**-96) * (2 * np.pi)  # (D/2,) radians a position
    angle = np.arange(start, stop, dtype=np.float64)[:, None] * frequency         # (T, D/2)
    return (np.cos(angle) * factor).astype(dtype), (np.sin(angle) * factor).astype(dtype)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn the pairs (x[i], x[i + D/2]) by their angles. (T, H, D), (T, D/2) -> (T, H, D)."""
    a, b = np.split(x, 2, axis=-1)                            # (T, H, D/2)
    c, s = cos[:, None], sin[:, None]                         # (T, 1, D/2)
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
