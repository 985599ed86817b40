"""Receipts: what was run, on what, what came out; enough to repeat it elsewhere and compare. Floor 7."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import refengine
from refengine.conformance.campaign import Campaign
from refengine.conformance.prove import LADDER, Result
from refengine.errors import RefengineError
from refengine.machine import describe
from refengine.model import Model

SCHEMA = "refengine-receipt/1"
_KINDS = {"chats": ("engine", "chats", "turns", "max_tokens", "long_words", "capacity", "page_size"), "histories": ("histories",)}
_OPTIONAL = {"chats": ("keep_ids", "reanchor", "snapshot_every", "snapshot_bytes"), "histories": ()}  # not in a receipt: off


class ReceiptError(RefengineError, ValueError):
    """A receipt cannot be used; the message names the field."""


def _common(kind: str, model: Model, seed: int, planned: dict[str, Any]) -> dict[str, Any]:
    return {"schema": SCHEMA, "kind": kind, "refengine": refengine.__version__, "machine": describe(),
            "model": {"source": model.checkpoint.source, "fingerprint": model.checkpoint.fingerprint()},
            "arithmetic": model.op.NAME, "seed": seed, "planned": planned}


def chats_receipt(model: Model, seed: int, planned: dict[str, Any], sides: list[str], result: Result) -> dict[str, Any]:
    """Of `prove.prove`."""
    return _common("chats", model, seed, planned) | {
        "sides": sides,
        "compared": {"chats": result.chats, "turns": len(result.rows), "tokens": result.tokens,
                     "logits_bytes": result.logits_bytes, "kv_bytes": result.kv_bytes},
        "equal": {kind: result.equal(kind) for kind in LADDER}, "lossless": not result.differences,
        "differences": [vars(difference) for difference in result.differences],
        "digest": result.digest, "seconds": round(result.seconds, 3),
        "rows": [{"chat": row.chat, "turn": row.turn, "kind": row.step.kind,
                  "sides": {name: turn and {"prompt": turn.prompt, "reused": turn.reused, "forwarded": turn.forwarded,
                                            "generated": turn.generated, "ttft": round(turn.ttft, 6), "finish": turn.finish_reason}
                            for name, turn in row.turns.items()}} for row in result.rows]}


def histories_receipt(model: Model, seed: int, planned: dict[str, Any], workers: int, campaign: Campaign) -> dict[str, Any]:
    """Of `campaign.run`."""
    return _common("histories", model, seed, planned) | {
        "compared": {"histories": campaign.histories, "operations": campaign.operations, "bytes": campaign.bytes},
        "lossless": campaign.failure is None, "difference": campaign.failure and campaign.failure[3],
        "digest": campaign.digest, "seconds": round(campaign.seconds, 3), "workers": workers}


def write(path: Path, receipt: dict[str, Any]) -> None:
    path.write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A receipt that this version can repeat. Raises ReceiptError naming the field that is wrong."""
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReceiptError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(receipt, dict) or receipt.get("schema") != SCHEMA:
        found = receipt.get("schema") if isinstance(receipt, dict) else type(receipt).__name__
        raise ReceiptError(f"{path}: schema is {found!r}, not {SCHEMA!r}")
    if receipt.get("kind") not in _KINDS:
        raise ReceiptError(f"{path}: kind is {receipt.get('kind')!r}, not one of {', '.join(_KINDS)}")
    if receipt.get("refengine") != refengine.__version__:
        raise ReceiptError(f"{path}: refengine is {receipt.get('refengine')!r}; this is {refengine.__version__}, whose random "
                           "histories may be others")
    planned, model = receipt.get("planned"), receipt.get("model")
    if not isinstance(planned, dict) or set(planned) - set(_OPTIONAL[receipt["kind"]]) != set(_KINDS[receipt["kind"]]):
        raise ReceiptError(f"{path}: planned does not have the fields {', '.join(_KINDS[receipt['kind']])}")
    if not isinstance(model, dict) or not all(isinstance(model.get(key), str) for key in ("source", "fingerprint")):
        raise ReceiptError(f"{path}: model does not have source and fingerprint")
    for key, kind in (("seed", int), ("digest", str), ("arithmetic", str), ("compared", dict)):
        if type(receipt.get(key)) is not kind:
            raise ReceiptError(f"{path}: {key} is {receipt.get(key)!r}, not a {kind.__name__}")
    return receipt
