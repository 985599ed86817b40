"""refengine vectors: golden vectors, made, checked and played. Floor 8."""
from __future__ import annotations

import argparse
from pathlib import Path

from refengine import vectors
from refengine.errors import RefengineError
from refengine.validate import open_subject
from refengine.vectors.make import make, read_plan


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "make":
        if not arguments.plan:
            raise RefengineError("vectors make needs --plan PLAN.json")
        plan = read_plan(Path(arguments.plan))
        count = make(plan, Path(arguments.folder), on_case=lambda title: print(f"{title} ..."))
        print(f"{arguments.folder}: {count} cases, each computed twice")
        return 0
    found = vectors.read(Path(arguments.folder))
    if arguments.action == "lint":
        print(f"{found.folder}: {len(found.cases)} cases of {len({case['model'] for case in found.cases.values()})} models, in order")
        return 0
    subject = open_subject(arguments.backend, found.folder / "models" / next(iter(found.cases.values()))["model"])
    exact = subject.name == "refengine" and subject.version.startswith("exact")
    outcomes = vectors.run_all(found, lambda model: open_subject(arguments.backend, model, 256).engine, subject.precision.activations,
                               bits=exact)
    errors, wrong = ([outcome for outcome in outcomes if outcome.wrong and outcome.error == kind] for kind in (True, False))
    for outcome in (*errors, *wrong):
        case = found.cases[outcome.id]
        what = "not played" if outcome.error else f"hunts {', '.join(case['hunts'])}"
        print(f"{outcome.id} ({case['model']}; {what}): {outcome.wrong}")
    print(f"{subject.name} {subject.version}: {len(outcomes) - len(errors) - len(wrong)} of {len(outcomes)} cases as they should be"
          + (", in bits" if exact else f", within the bounds of {subject.precision.activations}")
          + f"; {len(wrong)} wrong, {len(errors)} could not be played")
    return 1 if wrong else 2 if errors else 0
