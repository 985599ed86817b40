"""Makes a set of golden vectors of a plan, or makes it anew: no case is written that two computations do not agree on.

One is the exact set, played through the script on an engine with a cache; the other is `oracle`, which shares no code with it
and computes what is held then at once, in float64. They must be within the bound that the case will have.
"""
from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from refengine.backends import Precision
from refengine.errors import RefengineError
from refengine.loading import load
from refengine.model import load_model
from refengine.sources import open_checkpoint
from refengine.validate.envelope import Envelope
from refengine.vectors import SCHEMA, VectorsError, oracle, read

PLAN = "refengine-vectors-plan/1"
KINDS = ("f32", "f16", "bf16")
_CASE = {"title": str, "model": str, "hunts": list, "why": str, "source": str, "script": list}
_STEPS = {"feed": {"op", "tokens"}, "trim": {"op", "length"}, "reset": {"op"}, "generate": {"op", "count"}}


def read_plan(path: Path) -> dict[str, Any]:
    """A plan in JSON; the folders of its models are beside it where they are not absolute. Raises VectorsError.

    {"schema": "refengine-vectors-plan/1", "models": {NAME: FOLDER}, "cases": [{"title", "model", "hunts", "why", "source",
    "script"}]}. A script is as in a set, without what is to come out; "generate" has a count.
    """
    path = Path(path)
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VectorsError(f"{path}: not a plan ({error})") from None
    if not isinstance(plan, dict) or plan.get("schema") != PLAN:
        raise VectorsError(f"{path}: schema is {plan.get('schema') if isinstance(plan, dict) else None!r}, not {PLAN!r}")
    for name, kind in (("models", dict), ("cases", list)):
        if not isinstance(plan.get(name), kind) or not plan[name]:
            raise VectorsError(f"{path}: {name} is {plan.get(name)!r:.60}, not a {kind.__name__} that says something")
    return plan | {"models": {name: path.parent / str(folder) for name, folder in plan["models"].items()}}


def make(plan: dict[str, Any], folder: Path, on_case: Callable[[str], None] = lambda title: None) -> int:
    """Write a set; how many cases it has. A case keeps the id that its title had in the folder's ledger, a new one gets the
    next, that of a removed one is retired. Nothing is written before all is computed. Raises VectorsError, CheckpointError.
    """
    folder = Path(folder)
    _check(plan)
    ledger = folder / "ledger.json"
    old = json.loads(ledger.read_text(encoding="utf-8")) if ledger.is_file() else {"given": {}, "retired": []}
    cases, rows, given, files = [], {}, dict(old["given"]), {}
    for model, source in plan["models"].items():
        makers = None
        for planned in plan["cases"]:
            if planned["model"] != model:
                continue
            makers = makers or _Makers(Path(source))
            id = next((key for key, title in given.items() if title == planned["title"]), None) or f"{folder.name}-{len(given) + 1:03}"
            given[id] = planned["title"]
            on_case(planned["title"])
            case, rows[id] = makers.case(planned["script"], f"case {planned['title']!r}")
            cases.append({"id": id, **{name: planned[name] for name in ("model", "hunts", "why", "source")}, **case})
        if makers:
            files[model] = {name: (Path(source) / name).read_bytes() for name in ("config.json", "model.safetensors")}
    shutil.rmtree(folder / "models", ignore_errors=True)
    for model, contents in files.items():
        (folder / "models" / model).mkdir(parents=True)
        for name, content in contents.items():
            (folder / "models" / model / name).write_bytes(content)
    digests = {model: hashlib.sha256(contents["model.safetensors"]).hexdigest() for model, contents in files.items()}
    retired = sorted(set(old["retired"]) | set(given) - set(rows))
    ledger.write_text(json.dumps({"given": given, "retired": retired}, indent=1) + "\n", encoding="utf-8")
    lines = ",\n".join(json.dumps(case) for case in cases)
    (folder / "cases.json").write_text(f'{{"schema": "{SCHEMA}", "models": {json.dumps(digests)}, "cases": [\n{lines}\n]}}\n',
                                       encoding="utf-8")
    safetensors.numpy.save_file(rows, folder / "logits.safetensors")
    return len(read(folder).cases)


