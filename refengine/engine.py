"""The engine protocol, and the sequential engine. Floor 5.

An engine remembers: it owns one sequence's K/V, extends it, and can rewind it. What it holds is `tokens`; every way out
of a call (end, stop, cancel, exception) leaves `tokens`, `processed_token_count` and `logits` in agreement.
"""
from __future__ import annotations

import abc
from collections.abc import Collection, Generator, Sequence

import numpy as np

from refengine.errors import FeedError, StaleGenerationError
from refengine.model import Model, Tap
from refengine.sampling import GREEDY, Sampling


class Engine(abc.ABC):
    """What `Chat` and the proofs need of an engine; implement it to put your own under them."""

    prefix_reuse_feeds_full_sequence: bool = True
    """The feed contract after a trim. True: pass the FULL running sequence, the engine skips what it holds.
    False: pass only the suffix that it does not hold."""

    capacity: int | None = None
    """Most tokens that it can hold; None when it does not say."""

    vocab: int | None = None
    """How many ids it knows; None when it does not say."""

    snapshot_every: int | str | None = None
    """None: a rewind retains just the length asked for, or is refused. Else states are kept to go back to, after every so many
    tokens or, if "turn", where prefill and generate begin; a rewind may then retain less than was asked for."""

    snapshots: Sequence[int] = ()
    """The lengths that it can go back to, of those that it holds, when it keeps states."""

    snapshot_bytes: int = 0
    """Of memory, taken by those states."""

    @property
    @abc.abstractmethod
    def tokens(self) -> list[int]:
        """Exactly the ids that have K/V in the cache, in order."""

    @property
    def processed_token_count(self) -> int:
        """The offset: len(tokens), the same in every layer."""
        return len(self.tokens)

    @property
    @abc.abstractmethod
    def logits(self) -> np.ndarray | None:
        """float32 (V,) of the last position held; None when it was not computed since the last trim or reset."""

    def trim_kv_cache(self, length: int) -> int:
        """Rewind toward ``length``. Returns the prefix ACTUALLY retained, from which the caller goes on.

        Negative: the state cannot be rewound (recurrent layers), nothing was changed, `reset` instead. That is the
        default. ValueError when length < 0.
        """
        if length < 0:
            raise ValueError(f"trim_kv_cache({length}): a length is not negative")
        return -1

    def kv(self) -> list[dict[str, np.ndarray]] | None:
        """Copies of the K/V of the positions held, a dict of arrays (heads, positions, ...) for each layer, so that two
        engines can be compared. None when an engine cannot show it."""
        return None

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    @abc.abstractmethod
    def prefill(self, tokens: Sequence[int]) -> None:
        """Process tokens (as the feed contract says) without generating. At least one must be new."""

    @abc.abstractmethod
    def generate(self, tokens: Sequence[int], *, max_tokens: int | None = None, stop_ids: Collection[int] = (),
                 sampling: Sampling = GREEDY) -> Generator[int, None, None]:
        """Process tokens (as the feed contract says), then yield new ids until a stop id, which is yielded last, or
        ``max_tokens``. The id yielded last has no K/V yet: it lags one step. Closing the generator cancels."""


