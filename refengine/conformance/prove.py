"""Prefix cache ON against OFF, on several engines, over random chats: every byte compared. Floor 7.

All sides play the same steps. The first side is the truth; the others must equal it in text, ids, logits and K/V.
"""
from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from refengine.chat import Chat, Turn
from refengine.conformance.chats import Step, apply, random_steps
from refengine.conformance.compare import bits, first_difference, first_kv_difference
from refengine.engine import Engine
from refengine.errors import RefengineError
from refengine.prefix import common_prefix, reusable
from refengine.tokenizer import Tokenizer

LADDER = ("text", "ids", "logits", "kv")


@dataclass(frozen=True)
class Difference:
    """Where two sides first part, from the strongest claim that can be named: text, then ids, logits, K/V."""

    chat: int
    turn: int
    side: str
    kind: str          # of LADDER, or "state" (tokens against offset, accounting) or "error"
    where: str
    want: str
    got: str

    def __str__(self) -> str:
        return (f"chat {self.chat}, turn {self.turn}, {self.side}: {self.kind} differs at {self.where}: "
                f"{self.got}, but should be {self.want}")


@dataclass
class Row:
    """One turn, as all sides played it. ``turns``: side -> Turn, None where it was cancelled before a token."""

    chat: int
    turn: int
    step: Step
    turns: dict[str, Turn | None]


@dataclass
class Result:
    """What was compared, and what was found."""

    rows: list[Row] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    chats: int = 0
    tokens: int = 0                # generated on the first side
    logits_bytes: int = 0          # compared, over all sides
    kv_bytes: int = 0
    digest: str = ""               # SHA-256 of the first side's ids, logits and K/V, in order
    seconds: float = 0.0

    def equal(self, kind: str) -> bool:
        return not any(d.kind == kind for d in self.differences)


class Played(NamedTuple):
    """What a side made of a step: the text, its Turn (None when it ended before a token), an error or ""."""

    text: str
    turn: Turn | None
    error: str


class Side:
    """One engine with the cache on or off, its chat, and a record of what it computed.

    keep_ids, reanchor: as of `Chat`; but what that does in idle time is done before the next step, when all was compared.
    """

    def __init__(self, name: str, engine: Engine, tokenizer: Tokenizer, prefix_cache: bool, chat_class: type[Chat] = Chat, *,
                 keep_ids: bool = False, reanchor: bool = False):
        self.name, self.engine, self.tokenizer, self.prefix_cache = name, _Recorder(engine), tokenizer, prefix_cache
        self.chat_class, self.keep_ids, self.reanchor = chat_class, keep_ids, reanchor
        self.new_chat()

    def new_chat(self) -> None:
        """Another conversation on the same engine, which still holds the last one."""
        self.chat = self.chat_class(self.engine, self.tokenizer)
        self.chat.prefix_cache, self.chat.stats_log = self.prefix_cache, None  # whatever the environment says
        self.chat.keep_ids = self.keep_ids

    def play(self, step: Step) -> Played:
        """Do a step and read its answer to the end, or to where it is to be cancelled."""
        self.engine.begin()
        turns, text, error = len(self.chat.turns), "", ""
        try:
            if self.reanchor and self.prefix_cache and self.chat.turns:
                with contextlib.suppress(RefengineError):  # a full cache, a template that refuses: the turn will say so itself
                    self.chat.turns[-1].anchored += self.chat.anchor()
            stream = apply(step, self.chat)
            if step.cancel == 0:
                stream.close()
            for i, piece in enumerate(stream):
                text += piece
                if i + 1 == step.cancel:
                    stream.close()
        except Exception as raised:  # of an engine under test: any kind is a finding
            error = f"{type(raised).__name__}: {raised}"
        return Played(text, self.chat.turns[-1] if len(self.chat.turns) > turns else None, error)


class _Recorder(Engine):
    """An engine that writes down each generated id with the logits it was chosen from, and the first broken promise."""

    def __init__(self, inner: Engine):
        self.inner = inner
        self.prefix_reuse_feeds_full_sequence = inner.prefix_reuse_feeds_full_sequence
        self.snapshot_every = inner.snapshot_every
        self.begin()

    def begin(self) -> None:
        """A new turn: forget the last one's record."""
        self.steps: list[tuple[int, np.ndarray]] = []
        self.fault: tuple[str, int, int] | None = None       # (where, want, got)
        self.before: list[int] | None = None                  # held when a rewind was asked for

    @property
    def tokens(self):
        return self.inner.tokens

    @property
    def processed_token_count(self):
        return self.inner.processed_token_count

    @property
    def logits(self):
        return self.inner.logits

    @property
    def snapshots(self):
        return self.inner.snapshots

    @property
    def snapshot_bytes(self):
        return self.inner.snapshot_bytes

    def kv(self):
        return self.inner.kv()

    def trim_kv_cache(self, length):
        self.before = self.inner.tokens
        kept = self.inner.trim_kv_cache(length)
        if kept >= 0 and self.inner.processed_token_count != kept:
            self.fault = f"processed_token_count after trim_kv_cache({length})", kept, self.inner.processed_token_count
        if kept < 0:
            self.before = None  # nothing can be reused
        return kept

    def reset(self):
        self.inner.reset()

    def prefill(self, tokens):
        self._check_reuse(tokens)
        self.inner.prefill(tokens)

    def generate(self, tokens, **settings):
        self._check_reuse(tokens)
        return self._record(self.inner.generate(tokens, **settings))

    def _check_reuse(self, tokens):
        """Of what is fed first after a rewind: was all of it retained that could be?"""
        if self.before is None:
            return
        held = self.inner.tokens
        prompt = list(tokens) if self.prefix_reuse_feeds_full_sequence else held + list(tokens)
        want = reusable(prompt, self.before)
        if len(held) > want or len(held) < want and self.snapshot_every is None:
            self.fault = self.fault or ("tokens reused", want, len(held))
        self.before = None

    def _record(self, ids):
        try:
            for token in ids:
                self.steps.append((token, self.inner.logits.copy()))
                yield token
        finally:
            ids.close()


