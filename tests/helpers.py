"""What the tests share: engines to try, a fresh computation to compare with, and comparisons that name the place. Floor 9.

`cold` is the yardstick: one forward over the whole sequence in a cache of its own, so that it uses nothing of what the
tests are about (no engine, no chunks, no rewind). What an engine holds and says must equal it bit for bit.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from refengine.cache import Cache
from refengine.chat import Chat
from refengine.engine import Engine, SequentialEngine
from refengine.model import Model, load_model, load_tokenizer
from refengine.pipelined import PipelinedEngine
from refengine.prefix import reusable

KINDS = ("sequential", "pipelined")
SYSTEM = "You are a helpful assistant."
both_engines = pytest.mark.parametrize("kind", KINDS)


def make_engine(kind: str, model: Model, *, capacity: int = 128, page_size: int = 4, chunk_size: int = 8,
                page_order: Sequence[int] | None = None, **snapshots: int) -> SequentialEngine:
    """An engine with the sizes of the cases: capacity 128, pages of 4."""
    sizes = {"capacity": capacity, "page_size": page_size, "page_order": page_order, **snapshots}
    if kind == "sequential":
        return SequentialEngine(model, **sizes)
    return PipelinedEngine(model, chunk_size=chunk_size, **sizes)


def make_chat(kind: str = "pipelined", cache: bool = True, *, model: Model | None = None, capacity: int = 512,
              **options: Any) -> Chat:
    """A conversation with the built-in model, six ids an answer."""
    engine = make_engine(kind, model or load_model("tiny"), capacity=capacity, page_size=16, chunk_size=32)
    return Chat(engine, load_tokenizer("tiny"), cache, **{"system": SYSTEM, "max_tokens": 6} | options)


def naive_prefix(a: Sequence, b: Sequence) -> int:
    """Length of the longest common prefix, element by element."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def say(chat: Chat, text: str) -> str:
    """One answer, whole."""
    return "".join(chat.send(text))


def change(chat: Chat, verb: str, at: int, text: str) -> None:
    """Do something to a chat that its user may do, if it can be done. at: which message, for those that need one."""
    messages = chat.messages
    at %= max(1, len(messages))
    asked = any(message["role"] == "user" for message in messages)
    if verb == "send":
        say(chat, text)
    elif verb == "cancel":
        answer = chat.send(text)
        next(answer, None)
        answer.close()
    elif verb == "system":
        messages.insert(0, {"role": "system", "content": text})
    elif verb == "reset":
        chat.reset()
    elif verb == "undo" and asked:
        chat.undo()
    elif verb == "regenerate" and asked:
        list(chat.regenerate())
    elif verb == "edit" and messages:
        messages[at] = {**messages[at], "content": text}
    elif verb == "delete" and messages:
        del messages[at]
    elif verb == "swap" and len(messages) > 1:
        messages[at - 1], messages[at] = messages[at], messages[at - 1]


def same_turn(on: Chat, off: Chat, script: Any = "") -> None:
    """Answer, ids, counts, history, logits and all K/V of a chat with reuse and of one without are the same."""
    a, b = on.turns[-1], off.turns[-1]
    assert (a.text, a.ids, a.prompt, a.finish_reason) == (b.text, b.ids, b.prompt, b.finish_reason), script
    assert a.reused + a.forwarded == a.prompt == b.forwarded and b.reused == 0, script
    assert on.messages == off.messages and len(on.turns) == len(off.turns), script
    assert on.engine.tokens == off.engine.tokens, script
    same_bits(on.engine.logits, off.engine.logits, script)
    same_kv(on.engine.kv(), off.engine.kv(), script)


# Comparing bits

def same_bits(got: np.ndarray, want: np.ndarray, script: Any = "", name: str = "logits") -> None:
    """Type, shape and every bit are equal; else AssertionError with the first place where they are not.

    "logits[3, 17] = 0.125, but should be 0.25 [feed 5, trim_to 2, feed 1]". 0.0 and -0.0 are different bits.
    """
    trail = f" [{script if isinstance(script, str) else ', '.join(map(str, script))}]" if script else ""
    if got is None:
        raise AssertionError(f"{name} is None, but should be an array{trail}")
    for what in ("dtype", "shape"):
        if getattr(got, what) != getattr(want, what):
            raise AssertionError(f"{name} has {what} {getattr(got, what)}, but should have {getattr(want, what)}{trail}")
    differ = np.argwhere(_bits(got) != _bits(want))
    if len(differ):
        at = tuple(differ[0].tolist())
        raise AssertionError(f"{name}[{', '.join(map(str, at))}] = {got[at].item()!r}, but should be {want[at].item()!r}"
                             f" ({len(differ)} of {got.size} differ){trail}")


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def snapshots(cache: Cache) -> list[dict[str, np.ndarray]]:
    """Everything a cache holds below its offset, one dict of fields a layer."""
    return [cache.snapshot(layer) for layer in range(cache.pool.layers)]


