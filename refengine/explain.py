"""Why a turn reused what it reused: where the common prefix ended, on which message, and for what reason. Floor 3."""
from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from refengine.errors import TokenizerError
from refengine.parsers import Parser
from refengine.prefix import common_prefix, common_start
from refengine.tokenizer import Tokenizer

CAUSES = {
    "cold": "the engine held nothing",
    "cache off": "the prefix cache is off",
    "cannot rewind": "the engine cannot rewind its state and was reset",
    "append-only": "nothing was lost: the prompt goes on from all that was held",
    "same prompt": "nothing was lost: the prompt was held whole, and its last token is always run",
    "new conversation": "what was held belongs to another conversation",
    "re-tokenised text": "the text is the same, but encodes to other ids than were generated",
    "tool definitions": "the tools are others",
    "tool order": "the same tools, with their list or their keys in another order",
    "template arguments": "the template is given other arguments",
    "system prompt": "the system prompt was changed",
    "clock": "a date or time in the system prompt, or one that the template writes, went on",
    "truncation": "the oldest messages were dropped",
    "edited message": "a message that was already sent is not what it was",
    "generation-prompt think block": "the think block that the generation prompt opens with is not in the history",
    "stripped reasoning": "the template leaves the reasoning of an earlier answer out of the history",
    "template re-rendering": "the template writes an earlier message differently than before",
}
_CLOCK = re.compile(r"\d{1,4}([-/.:T ]\d{1,4})+|\d+|\b[AP]M\b|"
                    r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun)\w*")


class Prompt(NamedTuple):
    """What a turn gave the engine, and what it was made of."""

    messages: list[dict[str, Any]]
    arguments: dict[str, Any]       # of the template: tools, documents, enable_thinking, ...
    text: str
    ids: list[int]


class Trail:
    """What the turns of a chat were given and what was held before each, kept as what it adds to the turn before: as much as
    was said and run again, where whole prompts would grow with the square of the turns."""

    def __init__(self):
        self._added: list[tuple] = []                     # (common, rest) of messages, text, ids, held; arguments; answer
        self._last = Prompt([], {}, "", []), None         # the newest, whole, and the message that came of it

    def add(self, held: Sequence[int], prompt: Prompt) -> int:
        """A turn begins. Returns its number."""
        (messages, arguments, text, ids), answer = self._last
        if json.dumps(prompt.arguments) == json.dumps(arguments):               # by their text: the order of keys counts
            prompt = prompt._replace(arguments=arguments)
        was = [*messages, *([answer] if answer else [])]
        same = common_start(list(map(json.dumps, was)), list(map(json.dumps, prompt.messages)))
        pairs = (text, prompt.text), (ids, prompt.ids), (ids, held)
        self._added.append(((same, prompt.messages[same:]), *((n := common_start(old, new), new[n:]) for old, new in pairs),
                            prompt.arguments, answer))
        self._last = prompt, None
        return len(self._added) - 1

    def answered(self, message: dict[str, Any]) -> None:
        """The newest turn put this into the history."""
        self._last = self._last[0], message

    def explain(self, number: int, tokenizer: Tokenizer, parser: Parser, **counts: Any) -> Explanation:
        """See `explain`."""
        held, prompt, before, answer = self.turn(number)
        return explain(tokenizer, parser, held, prompt, before=before, answer=answer, **counts)

    def turn(self, number: int) -> tuple[list[int], Prompt, Prompt | None, dict[str, Any] | None]:
        """What was held, the prompt, the prompt before and its answer."""
        held, prompt, before, answer = [], Prompt([], {}, "", []), None, None
        for i, (messages, text, ids, kept, arguments, answer) in enumerate(self._added[:number + 1]):
            before = prompt if i else None
            was = [*prompt.messages, *([answer] if answer else [])]
            held = prompt.ids[:kept[0]] + list(kept[1])
            prompt = Prompt(was[:messages[0]] + messages[1], arguments, prompt.text[:text[0]] + text[1], prompt.ids[:ids[0]] + ids[1])
        return held, prompt, before, answer


