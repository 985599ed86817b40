"""The noise floor of a precision, derived: the reference itself, run with the roundings that a backend says it makes.

The reference is our forward in float64. A placement rounds each activation where it is made, the inputs of matrix products,
and K/V where they are stored, as `Precision` says. To the nearest is one placement. Another order of the sums inside a
product ends in a neighbouring number as often as not, so there are dithered placements too, which round up or down at random
from a seed; and where sums are float32, our own plain float32 set, which really adds in another order. What right arithmetic
of that precision can be away from the reference is what these are.

The floor of a figure is the largest over the placements. How far a right backend may lie beyond it is asked of the placements
themselves: `slack` is the largest factor by which one of them lies beyond all the others, at least 2. A backend is within
rounding up to slack times the floor, and wrong beyond twice that; between, it is suspicious.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from refengine.backends import Precision
from refengine.checkpoint import Checkpoint
from refengine.model import Model
from refengine.validate.metrics import compare, log_softmax, relative
from refengine.weights import load_weights
from refkernels import arithmetic

Rounding = Callable[[np.ndarray], np.ndarray]
_INPUTS = ("attn_norm", "heads", "mlp_norm", "act", "norm")
_STORED = ("k_rope", "v")
DITHERED = 3


def rounding(kind: str, seed: int | None = None) -> Rounding:
    """To the nearest number of a precision, or with a seed to one of the two neighbours, as often as it is near."""
    if kind in ("q8_0", "q8_k"):
        return partial(_blocks, size=32 if kind == "q8_0" else 256)
    bits = {"f32": 24, "bf16": 8, "f16": 11}[kind]
    rng = None if seed is None else np.random.default_rng(seed)

    def to(x: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(x.astype(np.float64))
        if kind == "f16":
            exponent = np.maximum(exponent, -13)              # subnormal from here on: the step stays
            mantissa = np.ldexp(x.astype(np.float64), -exponent)
        steps = np.ldexp(mantissa, bits)
        steps = np.rint(steps) if rng is None else np.floor(steps + rng.random(steps.shape))
        return np.where(np.isfinite(x), np.ldexp(steps, exponent - bits), x)
    return to


def _blocks(x: np.ndarray, size: int) -> np.ndarray:
    """q8_0 and q8_k: numbers of a block share a scale, their largest over 127, which is a float16 in q8_0."""
    rows = x.astype(np.float64).reshape(*x.shape[:-1], -1, size) if x.shape[-1] % size == 0 else x.astype(np.float64)[..., None, :]
    scale = np.abs(rows).max(axis=-1, keepdims=True) / 127
    scale = scale.astype(np.float16 if size == 32 else np.float32).astype(np.float64)
    return (np.rint(rows / np.where(scale, scale, 1)) * scale).reshape(x.shape)


class RoundedCheckpoint(Checkpoint):
    """A checkpoint whose weights are rounded as they are read."""

    def __init__(self, inner: Checkpoint, kind: str):
        self.inner, self.config, self.source, self._to = inner, inner.config, inner.source, rounding(kind)

    def shapes(self):
        return self.inner.shapes()

    def raw(self, name):
        return self.inner.raw(name)

    def tensor(self, name, rows=slice(None)):
        return self._to(self.inner.tensor(name, rows)).astype(np.float32)

    def _tokenizer(self):
        return self.inner._tokenizer()


class Envelope:
    """The reference of one backend, and its placements. scores: what is compared, "logits" or "log-probabilities"."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision, scores: str = "logits"):
        if precision.weights != "stored":
            checkpoint = RoundedCheckpoint(checkpoint, precision.weights)
        self.precision, self.config, self.scores = precision, checkpoint.config, scores
        self.model, self._float = (Model(checkpoint.config, load_weights(checkpoint, op), op, checkpoint)
                                   for op in (arithmetic("native64"), arithmetic("native")))

    def run(self, ids: Sequence[int], see: Callable[[str, np.ndarray], np.ndarray] | None = None, model: Model | None = None) -> np.ndarray:
        """(T, V) scores of ids from nothing, each activation through ``see``."""
        model = model or self.model
        logits = model.run(model.new_cache(len(ids), 64), np.array(ids), every=True, tap=see)
        return logits if self.scores == "logits" else log_softmax(logits.astype(np.float64))

    def placements(self) -> Iterable[tuple[str, Model, dict[str, Rounding]]]:
        """Name, which model runs, and what rounds activations, inputs and K/V. Each is whole: all that the precision rounds."""
        p = self.precision
        for seed in (None, *range(DITHERED)):
            yield ("to the nearest" if seed is None else f"dithered, seed {seed}"), self.model, {
                "activations": rounding(p.activations, seed), "inputs": rounding(p.inputs, None if seed is None else seed + 100),
                "kv": rounding(p.kv, None if seed is None else seed + 200)}
        if p.activations == "f32":
            yield "sums in float32", self._float, {"activations": lambda x: x, "inputs": rounding(p.inputs), "kv": rounding(p.kv)}

    def tap(self, rounds: dict[str, Rounding], look: Callable[[str, np.ndarray], None] | None = None):
        """A tap that rounds, and shows what came of it."""
        def see(name: str, x: np.ndarray) -> np.ndarray:
            last = name.rpartition(".")[2]
            new = rounds["activations"](x)
            new = rounds["kv"](new) if last in _STORED else rounds["inputs"](new) if last in _INPUTS else new
            new = new.astype(x.dtype)
            if look:
                look(name, new)
            return new
        return see

    def floors(self, ids: Sequence[int], known: np.ndarray | None = None) -> Floors:
        """What right arithmetic of this precision is away from the reference, on some ids. known: see `compare`."""
        want = self.run(ids)
        figures = {name: compare(want, self.run(ids, self.tap(rounds), model), known) for name, model, rounds in self.placements()}
        return Floors(want, figures, known)

    def floors_of(self, want: dict[str, np.ndarray], collect: Callable[[Model, Callable], dict[str, np.ndarray]]) -> dict[str, float]:
        """The same of activations: name -> largest relative distance. collect: runs a model through a tap, see `locate`."""
        floors = dict.fromkeys(want, 0.0)
        for _, model, rounds in self.placements():
            for name, x in collect(model, self.tap(rounds)).items():
                floors[name] = max(floors[name], relative(want[name], x))
        return floors


