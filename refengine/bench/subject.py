"""One engine in a process of its own, and what is measured of it there.

A process each, so that memory and load time are the engine's own and thread pools stay apart. While one is measured the
others wait for their turn.
"""
from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from refengine import backends
from refengine.engine import Engine, SequentialEngine
from refengine.errors import RefengineError
from refengine.machine import describe
from refengine.pipelined import PipelinedEngine
from refkernels import SETS

OURS = tuple(name for name in SETS if name != "native64")


class Subject:
    """An engine over a model: "exact" and "native" are ours (pipelined, and sequential over the same weights)."""

    def __init__(self, name: str, model: str, capacity: int, seed: int):
        before, start = _peak_megabytes(), time.perf_counter()
        self.sequential: SequentialEngine | None = None
        if name in SETS:
            from refengine.model import load_model

            loaded = load_model(model, name)
            self.engine: Engine = PipelinedEngine(loaded, capacity=capacity)
            self.sequential = SequentialEngine(loaded, capacity=1)
            self.sequential.cache = self.engine.cache         # they are never used at once
            vocab, self.version = loaded.config.vocab, f"{describe()['blas']}, {describe().get('blas_core', '')}"
        else:
            self.engine = backends.open_backend(name, model, capacity=capacity)
            vocab, self.version = self.engine.vocab, self.engine.version
        self.load_seconds, self.load_megabytes = time.perf_counter() - start, _peak_megabytes() - before
        self.ids = np.random.Generator(np.random.Philox(seed)).integers(0, vocab, capacity).tolist()

    def about(self) -> dict[str, Any]:
        return {"version": self.version, "load_s": self.load_seconds, "load_mb": self.load_megabytes,
                "peak_mb": _peak_megabytes()}

    def turn(self, context: int, reused: int, decode: int) -> dict[str, Any]:
        """Times in seconds: the first token with nothing cached (off), ``decode`` more tokens, the first token with
        ``reused`` positions retained (on). Leaves the engine with ``context`` positions."""
        self.engine.reset()
        answer, off = self._first(self.ids[:context], decode + 1)
        steps = []
        for _ in range(decode):
            start = time.perf_counter()
            next(answer)
            steps.append(time.perf_counter() - start)
        answer.close()
        return {"off": off, "decode": statistics.median(steps), "on": self._on(self.engine, context, reused)}

    def sequential_turn(self, context: int, reused: int, stretch: int) -> dict[str, float]:
        """The same at one token a forward, over the K/V that `turn` left: the offset goes back, no second prefill.

        A whole OFF turn is ``stretch`` tokens around its middle, times context / stretch: what a token costs grows evenly.
        """
        on = self._on(self.sequential, context, reused)
        stretch = min(stretch, context)
        middle = (context - stretch) // 2
        self.sequential.trim_kv_cache(middle)
        start = time.perf_counter()
        self.sequential.prefill(self.ids[:middle + stretch])
        off = (time.perf_counter() - start) * context / stretch
        return {"on": on, "off": off, "measured": stretch}

    def turns(self, prompts: Sequence[int]) -> list[dict[str, float]]:
        """Turns whose prompts grow; each reuses the whole prompt before it. [{"on", "off"}, ...]."""
        times, held = [], 0
        self.engine.reset()
        for prompt in prompts:
            times.append({"on": self._on(self.engine, prompt, held)})
            held = prompt
        for prompt, seconds in zip(prompts, times):
            seconds["off"] = self._on(self.engine, prompt, 0)
        return times

    def chunk(self, size: int, length: int) -> float:
        """Tokens a second of a prefill in chunks of ``size``."""
        usual, self.engine.chunk_size = self.engine.chunk_size, size
        try:
            self.engine.reset()
            start = time.perf_counter()
            self.engine.prefill(self.ids[:length])
            return length / (time.perf_counter() - start)
        finally:
            self.engine.chunk_size = usual

    def trim(self, length: int, repeats: int = 200) -> float:
        """Median seconds of a rewind by ``length`` tokens. The offset is what is moved, so K/V below it need not be real."""
        cache, seconds = self.engine.model.new_cache(length + 1, 64), []
        ids = np.zeros(length, np.int64)
        cache.reserve(1)
        cache.commit(ids[:1])
        cache.reserve(length)
        engine = SequentialEngine(self.engine.model, capacity=1)
        engine.cache = cache
        for _ in range(repeats):
            cache.commit(ids)
            start = time.perf_counter()
            engine.trim_kv_cache(1)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _on(self, engine: Engine, context: int, reused: int) -> float:
        """Seconds from the rewind to the first token."""
        start = time.perf_counter()
        held = engine.trim_kv_cache(reused)
        if held != reused:
            raise RefengineError(f"rewind to {reused} retained {held}")
        ids = self.ids[:context]
        answer = engine.generate(ids if engine.prefix_reuse_feeds_full_sequence else ids[held:], max_tokens=1)
        next(answer)
        seconds = time.perf_counter() - start
        answer.close()
        return seconds

    def _first(self, tokens: Sequence[int], max_tokens: int):
        start = time.perf_counter()
        answer = self.engine.generate(tokens, max_tokens=max_tokens)
        next(answer)
        return answer, time.perf_counter() - start


class Remote:
    """A `Subject` in another process: its methods, by the same names. Raises RefengineError with the text of its errors."""

    def __init__(self, name: str, model: str, capacity: int, seed: int):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, model, capacity, seed), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def __getattr__(self, method: str):
        return lambda *arguments: self._answer((method, arguments))

    def _answer(self, call=None):
        try:
            if call:
                self._pipe.send(call)
            error, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise RefengineError(f"{self.name}: its process ended with code {self._process.exitcode}; "
                                 "out of memory?") from None
        if error:
            raise RefengineError(f"{self.name}: {error}")
        return value

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


def _serve(pipe, name: str, model: str, capacity: int, seed: int) -> None:
    subject = None
    try:
        while True:
            try:
                if subject is None:
                    subject, value = Subject(name, model, capacity, seed), None
                else:
                    method, arguments = pipe.recv()
                    value = getattr(subject, method)(*arguments)
                pipe.send((None, value))
            except EOFError:
                return
            except Exception as error:  # told to the parent, which names the subject
                pipe.send((f"{type(error).__name__}: {error}", None))
                if subject is None:
                    return
    except (BrokenPipeError, KeyboardInterrupt):
        return


def _peak_megabytes() -> float:
    """Largest memory that the process has had, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
