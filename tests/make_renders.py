"""Writes renders.json: what transformers renders of conversations with Qwen3's template, as hashes. Floor 9.

    REFENGINE_QWEN3_TOKENIZER=FOLDER python tests/make_renders.py

Qwen3's template is not ours to keep here, so of each text there is only its length and SHA-256.
"""
import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

GOLDENS = Path(__file__).parent / "renders.json"
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "a<b & c>d 'e' \"f\" — / 你好",
                                           "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}}}]


def conversations() -> list[dict[str, Any]]:
    """System prompt, tools, thinking, answers that think, tool calls, one to five questions: messages and arguments."""
    made = []
    for system, tools, thinking, reasons, turns in itertools.product((False, True), (False, True), (None, False, True), (False, True),
                                                                     (1, 2, 3, 5)):
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief.\n"}] if system else []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"Question {turn}? \n"})
            reasoning = {"reasoning_content": f"\nthought {turn}\n"} if reasons else {}
            if tools:
                call = {"type": "function", "function": {"name": "weather", "arguments": {"b": f"x{turn}", "a": [1, None]}}}
                messages += [{"role": "assistant", "content": "\n\n" * (turn % 2), **reasoning, "tool_calls": [call, call]},
                             {"role": "tool", "content": f"sun {turn}"}, {"role": "tool", "content": "漢字 🙂"}]
            if turn + 1 < turns or reasons:
                text = f"<think>inline {turn}</think>\n\nAnswer" if turn % 3 == 2 else f"\nAnswer {turn} \n"
                messages.append({"role": "assistant", "content": text, **({} if turn % 3 == 2 else reasoning)})
        arguments = {**({"tools": TOOLS} if tools else {}), **({} if thinking is None else {"enable_thinking": thinking})}
        made.append({"messages": messages, "arguments": arguments})
    return made


def digest(text: str) -> dict[str, Any]:
    return {"length": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def main() -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(os.environ["REFENGINE_QWEN3_TOKENIZER"])
    texts = [tokenizer.apply_chat_template(made["messages"], tokenize=False, add_generation_prompt=True, **made["arguments"])
             for made in conversations()]
    GOLDENS.write_text(json.dumps({"transformers": transformers.__version__, "renders": list(map(digest, texts))}, indent=0) + "\n")
    print(f"{len(texts)} renders by transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
