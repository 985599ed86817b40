"""A chat as it was: what each turn gave the engine and got, enough to play it again. JSON, schema refengine-record/1.

    {"schema", "refengine": version, "model": {"source", "fingerprint"}, "arithmetic", "engine": settings of `load`,
     "turns": [{"held": ids before it, "prompt": ids, "reused", "fallback", "ids": generated, "text", "finish",
                "ttft", "seconds", "greedy", "messages", "arguments": of the template, "cause", "why"}]}
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import refengine
from refengine.chat import Chat
from refengine.engine import SequentialEngine
from refengine.errors import InspectError

SCHEMA = "refengine-record/1"
_TURN = {"held": list, "prompt": list, "reused": int, "fallback": str, "ids": list, "text": str, "finish": str, "ttft": float,
         "seconds": float, "greedy": bool, "messages": list, "arguments": dict, "cause": str, "why": str}


class Recorder:
    """Of a chat over one of our engines. `save` after each turn that should not be lost."""

    def __init__(self, chat: Chat, path: Path):
        engine = chat.engine
        if not isinstance(engine, SequentialEngine):
            raise InspectError(f"a chat over {type(engine).__name__} cannot be recorded; those over the engines of refengine.load can")
        model, kind = engine.model, type(engine).__name__.removesuffix("Engine").lower()
        self.chat, self.path, self._seen = chat, Path(path), 0
        self.record: dict[str, Any] = {
            "schema": SCHEMA, "refengine": refengine.__version__,
            "model": {"source": model.checkpoint.source, "fingerprint": model.checkpoint.fingerprint()},
            "arithmetic": model.op.NAME,
            "engine": {"engine": kind, "capacity": engine.capacity, "page_size": engine.cache.pool.page_size,
                       "chunk_size": engine.chunk_size, "snapshot_every": engine.snapshot_every}, "turns": []}

    def save(self) -> None:
        """Write the file, with the turns that are new."""
        if len(self.chat.turns) < self._seen:  # the chat began anew; what was said before it belongs to the record all the same
            self._seen = 0
        for turn in self.chat.turns[self._seen:]:
            held, prompt = turn.asked()
            why = turn.explain()
            self.record["turns"].append({
                "held": list(held), "prompt": prompt.ids, "reused": turn.reused, "fallback": turn.fallback, "ids": list(turn.ids),
                "text": turn.text, "finish": turn.finish_reason, "ttft": turn.ttft, "seconds": turn.seconds,
                "greedy": self.chat.sampling.temperature == 0, "messages": prompt.messages, "arguments": prompt.arguments,
                "cause": why.cause, "why": str(why)})
        self._seen = len(self.chat.turns)
        self.path.write_text(json.dumps(self.record) + "\n", encoding="utf-8")


def read_record(path: Path) -> dict[str, Any]:
    """A record from a file. Raises InspectError naming the field that is wrong."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InspectError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise InspectError(f"{path}: schema is {record.get('schema') if isinstance(record, dict) else record!r:.80}, not {SCHEMA}")
    _check(record, path, {"model": dict, "arithmetic": str, "engine": dict, "turns": list})
    _check(record["model"], f"{path}: model", {"source": str, "fingerprint": str})
    _check(record["engine"], f"{path}: engine", {"engine": str, "capacity": int, "page_size": int, "chunk_size": int})
    for i, turn in enumerate(record["turns"]):
        if not isinstance(turn, dict):
            raise InspectError(f"{path}: turns[{i}] is not an object")
        _check(turn, f"{path}: turns[{i}]", _TURN)
        for name in ("held", "prompt", "ids"):
            if not all(type(id) is int and 0 <= id < 2**31 for id in turn[name]) or not turn[name] and name != "held":
                raise InspectError(f"{path}: turns[{i}].{name} is not a list of token ids, at least one")
        if not 0 <= turn["reused"] < len(turn["prompt"]):
            raise InspectError(f"{path}: turns[{i}].reused is {turn['reused']}, of a prompt of {len(turn['prompt'])}")
    if not record["turns"]:
        raise InspectError(f"{path}: it has no turn")
    return record


def _check(value: dict[str, Any], where: Any, fields: dict[str, type]) -> None:
    for name, kind in fields.items():
        if not isinstance(value.get(name), (int, float) if kind is float else kind):
            raise InspectError(f"{where}.{name} is {value.get(name)!r:.80}, not a {kind.__name__}")
