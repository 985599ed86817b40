"""Histories: what can be done to an engine, as plain data, and a player that checks every byte after every step. Floor 7.

A history is a list of operations, each a JSON object with "op":

    {"op": "prefill",  "tokens": [...]}                              process tokens after those that are held
    {"op": "generate", "tokens": [...], "max_tokens": n, "cancel": k}   the same, then generate greedily; close after k ids
    {"op": "turn",     "prompt": [...], "max_tokens": n, "cancel": k}   a chat turn: common prefix, rewind, feed the rest
    {"op": "trim",     "length": n}                                  trim_kv_cache; on a negative answer, reset
    {"op": "reset"}
    {"op": "fault",    "after": n, "during": {...}}                  an operation whose n-th kernel call raises

"cancel" may be null: the generation ends by itself. The player keeps the ids that the engine should hold (the naive twin
is nothing but this list), and asks `truth` what logits and K/V these ids have.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from refengine.conformance.compare import bits, first_difference, first_kv_difference
from refengine.engine import Engine, SequentialEngine
from refengine.errors import RefengineError
from refengine.model import Model
from refengine.prefix import reusable

Op = dict[str, Any]
SCHEMA = "refengine-trace/1"
_FIELDS = {"prefill": {"tokens": "ids"}, "generate": {"tokens": "ids", "max_tokens": "count", "cancel": "count or null"},
           "turn": {"prompt": "ids", "max_tokens": "count", "cancel": "count or null"}, "trim": {"length": "count"},
           "reset": {}, "fault": {"after": "count", "during": "operation"}}


class TraceError(RefengineError, ValueError):
    """A trace file is not what the schema says; the message names the field."""


class Mismatch(AssertionError):
    """An engine did not do what it should. The message says after which operation, what and where."""


class Truth(NamedTuple):
    """What a sequence of ids has: the logits of its last position (None for no ids), K/V (None when unknown), and the
    logits of all its positions (None when unknown: then shorter sequences are asked for one by one)."""

    logits: np.ndarray | None
    kv: list[dict[str, np.ndarray]] | None
    rows: np.ndarray | None = None


def model_truth(model: Model) -> Callable[[tuple[int, ...]], Truth]:
    """The truth by one forward over a fresh cache: no rewind, no chunks, no engine. Remembers what it was asked last."""
    @functools.lru_cache(256)
    def truth(ids: tuple[int, ...]) -> Truth:
        cache = model.new_cache(max(1, len(ids)), 64)
        rows = None
        if ids:
            rows = model.run(cache, np.array(ids), every=True).astype(np.float32, copy=False)
            cache.commit(ids)
        kv = [cache.snapshot(layer) for layer in range(model.config.layers)]
        return Truth(None if rows is None else rows[-1], kv, rows)

    return truth


def engine_truth(make_engine: Callable[[], Engine]) -> Callable[[tuple[int, ...]], Truth]:
    """The truth by the engine itself, cold: a new one, fed everything at once. For engines that are not ours."""
    @functools.lru_cache(1024)
    def truth(ids: tuple[int, ...]) -> Truth:
        engine = make_engine()
        if ids:
            engine.prefill(list(ids))
        return Truth(engine.logits if ids else None, engine.kv())

    return truth


class Player:
    """Plays operations on an engine and raises Mismatch at the first thing that is not as it should be.

    poison: after every rewind of one of our own caches, fill what was forgotten with NaN.
    """

    def __init__(self, engine: Engine, truth: Callable[[tuple[int, ...]], Truth], *, poison: bool = True):
        self.engine, self.truth, self.poison = engine, truth, poison
        self.held: list[int] = []
        self.played: list[Op] = []
        self.bytes = 0  # compared

    def play(self, history: Sequence[Op]) -> None:
        for op in history:
            self.do(op)

    def do(self, op: Op) -> None:
        """One operation, then every check."""
        self.played.append(op)
        getattr(self, f"_{op['op']}")(op)
        self._check()

    def digest(self) -> bytes:
        """SHA-256 of what the engine should hold now: ids, logits, K/V."""
        truth, digest = self.truth(tuple(self.held)), hashlib.sha256(np.array(self.held, "<i8").tobytes())
        for array in [truth.logits] if truth.logits is not None else []:
            digest.update(array.astype("<f4").tobytes())
        for layer in truth.kv or ():
            for name in sorted(layer):
                digest.update(np.ascontiguousarray(layer[name]))
        return digest.digest()

    def _prefill(self, op: Op) -> None:
        self.engine.prefill(self._feed(op["tokens"]))
        self.held += op["tokens"]

    def _generate(self, op: Op) -> None:
        ids = self.engine.generate(self._feed(op["tokens"]), max_tokens=op["max_tokens"])
        new, steps = list(op["tokens"]), []
        try:
            for count in range(op["max_tokens"]):
                if count == op["cancel"]:
                    break
                token = next(ids, None)
                self.held, new = self.held + new, [token]
                self._check_tokens()
                steps.append((len(self.held), token, self.engine.logits))
            else:
                if (extra := next(ids, None)) is not None:
                    self._fail("the end of the generation", "no more ids", extra)
        finally:
            ids.close()
        for count, (length, token, logits) in enumerate(steps):
            want = self._logits_after(length)
            self._check_logits(logits, want, f"logits behind id {count}")
            self._check_choice(count, token, want)

    def _check_choice(self, count: int, token: int, want: np.ndarray) -> None:
        if token != int(np.argmax(want)):
            self._fail(f"id {count} of the generation", int(np.argmax(want)), token)

    def _logits_after(self, length: int) -> np.ndarray:
        """The true logits of position length - 1 of what is held. They do not depend on what follows."""
        rows = self.truth(tuple(self.held)).rows
        return self.truth(tuple(self.held[:length])).logits if rows is None else rows[length - 1]

    def _turn(self, op: Op) -> None:
        prompt = op["prompt"]
        self._trim({"length": reusable(prompt, self.engine.tokens)})
        self._check()
        self._generate({"tokens": prompt[len(self.held):], "max_tokens": op["max_tokens"], "cancel": op["cancel"]})

    def _trim(self, op: Op) -> None:
        want, before = min(op["length"], len(self.held)), self.engine.tokens
        kept = self.engine.trim_kv_cache(op["length"])
        if kept < 0:
            if self.engine.tokens != before:
                self._fail("tokens after a refused rewind", before, self.engine.tokens)
            self.engine.reset()
            kept = want = 0
        if kept > want or kept < want and self.engine.snapshot_every is None:
            self._fail("the retained prefix", want, kept)
        self.held = self.held[:kept]
        if self.poison and isinstance(self.engine, SequentialEngine):
            self.engine.cache.poison()

    def _reset(self, op: Op) -> None:
        self.engine.reset()
        self.held = []

    def _fault(self, op: Op) -> None:
        """The state afterwards may be any that the inner operation passes through; the engine says which."""
        before, inner = list(self.held), op["during"]
        with failing(self.engine, op["after"]):
            try:
                getattr(self, f"_{inner['op']}")(inner)
                return
            except InjectedFault:
                pass
        got = self.engine.tokens
        path = before + list(inner.get("tokens", ())) if "tokens" in inner else list(inner.get("prompt", before))
        generated = self.held if len(self.held) > len(path) else path
        if got != generated[:len(got)]:
            self._fail("tokens after a fault", generated[:len(got)], got)
        self.held = got

    def _feed(self, tokens: Sequence[int]) -> list[int]:
        return self.held + list(tokens) if self.engine.prefix_reuse_feeds_full_sequence else list(tokens)

    def _check(self) -> None:
        """The engine holds what it should, says so, and every byte of it is right."""
        self._check_tokens()
        truth, logits, kv = self.truth(tuple(self.held)), self.engine.logits, self.engine.kv()
        if logits is not None:
            self._check_logits(logits, truth.logits, "logits")
        if kv is not None and truth.kv is not None:
            self.bytes += sum(field.nbytes for layer in kv for field in layer.values())
            if difference := first_kv_difference(truth.kv, kv, len(self.held)):
                self._fail(*difference)

    def _check_logits(self, logits: np.ndarray | None, want: np.ndarray | None, what: str) -> None:
        if logits is None or want is None:
            self._fail(what, "there" if logits is None else "not there", "not there" if logits is None else "there")
        self.bytes += logits.nbytes
        if logits.tobytes() != want.tobytes():
            at = int(np.flatnonzero(bits(logits) != bits(want))[0])
            self._fail(f"{what}, id {at},", want[at], logits[at])

    def _check_tokens(self) -> None:
        tokens = self.engine.tokens
        if tokens != self.held:
            at = first_difference(tokens, self.held)
            self._fail(f"cached token {at}", self.held[at:at + 4], tokens[at:at + 4])
        if self.engine.processed_token_count != len(tokens):
            self._fail("processed_token_count", len(tokens), self.engine.processed_token_count)

    def _fail(self, where: str, want: Any, got: Any) -> None:
        raise Mismatch(f"{where} is {got}, but should be {want} [{'; '.join(map(describe, self.played))}]")


class InjectedFault(RuntimeError):
    """Raised on purpose inside a kernel."""


_FORWARD = ("linear", "rms_norm", "rotate", "pack_kv", "attention", "swiglu", "conv", "gates", "delta_rule", "times_silu",
            "times_sigmoid")  # what a forward calls


@contextlib.contextmanager
def failing(engine: Engine, after: int) -> Iterator[None]:
    """Within: the kernel call number ``after`` (from 0) of one of our engines raises InjectedFault. Others: nothing."""
    if not isinstance(engine, SequentialEngine):
        yield
        return
    model, calls = engine.model, iter(range(10**9))

    def wrapped(kernel):
        def call(*arguments, **settings):
            if next(calls) == after:
                raise InjectedFault(f"kernel call {after}")
            return kernel(*arguments, **settings)
        return call

    class Kernels:
        def __getattr__(self, name):
            found = getattr(model.op, name)
            return wrapped(found) if name in _FORWARD else found

    engine.model = replace(model, op=Kernels())
    try:
        yield
    finally:
        engine.model = model


def describe(op: Op) -> str:
    """An operation in a few words, for the failure's line."""
    name = op["op"]
    if name == "trim":
        return f"trim {op['length']}"
    if name == "fault":
        return f"fault at kernel call {op['after']} during ({describe(op['during'])})"
    if name in ("generate", "turn"):
        fed = len(op["tokens"] if name == "generate" else op["prompt"])
        return f"{name} {fed} for {op['max_tokens']}" + (f", cancel after {op['cancel']}" if op["cancel"] is not None else "")
    return f"prefill {len(op['tokens'])}" if name == "prefill" else name