def _check(plan: dict[str, Any]) -> None:
    titles: set[str] = set()
    for case in plan["cases"]:
        at = f"case {case.get('title')!r:.80}" if isinstance(case, dict) else f"case {case!r:.80}"
        for name, kind in _CASE.items():
            if not isinstance(case, dict) or not isinstance(case.get(name), kind) or not case[name]:
                raise VectorsError(f"{at}: {name} is missing, or not a {kind.__name__} that says something")
        if case["title"] in titles:
            raise VectorsError(f"{at}: its title is there twice")
        titles.add(case["title"])
        if case["model"] not in plan["models"]:
            raise VectorsError(f"{at}: there is no model {case['model']!r}")
        for step in case["script"]:
            if not isinstance(step, dict) or step.get("op") not in _STEPS or set(step) != _STEPS[step["op"]]:
                raise VectorsError(f"{at}: step {step!r:.80} is not known")
            ids = step.get("tokens", [step.get("length", step.get("count", 0))])
            if not isinstance(ids, list) or not ids or not all(type(id) is int and id >= 0 for id in ids):
                raise VectorsError(f"{at}: step {step!r:.80} needs numbers")
        if case["script"][0]["op"] != "feed":
            raise VectorsError(f"{at}: a script begins with a feed")


class _Makers:
    """The two computations of a model, and the envelopes that bounds are derived from."""

    def __init__(self, folder: Path):
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise VectorsError(f"{folder}: no {name}; a set is made of folders with both")
        self.folder, self.model = folder, load_model(folder)
        try:
            self.truth = oracle.read(folder)
        except (KeyError, ValueError) as error:
            raise VectorsError(f"{folder}: the second computation cannot read it ({error})") from None
        self.envelopes = {kind: Envelope(open_checkpoint(folder), Precision(kind, kind, kind, "stored" if kind == "f32" else kind))
                          for kind in KINDS}

    def case(self, steps: Sequence[dict[str, Any]], at: str) -> tuple[dict[str, Any], np.ndarray]:
        """(script with what comes out, bits and bounds; the oracle's rows)."""
        longest = sum(len(step.get("tokens", ())) + step.get("count", 0) for step in steps)
        engine = load(self.model, engine="pipelined", capacity=longest, page_size=16)
        script, found, held_then, held = [], [], [], []
        try:
            for step in steps:
                script.append(step := dict(step))
                held = self._do(engine, step, held)
                if step["op"] in ("feed", "generate"):
                    found.append(engine.logits)
                    held_then.append(held)
        except RefengineError as error:
            raise VectorsError(f"{at}: step {len(script)}: {error}") from None
        try:
            truths = [self.truth.logits(held) for held in held_then]
        except (KeyError, ValueError) as error:
            raise VectorsError(f"{at}: the second computation cannot run it ({error})") from None
        bounds = {kind: self._bound(envelope, held_then) for kind, envelope in self.envelopes.items()}
        wants = np.array([truth[-1] for truth in truths])
        far = float(np.abs(np.array(found, np.float64) - wants).max())
        if not far <= bounds["f32"]:
            raise VectorsError(f"{at}: the two computations are {far:.2e} apart, more than {bounds['f32']:.2e}; nothing is written")
        digest = hashlib.sha256(b"".join(x.astype("<f4").tobytes() for x in found)).hexdigest()
        return {"script": script, "bits": digest, "bounds": bounds}, wants

    @staticmethod
    def _do(engine, step: dict[str, Any], held: list[int]) -> list[int]:
        """One step, which gets what came out of it; what is held then."""
        if step["op"] == "feed":
            engine.prefill(step["tokens"])
            return held + step["tokens"]
        if step["op"] == "generate":
            ids = step["ids"] = []
            for _ in range(step.pop("count")):
                ids.append(int(engine.logits.argmax()))
                engine.prefill(ids[-1:])
            return held + ids
        if step["op"] == "trim":
            step["retained"] = engine.trim_kv_cache(step["length"])
            return held[:step["retained"]] if step["retained"] >= 0 else held
        engine.reset()
        return []

    def _bound(self, envelope: Envelope, held_then: list[list[int]]) -> float:
        """Four times the farthest that our forward, rounded to this precision, gets from itself in float64 with the weights as
        they are. Not from the second computation: where that is wrong, it must not widen what it has to meet."""
        apart = (np.abs(envelope.run(held, envelope.tap(rounds), model) - self.envelopes["f32"].run(held)).max()
                 for held in held_then for _, model, rounds in envelope.placements())
        return float(f"{4 * max(apart):.2e}")
