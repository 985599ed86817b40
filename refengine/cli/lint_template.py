"""refengine lint-template: on which conversations a chat template is append-only. Floor 8."""
from __future__ import annotations

import argparse
import json

from refengine.cli import setup
from refengine.lint_template import KINDS, lint
from refengine.parsers import parser_named


def run(arguments: argparse.Namespace) -> int:
    tokenizer = setup.tokenizer(arguments.model)
    findings = lint(tokenizer, parser_named(arguments.parser, tokenizer), seed=arguments.seed,
                    conversations=arguments.conversations)
    for finding in findings:
        what = f"{finding.kind} ({KINDS[finding.kind]})"
        if finding.refused:
            print(f"refused      {what}: {finding.refused}")
        elif finding.append_only:
            print(f"append-only  {what}: {finding.turns} turns")
        else:
            print(f"NOT          {what}: {finding.breaks} of {finding.turns} turns; first at message {finding.message} of")
            for i, message in enumerate(finding.conversation):
                print(f"    {i}  {json.dumps(message, ensure_ascii=False)}")
            print("    " + str(finding.explanation).replace("\n", "\n    "))
    return 0 if all(finding.append_only for finding in findings) else 1
