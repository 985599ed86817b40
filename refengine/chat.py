"""The chat turn: render, keep the common prefix, rewind, feed the rest. Floor 6."""
from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from refengine.engine import Engine
from refengine.errors import CapacityError, TokenizerError
from refengine.prefix import reusable
from refengine.sampling import GREEDY, Sampling
from refengine.tokenizer import Tokenizer


@dataclass
class Turn:
    """What one answer cost. ``prompt == reused + forwarded``, always; times in seconds."""

    prompt: int                    # tokens of the rendered history
    reused: int                    # of these, tokens whose K/V was in the cache
    forwarded: int                 # of these, tokens that had to run
    fallback: str = ""             # "reset" when the engine could not rewind
    ids: list[int] = field(default_factory=list)    # the generated ids, a stop id included
    text: str = ""
    ttft: float = 0.0              # from the call to the first id
    seconds: float = 0.0           # from the call to the end
    finish: str = ""               # "stop", "length", "capacity", "cancelled"

    @property
    def generated(self) -> int:
        return len(self.ids)

    def record(self) -> str:
        """The turn's line in the stats log."""
        values = {"prompt": self.prompt, "reused": self.reused, "ttft": f"{self.ttft:.6f}", "forwarded": self.forwarded,
                  "generated": self.generated, "finish": self.finish, **({"fallback": self.fallback} if self.fallback else {})}
        return "PFXCACHE " + " ".join(f"{key}={value}" for key, value in values.items())


class Chat:
    """A conversation over any engine of the protocol.

    ``messages`` is the history, {"role", "content"} each, yours to read and to edit between turns: a turn always renders
    all of it and compares ids with what the engine holds. ``turns`` has a `Turn` for each answer.

    prefix_cache=False (or REFENGINE_NO_PREFIX_CACHE=1) is the old path: reset and full prefill each turn.
    sampling: how to choose tokens; REFENGINE_GREEDY=1 makes it greedy. max_tokens: of one answer.
    stats_log (or REFENGINE_STATS_LOG): a file that gets one PFXCACHE line a turn, and when greedy one PFXANSWER line.
    template_arguments: passed to the chat template (enable_thinking and the like).
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, prefix_cache: bool = True, *, system: str | None = None,
                 sampling: Sampling = GREEDY, max_tokens: int | None = 256, stats_log: str | os.PathLike | None = None,
                 template_arguments: dict[str, Any] | None = None):
        self.engine, self.tokenizer = engine, tokenizer
        self.prefix_cache = prefix_cache and not _switch("REFENGINE_NO_PREFIX_CACHE")
        self.sampling = GREEDY if _switch("REFENGINE_GREEDY") else sampling
        self.max_tokens = max_tokens
        self.stats_log = stats_log or os.environ.get("REFENGINE_STATS_LOG") or None
        self.template_arguments = dict(template_arguments or {})
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.turns: list[Turn] = []
        self._answers = 0  # given out: only the newest may still write the history

    def send(self, text: str) -> Iterator[str]:
        """Say something and stream the answer in whole characters.

        Closing the iterator cancels: what was streamed stays in the history. An error takes the message back; the engine
        stays usable. Raises TokenizerError, FeedError or CapacityError with the history unchanged (the engine may have been
        rewound to what it shares with the prompt).
        """
        return self._answer([*self.messages, {"role": "user", "content": text}], self.sampling)

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
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
        self.turns = []
        self._answers += 1  # an answer still open must not come back
        self.engine.reset()

    def _last_user(self) -> int:
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i]["role"] == "user":
                return i
        raise ValueError("there is no user message yet")

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """The ids of a history with the generation prompt."""
        ids = self.tokenizer.encode(self.tokenizer.render(messages, **self.template_arguments))
        if not ids:
            raise TokenizerError("the chat template rendered to no token at all")
        return ids

    def rewind(self, prompt: list[int]) -> tuple[int, str]:
        """Keep what the engine holds of a prompt. Returns how many tokens, and "reset" if the engine could not rewind."""
        if not self.prefix_cache:
            self.engine.reset()
            return 0, ""
        retained = self.engine.trim_kv_cache(reusable(prompt, self.engine.tokens))
        if retained < 0:
            self.engine.reset()
            return 0, "reset"
        return retained, ""

    def _answer(self, messages: list[dict[str, Any]], sampling: Sampling) -> Iterator[str]:
        began = time.perf_counter()
        prompt = self.prompt_ids(messages)                                     # 1. render the whole history
        reused, fallback = self.rewind(prompt)                                 # 2., 3. common prefix, rewind
        feed = prompt if self.engine.prefix_reuse_feeds_full_sequence else prompt[reused:]
        ids = self.engine.generate(feed, max_tokens=self.max_tokens, stop_ids=self.tokenizer.stop_ids, sampling=sampling)
        self._answers += 1
        turn = Turn(len(prompt), reused, len(prompt) - reused, fallback)
        return self._stream(ids, turn, messages, began, self._answers)         # 4. feed the rest, stream

    def _stream(self, ids: Generator[int, None, None], turn: Turn, messages: list[dict[str, Any]], began: float,
                number: int) -> Iterator[str]:
        try:
            for text in self._decode(ids, turn, began):
                turn.text += text
                yield text
        except (GeneratorExit, KeyboardInterrupt):
            turn.finish = "cancelled"
            raise
        finally:
            ids.close()
            turn.seconds = time.perf_counter() - began
            if turn.finish and turn.ids and number == self._answers:  # not failed, not superseded, and something came
                self.messages = [*messages, {"role": "assistant", "content": turn.text}]
                self.turns.append(turn)
                self._log(turn)

    def _decode(self, ids: Iterator[int], turn: Turn, began: float) -> Iterator[str]:
        """Text of the ids, up to a stop id, the length limit or a full cache."""
        decoder = self.tokenizer.stream()
        finish = "length"
        try:
            for token in ids:
                if not turn.ids:
                    turn.ttft = time.perf_counter() - began
                turn.ids.append(token)
                if token in self.tokenizer.stop_ids:
                    finish = "stop"
                    break
                if text := decoder.push(token):
                    yield text
        except CapacityError:
            if not turn.ids:
                raise
            finish = "capacity"  # the answer so far is kept, and its turn says why it is short
        if text := decoder.flush():
            yield text
        turn.finish = finish

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
