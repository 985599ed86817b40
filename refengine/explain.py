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
from refengine.template import REASONING
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
    "documents": "the documents are others",
    "template arguments": "the template is given other arguments",
    "system prompt": "the system prompt was changed",
    "clock": "a date or time in the system prompt, or one that the template writes, went on",
    "truncation": "the oldest messages were dropped",
    "edited message": "a message that was already sent is not what it was",
    "generation-prompt think block": "the think block that the generation prompt opens with is not in the history",
    "stripped reasoning": "the template leaves the reasoning of an earlier answer out of the history",
    "template re-rendering": "the template writes an earlier message differently than before",
}
_DAY, _MONTH = r"(?:0?[1-9]|[12]\d|3[01])", (r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|"
                                              r"Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\.?")
_WEEKDAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,? )?"
_TIME = r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?: ?[AaPp]\.?[Mm])?(?:Z|[+-]\d\d:?\d\d)?"
_CLOCK = re.compile(r"(?<![\w.:/-])(?:" + "|".join((                         # a date, a time, or both
    rf"\d{{4}}-(?:0[1-9]|1[0-2])-{_DAY}(?:[T ]{_TIME})?", rf"\d{{4}}/(?:0?[1-9]|1[0-2])/{_DAY}", rf"{_DAY}/{_DAY}/\d{{4}}",
    rf"{_DAY}\.(?:0?[1-9]|1[0-2])\.\d{{4}}", rf"{_WEEKDAY}{_DAY}(?:st|nd|rd|th)?(?: of)? {_MONTH}(?:,? \d{{4}})?",
    rf"{_WEEKDAY}{_MONTH} {_DAY}(?:st|nd|rd|th)?(?:,? \d{{4}})?", rf"{_MONTH} \d{{4}}", r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day",
    _TIME, r"(?:0?[1-9]|1[0-2]) ?[AaPp]\.?[Mm]")) + r")(?![\w/]|[.:-]\d)")


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
    place, end = _message_at(tokenizer, prompt, at)
    cause, detail = _cause(tokenizer, parser, held, held_text, at, common, prompt, before, answer, place, end)
    ours, theirs = list(held[common:common + _SHOWN]), prompt.ids[common:common + _SHOWN]
    return Explanation(cause, **counts, message=place, role=prompt.messages[place]["role"] if place is not None else "",
                       held_ids=ours, prompt_ids=theirs, held_text=tokenizer.decode(ours, skip_special_tokens=False),
                       prompt_text=tokenizer.decode(theirs, skip_special_tokens=False), detail=detail)


def _message_at(tokenizer: Tokenizer, prompt: Prompt, at: int) -> tuple[int | None, int]:
    """(the message that character ``at`` of the prompt's text belongs to, where it ends); None in what follows the last one."""
    for i in range(len(prompt.messages)):
        end = _end_of(tokenizer, prompt, i)
        if end is not None and end >= at:
            return i, end
    return None, len(prompt.text)


def _end_of(tokenizer: Tokenizer, prompt: Prompt, i: int) -> int | None:
    """Where a message ends in the prompt's text, found by making it longer: up to there the rendering stays as it is, whatever
    the template does. None when the template does not show it."""
    message = prompt.messages[i]
    calls, content = message.get("tool_calls") or [], f"{message.get('content') or ''}\ue000"
    for more in ([{"tool_calls": [*calls, calls[-1]]}] if calls else []) + [{"content": content}]:
        try:
            text = _with_message(tokenizer, prompt, i, {**message, **more})
        except TokenizerError:
            continue
        if text != prompt.text:  # else the template does not show these
            return common_start(text, prompt.text)
    return None


def _with_message(tokenizer: Tokenizer, prompt: Prompt, i: int, message: dict[str, Any]) -> str:
    """The prompt's text if one message were another. Raises TokenizerError."""
    return tokenizer.render([*prompt.messages[:i], message, *prompt.messages[i + 1:]], **prompt.arguments)


def _cause(tokenizer: Tokenizer, parser: Parser, held: Sequence[int], held_text: str, at: int, common: int, prompt: Prompt,
           before: Prompt | None, answer: dict[str, Any] | None, place: int | None, end: int) -> tuple[str, str]:
    """(cause, detail). What changed in the caller's hands comes before what the template did with it."""
    parted = common_start(prompt.text, held_text)
    if at < parted and _respelled(tokenizer, held, prompt.ids, common, parted - at):
        return "re-tokenised text", ""
    if before is None:
        return "new conversation", ""
    was = [*before.messages, *([answer] if answer else [])]
    if found := _changed_arguments(tokenizer, before.arguments, prompt) or _changed_messages(was, prompt.messages, place):
        return found
    if parted < len(before.text):
        if _only_clock(_line(before.text, parted), _line(prompt.text, parted)):
            return "clock", "written by the template"
        try:
            history = tokenizer.render(before.messages, **{**before.arguments, "add_generation_prompt": False})
        except TokenizerError:  # not a history that may end there
            history = before.text
        if len(history) <= parted and "<think>" in before.text[len(history):]:
            return "generation-prompt think block", ""
    if place is not None and prompt.messages[place]["role"] == "assistant":
        if place == len(before.messages):                                        # what was generated
            raw, old = held_text[len(before.text):], held_text[parted:]
        else:
            raw, old = "", before.text[parted:_end_of(tokenizer, before, place)]
        reasoning = _reasoning(parser, {"content": raw}) or _reasoning(parser, prompt.messages[place])
        shown = raw or _shows(tokenizer, parser, before, place)
        if reasoning and reasoning in old and shown and not _shows(tokenizer, parser, prompt, place):
            # Left out, so that what followed it follows at once. Of that, the last id generated is not held.
            next_line, rest = prompt.text[parted:end].partition("\n")[0], old.partition(reasoning)[2]
            said = str(prompt.messages[place].get("content") or "")
            if next_line in rest or next_line in (said.partition(reasoning)[2] or said) \
                    or any(next_line.startswith(rest[i:]) for i in range(len(rest))):
                return "stripped reasoning", ""
    return "template re-rendering", ""


