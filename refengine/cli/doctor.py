"""refengine doctor. Floor 8."""
from __future__ import annotations

import argparse

from refengine.machine import describe
from refkernels import probe


def run(arguments: argparse.Namespace) -> int:
    for key, value in describe().items():
        print(f"{key:14} {value}")
    found = probe.checks()
    for name, wrong in found.items():
        print(f"{'WRONG' if wrong else 'ok':5} {name}{': ' + wrong if wrong else ''}")
    return 1 if any(found.values()) else 0
