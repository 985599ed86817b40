"""refengine synth. Floor 8."""
from __future__ import annotations

import argparse
from pathlib import Path

from refengine.synth import synthesize


def run(arguments: argparse.Namespace) -> int:
    synthesize(arguments.shape, Path(arguments.out), seed=arguments.seed)
    print(f"{arguments.shape}, random weights of seed {arguments.seed}: {arguments.out}")
    return 0
