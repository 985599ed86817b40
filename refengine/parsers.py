"""Parsers of raw generations: what of it is the answer, what was thought, which tools are called. Floor 2.

A parser is a function of the text so far, and while ids are added the content only grows: so a caller can show it meanwhile.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from refengine.tokenizer import Tokenizer


class Reply(NamedTuple):
    """A generation, read. ``content`` is what goes into the history; the raw text is in the turn."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()    # {"type": "function", "function": {"name", "arguments"}}


class Parser(NamedTuple):
    """``parse``: raw text -> Reply. ``reads_special``: the raw text shows special tokens (else they are left out).

    ``history``: Reply -> the message that stands for it in the history.
    """

    name: str
    parse: Callable[[str], Reply]
    reads_special: bool = False
    history: Callable[[Reply], dict[str, Any]] = lambda reply: {"role": "assistant", "content": reply.content}


def _plain(raw: str) -> Reply:
    return Reply(raw)


def _qwen3(raw: str) -> Reply:
    """<think>reasoning</think> answer <tool_call>{"name", "arguments"}</tool_call>. The content is all of it, unstripped:
    the template decides what of it stays in the history."""
    before, end, after = raw.partition("</think>")
    thinking = before.partition("<think>")[2] if "<think>" in before else before if end else ""
    calls = _between("<tool_call>", "</tool_call>", after if end else "" if "<think>" in raw else raw)
    return Reply(raw, thinking.strip("\n"), tuple(call for text in calls if (call := _call(text))))


def _between(start: str, end: str, text: str) -> Iterator[str]:
    """What stands between each start and the next end. In linear time: a model may repeat either without end."""
    at = text.find(start)
    while at >= 0 and (stop := text.find(end, at)) >= 0:
        yield text[at + len(start):stop]
        at = text.find(start, stop)


def _call(text: str, name: str | None = None) -> dict[str, Any] | None:
    """A tool call of the JSON text of {"name", "arguments"}, or of the arguments alone; None when it is broken, or such
    that no history with it could be rendered."""
    try:
        value = json.loads(text)
        function = value if name is None else {"name": name, "arguments": value}
        arguments = json.loads(function["arguments"]) if isinstance(function["arguments"], str) else function["arguments"]
        json.dumps(function, ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    return {"type": "function", "function": {"name": str(function["name"]), "arguments": arguments}}


_END = re.compile(r"<\|(end|call|return)\|>|(?=<\|start\|>)|\Z")
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def _harmony(raw: str) -> Reply:
    """gpt-oss: <|channel|>analysis|commentary|final<|message|>text<|end|>. The content is the final channel's."""
    content, reasoning, calls = [], [], []
    at = 0
    while (channel := raw.find("<|channel|>", at)) >= 0 and (message := raw.find("<|message|>", channel)) >= 0:
        begins = message + len("<|message|>")
        end = _END.search(raw, begins)
        body, name = raw[begins:end.start()], _NAME.search(raw, channel, message)
        recipient = _TO.search(raw, max(at, raw.rfind("<|start|>", at, channel)), message)  # before the channel or after it
        if recipient:
            calls += [call] if end[1] and (call := _call(body, recipient[1])) else []
        elif name and name[1] == "final":
            content.append(body)
        elif name and name[1] == "analysis":
            reasoning.append(body)
        at = end.end()
    return Reply("".join(content), "\n".join(reasoning), tuple(calls))


def _harmony_history(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["thinking"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = list(reply.tool_calls)
    return message


PARSERS = {parser.name: parser for parser in (Parser("plain", _plain), Parser("qwen3", _qwen3),
                                              Parser("harmony", _harmony, True, _harmony_history))}


def parser_named(name: str | None, tokenizer: Tokenizer) -> Parser:
    """The parser of that name; for None, the one that the model's chat template asks for."""
    if name is None:
        text = "".join(tokenizer.template.sources.values()) if tokenizer.template else ""
        name = "harmony" if "<|channel|>" in text else "qwen3" if "</think>" in text or "<tool_call>" in text else "plain"
    if name not in PARSERS:
        raise ValueError(f"parser {name!r} is not one of {', '.join(PARSERS)}")
    return PARSERS[name]
