"""From logits to a choice: the arg max, and integer weights to draw from."""
import numpy as np


def argmax(logits: np.ndarray) -> int:
    """The index of the largest logit; ties go to the lowest index. (V,) -> int."""
    return int(np.argmax(logits))


def token_weights(logits: np.ndarray, temperature: float) -> np.ndarray:
    """softmax(logits / temperature) as integers, the likeliest token 2^30. (V,) -> (V,) int64."""
    with np.errstate(over="ignore"):
        p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return np.rint(p * 2.0**30).astype(np.int64)
