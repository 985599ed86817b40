"""The cache of a model with recurrent layers: K/V where there is attention, and one state of each other layer. Floor 3.

A state stands for everything before the offset and cannot be cut: there is no position in it to forget. So a rewind
has only two ends that are free, where the sequence stands and where it began.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from refengine.cache import Cache, PagePool


class State(NamedTuple):
    """What a gated delta net remembers. conv: (W - 1, C), the convolution's last inputs; memory: (Hv, Dv, Dk)."""

    conv: np.ndarray
    memory: np.ndarray


class RecurrentCache(Cache):
    """``start``: the state of nothing, layer -> State, for each recurrent layer.

    A forward writes states beside the ones in force; `commit` puts them in force together with the offset. States are
    never changed in place, so an interrupted or dropped forward leaves no trace.
    """

    def __init__(self, pool: PagePool, capacity: int, start: dict[int, State]):
        super().__init__(pool, capacity)
        self._start, self._states = start, start
        self._written: dict[int, State] = {}
        self._written_for = (0, 0)                            # (offset, count) of the forward that wrote them

    def state(self, layer: int) -> State:
        """The state in force: of the tokens below the offset."""
        return self._states[layer]

    def write_state(self, layer: int, state: State, count: int) -> None:
        """The state after ``count`` more tokens. Not in force until commit."""
        if self._written_for != (self.offset, count):
            self._written, self._written_for = {}, (self.offset, count)
        for array in state:
            array.flags.writeable = False
        self._written[layer] = state

    def commit(self, tokens: Sequence[int]) -> None:
        """As `Cache.commit`, with the states of the same tokens. ValueError when a layer has not written its own."""
        if self._written_for != (self.offset, len(tokens)) or self._written.keys() != self._start.keys():
            raise ValueError(f"{len(tokens)} tokens after {self.offset} have no state in every recurrent layer")
        self._check_reserved(len(tokens))
        states, self._written = self._written, {}
        self._states = states
        super().commit(tokens)

    def reachable(self, length: int) -> int:
        """Negative below the offset: a state cannot be rewound."""
        return self.offset if length >= self.offset else -1

    def trim_to(self, length: int) -> None:
        """Forget everything, or nothing. Raises ValueError at any other length."""
        if length not in (0, self.offset):
            raise ValueError(f"trim_to({length}): a recurrent state of {self.offset} positions can only be kept or dropped")
        if length == 0:
            self._states = self._start
        super().trim_to(length)

    def release(self) -> None:
        self._states = self._start
        super().release()

    def snapshot(self, layer: int, start: int = 0, stop: int | None = None) -> dict[str, np.ndarray]:
        """As `Cache.snapshot`. Of a recurrent layer the state at the offset, as if it were one position: (heads, 1, ...)."""
        if layer not in self._start:
            return super().snapshot(layer, start, stop)
        conv, memory = self._states[layer]
        return {"conv": conv[None, None].copy(), "memory": memory[:, None].copy()}
