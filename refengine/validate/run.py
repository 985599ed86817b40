"""All checks of a backend, in order: preflight, prompt logits within the envelope, where it goes wrong, its own cache."""
from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import refengine
from refengine.errors import RefengineError
from refengine.machine import describe
from refengine.sources import open_checkpoint
from refengine.validate.envelope import Envelope, Floors, verdict
from refengine.validate.locate import locate
from refengine.validate.lossless import play, save
from refengine.validate.outcome import Check, Report
from refengine.validate.prompts import prompts
from refengine.validate.subject import Subject

_SCORES = {"logits": "logits raw, KL in nats of softmaxed rows",
           "log-probabilities": "log-probabilities, those that the backend tells; KL in nats, with all others as one event"}
CHECKS = ("preflight", "forward", "location", "cache")


def validate(subject: Subject, *, own: Sequence[Sequence[int]] = (), longest: int = 256, histories: int = 30, seed: int = 0,
             expected: Collection[str] = (), trace: str | os.PathLike | None = None,
             on_step: Callable[[str], None] = lambda what: None) -> Report:
    """Judge a backend. own: prompts as ids, instead of the built-in ones. longest: of the prompts that are used. trace: where a
    failing history is written. A check that raises is an "error", and the ones that need it are skipped."""
    report = Report({"backend": subject.name, "version": subject.version, "precision": subject.precision._asdict(),
                     "model": Path(subject.model).name, "refengine": refengine.__version__, "machine": describe(),
                     "reference": "our forward in float64, of the weights that the backend reads; prompts are forced, all positions; "
                                  + _SCORES[subject.scores]}, expected=frozenset(expected))
    state: dict[str, Any] = {}
    for name, check in (("preflight", _preflight), ("forward", _forward), ("location", _location), ("cache", _cache)):
        on_step(name)
        try:
            report.add(check(subject, state, own=own, longest=longest, histories=histories, seed=seed, trace=trace))
        except RefengineError as error:
            report.add(Check(name, "error", str(error)))
        except Exception as error:  # of a foreign engine: any kind
            report.add(Check(name, "error", f"{type(error).__name__}: {error}"))
        if name == "preflight" and report.checks[-1].outcome in ("fail", "error"):
            for later in CHECKS[1:]:
                report.add(Check(later, "skip", "the preflight did not pass: figures would be of something else"))
            break
    return report


def _preflight(subject: Subject, state: dict, *, own, longest, **_) -> Check:
    envelope = state["envelope"] = Envelope(open_checkpoint(subject.source), subject.precision, subject.scores)
    vocab, capacity = getattr(subject.engine, "vocab", None), getattr(subject.engine, "capacity", None)
    own = [subject.ids] if hasattr(subject, "ids") else own
    state["prompts"] = prompts(open_checkpoint(subject.model), min(longest, capacity or longest), own)
    unfit = [name for name, ids in state["prompts"].items() if ids and not subject.takes(ids)]
    state["prompts"] = {name: ids for name, ids in state["prompts"].items() if name not in unfit}
    problems = []
    if vocab is not None and vocab != envelope.config.vocab:
        problems.append(f"it knows {vocab} ids, the model has {envelope.config.vocab}")
    too_long = [name for name, ids in state["prompts"].items() if capacity is not None and len(ids) > capacity]
    bad = [name for name, ids in state["prompts"].items() if not ids or max(ids) >= envelope.config.vocab or min(ids) < 0]
    problems += [f"{', '.join(names)}: {what}" for names, what in ((too_long, f"longer than its context of {capacity}"),
                                                                   (bad, "not ids of the vocabulary")) if names]
    if problems or not state["prompts"]:
        return Check("preflight", "fail", "; ".join(problems) or "there is no prompt that fits")
    left_out = f"; left out, as their text has other ids: {', '.join(unfit)}" if unfit else ""
    given = "prompts go as text, and come to the same ids" if subject.as_text else "ids are given, so no text is compared"
    return Check("preflight", "pass", f"{envelope.config.vocab} ids, context of {capacity}; {given}{left_out}",
                 {"vocab": vocab, "context": capacity, "left_out": unfit,
                  "prompts": {name: len(ids) for name, ids in state["prompts"].items()}})


