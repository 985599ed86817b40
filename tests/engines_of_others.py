"""Engines as others would write them, for the conformance suite: one that is right, one whose rewind is not, one that has
none. Floor 9.

    pytest --pyargs refengine.conformance --engine engines_of_others:make_right
"""
import numpy as np

from refengine.engine import Engine
from refengine.pipelined import PipelinedEngine

_TABLE = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)


class Counting(Engine):
    """A toy: the logits are a row of a table, chosen by all ids so far. No K/V to show."""

    prefix_reuse_feeds_full_sequence = False

    def __init__(self):
        self._ids: list[int] = []

    @property
    def tokens(self):
        return list(self._ids)

    @property
    def logits(self):
        return _TABLE[sum((i + 1) * (t + 1) for i, t in enumerate(self._ids)) % 64] if self._ids else None

    def trim_kv_cache(self, length):
        if length < 0:
            raise ValueError(length)
        del self._ids[length:]
        return len(self._ids)

    def reset(self):
        self._ids.clear()

    def prefill(self, tokens):
        self._ids.extend(tokens)

    def generate(self, tokens, *, max_tokens=None, stop_ids=(), sampling=None):
        self.prefill(tokens)
        count = 0
        while max_tokens is None or count < max_tokens:
            token = int(np.argmax(self.logits))
            count += 1
            yield token
            if token in stop_ids or count == max_tokens:
                return
            self._ids.append(token)


class Broken(Counting):
    """Rewinding to zero keeps everything: a limit of 0 is taken for no limit."""

    def trim_kv_cache(self, length):
        if length == 0:
            return len(self._ids)
        return super().trim_kv_cache(length)


class NoRewind(PipelinedEngine):
    """Ours with its rewind taken away, as one with a recurrent state: it goes on, and never back."""

    def trim_kv_cache(self, length):
        if length < self.processed_token_count:
            return Engine.trim_kv_cache(self, length)
        return self.processed_token_count


make_right, make_broken = Counting, Broken
