"""The model: one forward pass for Qwen3, Qwen2 and Llama. Floor 4.

T new tokens, S = offset + T, H query heads, N kv heads, D head size, E hidden, F mlp, V vocabulary.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from refengine import hybrid
from refengine.cache import Cache, PagePool
from refengine.checkpoint import Checkpoint
from refengine.config import ModelConfig
from refengine.errors import CheckpointError, FeedError, NonFiniteError
from refengine.recurrent import RecurrentCache, State
from refengine.sources import open_checkpoint
from refengine.tokenizer import Tokenizer
from refengine.weights import Weights, load_weights
from refkernels import BoundError, arithmetic as kernel_set, probe

Tap = Callable[[str, np.ndarray], np.ndarray]


def forward(model: Model, cache: Cache, tokens: np.ndarray, *, every: bool = False, tap: Tap = lambda name, x: x) -> np.ndarray:
    """Logits of the last of T tokens that follow the cache's, (1, V), or with ``every`` of all of them, (T, V).

    Writes their K/V above the offset and does NOT commit: until the caller does, nothing has happened. Raises NonFiniteError.
    ``tap(name, array)`` sees every activation and returns it, or another one to go on with.
    """
    op, c, w = model.op, model.config, model.weights
    start, T, H, N, D = cache.offset, len(tokens), c.heads, c.kv_heads, c.head_dim
    cache.reserve(T)
    cos, sin = model.rope_rows(start, start + T)                                  # (T, D/2)
    x = tap("embed", w.embed(tokens))                                             # (T, E)
    for i, layer in enumerate(w.layers):
        at = f"layers.{i}."
        h = tap(at + "attn_norm", op.rms_norm(x, layer.attn_norm, c.rms_norm_eps))        # (T, E)
        qkv = op.linear(h, layer.qkv).reshape(T, H + 2 * N, D)                    # (T, H + 2N, D)
        q, k, v = tap(at + "q", qkv[:, :H]), tap(at + "k", qkv[:, H:H + N]), tap(at + "v", qkv[:, H + N:])
        if c.qk_norm:                                                             # before the rotation
            q = tap(at + "q_norm", op.rms_norm(q, layer.q_norm, c.rms_norm_eps))          # (T, H, D)
            k = tap(at + "k_norm", op.rms_norm(k, layer.k_norm, c.rms_norm_eps))          # (T, N, D)
        q = tap(at + "q_rope", op.rotate(q, cos, sin))                            # (T, H, D)
        k = tap(at + "k_rope", op.rotate(k, cos, sin))                            # (T, N, D)
        cache.write(i, op.pack_kv(k, v))
        heads = tap(at + "heads", op.attention(q, cache.read(i, T), start))       # (T, H * D)
        x = tap(at + "attn_residual", x + tap(at + "o", op.linear(heads, layer.o)))       # (T, E)
        h = tap(at + "mlp_norm", op.rms_norm(x, layer.mlp_norm, c.rms_norm_eps))  # (T, E)
        h = tap(at + "act", op.swiglu(tap(at + "gate_up", op.linear(h, layer.gate_up))))  # (T, F)
        x = tap(at + "residual", x + tap(at + "down", op.linear(h, layer.down)))  # (T, E)
    if not np.isfinite(x).all():    # kernels pass a NaN on, so that a row that met one anywhere shows it here
        raise NonFiniteError("an activation is infinite or NaN")
    x = tap("norm", op.rms_norm(x if every else x[-1:], w.norm, c.rms_norm_eps))  # (T or 1, E)
    return tap("logits", op.linear(x, w.head))                                    # (T or 1, V)


_forward = forward


@dataclass(eq=False)
class Model:
    """A loaded model: configuration, packed weights, the kernel set they are packed for."""

    config: ModelConfig
    weights: Weights
    op: ModuleType
    checkpoint: Checkpoint
    _table: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False)

    def new_cache(self, capacity: int, page_size: int, order: Sequence[int] | None = None, *,
                  snapshot_every: int | str | None = None, snapshot_bytes: int = 2**28) -> Cache:
        """An empty cache with memory of its own. Raises ValueError when the capacity is more than the set can sum over.

        The snapshots are of recurrent layers (`refengine.recurrent`); a model without them needs none.
        """
        if capacity < 1 or page_size < 1:
            raise ValueError(f"capacity {capacity} in pages of {page_size}; both must be at least 1")
        if capacity > self.op.MAX_CONTEXT:
            raise ValueError(f"capacity is {capacity}; the {self.op.NAME} set can hold {self.op.MAX_CONTEXT}")
        c = self.config
        pool = PagePool(self.op, layers=c.layers, kv_heads=c.kv_heads, head_dim=c.head_dim, pages=-(-capacity // page_size),
                        page_size=page_size, order=order)
        if c.delta is None:
            return Cache(pool, capacity)
        d, dtype = c.delta, self.op.DTYPE
        nothing = State(conv=np.zeros((d.window - 1, d.channels), dtype),
                        memory=np.zeros((d.value_heads, d.value_dim, d.key_dim), dtype))
        return RecurrentCache(pool, capacity, {i: nothing for i, recurrent in enumerate(d.layers) if recurrent},
                              snapshot_every=snapshot_every, snapshot_bytes=snapshot_bytes)

    def rope_rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of positions start..stop-1, (T, D/2) each, from a table that grows by doubling."""
        table = self._table
        if table is None or len(table[0]) < stop:
            size = max(64, 1 << (stop - 1).bit_length())
            table = self._table = self.op.rope_table(self.config.rope.turns(self.config.rotary_dim),
                                                     self.config.rope.attention_factor, 0, size)
        return table[0][start:stop], table[1][start:stop]

    def check_tokens(self, tokens: Sequence[int]) -> np.ndarray:
        """Ids as an int64 array. Raises FeedError when one is not an id of this model's vocabulary."""
        try:
            ids = np.asarray(tokens if len(tokens) else np.empty(0, np.int64))
        except ValueError:  # rows of different lengths
            raise FeedError("tokens must be one sequence of integer ids; a batch is not computed here") from None
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise FeedError(f"tokens must be a sequence of integer ids, not {ids.dtype} of shape {ids.shape}")
        outside = np.flatnonzero((ids < 0) | (ids >= self.config.vocab))
        if len(outside):
            raise FeedError(f"token {outside[0]} is {ids[outside[0]]}, outside the vocabulary of {self.config.vocab}")
        return ids.astype(np.int64, copy=False)

    def run(self, cache: Cache, tokens: np.ndarray, *, every: bool = False, tap: Tap | None = None) -> np.ndarray:
        """`forward`, with infinities and NaN turned into a NonFiniteError that names where they came from."""
        forward = _forward if self.config.delta is None else hybrid.forward
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                logits = forward(self, cache, tokens, every=every, **({"tap": tap} if tap else {}))
            if np.isfinite(logits).all():
                return logits
        except NonFiniteError:
            pass
        with np.errstate(invalid="ignore", over="ignore"):  # nothing was committed: run it again
            forward(self, cache, tokens, every=every, tap=_Watch(cache.offset + len(tokens), tap))
        raise NonFiniteError(f"a kernel met an infinity or a NaN at positions {cache.offset}.."
                             f"{cache.offset + len(tokens) - 1} that no activation shows")

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of every position of a sequence, computed at once without a cache to reuse. (T,) ids -> float32 (T, V).

        Raises FeedError on an id outside the vocabulary or an empty sequence, NonFiniteError.
        """
        ids = self.check_tokens(tokens)
        if not len(ids):
            raise FeedError("no tokens: there are no logits of nothing")
        return self.run(self.new_cache(len(ids), 64), ids, every=True).astype(np.float32, copy=False)


class _Watch:
    """A tap that raises at the first activation with an infinity or a NaN."""

    def __init__(self, stop: int, inner: Tap | None):
        self.stop, self.inner = stop, inner  # the last row of any activation is position stop - 1

    def __call__(self, name: str, x: np.ndarray) -> np.ndarray:
        x = self.inner(name, x) if self.inner else x
        bad = ~np.isfinite(x).reshape(len(x), -1).all(axis=1)
        if bad.any():
            position = self.stop - len(x) + int(np.flatnonzero(bad)[0])
            raise NonFiniteError(f"{name} is infinite or NaN at position {position}")
        return x


def load_model(source: str | os.PathLike | Model, arithmetic: str | None = None) -> Model:
    """Load a Hugging Face folder, a .gguf file, a hub id, or one of the built-in "tiny", "tiny-hybrid" and "small".
    A Model is returned as it is.

    arithmetic: "exact" (the default; 8 bytes a weight), "native" (float32) or "native64".
    Raises CheckpointError, ConfigError; ProbeError when this process cannot compute exactly.
    """
    if isinstance(source, Model):
        if arithmetic not in (None, source.op.NAME):
            raise ValueError(f"the model is loaded in {source.op.NAME} arithmetic, not {arithmetic}")
        return source
    op = kernel_set(arithmetic or "exact")
    if op.NAME == "exact":
        probe.require()
    checkpoint = open_checkpoint(source)
    try:
        op.kv_fields(checkpoint.config.head_dim)
        if delta := checkpoint.config.delta:
            op.check_delta(delta.key_dim, delta.value_dim)
    except BoundError as error:
        raise CheckpointError(f"{checkpoint.source}: heads are too large: {error}") from error
    return Model(checkpoint.config, load_weights(checkpoint, op), op, checkpoint)


def tiny(arithmetic: str | None = None) -> Model:
    """The built-in model of the proofs: Qwen3 architecture, random weights, a byte-level tokenizer, a few hundred kilobytes."""
    return load_model("tiny", arithmetic)


def load_tokenizer(source: str | os.PathLike | Model) -> Tokenizer:
    """The tokenizer, chat template and stop ids of a model. Raises TokenizerError, CheckpointError, ConfigError."""
    checkpoint = source.checkpoint if isinstance(source, Model) else open_checkpoint(source)
    return checkpoint.tokenizer()
