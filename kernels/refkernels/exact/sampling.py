"""From logits to a choice: the arg max, and integer weights to draw from."""
import numpy as np

from refkernels.exact.elementary import LOG2E, exp2
from refkernels.exact.reduce import row_max

_BITS = 30


def argmax(logits: np.ndarray) -> int:
    """The index of the largest logit; ties go to the lowest index. (V,) -> int."""
    return int(np.argmax(logits))


def token_weights(logits: np.ndarray, temperature: float) -> np.ndarray:
    """softmax(logits / temperature) as integers, the likeliest token 2^30. (V,) float32 -> (V,) int64."""
    t = (logits - row_max(logits)).astype(np.float64)         # (V,)
    with np.errstate(over="ignore"):                          # a tiny temperature: -inf, weight 0
        t = (t / temperature * LOG2E).astype(np.float32)
    return np.rint(exp2(t).astype(np.float64) * 2.0**_BITS).astype(np.int64)