DEFAULT_SETTINGS = {"engine": "pipelined", "page_size": 16, "chunk_size": 8, "page_order": None}
SNAPSHOTS = {"snapshot_every": None, "snapshot_bytes": 2**28}  # settings that only engines over recurrent layers have


def save_trace(path: Path, history: Sequence[Op], *, model: str, engine: dict[str, Any] = DEFAULT_SETTINGS, note: str = "") -> None:
    """Write a portable trace: schema, model, engine (settings of ours, another engine may ignore them), note, ops."""
    trace = {"schema": SCHEMA, "model": model, "engine": engine, "note": note, "ops": list(history)}
    path.write_text(json.dumps(trace, indent=1) + "\n", encoding="utf-8")


def load_trace(path: Path, vocab: int) -> tuple[dict[str, Any], list[Op]]:
    """Engine settings and operations of a trace file. Raises TraceError naming the field that is wrong."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(trace, dict) or trace.get("schema") != SCHEMA:
        raise TraceError(f"{path}: schema is {trace.get('schema') if isinstance(trace, dict) else trace!r}, not {SCHEMA}")
    settings = trace.get("engine", DEFAULT_SETTINGS)
    if not isinstance(settings, dict) or set(settings) - set(SNAPSHOTS) != set(DEFAULT_SETTINGS):
        raise TraceError(f"{path}: engine does not have the fields {', '.join(DEFAULT_SETTINGS)}")
    if settings["engine"] not in ("sequential", "pipelined"):
        raise TraceError(f"{path}: engine.engine is {settings['engine']!r}, not one of sequential, pipelined")
    for name in ("page_size", "chunk_size"):
        if type(settings[name]) is not int or settings[name] < 1:
            raise TraceError(f"{path}: engine.{name} is {settings[name]!r}, not a number from 1 up")
    every, size = ({**SNAPSHOTS, **settings}[name] for name in SNAPSHOTS)
    if not (every in (None, "turn") or type(every) is int and every >= 1) or type(size) is not int:
        raise TraceError(f"{path}: engine.snapshot_every is {every!r}, engine.snapshot_bytes {size!r}; they are a number from 1 up, "
                         '"turn" or null, and a number')
    order = settings["page_order"]
    if order is not None and not (isinstance(order, list) and all(type(page) is int for page in order)):
        raise TraceError(f"{path}: engine.page_order is {order!r}, neither null nor a list of page numbers")
    if not isinstance(trace.get("ops"), list):
        raise TraceError(f"{path}: ops is not a list")
    for i, op in enumerate(trace["ops"]):
        _check_op(op, f"{path}: ops[{i}]", vocab)
    return settings, trace["ops"]


def _check_op(op: Any, where: str, vocab: int) -> None:
    if not isinstance(op, dict) or op.get("op") not in _FIELDS:
        raise TraceError(f"{where}.op is {op.get('op') if isinstance(op, dict) else op!r}, not one of {', '.join(_FIELDS)}")
    fields = _FIELDS[op["op"]]
    if set(op) != {"op", *fields}:
        raise TraceError(f"{where} has the fields {sorted(op)}, not op, {', '.join(fields)}")
    for name, kind in fields.items():
        value = op[name]
        if kind == "operation":
            _check_op(value, f"{where}.{name}", vocab)
        elif kind == "ids":
            if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < vocab for i in value):
                raise TraceError(f"{where}.{name} is not a list of ids in 0..{vocab - 1}, at least one: {value!r}")
        elif not (type(value) is int and value >= 0) and not (value is None and kind == "count or null"):
            raise TraceError(f"{where}.{name} is {value!r}, not a {kind}")
