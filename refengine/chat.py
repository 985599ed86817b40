"""The chat turn: render, keep the common prefix, rewind, feed the rest. Floor 6."""
from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from refengine.engine import Engine
from refengine.errors import CapacityError, RefengineError, TokenizerError
from refengine.explain import Explanation, Prompt, Trail
from refengine.parsers import Parser, parser_named
from refengine.prefix import common_prefix, reusable
from refengine.sampling import GREEDY, Sampling
from refengine.template import template_arguments as _arguments
from refengine.text_stream import StopText
from refengine.tokenizer import Spoken, Tokenizer


@dataclass
class Turn:
    """What one answer was and what it cost. ``prompt == reused + forwarded``, always; times in seconds."""

    prompt: int                    # tokens of the rendered history
    reused: int                    # of these, tokens whose K/V was in the cache
    forwarded: int                 # of these, tokens that had to run
    fallback: str = ""             # "recurrent" when the engine could not rewind
    ids: list[int] = field(default_factory=list)    # the generated ids, a stop id included
    text: str = ""                 # the content, as it was streamed and as it is in the history
    raw: str = ""                  # all that was generated, special tokens included
    reasoning: str = ""            # what the parser found beside the content
    tool_calls: tuple[dict[str, Any], ...] = ()
    ttft: float = 0.0              # from the call to the first id
    seconds: float = 0.0           # from the call to the end
    finish_reason: str = ""        # "stop", "length", "capacity", "cancelled"
    anchored: int = 0              # tokens prefilled after it, in idle time
    snapshots: int | None = None   # states kept to go back to, when the engine keeps any
    snapshot_bytes: int = 0        # of them all
    _explain: Callable[[], Explanation] | None = field(default=None, repr=False, compare=False)
    _asked: Callable[[], tuple] | None = field(default=None, repr=False, compare=False)

    @property
    def generated(self) -> int:
        return len(self.ids)

    def explain(self) -> Explanation:
        """Why it reused what it reused. Raises ValueError when the turn was kept without its prompt, as campaigns do."""
        if self._explain is None:
            raise ValueError("this turn was kept without its prompt")
        return self._explain()

    def asked(self) -> tuple[list[int], Prompt]:
        """(the ids that the engine held before it, its prompt). Raises ValueError as `explain` does."""
        if self._asked is None:
            raise ValueError("this turn was kept without its prompt")
        return self._asked()[:2]

    def record(self) -> str:
        """The turn's line in the stats log."""
        values = {"prompt": self.prompt, "reused": self.reused, "ttft": f"{self.ttft:.6f}", "forwarded": self.forwarded,
                  "generated": self.generated, "finish": self.finish_reason,
                  **({} if self.snapshots is None else {"snapshots": self.snapshots, "snapshot_bytes": self.snapshot_bytes}),
                  **({"fallback": self.fallback} if self.fallback else {})}
        return "PFXCACHE " + " ".join(f"{key}={value}" for key, value in values.items())


