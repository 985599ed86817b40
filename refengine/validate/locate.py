"""Where it first goes wrong: activation by activation, against the reference and its envelope."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refengine.inspect.names import activations
from refengine.inspect.trace import tap_of
from refengine.model import Model
from refengine.validate.envelope import Envelope, verdict
from refengine.validate.metrics import relative
from refengine.validate.subject import Subject

_KV = ("k", "k_norm", "k_rope", "v")
_QUERY = ("q", "q_norm", "q_rope")


def locate(subject: Subject, envelope: Envelope, ids: Sequence[int], slack: float) -> dict[str, Any] | None:
    """The first activation that is wrong, as figures; {} when none is; None when the backend shows none."""
    known = activations(envelope.config)
    theirs = subject.activations(ids, known)
    if theirs is None:
        return None

    def collect(model: Model, see=None) -> dict[str, np.ndarray]:
        """All activations of a run, each as the model went on with it."""
        cache, seen = model.new_cache(len(ids), 64), {}
        envelope_tap = tap_of(model, cache, known, seen, see)
        model.run(cache, np.array(ids), every=True, tap=envelope_tap)
        return seen

    want = collect(envelope.model)
    floors = envelope.floors_of(want, collect)
    for name, about in known.items():
        if name not in theirs:
            continue
        got = theirs[name]
        if got.shape != want[name].shape:
            return {"name": name, "what": f"shape {got.shape}, but should be {want[name].shape}", **_place(name)}
        ratio = relative(want[name], got) / max(floors[name], 1e-300)
        if verdict(ratio, slack) == "wrong":
            return {"name": name, "ratio": ratio, "module": about.module, **_place(name), **_where(name, want[name], got),
                    **_shifted(name, want[name], got, floors[name], slack)}
    return {}


def _place(name: str) -> dict[str, Any]:
    layer, last = name.split(".")[1:] if name.startswith("layers.") else (None, name)
    side = "keys and values" if last in _KV else "queries" if last in _QUERY else "attention" if last in (
        "scores", "weights", "heads", "attended", "o") else "elsewhere"
    return {"layer": None if layer is None else int(layer), "side": side}


def _where(name: str, want: np.ndarray, got: np.ndarray) -> dict[str, Any]:
    """Position and head of the largest difference."""
    difference = np.nan_to_num(np.abs(got.astype(np.float64) - want), nan=np.inf, posinf=0 if name.endswith("scores") else np.inf)
    at = np.unravel_index(int(np.argmax(difference)), difference.shape)
    axes = ("head", "position", "key") if name.endswith((".scores", ".weights")) else ("position", "head")
    bad = difference.max(axis=tuple(i for i in range(difference.ndim) if i != axes.index("position")))
    first = int(np.flatnonzero(bad > 0.1 * bad.max())[0])
    return {axis: int(i) for axis, i in zip(axes, at) if difference.ndim > 2 or axis == "position"} | {"first_position": first}


def _shifted(name: str, want: np.ndarray, got: np.ndarray, floor: float, slack: float) -> dict[str, Any]:
    """Are they right, but of a neighbouring position? Then what was compared is not aligned."""
    if name.endswith((".scores", ".weights")) or len(want) < 3:
        return {}
    for shift in (1, -1):
        a, b = (want[1:], got[:-1]) if shift == 1 else (want[:-1], got[1:])
        if verdict(relative(a, b) / max(floor, 1e-300), slack) == "within rounding":
            return {"alignment": shift}
    return {}
