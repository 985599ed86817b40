"""Any program that speaks JSON lines over standard input and output: an engine in its own environment, in any language.

One request a line, one answer a line. Ids are numbers; logits are float32, little-endian, in base64.

    {"op": "hello"}                      {"name": "...", "version": "...", "vocab": V, "capacity": n, "precision": {...}}
    {"op": "prefill", "tokens": [...]}   {"logits": "..."}    process tokens after those that are held; logits of the last
    {"op": "trim", "length": n}          {"retained": n}      rewind; what is really retained, or -1 and nothing is changed
    {"op": "reset"}                      {}

Anything can be answered with {"error": "what is wrong"}. precision is as `refengine.backends.Precision`, float32 if left out.
What a worker writes to standard error is shown when it fails. Standard output is for answers only.
"""
from __future__ import annotations

import base64
import binascii
import json
import queue
import shlex
import subprocess
import tempfile
import threading
from typing import Any

import numpy as np

from refengine.backends import KINDS, Backend, BackendError, Precision

TIMEOUT = 120.0  # seconds for one answer


class WorkerError(BackendError):
    """A worker ended, hung, or answered what the protocol does not know. It is not used any more."""


class WorkerBackend(Backend):
    """A process that is asked, and killed when this goes, when it takes longer than ``timeout``, or answers nonsense."""

    def __init__(self, command: str, timeout: float = TIMEOUT):
        words, self.timeout, self._broken = shlex.split(command), timeout, ""
        if not words:
            raise BackendError("worker: no command; write worker:COMMAND")
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        try:
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
                                             encoding="utf-8", errors="replace")
        except OSError as error:
            raise BackendError(f"worker: {words[0]} cannot be started ({error.strerror})") from None
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        about = self._ask({"op": "hello"}, name=str, vocab=int, capacity=int)
        self.name, self.version = about["name"], str(about.get("version", ""))
        given = about.get("precision", {})
        if not isinstance(given, dict) or not set(given) <= set(Precision._fields) or not all(
                kind in KINDS for kind in given.values()):
            raise self._fail(f"precision is {given!r}")
        self.precision = Precision(**given)
        if about["vocab"] < 1 or about["capacity"] < 1:
            raise self._fail(f"vocab {about['vocab']} and capacity {about['capacity']} must be at least 1")
        super().__init__(about["vocab"], about["capacity"])

    def _read(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _ask(self, request: dict[str, Any], **fields: type) -> dict[str, Any]:
        """An answer with these fields. Raises WorkerError, and BackendError when it answers with an error."""
        if self._broken:
            raise WorkerError(self._broken)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=self.timeout)
        except queue.Empty:
            raise self._fail(f"no answer to {request['op']!r} in {self.timeout:g} s") from None
        except OSError:
            line = None
        if line is None:
            raise self._fail(f"it ended at {request['op']!r} with exit code {self._process.wait()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._fail(f"the answer to {request['op']!r} is not JSON: {line[:80]!r}") from None
        if isinstance(answer, dict) and "error" in answer:
            raise BackendError(f"worker: {request['op']}: {answer['error']}")
        if not isinstance(answer, dict):
            raise self._fail(f"the answer to {request['op']!r} is {line[:80]!r}, not an object")
        for name, kind in fields.items():
            if type(answer.get(name)) is not kind:
                raise self._fail(f"{name} in the answer to {request['op']!r} is {answer.get(name)!r:.80}, not a {kind.__name__}")
        return answer

    def _fail(self, what: str) -> WorkerError:
        """End the process; from here on it is broken."""
        self.close()
        self._said.seek(0)
        said = self._said.read()[-400:].strip()
        self._broken = f"worker: {what}" + (f"; it said: {said}" if said else "")
        return WorkerError(self._broken)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def __del__(self):
        if hasattr(self, "_process") and self._process.poll() is None:
            self.close()

    def _forward(self, ids: list[int]) -> np.ndarray:
        text = self._ask({"op": "prefill", "tokens": ids}, logits=str)["logits"]
        try:
            logits = np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)
        except (binascii.Error, ValueError):
            raise self._fail("logits are not base64 of float32") from None
        if len(logits) != self.vocab:
            raise self._fail(f"{len(logits)} logits, but it said that it knows {self.vocab} ids")
        return logits

    def trim_kv_cache(self, length: int) -> int:
        if length < 0:
            raise ValueError(f"trim_kv_cache({length}): a length is not negative")
        retained = self._ask({"op": "trim", "length": length}, retained=int)["retained"]
        if retained >= 0:
            if retained < len(self._ids):
                self._logits = None
            del self._ids[retained:]
        return retained

    def reset(self) -> None:
        self._ask({"op": "reset"})
        self._ids, self._logits = [], None

    def _rewind(self, length: int) -> None:
        raise AssertionError("trim_kv_cache asks the worker itself")