class Chat:
    """A conversation over any engine of the protocol.

    ``messages`` is the history, OpenAI-style dicts, yours to read and to edit between turns: a turn always renders all of
    it and compares ids with what the engine holds. ``turns`` has a `Turn` for each answer.

    prefix_cache=False (or REFENGINE_NO_PREFIX_CACHE=1) is the old path: reset and full prefill each turn.
    sampling: how to choose tokens; REFENGINE_GREEDY=1 makes it greedy. max_tokens: of one answer. stop: texts that end an
    answer and are not part of it. tools, documents, template_arguments (enable_thinking, ...): for the chat template.
    parser: how to read an answer, a `Parser` or "plain", "qwen3", "harmony"; by default what the template asks for.
    control_in_text: control tokens (<|im_end|>, <think>, <tool_call>, ...) in messages are control tokens, not text. Whoever
    writes a message can then end it, or open a think block.
    keep_ids: answers keep the ids they were generated with where the template renders them to the same text, instead of
    being encoded again. reanchor: after an answer, prefill in a thread what the next prompt will begin with.
    stats_log (or REFENGINE_STATS_LOG): a file that gets one PFXCACHE line a turn, and when greedy one PFXANSWER line.
    Raises TokenizerError when the tokenizer is another model's, or an argument is not the template's; ValueError.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, prefix_cache: bool = True, *, system: str | None = None,
                 sampling: Sampling = GREEDY, max_tokens: int | None = 256, stop: Sequence[str] = (),
                 tools: list[dict[str, Any]] | None = None, documents: list[dict[str, Any]] | None = None,
                 template_arguments: dict[str, Any] | None = None, parser: str | Parser | None = None,
                 control_in_text: bool = False, keep_ids: bool = False, reanchor: bool = False,
                 stats_log: str | os.PathLike | None = None):
        self.engine, self.tokenizer = engine, tokenizer
        if engine.vocab is not None:
            tokenizer.check_fits(engine.vocab, "the engine's model")
        self.prefix_cache = prefix_cache and not _switch("REFENGINE_NO_PREFIX_CACHE")
        self.sampling = GREEDY if _switch("REFENGINE_GREEDY") else sampling
        self.max_tokens, self.stop = max_tokens, (stop,) if isinstance(stop, str) else tuple(stop)
        StopText(self.stop)  # refuses what is no stop string
        self.tools, self.documents, self.template_arguments = tools, documents, _arguments(template_arguments)
        self.parser = parser if isinstance(parser, Parser) else parser_named(parser, tokenizer)
        self.control_in_text, self.keep_ids, self.reanchors = control_in_text, keep_ids, reanchor
        self.stats_log = stats_log or os.environ.get("REFENGINE_STATS_LOG") or None
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.turns: list[Turn] = []
        self._answers = 0  # given out: only the newest may still write the history
        self._trail, self._spoken = Trail(), Spoken()
        self._idle: tuple[threading.Thread, threading.Event] | None = None

    def send(self, message: str | dict[str, Any] | list[dict[str, Any]]) -> Iterator[str]:
        """Say something (a text, a message, or several, as tool results are) and stream the answer in whole characters.

        Closing the iterator cancels: what was streamed stays in the history. An error takes the message back; the engine
        stays usable. Raises TokenizerError or CapacityError with history and engine unchanged.
        """
        if isinstance(message, str):
            message = {"role": "user", "content": message}
        return self._answer([*self.messages, *(message if isinstance(message, list) else [message])], self.sampling)

    def regenerate(self) -> Iterator[str]:
        """Answer the last user message again, in place of the present answer. A sampled answer draws anew."""
        another = replace(self.sampling, seed=(self.sampling.seed + len(self.turns)) % 2**64)
        return self._answer(self.messages[:self._last_user() + 1], another)

    def undo(self) -> None:
        """Take back the last user message and all that followed."""
        del self.messages[self._last_user():]
        self._answers += 1

    def reset(self) -> None:
        """Start over, keeping the system prompt."""
        self._interrupt()
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
        self.turns, self._trail, self._spoken = [], Trail(), Spoken()
        self._answers += 1  # an answer still open must not come back
        self.engine.reset()

    def _last_user(self) -> int:
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i]["role"] == "user":
                return i
        raise ValueError("there is no user message yet")

    def prompt(self, messages: list[dict[str, Any]]) -> Prompt:
        """A history with the generation prompt, as the engine would be given it now. Raises TokenizerError."""
        own = {"tools": self.tools, "documents": self.documents}
        arguments = {**{name: value for name, value in own.items() if value is not None}, **_arguments(self.template_arguments)}
        text, ids = self.tokenizer.encode_chat(messages, control_in_text=self.control_in_text,
                                               spoken=self._spoken if self.keep_ids else Spoken(), **arguments)
        if not ids:
            raise TokenizerError("the chat template rendered to no token at all")
        try:
            return Prompt(copy.deepcopy(messages), copy.deepcopy(arguments), text, ids)
        except RecursionError:
            raise TokenizerError("what the chat template is given is nested too deeply") from None

    def rewind(self, prompt: list[int]) -> tuple[int, str]:
        """Keep what the engine holds of a prompt. Returns how many tokens, and "recurrent" if the engine could not rewind."""
        if not self.prefix_cache:
            self.engine.reset()
            return 0, ""
        retained = self.engine.trim_kv_cache(reusable(prompt, self.engine.tokens))
        if retained < 0:
            self.engine.reset()
            return 0, "recurrent"
        return retained, ""

    def _answer(self, messages: list[dict[str, Any]], sampling: Sampling) -> Iterator[str]:
        began = time.perf_counter()
        self._interrupt()
        prompt = self.prompt(messages)                                         # 1. render the whole history
        if self.engine.capacity is not None and len(prompt.ids) > self.engine.capacity:
            raise CapacityError(0, len(prompt.ids), self.engine.capacity)
        held = self.engine.tokens
        reused, fallback = self.rewind(prompt.ids)                             # 2., 3. common prefix, rewind
        turn = Turn(len(prompt.ids), reused, len(prompt.ids) - reused, fallback)
        number = self._trail.add(held, prompt)
        turn._asked = partial(self._trail.turn, number)
        turn._explain = partial(self._trail.explain, number, self.tokenizer, self.parser, reused=reused, fallback=fallback,
                                cache=self.prefix_cache)
        ids = self.engine.generate(self._feed(prompt, reused), max_tokens=self.max_tokens, stop_ids=self.tokenizer.stop_ids, sampling=sampling)
        self._answers += 1
        return self._stream(ids, turn, prompt, messages, began, self._answers)  # 4. feed the rest, stream

    def _feed(self, prompt: Prompt, held: int) -> list[int]:
        """What to generate from. An engine that keeps a state where a call begins is first given the messages alone: later
        prompts begin with them too, but seldom with all that asks for this answer."""
        full = self.engine.prefix_reuse_feeds_full_sequence
        if self.engine.snapshot_every == "turn":
            messages = self.tokenizer.encode_chat(
                prompt.messages, control_in_text=self.control_in_text, spoken=self._spoken if self.keep_ids else Spoken(),
                **{**prompt.arguments, "add_generation_prompt": False}).ids
            end = min(common_prefix(messages, prompt.ids), len(prompt.ids) - 1)
            if end > held:
                self.engine.prefill(prompt.ids[0 if full else held:end])
                held = end
        return prompt.ids if full else prompt.ids[held:]

    def _stream(self, ids: Generator[int, None, None], turn: Turn, prompt: Prompt, messages: list[dict[str, Any]], began: float,
                number: int) -> Iterator[str]:
        try:
            for text in self._decode(ids, turn, began):
                turn.text += text
                yield text
        except (GeneratorExit, KeyboardInterrupt):
            turn.finish_reason = "cancelled"
            raise
        finally:
            ids.close()
            turn.seconds = time.perf_counter() - began
            if turn.finish_reason and turn.ids and number == self._answers:  # not failed, not superseded, something came
                self._keep(turn, prompt, messages)

    def _decode(self, ids: Iterator[int], turn: Turn, began: float) -> Iterator[str]:
        """The content of the ids, up to a stop id, a stop string, the length limit or a full cache."""
        decoder = self.tokenizer.stream(skip_special_tokens=not self.parser.reads_special)
        stops, raw, shown, finish = StopText(self.stop), "", 0, "length"

        def more(text: str) -> str:
            nonlocal raw, shown
            raw += text
            content = self.parser.parse(raw).content
            new, shown = content[shown:], max(shown, len(content))
            return stops.push(new)

        try:
            for token in ids:
                if not turn.ids:
                    turn.ttft = time.perf_counter() - began
                turn.ids.append(token)
                end = token in self.tokenizer.stop_ids
                if (not end or self.parser.reads_special) and (text := more(decoder.push(token))):
                    yield text
                if end or stops.found:
                    finish = "stop"
                    break
        except CapacityError:
            if not turn.ids:
                raise
            finish = "capacity"  # the answer so far is kept, and its turn says why it is short
        if not stops.found and (text := more(decoder.flush()) + stops.flush()):
            yield text
        turn.finish_reason = finish

    def _keep(self, turn: Turn, prompt: Prompt, messages: list[dict[str, Any]]) -> None:
        """Put a finished answer into the history."""
        turn.raw = self.tokenizer.decode(turn.ids, skip_special_tokens=False)
        raw = turn.raw if self.parser.reads_special else self.tokenizer.decode(turn.ids)
        reply = self.parser.parse(raw)._replace(content=turn.text)
        turn.reasoning, turn.tool_calls = reply.reasoning, reply.tool_calls
        message = self.parser.history(reply)
        self.messages = [*messages, message]
        self.turns.append(turn)
        self._trail.answered(copy.deepcopy(message))
        if self.engine.snapshot_every is not None:
            turn.snapshots, turn.snapshot_bytes = len(self.engine.snapshots), self.engine.snapshot_bytes
        self._spoken = self._spoken.followed_by(prompt.text, turn.raw, turn.ids)
        self._log(turn)
        if self.reanchors and self.prefix_cache:
            stop = threading.Event()
            self._idle = threading.Thread(target=self._anchor, args=(turn, stop), daemon=True, name="refengine-anchor"), stop
            self._idle[0].start()

    # Re-anchoring: the history's answer is often rendered otherwise than it was generated (reasoning is stripped), so that
    # the next prompt would forward it again, before its first token. There is time for that before the next message comes.

    def anchor(self) -> int:
        """Prefill now what the next prompt will begin with. Returns how many tokens that forwarded. Raises TokenizerError."""
        self._interrupt()
        turn = Turn(0, 0, 0)
        self._prefill_anchor(turn, threading.Event())
        return turn.anchored

    def settle(self) -> None:
        """Wait until the work in idle time is done."""
        if self._idle:
            self._idle[0].join()
            self._idle = None

    def _interrupt(self) -> None:
        """Stop the work in idle time; what it has done stays."""
        if self._idle:
            self._idle[1].set()
            self.settle()

    def _anchor(self, turn: Turn, stop: threading.Event) -> None:
        try:
            self._prefill_anchor(turn, stop)
        except RefengineError:  # a full cache, a template that refuses: the next turn will say so itself
            pass

    def _prefill_anchor(self, turn: Turn, stop: threading.Event) -> None:
        role = "tool" if self.messages and self.messages[-1].get("tool_calls") else "user"
        messages = list(self.messages)
        probes = [self.prompt([*messages, {"role": role, "content": text}]).ids for text in ("a", "7", "\u6f22")]
        anchor = probes[0][:min(common_prefix(probes[0], other) for other in probes[1:])]
        keep = common_prefix(anchor, self.engine.tokens)
        if keep == len(anchor):
            return
        keep = self.engine.trim_kv_cache(keep)
        if keep < 0:  # there is time for all of it, and then the next prompt goes on from there
            self.engine.reset()
            keep = 0
        step = getattr(self.engine, "chunk_size", 256)
        for start in range(keep, len(anchor), step):
            if stop.is_set():
                return
            part = anchor[start:start + step]
            self.engine.prefill(anchor[:start] + part if self.engine.prefix_reuse_feeds_full_sequence else part)
            turn.anchored += len(part)

    def _log(self, turn: Turn) -> None:
        if self.stats_log is None:
            return
        lines = [turn.record()]
        if self.sampling.temperature == 0:
            lines.append("PFXANSWER " + json.dumps(turn.text))
        with open(self.stats_log, "a", encoding="utf-8") as log:
            log.write("\n".join(lines) + "\n")


def _switch(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")