def prove(sides: Sequence[Side], *, seed: int, chats: int, turns: int, long_words: int = 60, max_tokens: int = 24,
          on_turn: Callable[[Row], None] = lambda row: None, first: int = 0, until: float = float("inf")) -> Result:
    """Play random chats, number ``first`` and on, on all sides and compare. Stops after the first turn that differs, or after
    the chat in which ``until`` (time.time) passes."""
    began, result, digest = time.perf_counter(), Result(), hashlib.sha256()
    for chat in range(first, first + chats):
        for side in sides:
            side.new_chat()
        steps = random_steps(random.Random(f"refengine {seed} {chat}"), turns, long_words=long_words, max_tokens=max_tokens)
        for turn, step in enumerate(steps):
            played = [side.play(step) for side in sides]
            row = Row(chat, turn, step, {side.name: played[i].turn for i, side in enumerate(sides)})
            result.rows.append(row)
            result.differences += _compare(chat, turn, sides, played, result, digest)
            on_turn(row)
            if result.differences:
                break
        result.chats += 1
        if result.differences or time.time() > until:
            break
    result.digest, result.seconds = digest.hexdigest(), time.perf_counter() - began
    return result


def _compare(chat: int, turn: int, sides: Sequence[Side], played: Sequence[Played], result: Result, digest) -> list[Difference]:
    """The first difference of each kind, of each side against the first."""
    truth, (want_text, want_turn, want_error) = sides[0], played[0]
    want_ids = [token for token, _ in truth.engine.steps]
    want_kv = truth.engine.kv()
    result.tokens += len(want_ids)
    digest.update(np.array(want_ids, "<i8").tobytes())
    for _, logits in truth.engine.steps:
        digest.update(logits.astype("<f4").tobytes())
    for layer in want_kv or ():
        for name in sorted(layer):
            digest.update(np.ascontiguousarray(layer[name]))
    found = []
    for side, (text, taken, error) in zip(sides, played):
        def differs(kind: str, where: str, want: Any, got: Any) -> None:
            found.append(Difference(chat, turn, side.name, kind, where, str(want), str(got)))

        state = _state_fault(side, taken)
        if state:
            differs("state", *state)
        if side is truth:
            continue
        if error != want_error:
            differs("error", "the call", want_error or "no error", error or "no error")
        ids = [token for token, _ in side.engine.steps]
        if text != want_text:
            at = first_difference(text, want_text)
            differs("text", f"character {at}", repr(want_text[at:at + 12]), repr(text[at:at + 12]))
        if ids != want_ids:
            at = first_difference(ids, want_ids)
            differs("ids", f"token {at}", want_ids[at:at + 4], ids[at:at + 4])
        for at, ((_, want), (_, got)) in enumerate(zip(truth.engine.steps, side.engine.steps)):
            result.logits_bytes += want.nbytes
            if want.tobytes() != got.tobytes():
                i = int(np.flatnonzero(bits(want) != bits(got))[0])
                differs("logits", f"token {at}, id {i}", want[i], got[i])
                break
        held, want_held = side.engine.tokens, truth.engine.tokens
        common = common_prefix(held, want_held)
        if taken and want_turn and held != want_held:  # a turn that never began only rewinds, or resets: both are right
            differs("state", f"cached token {common}", want_held[common:common + 4], held[common:common + 4])
        got_kv = side.engine.kv()
        if want_kv is not None and got_kv is not None:
            result.kv_bytes += sum(field[:, :common].nbytes for layer in want_kv for field in layer.values())
            if place := first_kv_difference(want_kv, got_kv, common):
                differs("kv", *place)
    return found


def _state_fault(side: Side, turn: Turn | None) -> tuple[str, Any, Any] | None:
    """Does the engine hold what it says, and does the turn add up? (where, want, got) if not."""
    if side.engine.fault:
        return side.engine.fault
    if len(side.engine.tokens) != side.engine.processed_token_count:
        return "processed_token_count", len(side.engine.tokens), side.engine.processed_token_count
    if turn and turn.reused + turn.forwarded != turn.prompt:
        return "reused + forwarded", turn.prompt, turn.reused + turn.forwarded
    return None


def pairs(sides: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(engine, its ON side, its OFF side), from names like "sequential ON"."""
    for side in sides:
        engine, _, cache = side.rpartition(" ")
        if cache == "ON" and f"{engine} OFF" in sides:
            yield engine, side, f"{engine} OFF"
