"""The pipelined engine: chunked prefill, suffix feed, and the next step in flight while a token is handed out. Floor 6."""
from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from refengine.engine import SequentialEngine
from refengine.errors import StaleGenerationError
from refengine.model import Model, Tap
from refengine.sampling import Sampling


class PipelinedEngine(SequentialEngine):
    """Feeds ``chunk_size`` tokens a forward, takes only the suffix after a trim, and starts step n + 1 before token n is
    handed out.

    A step in flight writes above the offset and is committed by the caller's thread when its token is asked for. So
    between two tokens the engine looks just like the sequential one, and a cancelled step leaves no trace.
    """

    prefix_reuse_feeds_full_sequence = False

    def __init__(self, model: Model, *, chunk_size: int = 256, capacity: int = 4096, page_size: int = 64,
                 page_order: Sequence[int] | None = None, snapshot_every: int | str | None = None, snapshot_bytes: int = 2**28):
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}, but must be at least 1")
        super().__init__(model, capacity=capacity, page_size=page_size, page_order=page_order,
                         snapshot_every=snapshot_every, snapshot_bytes=snapshot_bytes)
        self.chunk_size = chunk_size
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="refengine-step")
        self._flight: Future | None = None

    def peek(self, tokens: Sequence[int], *, start: int | None = None, every: bool = False, tap: Tap | None = None) -> np.ndarray:
        if self._flight is not None:
            wait([self._flight])  # and keep it: what it wrote above the offset is put back
        return super().peek(tokens, start=start, every=every, tap=tap)

    def _new(self, tokens: Sequence[int]) -> np.ndarray:
        """Suffix feed: all of the tokens are new."""
        self._land()
        return self._fits(self.model.check_tokens(tokens))

    def _begin(self) -> int:
        self._land()
        return super()._begin()

    def _land(self) -> None:
        """Wait for a step in flight and drop it: it must not write while the cache is used for something else.

        Its error, if any, is dropped with it: nobody asked for the step, and it changed nothing.
        """
        if self._flight is not None:
            wait([self._flight])
            self._flight = None

    def _generate(self, suffix: np.ndarray, use: int, max_tokens: int | None, stop_ids: frozenset[int],
                  sampling: Sampling) -> Generator[int, None, None]:
        if max_tokens == 0:
            return
        if self._use != use:
            raise StaleGenerationError("the engine was trimmed, reset or fed since this generation began")
        self._run(suffix)
        count = 0
        while True:
            token = sampling.pick(self.model.op, self._logits, self.cache.ids())
            count += 1
            if token in stop_ids or count == max_tokens:
                yield token
                return
            step = np.array([token])
            flight = self._flight = self._worker.submit(self.model.run, self.cache, step)
            yield token
            if self._use != use:
                raise StaleGenerationError("the engine was trimmed, reset or fed since this generation began")
            logits = flight.result()
            self._flight = None
            self._commit(step, logits)