def same_kv(got: list[dict[str, np.ndarray]], want: list[dict[str, np.ndarray]], script: Any = "") -> None:
    """The stored K/V of all layers are equal bit for bit."""
    assert len(got) == len(want)
    for layer, (a, b) in enumerate(zip(got, want)):
        assert a.keys() == b.keys()
        for name in b:
            same_bits(a[name], b[name], script, f"layers.{layer}.{name}")


class State(NamedTuple):
    """All that must be as before when a call was refused."""

    tokens: list[int]
    offset: int
    logits: bytes | None
    kv: list[bytes]


def state(engine: SequentialEngine) -> State:
    kv = [field.tobytes() for layer in snapshots(engine.cache) for field in layer.values()]
    return State(engine.tokens, engine.processed_token_count, None if engine.logits is None else engine.logits.tobytes(), kv)


def ids_of(count: int, seed: int = 0, vocab: int = 64) -> list[int]:
    """Some ids of T's vocabulary."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


# The fresh computation

class Cold(NamedTuple):
    ids: list[int]                        # greedy answer
    rows: np.ndarray                      # (T, V) logits of the prompt and of the answer but its last id
    kv: list[dict[str, np.ndarray]]       # of the same positions

    @property
    def logits(self) -> np.ndarray:
        return self.rows[-1]


def cold(model: Model, prompt: Sequence[int], count: int = 0) -> Cold:
    """Prompt and ``count`` greedy ids after it, each step one forward over everything from nothing."""
    return _cold(model.plain if isinstance(model, Watched) else model, tuple(map(int, prompt)), count)


@functools.lru_cache(512)
def _cold(model: Model, prompt: tuple[int, ...], count: int) -> Cold:
    # The answer's last id has no K/V yet, so the last forward is over prompt + answer[:-1].
    answer: list[int] = []
    while True:
        ids = [*prompt, *answer]
        cache = model.new_cache(len(ids), page_size=len(ids))
        rows = model.run(cache, np.array(ids), every=True)
        if len(answer) >= count - 1:
            break
        answer.append(int(np.argmax(rows[-1])))
    cache.commit(ids)
    return Cold([*answer, int(np.argmax(rows[-1]))][:count], rows, snapshots(cache))


# Driving an engine

class Served(NamedTuple):
    reused: int
    forwarded: int
    ids: list[int]


def feed_of(engine: Engine, prompt: Sequence[int]) -> list[int]:
    """What the engine's feed contract wants of a prompt of which it holds the beginning."""
    return list(prompt) if engine.prefix_reuse_feeds_full_sequence else list(prompt[engine.processed_token_count:])


def serve(engine: Engine, prompt: Sequence[int], count: int = 0, *, reuse: bool = True, **settings: Any) -> Served:
    """One turn: keep the common prefix (or, reuse=False, nothing), feed the rest, take ``count`` ids (0: only prefill)."""
    reused = 0
    if reuse:
        reused = engine.trim_kv_cache(reusable(prompt, engine.tokens))
    else:
        engine.reset()
    fresh = len(prompt) - engine.processed_token_count
    if count:
        return Served(reused, fresh, list(engine.generate(feed_of(engine, prompt), max_tokens=count, **settings)))
    engine.prefill(feed_of(engine, prompt))
    return Served(reused, fresh, [])


def assert_holds(engine: SequentialEngine, tokens: Sequence[int], script: Any = "") -> None:
    """The engine holds just these tokens, with the K/V and the last logits of a fresh computation, bit for bit."""
    assert engine.tokens == list(tokens), f"{engine.tokens}, but should be {list(tokens)} [{script}]"
    assert engine.processed_token_count == len(engine.tokens) == engine.cache.offset
    if len(tokens):
        want = cold(engine.model, tokens)
        same_kv(snapshots(engine.cache), want.kv, script)
        if engine.logits is not None:
            same_bits(engine.logits, want.logits, script)


