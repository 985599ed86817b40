"""refengine verify: the run of a receipt, once more. Floor 8."""
from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from refengine.cli.prove import play, play_campaign
from refengine.conformance import receipt
from refengine.conformance.receipt import ReceiptError
from refengine.model import load_model


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    old = receipt.read(Path(arguments.receipt))
    model, planned = load_model(old["model"]["source"], old["arithmetic"]), old["planned"]
    if model.checkpoint.fingerprint() != old["model"]["fingerprint"]:
        raise ReceiptError(f"{arguments.receipt}: model.fingerprint is not that of {old['model']['source']} here: other weights")
    if old["kind"] == "chats":
        result = play(console, model, old["model"]["source"], planned, old["seed"], arguments.workers)
        new = receipt.chats_receipt(model, old["seed"], planned, old["sides"], result)
    else:
        done = play_campaign(console, old["model"]["source"], old["arithmetic"], old["seed"], planned["histories"], arguments.workers)
        new = receipt.histories_receipt(model, old["seed"], planned, arguments.workers, done)
    same = True
    for key in ("lossless", "compared", "digest"):
        equal = new[key] == old[key]
        same &= equal
        console.print(f"{key:10} {'the same' if equal else f'{new[key]}, but the receipt says {old[key]}'}", highlight=False, soft_wrap=True)
    return 0 if same else 1
