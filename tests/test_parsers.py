"""Raw generations, read: the content, the reasoning, the tools that are called."""
import json

import pytest
from hypothesis import given, strategies as st

from refengine.model import load_tokenizer
from refengine.parsers import PARSERS, parser_named
from refengine.template import ChatTemplate
from refengine.tokenizer import Tokenizer

PLAIN, QWEN3, HARMONY = (PARSERS[name] for name in ("plain", "qwen3", "harmony"))
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


@given(st.text("ab\n <>/think", max_size=40))
def test_plain_and_qwen3_pass_the_text_through_unchanged(raw):
    for parser in (PLAIN, QWEN3):
        assert parser.parse(raw).content == raw
        assert parser.history(parser.parse(raw)) == {"role": "assistant", "content": raw}


@pytest.mark.parametrize(("raw", "reasoning", "calls"), [
    ("<think>\nhm\n</think>\n\nParis", "hm", 0), ("hm\n</think>\nParis", "hm", 0), ("<think>cut sho", "cut sho", 0),
    ("Paris", "", 0), ("<think></think>x", "", 0),
    ('a<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', "", 1),
    ('<think>say <tool_call>{"name": "f", "arguments": {}}</tool_call></think>no', 'say <tool_call>{"name": "f", "arguments": {}}</tool_call>', 0),
    ('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' * 2, "", 2),
    ("<tool_call>{broken</tool_call>", "", 0), ('<tool_call>["a"]</tool_call>', "", 0), ('<tool_call>{"name": "weather"', "", 0)])
def test_qwen3_finds_reasoning_and_tool_calls(raw, reasoning, calls):
    reply = QWEN3.parse(raw)
    assert (reply.reasoning, reply.tool_calls) == (reasoning, (CALL,) * calls)


THOUGHT = "<|channel|>analysis<|message|>Think.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is Paris.<|return|>"
ASK = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + json.dumps({"city": "Rome"}) + "<|call|>"


@pytest.mark.parametrize(("raw", "content", "reasoning", "calls"), [
    (THOUGHT + FINAL, "It is Paris.", "Think.", 0), (FINAL, "It is Paris.", "", 0), (THOUGHT + ASK, "", "Think.", 1),
    (THOUGHT + THOUGHT + FINAL, "It is Paris.", "Think.\nThink.", 0), (THOUGHT.removesuffix("k.<|end|>"), "", "Thin", 0),
    (THOUGHT + FINAL.removesuffix(".<|return|>"), "It is Paris", "Think.", 0), (THOUGHT + ASK[:-10], "", "Think.", 0), ("no channels", "", "", 0), ("", "", "", 0),
    ("<|channel|>final<|message|>a <b> c<|end|>", "a <b> c", "", 0)])
def test_harmonys_content_is_the_final_channels(raw, content, reasoning, calls):
    reply = HARMONY.parse(raw)
    assert reply == (content, reasoning, (CALL,) * calls)
    message = HARMONY.history(reply)
    assert message["content"] == content and message.get("thinking", "") == reasoning and len(message.get("tool_calls", ())) == calls


TOKENS = st.lists(st.sampled_from(["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>", "assistant",
                                   "analysis", "final", "commentary", " to=functions.f", "json", "{}", " a", "\n", "<think>", "</think>",
                                   "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}']), max_size=14)


@given(TOKENS)
def test_while_tokens_come_the_content_only_grows(tokens):
    for parser in PARSERS.values():
        shown = ""
        for i in range(len(tokens) + 1):
            content = parser.parse("".join(tokens[:i])).content
            assert content.startswith(shown), (parser.name, tokens[:i])
            shown = content


@pytest.mark.parametrize(("template", "name"), [("{{ messages }}", "plain"), ("<think></think>", "qwen3"), ("<|channel|>", "harmony")])
def test_the_parser_is_the_one_the_template_asks_for(template, name):
    tokenizer = Tokenizer(load_tokenizer("tiny").backend, ChatTemplate(template), ())
    assert parser_named(None, tokenizer).name == name and parser_named("plain", tokenizer).name == "plain"
    with pytest.raises(ValueError, match="parser 'gpt' is not one of plain, qwen3, harmony"):
        parser_named("gpt", tokenizer)
