"""refengine replay: one history from a trace. Floor 8."""
from __future__ import annotations

import argparse
from pathlib import Path

from refengine.conformance import campaign
from refengine.conformance.history import describe, load_trace
from refengine.model import load_model


def run(arguments: argparse.Namespace) -> int:
    model = load_model(arguments.model, arguments.arithmetic)
    settings, history = load_trace(Path(arguments.trace), model.config.vocab)
    print(f"{settings}: {'; '.join(map(describe, history))}")
    if failure := campaign.failure_of(model, settings, history):
        print(failure)
        return 1
    print(f"{len(history)} operations, every byte is equal")
    return 0