class Floors:
    """want: (T, V) of the reference. figures: placement -> figures of `compare`."""

    JUDGED = ("nmse", "kl_forward", "worst")

    def __init__(self, want: np.ndarray, figures: dict[str, dict], known: np.ndarray | None = None):
        self.want, self.figures, self._known = want, figures, known
        each = {name: [_judged(figure, name) for figure in figures.values()] for name in self.JUDGED}
        self.floor = {name: max(values) for name, values in each.items()}
        beyond = [sorted(values)[-1] / max(sorted(values)[-2], 1e-300) for values in each.values()]
        self.slack = max(2.0, *beyond)

    def ratios(self, got: np.ndarray) -> tuple[dict, dict[str, float]]:
        """(figures of a backend's scores, each judged figure over its floor)."""
        figures = compare(self.want, got, self._known)
        return figures, {name: _judged(figures, name) / max(self.floor[name], 1e-300) for name in self.JUDGED}

    def positions(self, figures: dict) -> np.ndarray:
        """Each position's distance over the largest that a placement has there, or on average."""
        rows = np.array([figure["by_position"] for figure in self.figures.values()])     # (placements, T)
        return np.array(figures["by_position"]) / np.maximum(rows.max(axis=0), rows.mean())


def _judged(figures: dict, name: str) -> float:
    """Figures in one unit: distances, not their squares."""
    return {"nmse": figures["nmse"]**0.5, "kl_forward": max(figures["kl_forward"], 0.0)**0.5, "worst": max(figures["by_position"])}[name]


def verdict(ratio: float, slack: float) -> str:
    return "within rounding" if ratio <= slack else "suspicious" if ratio <= 2 * slack else "wrong"
