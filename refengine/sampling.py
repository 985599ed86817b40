"""Choosing the next token. Greedy, or drawn by a generator keyed by (seed, position). Floor 2.

Everything after the softmax is integer arithmetic, and the random number of a position depends on nothing but the seed
and the position: a turn draws the same tokens whether its prompt was reused or recomputed.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How to choose. ``temperature=0`` is greedy: the largest logit, ties to the lowest id."""

    temperature: float = 0.0
    top_k: int = 0                     # keep the k likeliest; 0 keeps all
    top_p: float = 1.0                 # keep the likeliest that together reach p
    min_p: float = 0.0                 # keep what is at least this likely, relative to the likeliest
    repetition_penalty: float = 1.0    # on every token of the whole history (Keskar et al. 2019)
    seed: int = 0

    def __post_init__(self):
        # Bounds within float32: what is smaller or larger would become 0 or infinite there.
        for name, ok, rule in (("temperature", self.temperature == 0 or 1e-30 <= self.temperature <= 1e30, "0 or in [1e-30, 1e30]"),
                               ("top_k", self.top_k >= 0, "at least 0"),
                               ("top_p", 0 < self.top_p <= 1, "in (0, 1]"), ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
                               ("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "in [0.001, 1000]"),
                               ("seed", 0 <= self.seed < 2**64, "in [0, 2^64)")):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but must be {rule}")

    def pick(self, op: ModuleType, logits: np.ndarray, history: Sequence[int]) -> int:
        """The id that follows ``history`` (all tokens up to now). logits: (V,). op: the kernel set."""
        if self.repetition_penalty != 1.0 and len(history):
            logits = _penalised(logits, history, self.repetition_penalty)
        if self.temperature == 0:
            return op.argmax(logits)
        weights = op.token_weights(logits, self.temperature)             # (V,) int64, the likeliest 2^30
        order = np.argsort(-weights, kind="stable")                      # ties: lowest id first
        if self.top_k:
            order = order[:self.top_k]
        if self.top_p < 1:
            reached = np.add.accumulate(weights[order])
            order = order[:1 + int(np.searchsorted(reached, self.top_p * float(reached[-1])))]
        order = order[weights[order] >= self.min_p * float(weights[order[0]])]
        reached = np.add.accumulate(weights[order])
        draw = int(np.random.Philox(key=self.seed, counter=len(history)).random_raw())   # 64 bits
        return int(order[np.searchsorted(reached, draw * int(reached[-1]) >> 64, side="right")])


GREEDY = Sampling()


def _penalised(logits: np.ndarray, history: Sequence[int], penalty: float) -> np.ndarray:
    """Logits of tokens that were seen, divided by the penalty when positive, multiplied when negative."""
    seen = np.unique(np.asarray(history))
    logits = logits.copy()
    x, p = logits[seen], logits.dtype.type(penalty)
    logits[seen] = np.where(x > 0, x / p, x * p)
    return logits
