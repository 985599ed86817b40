"""Engines of others under our protocol, to measure and to check them beside ours. Floor 7.

A backend is an `Engine`: it takes ids and rewinds, so `Chat`, `refengine bench` and the conformance suite run on it as on
ours. Each is imported when it is opened, and says how to install what it needs.
"""
from __future__ import annotations

import abc
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

import refkernels
from refengine.engine import Engine
from refengine.errors import CapacityError, FeedError, RefengineError
from refengine.sampling import GREEDY, Sampling
from refengine.sources import open_checkpoint

_MODULES = {"transformers": "transformers", "llama.cpp": "llama_cpp", "mlx": "mlx"}
NAMES = tuple(_MODULES)


class BackendError(RefengineError):
    """A backend is not installed, or cannot run this model. The message says what to do."""


KINDS = ("f32", "f16", "bf16", "q8_0", "q8_k", "stored")


class Precision(NamedTuple):
    """How a backend rounds: what its activations, the inputs of its products, its K/V and its weights are kept in.

    Each "f32", "f16" or "bf16"; inputs also "q8_0" or "q8_k" (integers, in blocks of 32 or 256 with a scale of their own);
    weights also "stored": as in the file that it reads.
    """

    activations: str = "f32"
    inputs: str = "f32"
    kv: str = "f32"
    weights: str = "stored"


class Backend(Engine):
    """What foreign engines share: suffix feed, the ids they hold, and the loop around one forward after the other."""

    prefix_reuse_feeds_full_sequence = False
    precision = Precision()
    version = ""
    scores = "logits"
    """Or "log-probabilities", minus infinity where it does not tell one."""
    reused: int | None = None
    """Tokens that it found in a cache of its own, where it is that which looks for them."""
    source: str | os.PathLike | None = None
    """The files that it reads, when they are not those that it was opened with."""

    def __init__(self, vocab: int, capacity: int):
        self.vocab, self.capacity = vocab, capacity
        self._ids: list[int] = []
        self._logits: np.ndarray | None = None

    @abc.abstractmethod
    def _forward(self, ids: list[int]) -> np.ndarray:
        """Append ids to the cache; float32 (V,) logits of the last."""

    @abc.abstractmethod
    def _rewind(self, length: int) -> None:
        """Keep the first ``length`` positions, fewer than are held."""

    def rows(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each of some ids, from nothing: (T, V) float32. One token at a time, unless it can do better."""
        self.reset()
        found = []
        for id in ids:
            self.prefill([id])
            found.append(self._logits)
        return np.stack(found)

    def activations(self, ids: Sequence[int], names: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        """Activations by name (of `refengine.inspect.activations`) of ids from nothing; None when it cannot show any."""
        return None

    @property
    def tokens(self) -> list[int]:
        return list(self._ids)

    @property
    def processed_token_count(self) -> int:
        return len(self._ids)

    @property
    def logits(self) -> np.ndarray | None:
        return self._logits

    def trim_kv_cache(self, length: int) -> int:
        if length < 0:
            raise ValueError(f"trim_kv_cache({length}): a length is not negative")
        if length < len(self._ids):
            self._rewind(length)
            del self._ids[length:]
            self._logits = None
        return len(self._ids)

    def reset(self) -> None:
        self.trim_kv_cache(0)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._run(self._new(tokens))

    def generate(self, tokens: Sequence[int], *, max_tokens: int | None = None, stop_ids: Collection[int] = (),
                 sampling: Sampling = GREEDY) -> Generator[int, None, None]:
        return self._generate(self._new(tokens), max_tokens, frozenset(stop_ids), sampling)

    def _generate(self, new: list[int], max_tokens: int | None, stop_ids: frozenset[int],
                  sampling: Sampling) -> Generator[int, None, None]:
        count = 0
        while max_tokens is None or count < max_tokens:
            self._run(new)
            token = sampling.pick(refkernels.arithmetic("native"), self._logits, self._ids)
            count += 1
            yield token
            if token in stop_ids:
                return
            new = [token]

    def _new(self, tokens: Sequence[int]) -> list[int]:
        ids = [int(token) for token in tokens]
        if not ids:
            raise FeedError("no new token to run, so there would be no logits")
        if not 0 <= min(ids) <= max(ids) < self.vocab:
            raise FeedError(f"tokens reach from {min(ids)} to {max(ids)}, the vocabulary from 0 to {self.vocab - 1}")
        return ids

    def _run(self, new: list[int]) -> None:
        if len(self._ids) + len(new) > self.capacity:
            raise CapacityError(len(self._ids), len(new), self.capacity)
        logits = self._forward(new)
        self._ids += new
        self._logits = logits


def open_backend(name: str, model: str | os.PathLike, *, capacity: int = 4096, **options: str) -> Backend:
    """The backend of that name, over any model that `load_model` takes; in float32 unless its options say otherwise.

    Raises BackendError, CheckpointError.
    """
    if name not in _MODULES:
        raise BackendError(f"backend {name!r} is not one of {', '.join(NAMES)}")
    kind = import_module(f"refengine.backends.{_MODULES[name]}").open_backend
    for option, value in options.items():
        if value not in kind.OPTIONS.get(option, ()):
            known = "; ".join(f"{key}={'|'.join(values)}" for key, values in kind.OPTIONS.items())
            raise BackendError(f"backend {name} has no option {option}={value}; there are {known}")
    return kind(open_checkpoint(model), capacity, **options)