@dataclass(frozen=True)
class Explanation:
    """Where a prompt parted from what the engine held, and why."""

    cause: str                      # of CAUSES
    prompt: int                     # tokens of the prompt
    reused: int
    held: int                       # tokens that the engine held before
    message: int | None = None      # index of the message where they part
    role: str = ""
    held_ids: list[int] = field(default_factory=list)      # a few ids from there on, on both sides
    prompt_ids: list[int] = field(default_factory=list)
    held_text: str = ""
    prompt_text: str = ""
    detail: str = ""

    @property
    def forwarded(self) -> int:
        return self.prompt - self.reused

    @property
    def avoidable(self) -> int:
        """Tokens that had to run only because the prefix ended early."""
        return max(0, min(self.held, self.prompt - 1) - self.reused)

    def __str__(self) -> str:
        lines = [f"{self.reused} of {self.prompt} prompt tokens reused, {self.forwarded} forwarded"
                 + (f", {self.avoidable} of them for this reason" if self.avoidable else ""),
                 f"{self.cause}: {CAUSES[self.cause]}" + (f" ({self.detail})" if self.detail else "")]
        if self.message is not None:
            lines.append(f"at message {self.message} ({self.role})")
        if self.held_ids or self.prompt_ids:
            lines += [f"held    {self.held_ids} {self.held_text!r}", f"prompt  {self.prompt_ids} {self.prompt_text!r}"]
        return "\n".join(lines)


_SHOWN = 8  # ids of either side


def explain(tokenizer: Tokenizer, parser: Parser, held: Sequence[int], prompt: Prompt, *, reused: int | None = None,
            before: Prompt | None = None, answer: dict[str, Any] | None = None, fallback: str = "",
            cache: bool = True) -> Explanation:
    """Compare a prompt with the ids that an engine held.

    before: the prompt of the turn that ran last on the engine, answer: the message that this turn put into the history.
    reused: what the engine did retain, when it is not the common prefix.
    """
    common = min(common_prefix(prompt.ids, held), max(0, len(prompt.ids) - 1))
    counts = {"prompt": len(prompt.ids), "reused": common if reused is None else reused, "held": len(held)}
    if not cache or fallback or not held:
        return Explanation("cache off" if not cache else "cannot rewind" if fallback else "cold", **counts)
    if common == len(prompt.ids) - 1 and list(held[:len(prompt.ids)]) == prompt.ids:
        return Explanation("same prompt", **counts)
    if common == len(held):
        return Explanation("append-only", **counts)
    held_text = tokenizer.decode(held, skip_special_tokens=False)
    at = len(tokenizer.decode(held[:common], skip_special_tokens=False))         # characters in common by ids
    place = _message_at(tokenizer, prompt, at)
    cause, detail = _cause(tokenizer, parser, held, held_text, at, common, prompt, before, answer, place)
    ours, theirs = list(held[common:common + _SHOWN]), prompt.ids[common:common + _SHOWN]
    return Explanation(cause, **counts, message=place, role=prompt.messages[place]["role"] if place is not None else "",
                       held_ids=ours, prompt_ids=theirs, held_text=tokenizer.decode(ours, skip_special_tokens=False),
                       prompt_text=tokenizer.decode(theirs, skip_special_tokens=False), detail=detail)


def _message_at(tokenizer: Tokenizer, prompt: Prompt, at: int) -> int | None:
    """The message that character ``at`` of the prompt's text belongs to; None in what follows the last one.

    Where a message ends is found by making it longer: up to there the rendering stays as it is, whatever the template does.
    """
    for i, message in enumerate(prompt.messages):
        calls, content = message.get("tool_calls") or [], f"{message.get('content') or ''}\ue000"
        for more in ([{"tool_calls": [*calls, calls[-1]]}] if calls else []) + [{"content": content}]:
            try:
                changed = [*prompt.messages[:i], {**message, **more}, *prompt.messages[i + 1:]]
                text = tokenizer.render(changed, **prompt.arguments)
            except TokenizerError:
                continue
            if text != prompt.text:  # else the template does not show these
                if common_start(text, prompt.text) >= at:
                    return i
                break
    return None


