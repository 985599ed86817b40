"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face checkpoints."""
import numpy as np

from refkernels.exact.elementary import cos_sin_turns


def rope_table(turns: np.ndarray, factor: float, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin for positions start..stop-1, times the attention factor. -> two float32 (T, D/2).

    turns: (D/2, 2) uint64, the turns that each pair of dimensions makes in one position, in fixed point: turns[:, 0] in
    units of 2^-64 and turns[:, 1] (below 2^32) in units of 2^-96. Integers that overflow drop whole turns: the argument
    reduction is exact at any position below 2^31.
    """
    p = np.arange(start, stop, dtype=np.uint64)[:, None]                     # (T, 1)
    phase = p * turns[:, 0] + (p * turns[:, 1] >> np.uint64(32))             # (T, D/2), modulo one turn
    cos, sin = cos_sin_turns(phase)
    return (cos * factor).astype(np.float32), (sin * factor).astype(np.float32)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn the pairs (x[i], x[i + D/2]) by their angles. (T, H, D), (T, D/2) -> (T, H, D) float32."""
    t, h, d = x.shape
    x = x.reshape(t, h, 2, d // 2)                            # the pairs' two halves
    y = x * cos[:, None, None]                                # (T, H, 2, D/2)
    crossed = x[:, :, ::-1] * sin[:, None, None]              # (T, H, 2, D/2)
    y[:, :, 0] -= crossed[:, :, 0]
    y[:, :, 1] += crossed[:, :, 1]
    return y.reshape(t, h, d)
