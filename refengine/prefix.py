"""How much of a prompt the cache already holds. Ids are compared, never text. Floor 2."""
from collections.abc import Sequence

import numpy as np


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two id sequences."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n])) if n else ()
    return int(differ[0]) if len(differ) else n


def common_start(a: Sequence, b: Sequence) -> int:
    """Length of the longest common prefix of two texts, or of two lists of anything. Never decides what is reused."""
    n, at = min(len(a), len(b)), 0
    while at < n and a[at:at + 4096] == b[at:at + 4096]:
        at += 4096
    return next((i for i in range(at, n) if a[i] != b[i]), n)


def reusable(prompt: Sequence[int], cached: Sequence[int]) -> int:
    """How many cached positions a prompt may keep: its common prefix with the cache, but never all of itself.

    One token is always left to run: the next token is chosen from the logits of the LAST position, and those exist only
    while that position is being computed. Even a prompt that is cached whole must run its last token again.
    """
    return min(common_prefix(prompt, cached), len(prompt) - 1)
