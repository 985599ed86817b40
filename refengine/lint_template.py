"""Is a chat template append-only? Random conversations, and where a prompt ceases to go on from what was held. Floor 4."""
from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from refengine.errors import TokenizerError
from refengine.explain import Explanation, Prompt, explain
from refengine.parsers import Parser
from refengine.template import plain_messages
from refengine.tokenizer import Tokenizer

Message = dict[str, Any]
KINDS = {"plain": "questions and answers", "whitespace": "answers that begin or end with blanks or newlines",
         "thinking": "answers that think first", "no thinking": "enable_thinking=False",
         "tools": "answers that call tools, and go on from the results", "thinking and tools": "both, within one question"}
_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather in a <city>",
                                            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]


@dataclass
class Finding:
    """What conversations of one kind showed. ``message``: index of the first message whose rendering changes later."""

    kind: str
    turns: int = 0
    breaks: int = 0                       # turns whose prompt did not go on from all that was held
    message: int | None = None
    explanation: Explanation | None = None
    conversation: list[Message] = field(default_factory=list)
    refused: str = ""                     # why the template renders no such conversation

    @property
    def append_only(self) -> bool:
        return not self.breaks


def lint(tokenizer: Tokenizer, parser: Parser, *, seed: int = 0, conversations: int = 20) -> list[Finding]:
    """A Finding for each of KINDS. Nothing is generated: the answers are written as such a model writes them."""
    findings = []
    for kind in KINDS:
        finding = Finding(kind)
        for number in range(conversations):
            messages = random_conversation(random.Random(f"refengine lint {seed} {kind} {number}"), kind)
            arguments: dict[str, Any] = {"tools": _TOOLS} if "tools" in kind else {}
            if kind == "no thinking":
                arguments["enable_thinking"] = False
            try:
                walked = list(walk(tokenizer, parser, messages, arguments))
            except TokenizerError as error:
                finding.refused = str(error)
                break
            finding.turns += len(walked)
            broken = [found for found in walked if found.cause not in ("cold", "append-only")]
            finding.breaks += len(broken)
            if broken and (finding.explanation is None or len(messages) < len(finding.conversation)):
                finding.explanation, finding.message, finding.conversation = broken[0], broken[0].message, messages
        findings.append(finding)
    return findings


def walk(tokenizer: Tokenizer, parser: Parser, messages: list[Message], arguments: dict[str, Any]) -> Iterator[Explanation]:
    """The explanation of each turn that a conversation came from: one for each assistant message and one for what may follow.

    What the engine holds before it is the last prompt and the answer as the model will have generated it (`generation`).
    Raises TokenizerError.
    """
    messages = plain_messages(messages)
    held: list[int] = []
    before, answer = None, None
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for end in [*ends, *([len(messages)] if messages and messages[-1]["role"] != "assistant" else [])]:
        text, ids = tokenizer.encode_chat(messages[:end], **arguments)
        prompt = Prompt(messages[:end], arguments, text, ids)
        yield explain(tokenizer, parser, held, prompt, before=before, answer=answer)
        if end < len(messages):
            answer = messages[end]
            generated = answer.get("ids") or tokenizer.encode(generation(tokenizer, parser, messages[:end + 1], prompt))
            held, before = ids + list(generated), prompt


def generation(tokenizer: Tokenizer, parser: Parser, messages: list[Message], prompt: Prompt) -> str:
    """The raw text that an assistant message, the last, was read from: "raw" if it has that; else what the template would
    have it be, or its reasoning, content and tool calls as its family writes them. Without the last stop token."""
    answer = messages[-1]
    if "raw" in answer:
        return answer["raw"]
    content = str(answer.get("content") or "")
    reasoning = answer.get("reasoning_content", "")
    if parser.name == "harmony":
        calls = "".join(f"<|channel|>commentary to=functions.{_function(call)['name']} <|constrain|>json<|message|>"
                        f"{json.dumps(_function(call)['arguments'])}<|call|>" for call in answer.get("tool_calls") or ())
        thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
        return thought + (calls or f"<|channel|>final<|message|>{content}")
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    calls = [f"<tool_call>\n{json.dumps(_function(call), ensure_ascii=False)}\n</tool_call>"
             for call in answer.get("tool_calls") or ()]
    return thought + "\n".join([*([content] if content else []), *calls])


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    return {"name": function.get("name", ""), "arguments": function.get("arguments", {})}


def random_conversation(rng: random.Random, kind: str) -> list[Message]:
    """Two to four questions with answers, and a last question."""
    messages: list[Message] = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
    for number in range(rng.randint(2, 4)):
        messages.append({"role": "user", "content": _words(rng)})
        for _ in range(rng.randint(1, 2) if "tools" in kind else 0):
            call = {"type": "function", "function": {"name": "weather", "arguments": {"city": _words(rng), "days": number}}}
            messages += [_answer(rng, kind, tool_calls=[call]), {"role": "tool", "content": _words(rng)}]
        messages.append(_answer(rng, kind))
    return [*messages, {"role": "user", "content": _words(rng)}]


def _answer(rng: random.Random, kind: str, **rest: Any) -> Message:
    content = _words(rng)
    if kind == "whitespace":
        content = rng.choice(("", " ", "\n", "\n\n")) + content + rng.choice((" ", "\n", "\n\n"))
    if "tool_calls" in rest:
        content = rng.choice(("", content))
    if "thinking" in kind and kind != "no thinking":
        rest["reasoning_content"] = _words(rng)
    return {"role": "assistant", "content": content, **rest}


def _words(rng: random.Random) -> str:
    words = "the sea is blue and 42 ships sail to Paris in rain, is it? yes: no".split()
    return " ".join(rng.choices(words, k=rng.randint(1, 6)))
