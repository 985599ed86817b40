"""Activations by name, changed ones, the logit lens, and K/V as numbers."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from refengine.cache import Cache
from refengine.engine import Engine, SequentialEngine
from refengine.errors import InspectError, NonFiniteError
from refengine.inspect.names import activations, select, unknown
from refengine.model import Model

Patch = Callable[[np.ndarray], np.ndarray]


def trace(engine: Engine, tokens: Sequence[int], names: str | Iterable[str] | None = None, *, start: int | None = None,
          patch: Mapping[str, Patch] | None = None) -> dict[str, np.ndarray]:
    """Run tokens after what the engine holds, in one forward, and keep activations. The engine stays just as it was: tokens,
    logits, K/V; also in the midst of an answer (of a chat that works in idle time, `Chat.settle` first).

    names: of `activations`, or patterns as of files ("layers.*.q_rope"); all when None, of which scores and weights are
    large. start: run them after the first ``start`` positions held instead of after all: ``trace(engine, engine.tokens[n:],
    start=n)`` shows what is held already.
    patch: name -> a function of the activation, whose result the forward goes on with. With scores or weights, the heads
    and positions that it changes are computed from the new ones, all others keep what they were. What a trace shows of a
    patched activation is the patched one.

    (T,) ids -> name -> float32 array, in the order of the forward pass; shapes as in `activations`. Raises InspectError on a
    name that the model does not have, a patch of another shape, an engine that shows nothing; FeedError, CapacityError,
    NonFiniteError; ValueError for a start not held.
    """
    engine = _subject(engine)
    known = activations(engine.model.config)
    patch = dict(patch or {})
    for name in patch:
        if name not in known:
            raise unknown(name, known)
    tap = _Tap(engine.model, engine.cache, select(names, known), patch)
    engine.peek(tokens, start=start, every=bool({"norm", "logits"} & (tap.wanted | patch.keys())), tap=tap)
    return tap.seen


def tap_of(model: Model, cache: Cache, names: Iterable[str], seen: dict[str, np.ndarray],
           first: Callable[[str, np.ndarray], np.ndarray] | None = None) -> Callable[[str, np.ndarray], np.ndarray]:
    """A tap for `Model.run` over a cache: what it is shown goes through ``first``, then those of ``names`` are kept in ``seen``."""
    tap = _Tap(model, cache, set(names), {}, seen)
    return lambda name, x: tap(name, first(name, x) if first else x)


def logit_lens(model: Model, x: np.ndarray) -> np.ndarray:
    """What the model would say if it ended at a residual: its last norm and head. (..., E) float32 -> float32 (..., V).

    Of the last layer's residual these are the logits themselves.
    """
    if x.shape[-1:] != (model.config.hidden,):
        raise InspectError(f"a residual ends with {model.config.hidden} numbers a position; this has shape {x.shape}")
    rows = np.ascontiguousarray(x, model.op.DTYPE).reshape(-1, x.shape[-1])
    logits = model.op.linear(model.op.rms_norm(rows, model.weights.norm, model.config.rms_norm_eps), model.weights.head)
    return logits.astype(np.float32, copy=False).reshape(*x.shape[:-1], -1)


def kv(engine: Engine, start: int = 0, stop: int | None = None) -> dict[str, np.ndarray]:
    """The K/V that the cache holds for positions start..stop-1 (default: to the end), as attention uses them: "layers.0.k",
    "layers.0.v", ... -> float32 (stop - start, N, D), of each layer that has attention. Raises ValueError for positions not
    held, InspectError."""
    engine, found = _subject(engine), {}
    delta = engine.model.config.delta
    for i in range(engine.model.config.layers):
        if delta and delta.layers[i]:
            continue
        packed = engine.model.op.KV(**engine.cache.snapshot(i, start, stop))
        for name, x in zip("kv", engine.model.op.unpack_kv(packed)):
            found[f"layers.{i}.{name}"] = x.astype(np.float32, copy=False)                # (stop - start, N, D)
    return found


def _subject(engine: Engine) -> SequentialEngine:
    if not isinstance(engine, SequentialEngine):
        raise InspectError(f"{type(engine).__name__} does not show its activations; the engines of refengine.load do")
    return engine


class _Tap:
    """Sees all activations of a forward; keeps those that are wanted, changes those that have a patch."""

    def __init__(self, model: Model, cache: Cache, wanted: set[str], patch: Mapping[str, Patch],
                 seen: dict[str, np.ndarray] | None = None):
        self.op, self.cache, self.wanted, self.patch = model.op, cache, wanted, patch
        self.seen: dict[str, np.ndarray] = {} if seen is None else seen
        self._used = wanted | patch.keys()
        self._attended = "attended" if model.config.delta else "heads"  # a hybrid's heads are gated after attention
        self._q = np.empty(0)

    def __call__(self, name: str, x: np.ndarray) -> np.ndarray:
        at, _, last = name.rpartition(".")
        if last == "gate_up" and self._used & {f"{at}.gate", f"{at}.up"}:
            gate, up = np.split(x, 2, axis=-1)                                            # (T, F) twice
            halves = self._see(f"{at}.gate", gate), self._see(f"{at}.up", up)
            return x if halves[0] is gate and halves[1] is up else np.concatenate(halves, axis=-1)
        if last == self._attended and self._used & {f"{at}.scores", f"{at}.weights"}:
            x = self._attention(at, x)
        x = self._see(name, x)
        if last == "q_rope":
            self._q = x                                                                   # (T, H, D)
        return x

    def _see(self, name: str, x: np.ndarray) -> np.ndarray:
        if name in self.patch:
            new = np.asarray(self.patch[name](x.copy()))
            if new.shape != x.shape:
                raise InspectError(f"the patch of {name} made shape {new.shape} of shape {x.shape}")
            new = new.astype(x.dtype)
            finite = np.isfinite(new) | (new == -np.inf) if name.endswith(".scores") else np.isfinite(new)
            if not finite.all():
                raise NonFiniteError(f"the patch of {name} made an infinity or a NaN")
            x = new
        if name in self.wanted:
            self.seen[name] = np.array(x, np.float32)
        return x

    def _attention(self, at: str, heads: np.ndarray) -> np.ndarray:
        """Scores and weights of a layer, computed once more. heads: what the kernel made of them, (T, H * D)."""
        (t, h, d), cache = self._q.shape, self.cache
        runs = cache.read(int(at.rpartition(".")[2]), t)
        scores, weights = self.op.attention_pattern(self._q, runs, cache.offset)          # (H, T, S) twice
        patched = self._see(f"{at}.scores", scores)
        if (patched == -np.inf).all(axis=-1).any():
            raise NonFiniteError(f"the patch of {at}.scores leaves a query no key")
        changed = (patched != scores).any(axis=-1, keepdims=True)                         # (H, T, 1)
        used = np.where(changed, self.op.softmax(patched), weights) if changed.any() else weights
        used = self._see(f"{at}.weights", used)                                           # (H, T, S)
        changed = (used != weights).any(axis=-1).T[..., None]                             # (T, H, 1)
        if not changed.any():
            return heads
        new = self.op.weighted_values(used, runs).reshape(t, h, d)                        # (T, H, D)
        return np.where(changed, new, heads.reshape(t, h, d)).reshape(t, h * d)