def _forward(subject: Subject, state: dict, **_) -> Check:
    envelope, found, worst, slack = state["envelope"], {}, ("", 0.0), 2.0
    every, rows, told = {}, {}, subject.scores == "logits"
    for name, ids in state["prompts"].items():
        got = rows[name] = np.asarray(subject.rows(ids))
        if got.shape != (len(ids), envelope.config.vocab):
            return Check("forward", "fail", f"{name}: {subject.scores} have shape {got.shape}, but should have "
                                            f"{(len(ids), envelope.config.vocab)}")
        fit = np.isfinite(got) if told else got < np.inf
        if not fit.all():
            state["worst"], state["slack"] = name, 2.0
            return Check("forward", "fail", f"{name}: {subject.scores} of position {int(np.argmin(fit.all(axis=1)))} are not finite")
        every[name] = envelope.floors(ids, None if told else np.isfinite(got))
    for judged in Floors.JUDGED:  # a short prompt has few numbers to tell its floor from: it is at least what is usual
        usual = statistics.median(floors.floor[judged] for floors in every.values())
        for floors in every.values():
            floors.floor[judged] = max(floors.floor[judged], usual)
    for name, floors in every.items():
        figures, ratios = floors.ratios(rows[name])
        by_position = floors.positions(figures)
        beyond = np.flatnonzero(by_position > 2 * floors.slack)
        found[name] = figures | {"ratios": ratios, "floors": floors.floor, "slack": floors.slack,
                                 "verdict": verdict(max(ratios.values()), floors.slack),
                                 "first_position_beyond": int(beyond[0]) if len(beyond) else None}
        if max(ratios.values()) / floors.slack > worst[1]:
            worst, slack = (name, max(ratios.values()) / floors.slack), floors.slack
    state["worst"], state["slack"] = worst[0], slack
    state["floor"] = max(figures["floors"]["nmse"] for figures in found.values())
    name, figures = worst[0], found[worst[0]]
    ratio = max(figures["ratios"].values())
    where = f" from position {figures['first_position_beyond']} on" if figures["first_position_beyond"] is not None else ""
    said = (f"{figures['verdict']}: at most {ratio:.2g} times the noise of its roundings (up to {slack:.2g} is within), "
            f"in {name!r}{where}; largest difference {figures['largest']:.2g}, KL {figures['kl_forward']:.2g}, top-1 equal at "
            f"{figures['top_1']:.0%} of the positions")
    return Check("forward", "fail" if figures["verdict"] == "wrong" else "pass", said,
                 {"verdict": figures["verdict"], "ratio": ratio, "slack": slack, "prompts": found})


def _location(subject: Subject, state: dict, **_) -> Check:
    if "worst" not in state:
        return Check("location", "skip", "the forward pass could not be compared")
    found = locate(subject, state["envelope"], state["prompts"][state["worst"]], state["slack"])
    if found is None:
        return Check("location", "skip", "it shows no activations")
    if not found:
        return Check("location", "pass", "every activation that it shows is within rounding, or no more than suspicious")
    at = ", ".join(f"{key} {found[key]}" for key in ("layer", "position", "head") if found.get(key) is not None)
    said = f"first wrong: {found['name']}" + (f" ({at})" if at else "") + f", {found['side']}"
    if "alignment" in found:
        said += f"; right, but {found['alignment']:+} position: what was compared is not aligned"
    return Check("location", "fail", said, found)


def _cache(subject: Subject, state: dict, *, histories, seed, trace, **_) -> Check:
    if histories < 1:
        return Check("cache", "skip", "no histories were asked for")
    floor = state.get("floor")
    if reason := subject.no_cache or (floor is None and "the forward pass could not be compared, so there is no floor"):
        return Check("cache", "skip", reason)
    cold = subject.another()
    most = 4 * state["slack"] * floor          # both sides are rounded, so they may be twice as far apart
    before = getattr(subject.engine, "reused", None)
    figures = play(subject.engine, cold, state["envelope"].config.vocab, most, histories, seed)
    history = figures["violating"] or figures["first"]
    if history and trace is not None:
        save(Path(trace), history, Path(subject.model).name, figures["violation"] or "logits differ in bits")
        figures["trace"] = Path(trace).name
    if figures["violation"]:
        return Check("cache", "fail", f"not lossless, and not by rounding: {figures['violation']}", figures)
    rows = f"{figures['unequal']:,} of {figures['compared']:,} rows of {subject.scores} differ in bits"
    if before is not None:
        figures["reused"] = subject.engine.reused - before
        rows += f", {figures['reused']:,} tokens were reused"
        if not figures["reused"]:
            return Check("cache", "skip", f"it reused nothing in {figures['histories']} histories, so nothing is shown", figures)
    if figures["unequal"]:
        return Check("cache", "fail", f"not lossless in bits, within its rounding: {rows}, at most {figures['largest']:.1e} "
                     f"relative; cold against cold is {'equal' if figures['control'] else 'not equal either'}", figures)
    return Check("cache", "pass", f"lossless in bits: {rows}, over {figures['histories']} histories", figures)
