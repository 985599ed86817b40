"""refengine validate. Floor 8."""
from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from refengine.errors import RefengineError
from refengine.validate import open_subject, validate
from refengine.validate.page import page

_STYLE = {"pass": "green", "fail": "red", "error": "bold red", "skip": "dim", "expected fail": "yellow", "unexpected pass": "bold yellow"}


def run(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    own = _prompts(Path(arguments.prompts)) if arguments.prompts else ()
    subject = open_subject(arguments.backend, arguments.model, arguments.capacity)
    console.print(f"{subject.name} {subject.version}, {', '.join(f'{k} {v}' for k, v in subject.precision._asdict().items())}",
                  markup=False, soft_wrap=True)
    out = Path(arguments.report)
    report = validate(subject, own=own, longest=arguments.longest, histories=arguments.histories, seed=arguments.seed,
                      expected=arguments.expect, trace=out.with_suffix(".trace.json"),
                      on_step=lambda name: console.print(f"[dim]{name} ...[/]"))
    for check in report.checks:
        console.print(f"[{_STYLE[check.outcome]}]{check.outcome:15}[/] {check.name}: ", end="")
        console.print(check.words, markup=False, soft_wrap=True)
    out.write_text(json.dumps(report.json(), indent=1) + "\n", encoding="utf-8")
    if arguments.html:
        Path(arguments.html).write_text(page(report.json()), encoding="utf-8")
    console.print(f"[{_STYLE[report.outcome]}]{report.outcome}[/]; report: {out}", soft_wrap=True)
    return {"pass": 0, "skip": 3, "error": 2}.get(report.outcome, 1)


def _prompts(path: Path) -> list[list[int]]:
    """A JSON list of lists of ids. Raises RefengineError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RefengineError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, list) or not value or not all(
            isinstance(ids, list) and ids and all(type(id) is int for id in ids) for ids in value):
        raise RefengineError(f"{path}: it should be a list of lists of token ids")
    return value
