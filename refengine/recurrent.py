"""The cache of a model with recurrent layers: K/V where there is attention, and one state of each other layer. Floor 3.

A state stands for everything before the offset and cannot be cut: there is no position in it to forget. So a sequence can
go back only to where a state was kept: with snapshots to the nearest one, without them nowhere.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from refengine.cache import Cache, PagePool


class State(NamedTuple):
    """What a gated delta net remembers. conv: (W - 1, C), the convolution's last inputs; memory: (Hv, Dv, Dk)."""

    conv: np.ndarray
    memory: np.ndarray


class RecurrentCache(Cache):
    """``start``: the state of nothing, layer -> State, for each recurrent layer.

    ``snapshot_every``: keep the states after every so many tokens, or "turn": at each `begin_turn`. At most
    ``snapshot_bytes`` of them are kept; the oldest go first.

    A forward writes states beside the ones in force; `commit` puts them in force together with the offset. States are
    never changed in place, so an interrupted or dropped forward leaves no trace.
    """

    def __init__(self, pool: PagePool, capacity: int, start: dict[int, State], *,
                 snapshot_every: int | str | None = None, snapshot_bytes: int = 2**28):
        super().__init__(pool, capacity)
        self.state_bytes = sum(array.nbytes for state in start.values() for array in state)
        if not (snapshot_every in (None, "turn") or type(snapshot_every) is int and snapshot_every >= 1):
            raise ValueError(f'snapshot_every is {snapshot_every!r}, but must be a number of tokens from 1 on, or "turn"')
        if snapshot_every is not None and snapshot_bytes < self.state_bytes:
            raise ValueError(f"snapshot_bytes is {snapshot_bytes}, but one snapshot has {self.state_bytes} bytes")
        self.snapshot_every, self._most = snapshot_every, snapshot_bytes // max(1, self.state_bytes)
        self._stretch = None if snapshot_every == "turn" else snapshot_every
        self._snapshots: dict[int, dict[int, State]] = {}     # by the offset that they belong to, oldest first
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
        if self._stretch and self.offset % self._stretch == 0:
            self._keep()

    def begin_turn(self) -> None:
        if self.snapshot_every == "turn" and self.offset:
            self._keep()

    def _keep(self) -> None:
        self._snapshots[self.offset] = self._states           # never changed in place, so they need no copy
        while len(self._snapshots) > self._most:
            del self._snapshots[next(iter(self._snapshots))]

    @property
    def snapshots(self) -> list[int]:
        """The offsets that can be gone back to, oldest snapshot first. Together they take len(snapshots) * state_bytes."""
        return list(self._snapshots)

    def until_snapshot(self) -> int | None:
        """How many tokens until one is due: a forward that ran over it would leave none there."""
        return self._stretch and self._stretch - self.offset % self._stretch

    def reachable(self, length: int) -> int:
        """The nearest snapshot, or the beginning. Negative when none are kept: a state cannot be rewound."""
        if length >= self.offset:
            return self.offset
        return max((at for at in self._snapshots if at <= length), default=0) if self.snapshot_every else -1

    def trim_to(self, length: int) -> None:
        """Go back to where a state was kept, K/V and states together. Raises ValueError at any other length."""
        if length not in (0, self.offset, *self._snapshots):
            raise ValueError(f"trim_to({length}): of {self.offset} positions, a state is kept of {[0, *self._snapshots]}")
        super().trim_to(length)
        if length in self._snapshots:
            self._states = self._snapshots[length]
        elif length == 0:
            self._states = self._start
        self._snapshots = {at: states for at, states in self._snapshots.items() if at <= length}

    @contextmanager
    def aside(self, start: int, count: int) -> Iterator[None]:
        """As `Cache.aside`, with the states. Raises ValueError also when none was kept at ``start``."""
        before = self._states, self._snapshots, self._written, self._written_for
        try:
            with super().aside(start, count):
                yield
        finally:
            self._states, self._snapshots, self._written, self._written_for = before

    def release(self) -> None:
        self._states, self._snapshots = self._start, {}
        super().release()

    def snapshot(self, layer: int, start: int = 0, stop: int | None = None) -> dict[str, np.ndarray]:
        """As `Cache.snapshot`. Of a recurrent layer the state at the offset, as if it were one position: (heads, 1, ...)."""
        if layer not in self._start:
            return super().snapshot(layer, start, stop)
        conv, memory = self._states[layer]
        return {"conv": conv[None, None].copy(), "memory": memory[:, None].copy()}
