"""Is a backend's own prefix cache lossless: its ON against its own OFF, over random histories, in bits and within its rounding."""
from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refengine.conformance.campaign import shorten
from refengine.conformance.caller import RULES, Caller, SeededChoices
from refengine.conformance.history import Mismatch, Op, Player, Truth, save_trace
from refengine.engine import Engine

LONGEST = 48
_RULES = tuple(rule for rule in RULES if rule != "fault")


class TolerantPlayer(Player):
    """A player that lets logits differ by rounding, counts how often they do, and still demands all the rest.

    most: relative distance up to which a difference is rounding. ``unequal`` of ``compared`` rows of logits differed in bits.
    """

    def __init__(self, engine: Engine, truth: Callable, most: float):
        super().__init__(engine, truth, poison=False)
        self._partial = getattr(engine, "scores", "logits") != "logits"
        self.most, self.compared, self.unequal, self.largest = most, 0, 0, 0.0
        self.first: list[Op] | None = None       # the operations up to the first difference in bits

    def _check_logits(self, logits, want, what):
        if logits is None or want is None:
            super()._check_logits(logits, want, what)
        self.compared += 1
        if logits.tobytes() == want.tobytes():
            return
        self.unequal += 1
        self.first = self.first or list(self.played)
        a, b = logits.astype(np.float64), want.astype(np.float64)
        if self._partial:                         # of what both tell
            told = np.isfinite(a) & np.isfinite(b)
            a, b = a[told], b[told]
        distance = float(np.sqrt(((a - b)**2).mean() / (b**2).mean()))
        self.largest = max(self.largest, distance) if np.isfinite(distance) else np.inf
        if not distance <= self.most:
            self._fail(f"{what}: far beyond rounding, relative distance", f"at most {self.most:.1e}", f"{distance:.1e}")

    def _check_choice(self, count: int, token: int, want: np.ndarray) -> None:
        near = self.most * 4 * np.sqrt((want[np.isfinite(want)].astype(np.float64)**2).mean())
        if want[token] < want.max() - near:       # not one of those that rounding can put first
            super()._check_choice(count, token, want)


def play(engine: Engine, cold: Engine, vocab: int, most: float, histories: int, seed: int = 0) -> dict[str, Any]:
    """Random histories on ``engine``; the truth is ``cold``, reset and given everything at once. -> figures.

    "control": cold against cold, in bits; when that is not equal, nothing can be lossless in bits.
    """
    @functools.lru_cache(4096)
    def truth(ids: tuple[int, ...]) -> Truth:
        cold.reset()
        if ids:
            cold.prefill(list(ids))
        return Truth(cold.logits.copy() if ids else None, None)

    rng = random.Random(f"control {seed}")
    control = True
    for _ in range(3):
        ids = [rng.randrange(vocab) for _ in range(12)]
        first = truth(tuple(ids)).logits
        truth.cache_clear()
        control &= first.tobytes() == truth(tuple(ids)).logits.tobytes()

    figures: dict[str, Any] = {"control": bool(control), "histories": 0, "compared": 0, "unequal": 0, "largest": 0.0, "first": None,
                               "violation": None, "violating": None}

    def replay(ops: Sequence[Op]) -> str | None:
        engine.reset()
        player = TolerantPlayer(engine, truth, most)
        try:
            player.play(ops)
        except Mismatch as mismatch:
            return str(mismatch)
        return None

    for number in range(histories):
        rng = random.Random(f"validate {seed} {number}")
        engine.reset()
        player, caller, choose = TolerantPlayer(engine, truth, most), Caller(vocab, LONGEST), SeededChoices(rng)
        try:
            for _ in range(rng.randint(4, 7)):
                op = caller.operation(rng.choice(_RULES), choose, player.held)
                player.do(op)
                caller.answered(op, player.held)
        except Mismatch:
            short = shorten(player.played, lambda ops: replay(ops) is not None)
            figures |= {"violation": replay(short), "violating": short}
        figures["histories"] += 1
        for name in ("compared", "unequal"):
            figures[name] += getattr(player, name)
        figures["largest"] = max(figures["largest"], player.largest)
        figures["first"] = figures["first"] or player.first
        if figures["violation"]:
            break
    if figures["first"] and not figures["violation"]:
        def unequal(ops):
            engine.reset()
            player = TolerantPlayer(engine, truth, most)
            player.play(ops)
            return player.unequal > 0
        figures["first"] = shorten(figures["first"], unequal)
    return figures


def save(path: Path, history: Sequence[Op], model: str, note: str) -> None:
    """The history as a portable trace."""
    save_trace(path, history, model=model, note=note)
