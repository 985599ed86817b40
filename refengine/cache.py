"""The KV cache: pages preallocated once, a page table, and ONE offset. Floor 3.

The offset says how many positions are real. Attention reads below it, a forward writes above it, `commit` moves it up
after the last layer, `trim_to` moves it down. Nothing is ever cleared: what lies at or above the offset is overwritten
before it is read. That is the whole trick of a rewind.

The cache stores the fields that a kernel set packs (integers and steps, or floats) and never looks inside.
N kv heads, P positions a page; a field of one layer is an array (N, pages * P, ...), so that neighbouring pages are
neighbouring memory and a run of them is read as one view.
"""
from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from refengine.errors import CapacityError


class PagePool:
    """Memory for K/V of all layers, handed out in pages. A page counts its holders, so that sequences may share it.

    ``order``: the page numbers in the order in which to hand them out (default: ascending), for tests.
    """

    def __init__(self, op: ModuleType, *, layers: int, kv_heads: int, head_dim: int, pages: int, page_size: int,
                 order: Sequence[int] | None = None):
        if pages < 1 or page_size < 1:
            raise ValueError(f"{pages} pages of {page_size} positions; both must be at least 1")
        self.page_size, self.kv, self.layers = page_size, op.KV, layers
        # np.empty touches no memory: a page costs nothing until it is written.
        self.fields = [np.empty((layers, kv_heads, pages * page_size, *shape), dtype)
                       for shape, dtype in op.kv_fields(head_dim).values()]
        self.holders = [0] * pages
        self._rank = {page: i for i, page in enumerate(range(pages) if order is None else order)}
        if sorted(self._rank) != list(range(pages)):
            raise ValueError(f"order is not an arrangement of 0..{pages - 1}")
        self._free = [(rank, page) for page, rank in self._rank.items()]
        heapq.heapify(self._free)

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page, now held once. The caller has checked that there is one."""
        page = heapq.heappop(self._free)[1]
        self.holders[page] = 1
        return page

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        if self.holders[page] < 1:
            raise ValueError(f"page {page} is released, but nobody holds it")
        self.holders[page] -= 1
        if not self.holders[page]:
            heapq.heappush(self._free, (self._rank[page], page))


class Cache:
    """K/V of one sequence, with the ids they stand for. ``capacity``: most positions it may hold."""

    snapshot_every: int | str | None = None  # of states: K/V can be cut anywhere, and need none
    snapshots: list[int] = []
    state_bytes = 0

    def __init__(self, pool: PagePool, capacity: int):
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, but must be at least 1")
        self.pool, self.capacity = pool, capacity
        self.offset = 0
        self._ids = np.empty(capacity, np.int64)
        self._pages: list[int] = []
        self._runs: list[tuple[int, int, int]] = []  # (first position, its slot, length): neighbouring pages merged

    @property
    def pages(self) -> tuple[int, ...]:
        """The page table: which page of the pool holds the first page_size positions, which the next, ..."""
        return tuple(self._pages)

    @property
    def tokens(self) -> list[int]:
        """The ids whose K/V the cache holds."""
        return self._ids[:self.offset].tolist()

    def ids(self) -> np.ndarray:
        """The same as a read-only view, (offset,) int64."""
        view = self._ids[:self.offset]
        view.flags.writeable = False
        return view

    def reserve(self, count: int) -> None:
        """Make sure that ``count`` more positions have pages. Raises CapacityError, changing nothing."""
        size = self.pool.page_size
        pages = -(-(self.offset + count) // size) - len(self._pages)
        if self.offset + count > self.capacity:
            raise CapacityError(self.offset, count, self.capacity)
        if pages > self.pool.free:
            raise CapacityError(self.offset, count, (len(self._pages) + self.pool.free) * size)
        for _ in range(pages):
            page = self.pool.take()
            position, slot = len(self._pages) * size, page * size
            self._pages.append(page)
            if self._runs and sum(self._runs[-1][1:]) == slot:
                self._runs[-1] = (*self._runs[-1][:2], self._runs[-1][2] + size)
            else:
                self._runs.append((position, slot, size))

    def _stretches(self, start: int, stop: int) -> Iterator[tuple[int, int, slice]]:
        """(from, to, slots) of positions start..stop-1, one for each run of neighbouring pages."""
        for position, slot, length in self._runs:
            a, b = max(start, position), min(stop, position + length)
            if a < b:
                yield a, b, slice(slot + a - position, slot + b - position)

    def write(self, layer: int, kv: Any) -> None:
        """Put a layer's packed K/V of T new positions at offset..offset+T-1. Not visible until commit.

        Raises ValueError when they were not reserved.
        """
        count = kv[0].shape[1]
        self._check_reserved(count)
        for a, b, slots in self._stretches(self.offset, self.offset + count):
            for field, new in zip(self.pool.fields, kv):
                field[layer, :, slots] = new[:, a - self.offset:b - self.offset]

    def read(self, layer: int, count: int = 0) -> list[Any]:
        """Views of a layer's packed K/V of positions 0..offset+count-1, one for each run of neighbouring pages."""
        return [self.pool.kv(*(field[layer, :, slots] for field in self.pool.fields))
                for _, _, slots in self._stretches(0, self.offset + count)]

    def commit(self, tokens: Sequence[int]) -> None:
        """The one place where the offset grows: these tokens' K/V are complete in every layer. ValueError as `write`."""
        self._check_reserved(len(tokens))
        self._ids[self.offset:self.offset + len(tokens)] = tokens
        self.offset += len(tokens)

    def _check_reserved(self, count: int) -> None:
        if self.offset + count > len(self._pages) * self.pool.page_size:
            raise ValueError(f"{count} positions after {self.offset} were not reserved")

    def until_snapshot(self) -> int | None:
        """How many tokens a forward may run at most, or None: any position can be gone back to."""
        return None

    def begin_turn(self) -> None:
        """Here a prefill or a generation begins, and one may want to come back."""

    def reachable(self, length: int) -> int:
        """The longest prefix, not beyond ``length``, that can be gone back to. Negative: none, but for nothing at all."""
        return min(length, self.offset)

    def trim_to(self, length: int) -> None:
        """Forget everything from position ``length`` on: set the offset. Raises ValueError outside 0..offset."""
        if not 0 <= length <= self.offset:
            raise ValueError(f"trim_to({length}): not in 0..{self.offset}, the positions held")
        self.offset = length

    @contextmanager
    def aside(self, start: int, count: int) -> Iterator[None]:
        """Inside, the cache ends at ``start`` and has room for ``count`` positions more; afterwards all is as it was, also what
        lay above the offset, where a step in flight may have written, and the pages.

        Raises ValueError when start cannot be gone back to, CapacityError, both changing nothing.
        """
        offset, pages, runs = self.offset, list(self._pages), list(self._runs)
        self.trim_to(start)
        try:
            self.reserve(count)
            before = [(slots, [field[:, :, slots].copy() for field in self.pool.fields])
                      for _, _, slots in self._stretches(start, start + count)]
            try:
                yield
            finally:
                for slots, rows in before:
                    for field, row in zip(self.pool.fields, rows):
                        field[:, :, slots] = row
        finally:
            for page in self._pages[len(pages):]:
                self.pool.release(page)
            self._pages, self._runs, self.offset = pages, runs, offset

    def release(self) -> None:
        """Forget everything and give all pages back to the pool."""
        self.offset = 0
        for page in self._pages:
            self.pool.release(page)
        self._pages, self._runs = [], []

    def snapshot(self, layer: int, start: int = 0, stop: int | None = None) -> dict[str, np.ndarray]:
        """Copies of a layer's fields for positions start..stop-1 (default: to the offset), in order, whatever the pages.

        Field name -> (N, stop - start, ...).
        """
        stop = self.offset if stop is None else stop
        if not 0 <= start <= stop <= self.offset:
            raise ValueError(f"snapshot({start}, {stop}): not in 0..{self.offset}")
        pieces = [self.pool.kv(*(field[layer, :, slots] for field in self.pool.fields))
                  for _, _, slots in self._stretches(start, stop)]
        empty = self.pool.kv(*(field[layer, :, :0] for field in self.pool.fields))
        return {name: np.concatenate([getattr(kv, name) for kv in (empty, *pieces)], axis=1) for name in self.pool.kv._fields}

    def poison(self) -> None:
        """Fill every slot that this sequence owns at or above the offset with NaN, so that a stale read shows."""
        reserved = len(self._pages) * self.pool.page_size
        for _, _, slots in self._stretches(self.offset, reserved):
            for field in self.pool.fields:
                field[:, :, slots] = np.nan