def _respelled(tokenizer: Tokenizer, held: Sequence[int], prompt: Sequence[int], common: int, same: int) -> bool:
    """Do two sequences of ids part in a text that is the same, for ``same`` more characters? Yes where one has a control token
    and the other its text. Else if the text of what was held, up to the next control token, encodes to other ids than those;
    if not, what comes later has made the difference."""
    real = set(tokenizer.control.values())
    if control := real & {*held[common:common + 1], *prompt[common:common + 1]}:
        return len(tokenizer.decode([control.pop()], skip_special_tokens=False)) <= same
    start = max((i + 1 for i in range(common) if held[i] in real), default=0)
    own = list(held[start:next((i for i in range(common, len(held)) if held[i] in real), len(held))])
    try:
        return common_prefix(tokenizer.encode_plain(tokenizer.decode(own), within=start > 0), own) == common - start
    except TokenizerError:
        return False


def _reasoning(parser: Parser, message: dict[str, Any]) -> str:
    """What a message says that was thought, in a field of its own or within its content."""
    named = next((value for name in REASONING if (value := message.get(name))), "")
    content = message.get("content")
    return str(named or (parser.parse(content).reasoning if isinstance(content, str) else "")).strip()


def _shows(tokenizer: Tokenizer, parser: Parser, prompt: Prompt, i: int) -> bool:
    """Would the prompt's text be another if the reasoning of a message were?"""
    message = prompt.messages[i]
    reasoning = _reasoning(parser, message)
    other = {key: value.replace(reasoning, reasoning + "\ue000", 1) for key, value in message.items()
             if key in (*REASONING, "content") and isinstance(value, str) and reasoning}
    if any(message.get(name) for name in REASONING):
        other.pop("content", None)                                               # there it is something else
    try:
        return _with_message(tokenizer, prompt, i, {**message, **other}) != prompt.text
    except TokenizerError:
        return True


def _line(text: str, at: int) -> str:
    return text[text.rfind("\n", 0, at) + 1:].partition("\n")[0]


def _only_clock(old: str, new: str) -> bool:
    """Do two texts differ in dates and times only?"""
    return old != new and _CLOCK.sub("\0", old) == _CLOCK.sub("\0", new)


def _changed_arguments(tokenizer: Tokenizer, was: dict[str, Any], prompt: Prompt) -> tuple[str, str] | None:
    """What the template was given otherwise, if that shows in the prompt."""
    def shows(name: str) -> bool:
        back = {**prompt.arguments, name: was.get(name)}
        try:
            return tokenizer.render(prompt.messages, **{key: value for key, value in back.items() if key in was or key != name}) != prompt.text
        except TokenizerError:
            return True

    now = prompt.arguments
    names = [name for name in sorted({**was, **now}, key=("documents", "tools").__contains__, reverse=True)
             if json.dumps(was.get(name)) != json.dumps(now.get(name)) and shows(name)]
    if "tools" in names:
        def canonical(tools):
            return sorted(json.dumps(tool, sort_keys=True) for tool in tools or [])
        cause = "tool order" if canonical(was.get("tools")) == canonical(now.get("tools")) else "tool definitions"
    elif "documents" in names:
        cause = "documents"
    else:
        return ("template arguments", ", ".join(names)) if names else None
    others = [name for name in names if name != ("tools" if "tools" in names else "documents")]
    return cause, f"and {', '.join(others)}" if others else ""


def _changed_messages(was: list[dict[str, Any]], now: list[dict[str, Any]], place: int | None) -> tuple[str, str] | None:
    same = common_start(was, now)
    if same == len(was):
        return None
    system = [len(messages) > 0 and messages[0]["role"] == "system" for messages in (was, now)]
    if same == 0 and any(system) and any(message in was for message in now):
        if all(system):
            old, new = (str(messages[0].get("content")) for messages in (was, now))
            return ("clock", "in the system prompt") if _only_clock(old, new) else ("system prompt", "")
        return "system prompt", "it was put in" if system[1] else "it was taken out"
    head = 1 if all(system) else 0
    for dropped in range(head + 1, len(was)):
        rest = was[dropped:]
        if now[head:head + len(rest)] == rest and same <= head:
            return "truncation", f"{dropped - head} messages"
    if not any(message in was for message in now[head:]):
        return "new conversation", ""
    if place is not None and (place < same or now[place] in was[place:place + 1]):
        return None                                                              # they part elsewhere: that change is not shown
    return "edited message", f"message {same if place is None else place}"