def assert_identical(engine: SequentialEngine, prompt: Sequence[int], count: int = 3, script: Any = "") -> Served:
    """IDENT of the cases: served from what the engine holds now, a prompt gets the greedy ids and the last logits of a
    fresh computation; and its K/V too."""
    served, want = serve(engine, prompt, count), cold(engine.model, prompt, count)
    assert served.ids == want.ids, f"greedy ids {served.ids}, but should be {want.ids} [{script}]"
    assert served.reused + served.forwarded == len(prompt)
    assert engine.logits is not None
    assert_holds(engine, [*prompt, *want.ids[:-1]], script or f"serve {len(prompt)}, {served.reused} reused")
    return served


def run_script(engine: SequentialEngine, script: Sequence[tuple], check: Any = assert_holds) -> list[int]:
    """Do ("feed", ids), ("trim", length), ("generate", count), ("cancel", count) and ("reset",) steps in turn.

    After each, ``check(engine, tokens that it must hold, steps so far)``. Returns all generated ids.
    """
    held: list[int] = []
    answers: list[int] = []
    done = []
    for verb, *args in script:
        done.append(f"{verb} {' '.join(map(str, args))}".strip())
        if verb == "feed":
            held = [*held, *args[0]]
            engine.prefill(feed_of(engine, held))
        elif verb == "trim":
            assert engine.trim_kv_cache(args[0]) == min(args[0], len(held)), done
            held = held[:args[0]]
        elif verb == "reset":
            engine.reset()
            held = []
        else:  # the last id held is run again, so that there are logits to go on from
            prompt, held = held, held[:-1]
            engine.trim_kv_cache(len(held))
            ids = engine.generate(feed_of(engine, prompt), max_tokens=args[0] if verb == "generate" else None)
            answer = [next(ids) for _ in range(args[0])]
            ids.close()
            answers += answer
            held = [*prompt, *answer[:-1]]
        check(engine, held, done)
    return answers


class Scripted(SequentialEngine):
    """An engine that says what it is told to, over the built-in model: ``answers``, the ids of one after the other."""

    def __init__(self, answers: Sequence[Sequence[int]], rewinds: bool = True):
        super().__init__(load_model("tiny"), capacity=1024, page_size=64)
        self.answers, self.rewinds = list(answers), rewinds

    def trim_kv_cache(self, length: int) -> int:
        return super().trim_kv_cache(length) if self.rewinds else -1

    def generate(self, tokens: Sequence[int], **_: Any):
        self.prefill(tokens)
        answer = self.answers.pop(0)
        for i, id in enumerate(answer):
            yield id
            if i + 1 < len(answer):
                self.prefill([*self.tokens, id])


# Watching and breaking a model

class Watched(Model):
    """A model that is watched or broken. ``plain``: the same without that, for the fresh computation."""

    def __init__(self, plain: Model, **changes: Any):
        super().__init__(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)} | changes)
        self.plain = plain


def spied(model: Model) -> tuple[Model, list[tuple[int, list[int]]]]:
    """The model with a record of its forwards: (first position that is rotated, the ids that are embedded)."""
    starts: list[int] = []
    forwards: list[tuple[int, list[int]]] = []

    def embed(tokens):
        forwards.append((starts[-1], tokens.tolist()))
        return model.weights.embed(tokens)

    def rope_rows(start, stop):
        starts.append(start)
        return model.rope_rows(start, stop)

    watched = Watched(model, weights=model.weights._replace(embed=embed))
    watched.rope_rows = rope_rows
    return watched, forwards


class Breaking:
    """A kernel set of which one function raises at its n-th call from now on (`arm`), and before and after works."""

    def __init__(self, op: Any):
        self._op, self._name, self._left, self._error = op, "", 0, None
        self.calls = 0

    def arm(self, name: str, nth: int, error: BaseException) -> None:
        self._name, self._left, self._error, self.calls = name, nth, error, 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._op, name)
        if name != self._name:
            return value

        def function(*args, **kwargs):
            self.calls += 1
            if self.calls == self._left:
                raise self._error
            return value(*args, **kwargs)

        return function


def breaking(model: Model) -> tuple[Model, Breaking]:
    """The model over a kernel set that can be made to raise."""
    op = Breaking(model.op)
    return Watched(model, op=op), op