class SequentialEngine(Engine):
    """One token a forward (S = 1), full-sequence feed. The plainest engine over the paged cache, and the yardstick."""

    prefix_reuse_feeds_full_sequence = True
    chunk_size = 1

    def __init__(self, model: Model, *, capacity: int = 4096, page_size: int = 64, page_order: Sequence[int] | None = None,
                 snapshot_every: int | str | None = None, snapshot_bytes: int = 2**28):
        self.model, self.capacity, self.vocab = model, capacity, model.config.vocab
        self.cache = model.new_cache(capacity, page_size, page_order, snapshot_every=snapshot_every,
                                     snapshot_bytes=snapshot_bytes)
        self._logits: np.ndarray | None = None
        self._use = 0  # counts the calls that change the state: an iterator of an older one must not go on

    @property
    def tokens(self) -> list[int]:
        return self.cache.tokens

    @property
    def processed_token_count(self) -> int:
        return self.cache.offset

    @property
    def logits(self) -> np.ndarray | None:
        return self._logits

    @property
    def snapshot_every(self) -> int | str | None:
        return self.cache.snapshot_every

    @property
    def snapshots(self) -> list[int]:
        return self.cache.snapshots

    @property
    def snapshot_bytes(self) -> int:
        return len(self.cache.snapshots) * self.cache.state_bytes

    def kv(self) -> list[dict[str, np.ndarray]]:
        return [self.cache.snapshot(layer) for layer in range(self.model.config.layers)]

    def trim_kv_cache(self, length: int) -> int:
        """Rewind: set the offset. Returns min(length, processed_token_count). Takes the same time for any length.

        With recurrent layers the nearest snapshot at or below it. Without ``snapshot_every``, -1 for any length that is
        less than what it holds: nothing was changed, `reset` instead.
        """
        if length < 0:
            raise ValueError(f"trim_kv_cache({length}): a length is not negative")
        keep = self.cache.reachable(length)
        if keep < 0:
            return -1
        self._begin()
        if keep < self.cache.offset:
            self.cache.trim_to(keep)
            self._logits = None  # they were of a position that is gone
        return self.cache.offset

    def reset(self) -> None:
        self._begin()
        self.cache.trim_to(0)
        self._logits = None

    def prefill(self, tokens: Sequence[int]) -> None:
        """See `Engine.prefill`. Raises FeedError or CapacityError before anything is changed, NonFiniteError."""
        suffix = self._new(tokens)
        self._begin()
        self.cache.begin_turn()
        self._run(suffix)

    def generate(self, tokens: Sequence[int], *, max_tokens: int | None = None, stop_ids: Collection[int] = (),
                 sampling: Sampling = GREEDY) -> Generator[int, None, None]:
        """See `Engine.generate`. Nothing runs before the first id is asked for, but bad tokens are refused at once.

        Raises FeedError or CapacityError before anything is changed. While iterating: CapacityError when the cache is
        full, NonFiniteError, StaleGenerationError when the engine was used for something else meanwhile.
        """
        suffix = self._new(tokens)
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}, but must be at least 0")
        use = self._begin()
        self.cache.begin_turn()
        return self._generate(suffix, use, max_tokens, frozenset(stop_ids), sampling)

    def peek(self, tokens: Sequence[int], *, start: int | None = None, every: bool = False, tap: Tap | None = None) -> np.ndarray:
        """Logits of tokens as if they came after the first ``start`` positions held (default: after all), in one forward.
        See `forward` for ``every`` and ``tap``. The engine stays just as it is, also in the midst of a generation.

        (T,) ids -> float32 (1 or T, V). Raises FeedError, CapacityError, NonFiniteError; ValueError for a start not held.
        """
        ids = self.model.check_tokens(tokens)
        if not len(ids):
            raise FeedError("no tokens: there are no logits of nothing")
        with self.cache.aside(self.cache.offset if start is None else start, len(ids)):
            return self.model.run(self.cache, ids, every=every, tap=tap).astype(np.float32, copy=False)

    def _new(self, tokens: Sequence[int]) -> np.ndarray:
        """The tokens that are not in the cache yet, checked. Full-sequence feed: what it holds must come first."""
        ids, held = self.model.check_tokens(tokens), self.cache.ids()
        if len(ids) < len(held) or not np.array_equal(ids[:len(held)], held):
            same = min(len(ids), len(held))
            differ = np.flatnonzero(ids[:same] != held[:same])
            at = int(differ[0]) if len(differ) else same
            raise FeedError(f"the full sequence is due, but it differs from the {len(held)} cached tokens at {at}: "
                            f"trim_kv_cache({at}) first")
        return self._fits(ids[len(held):])

    def _fits(self, suffix: np.ndarray) -> np.ndarray:
        if not len(suffix):
            raise FeedError("no new token to run, so there would be no logits: "
                            f"trim_kv_cache({max(0, self.cache.offset - 1)}) and feed the last token again")
        self.cache.reserve(len(suffix))
        return suffix

    def _begin(self) -> int:
        self._use += 1
        return self._use

    def _run(self, tokens: np.ndarray) -> None:
        """Forward in chunks, each committed when it is complete."""
        while len(tokens):
            chunk = tokens[:min(self.chunk_size, self.cache.until_snapshot() or self.chunk_size)]
            self._commit(chunk, self.model.run(self.cache, chunk))
            tokens = tokens[len(chunk):]

    def _commit(self, tokens: np.ndarray, logits: np.ndarray) -> None:
        self._logits = None  # an interrupt between the next two lines must not pair old logits with a new offset
        self.cache.commit(tokens)
        self._logits = logits[-1].astype(np.float32, copy=False)

    def _generate(self, suffix: np.ndarray, use: int, max_tokens: int | None, stop_ids: frozenset[int],
                  sampling: Sampling) -> Generator[int, None, None]:
        count = 0
        while max_tokens is None or count < max_tokens:
            if self._use != use:
                raise StaleGenerationError("the engine was trimmed, reset or fed since this generation began")
            self._run(suffix)
            token = sampling.pick(self.model.op, self._logits, self.cache.ids())
            count += 1
            yield token
            if token in stop_ids:
                return
            suffix = np.array([token])
