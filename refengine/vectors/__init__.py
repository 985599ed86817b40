"""Golden vectors: what an engine is fed, in what order it rewinds, and the logits that must come out. Floor 7.

A set is a folder: cases.json, logits.safetensors, ledger.json, models/NAME/. Its README says how to write a runner in another
language; this is ours, over any engine of the protocol.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from refengine.engine import Engine
from refengine.errors import RefengineError

SCHEMA = "refengine-vectors/1"
_CASE = {"id": str, "hunts": list, "why": str, "source": str, "model": str, "script": list, "bits": str, "bounds": dict}
_STEPS = {"feed": {"op", "tokens"}, "trim": {"op", "length", "retained"}, "reset": {"op"}, "generate": {"op", "ids"}}


class VectorsError(RefengineError, ValueError):
    """A set of vectors is not what its document says; the message names the case and the field."""


class Vectors(NamedTuple):
    """folder; cases by id; rows: id -> (steps that give logits, V) float64."""

    folder: Path
    cases: dict[str, dict[str, Any]]
    rows: dict[str, np.ndarray]


class Outcome(NamedTuple):
    """Of one case: "" or what was wrong; error: it could not be played, which says nothing of right and wrong."""

    id: str
    wrong: str
    error: bool = False


def read(folder: Path) -> Vectors:
    """A set, checked: schema, ids in the ledger and never twice, models there with their digests, rows for every step.

    Raises VectorsError.
    """
    folder = Path(folder)
    try:
        whole = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
        ledger = json.loads((folder / "ledger.json").read_text(encoding="utf-8"))
        rows = safetensors.numpy.load_file(folder / "logits.safetensors")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise VectorsError(f"{folder}: not a set of vectors ({error})") from None
    if whole.get("schema") != SCHEMA:
        raise VectorsError(f"{folder}: schema is {whole.get('schema')!r}, not {SCHEMA!r}")
    cases: dict[str, dict[str, Any]] = {}
    for case in whole["cases"]:
        at = f"{folder}: case {case.get('id')!r}"
        for name, kind in _CASE.items():
            if not isinstance(case.get(name), kind) or not case[name]:
                raise VectorsError(f"{at}: {name} is {case.get(name)!r:.60}, not a {kind.__name__} that says something")
        if case["id"] in cases:
            raise VectorsError(f"{at}: its id is there twice")
        if case["id"] not in ledger["given"] or case["id"] in ledger["retired"]:
            raise VectorsError(f"{at}: its id is not one that the ledger gave, or is retired")
        for step in case["script"]:
            if step.get("op") not in _STEPS or set(step) != _STEPS[step["op"]]:
                raise VectorsError(f"{at}: step {step!r:.80} is not known")
        if len(rows.get(case["id"], ())) != sum(step["op"] in ("feed", "generate") for step in case["script"]):
            raise VectorsError(f"{at}: a row of logits for each feed and each generate is needed")
        cases[case["id"]] = case
    if surplus := set(rows) - set(cases):
        raise VectorsError(f"{folder}: rows of {', '.join(sorted(surplus))}, which are no cases")
    for name, digest in whole["models"].items():
        path = folder / "models" / name / "model.safetensors"
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise VectorsError(f"{folder}: model {name} is missing, or not the one that the cases were made of")
    if missing := {case["model"] for case in cases.values()} - set(whole["models"]):
        raise VectorsError(f"{folder}: no model {', '.join(sorted(missing))}")
    return Vectors(folder, cases, rows)


def play(engine: Engine, script: list[dict[str, Any]]) -> Iterator[np.ndarray]:
    """The logits after each step that gives some. Raises VectorsError at a wrong count or a wrong id."""
    for step in script:
        if step["op"] == "feed":
            engine.prefill([*engine.tokens, *step["tokens"]] if engine.prefix_reuse_feeds_full_sequence else step["tokens"])
            yield engine.logits
        elif step["op"] == "generate":  # greedy, from the logits that are there: each id is chosen, then fed
            for count, want in enumerate(step["ids"]):
                if (got := int(np.argmax(engine.logits))) != want:
                    raise VectorsError(f"id {count} of the generation is {got}, but should be {want}")
                engine.prefill([*engine.tokens, want] if engine.prefix_reuse_feeds_full_sequence else [want])
            yield engine.logits
        elif step["op"] == "trim":
            before, got = engine.tokens, engine.trim_kv_cache(step["length"])
            if got != step["retained"]:
                raise VectorsError(f"trim to {step['length']} retained {got}, but should have retained {step['retained']}")
            if got < 0 and engine.tokens != before:
                raise VectorsError(f"a refused trim to {step['length']} changed what is held")
        else:
            engine.reset()


def run(case: dict[str, Any], rows: np.ndarray, engine: Engine, precision: str = "f32", bits: bool = False) -> Outcome:
    """Play one case on an engine that holds nothing. precision: whose bound. bits: the exact arithmetic's, too."""
    digest = hashlib.sha256()
    try:
        for step, (got, want) in enumerate(zip(play(engine, case["script"]), rows, strict=True)):
            if got is None or got.shape != want.shape:
                return Outcome(case["id"], f"row {step}: {'no logits' if got is None else f'shape {got.shape}'}")
            digest.update(got.astype("<f4").tobytes())
            far = float(np.abs(got.astype(np.float64) - want).max())
            if not far <= case["bounds"][precision]:
                return Outcome(case["id"], f"row {step}: {far:.2e} away, the bound of {precision} is {case['bounds'][precision]:.2e}")
    except RefengineError as error:
        return Outcome(case["id"], str(error))
    except Exception as error:  # of a foreign engine: any kind
        return Outcome(case["id"], f"{type(error).__name__}: {error}", True)
    if bits and digest.hexdigest() != case["bits"]:
        return Outcome(case["id"], "within the bound, but not the bits of exact arithmetic")
    return Outcome(case["id"], "")


def run_all(vectors: Vectors, make_engine: Callable[[Path], Engine], precision: str = "f32", bits: bool = False) -> list[Outcome]:
    """Every case. make_engine: a checkpoint's folder -> an engine over it; made once for each model, and reset."""
    engines: dict[str, Engine] = {}
    found = []
    for case in vectors.cases.values():
        try:
            if case["model"] not in engines:
                engines[case["model"]] = make_engine(vectors.folder / "models" / case["model"])
        except RefengineError as error:
            found.append(Outcome(case["id"], str(error), True))
            continue
        engine = engines[case["model"]]
        engine.reset()
        found.append(run(case, vectors.rows[case["id"]], engine, precision, bits))
    return found
