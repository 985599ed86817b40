"""refengine bench. Floor 8."""
from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from refengine.bench.measure import Plan, bench
from refengine.bench.report import ceilings, markdown, plot, tables
from refengine.bench.subject import OURS
from refengine.synth import synthesize

PLAN = Plan()


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    console.width = max(console.width, 140)  # the widest table
    plan = replace(PLAN, turns=tuple(_turn(text) for text in arguments.turn) or PLAN.turns, rounds=arguments.rounds,
                   sequential=not arguments.no_sequential)
    subjects = [*(arguments.arithmetic or OURS), *arguments.peer]
    with tempfile.TemporaryDirectory(prefix="refengine-bench-") as folder:
        model = arguments.model
        if model is None:
            model = f"{folder}/{arguments.shape}"
            console.print(f"writing {arguments.shape} with random weights", highlight=False)
            synthesize(arguments.shape, Path(model))
        with console.status("") as status:
            report = bench(model, list(dict.fromkeys(subjects)), plan,
                           on_step=lambda name, what: status.update(f"{name}: {what}"))
    if arguments.model is None:
        report["model"]["source"] = f"{arguments.shape}, random weights"
    for table in tables(report):
        console.print(table)
    console.print(ceilings(report), highlight=False)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.markdown:
        Path(arguments.markdown).write_text(markdown(report), encoding="utf-8")
    if arguments.plot:
        plot(report, Path(arguments.plot))
    return 0


def _turn(text: str) -> tuple[int, int]:
    """PROMPT:REUSED."""
    try:
        prompt, reused = map(int, text.split(":"))
    except ValueError:
        raise ValueError(f"--turn {text!r}: should be PROMPT:REUSED, as 1024:996") from None
    return prompt, reused
