"""A recorded chat, played again: every operation on the cache in order, and each turn once more without any cache.

What the page shows is measured here, on the real engine. The generated ids are those of the record (each is fed where it
was chosen), so that a sampled answer can be played too; where the engine would choose another now, it is said.
"""
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from refengine.engine import SequentialEngine
from refengine.errors import InspectError, TokenizerError
from refengine.inspect.names import activations
from refengine.inspect.trace import kv, logit_lens, trace
from refengine.loading import load
from refengine.model import Model, load_model, load_tokenizer
from refengine.prefix import common_prefix, reusable
from refengine.tokenizer import Tokenizer

LENS_LAYERS, LENS_POSITIONS, TOP = 8, 512, 8


class Replay:
    """``data`` is what the page shows, as JSON; ``differences`` says what is not as it was recorded."""

    def __init__(self, record: dict[str, Any], model: Model | None = None, tokenizer: Tokenizer | None = None):
        """Play it. Raises InspectError when the model is another, and what `load` raises."""
        self.model = model or load_model(record["model"]["source"], record["arithmetic"])
        self.tokenizer = tokenizer or load_tokenizer(self.model)
        self.differences: list[str] = []
        if self.model.checkpoint.fingerprint() != record["model"]["fingerprint"]:
            self.differences.append(f"the weights of {record['model']['source']} are not those of the record")
        self.settings = dict(record["engine"])
        if self.settings["engine"] == "sequential":
            self.settings["chunk_size"] = None
        self.engine = self._new()
        self.events: list[dict[str, Any]] = []
        turns = [self._turn(number, turn) for number, turn in enumerate(record["turns"])]
        ids = sorted({id for event in self.events for id in event["ids"]} | {id for turn in turns for row in turn["lens"] for id in row})
        self.data = {"model": Path(record["model"]["source"]).name, "arithmetic": self.model.op.NAME, "engine": record["engine"],
                     "layers": self.model.config.layers, "events": self.events, "turns": turns, "differences": self.differences,
                     "tokens": {id: self.tokenizer.decode([id], skip_special_tokens=False) for id in ids}}

    def _new(self) -> SequentialEngine:
        try:
            return load(self.model, **self.settings)
        except TypeError as error:
            raise InspectError(f"the record's engine has settings that are none: {error}") from None

    def _turn(self, number: int, turn: dict[str, Any]) -> dict[str, Any]:
        """One turn with the cache, then without. -> what the page says of it."""
        engine, prompt, answer = self.engine, turn["prompt"], turn["ids"]
        self._bring(number, turn["held"])
        length = min(turn["reused"], reusable(prompt, engine.tokens))     # a record may say what cannot be
        reused = self._rewind(number, length, turn["fallback"], turn["cause"])
        if reused != turn["reused"]:
            self.differences.append(f"turn {number}: {reused} tokens are reused now, {turn['reused']} were")
        began = time.perf_counter()
        self._feed(number, "prefill", prompt[reused:])
        seconds, steps = time.perf_counter() - began, [engine.logits]
        for id in answer[:-1]:                                # the last one has no K/V: nobody went on from it
            self._feed(number, "decode", [id])
            steps.append(engine.logits)
        if turn["greedy"]:
            for at, (id, logits) in enumerate(zip(answer, steps)):
                if id != int(self.model.op.argmax(logits)):
                    self.differences.append(f"turn {number}: token {at} would be another one now")
                    break
        off = self._new()
        began = time.perf_counter()
        self._give(off, prompt)
        seconds_off, cold = time.perf_counter() - began, [off.logits]
        for id in answer[:-1]:
            self._give(off, [id])
            cold.append(off.logits)
        unequal = sum(int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in zip(steps, cold))
        return {"prompt": len(prompt), "reused": reused, "forwarded": len(prompt) - reused, "generated": len(answer),
                "end": engine.processed_token_count, "fallback": turn["fallback"], "cause": turn["cause"], "why": turn["why"],
                "finish": turn["finish"], "text": turn["text"], "ttft": turn["ttft"], "on": seconds, "off": seconds_off,
                "logits_bytes": sum(x.nbytes for x in steps), "unequal_bytes": unequal,
                "largest": max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(steps, cold)),
                "messages": self._messages(turn), "pages": list(engine.cache.pages), "snapshots": list(engine.snapshots),
                **self._look(reused)}

    def _bring(self, number: int, held: list[int]) -> None:
        """What happened between turns (work in idle time, an answer that came to nothing) left this in the cache."""
        if self.engine.tokens != held:
            common = common_prefix(self.engine.tokens, held)
            kept = self._rewind(number, common, "", "between turns")
            if held[kept:]:
                self._feed(number, "prefill", held[kept:], "between turns")

    def _rewind(self, number: int, length: int, fallback: str, why: str) -> int:
        engine, before, op = self.engine, self.engine.processed_token_count, "trim"
        kept = -1 if fallback else engine.trim_kv_cache(length)
        if kept < 0:
            op, kept = "reset", 0
            engine.reset()
        if kept < before:
            self.events.append({"op": op, "turn": number, "from": before, "to": kept, "ids": [], "note": why})
        return kept

    def _feed(self, number: int, op: str, ids: list[int], note: str = "") -> None:
        """Chunk by chunk, an event for each."""
        step = self.engine.chunk_size
        for at in range(0, len(ids), step):
            before, part = self.engine.processed_token_count, ids[at:at + step]
            self._give(self.engine, part)
            self.events.append({"op": op, "turn": number, "from": before, "to": before + len(part), "ids": part, "note": note})

    def _give(self, engine: SequentialEngine, ids: list[int]) -> None:
        engine.prefill(engine.tokens + ids if engine.prefix_reuse_feeds_full_sequence else ids)

    def _messages(self, turn: dict[str, Any]) -> list[dict[str, Any]]:
        """Where each message of the prompt begins. -> [{"at", "role"}], the answer's own beginning last."""
        marks, at = [], 0
        try:
            for i, message in enumerate(turn["messages"]):
                ids = self.tokenizer.encode_chat(turn["messages"][:i + 1], **{**turn["arguments"], "add_generation_prompt": False}).ids
                marks.append({"at": at, "role": str(message.get("role", ""))})
                at = max(at, common_prefix(ids, turn["prompt"]))
        except TokenizerError:  # a template that refuses a part of a conversation: no marks, then
            marks = []
        return [*marks, {"at": len(turn["prompt"]), "role": "answer"}]

    def _look(self, reused: int) -> dict[str, Any]:
        """Of each position held: the lengths of its K and V, the last token's attention to it; of the newest, the lens."""
        engine, model = self.engine, self.model
        end, values = engine.processed_token_count, kv(engine)
        norms = {which: np.mean([np.sqrt((x.astype(np.float64)**2).sum(axis=(1, 2))) for name, x in values.items()
                                 if name.endswith(f".{which}")] or [np.zeros(end)], axis=0) for which in "kv"}      # (S,)
        names, found = [name for name in activations(model.config) if name.endswith(".residual")], {"lens": [], "lens_from": end}
        layers = sorted({round(i) for i in np.linspace(0, len(names) - 1, min(LENS_LAYERS, len(names)))})
        attention = np.zeros(end)
        try:
            last = trace(engine, engine.tokens[-1:], [name for name in activations(model.config) if name.endswith(".weights")] or ["embed"],
                         start=end - 1)
            if weights := [x for name, x in last.items() if name.endswith(".weights")]:
                attention = np.mean([x[:, 0].mean(axis=0) for x in weights], axis=0)                               # (S,)
            start = max(reused, end - LENS_POSITIONS)
            seen = trace(engine, engine.tokens[start:], [names[i] for i in layers], start=start)
            found = {"lens_from": start, "lens": [logit_lens(model, x).argmax(axis=-1).tolist() for x in seen.values()]}
        except ValueError:  # recurrent layers cannot be traced from where no state was kept
            pass
        top = np.argsort(-attention, kind="stable")[:TOP]
        return {"k": _short(norms["k"]), "v": _short(norms["v"]), "attention": _short(attention), "top": top.tolist(),
                "lens_layers": layers, **found}


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.3g}") for value in values]