def _cause(tokenizer: Tokenizer, parser: Parser, held: Sequence[int], held_text: str, at: int, common: int, prompt: Prompt,
           before: Prompt | None, answer: dict[str, Any] | None, place: int | None) -> tuple[str, str]:
    """(cause, detail). What changed in the caller's hands comes before what the template did with it."""
    parted = common_start(prompt.text, held_text)
    if at < parted and common_prefix(tokenizer.encode(held_text), held) == common:
        return "re-tokenised text", ""                       # the held ids are not those of their own text
    if before is None:
        return "new conversation", ""
    was = [*before.messages, *([answer] if answer else [])]
    if found := _changed_arguments(before.arguments, prompt.arguments) or _changed_messages(was, prompt.messages):
        return found
    if parted < len(before.text):
        old, new = _line(before.text, parted), _line(prompt.text, parted)
        if old != new and _CLOCK.sub("0", old) == _CLOCK.sub("0", new):
            return "clock", "written by the template"
        try:
            history = tokenizer.render(before.messages, **{**before.arguments, "add_generation_prompt": False})
        except TokenizerError:  # not a history that may end there
            history = before.text
        if len(history) <= parted and "<think>" in before.text[len(history):]:
            return "generation-prompt think block", ""
    if place is not None and prompt.messages[place]["role"] == "assistant":
        message = prompt.messages[place]
        raw = held_text[len(before.text):] if place == len(before.messages) else str(message.get("content", ""))
        reasoning = parser.parse(raw).reasoning or str(message.get("reasoning_content") or "")
        thought = held_text.find(reasoning.strip(), parted)
        header = 2 * len("<|channel|>analysis<|message|>")
        if reasoning.strip() and 0 <= thought <= parted + header:              # they part where the reasoning begins
            return "stripped reasoning", ""
    return "template re-rendering", ""


def _line(text: str, at: int) -> str:
    return text[text.rfind("\n", 0, at) + 1:].partition("\n")[0]


def _changed_arguments(was: dict[str, Any], now: dict[str, Any]) -> tuple[str, str] | None:
    names = [name for name in {**was, **now} if json.dumps(was.get(name)) != json.dumps(now.get(name))]
    if "tools" in names:
        def canonical(tools):
            return sorted(json.dumps(tool, sort_keys=True) for tool in tools or [])
        return ("tool order" if canonical(was.get("tools")) == canonical(now.get("tools")) else "tool definitions"), ""
    return ("template arguments", ", ".join(names)) if names else None


def _changed_messages(was: list[dict[str, Any]], now: list[dict[str, Any]]) -> tuple[str, str] | None:
    same = common_start(was, now)
    if same == len(was):
        return None
    system = [len(messages) > 0 and messages[0]["role"] == "system" for messages in (was, now)]
    if same == 0 and any(system) and any(message in was for message in now):
        if all(system):
            old, new = (str(messages[0].get("content")) for messages in (was, now))
            return ("clock", "in the system prompt") if _CLOCK.sub("0", old) == _CLOCK.sub("0", new) else ("system prompt", "")
        return "system prompt", "it was put in" if system[1] else "it was taken out"
    head = 1 if all(system) else 0
    for dropped in range(head + 1, len(was)):
        rest = was[dropped:]
        if now[head:head + len(rest)] == rest and same <= head:
            return "truncation", f"{dropped - head} messages"
    if not any(message in was for message in now[head:]):
        return "new conversation", ""
    return "edited message", f"message {same}"
