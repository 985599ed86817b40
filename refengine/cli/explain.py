"""refengine explain: what each turn of a conversation reuses, and why not more. Floor 8."""
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from refengine.cli import setup
from refengine.errors import TokenizerError
from refengine.lint_template import walk
from refengine.parsers import parser_named
from refengine.template import plain_messages, template_arguments


def run(arguments: argparse.Namespace) -> int:
    tokenizer = setup.tokenizer(arguments.model)
    messages, given = _transcript(Path(arguments.transcript))
    total = 0
    for number, found in enumerate(walk(tokenizer, parser_named(arguments.parser, tokenizer), messages, given)):
        print(f"turn {number}: {found}\n")
        total += found.avoidable
    print(f"{total} tokens forwarded again in all")
    return 0


def _transcript(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(messages, template arguments) of a JSON file. Raises TokenizerError naming what is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not a JSON file ({error})") from None
    given = value if isinstance(value, dict) else {"messages": value}
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise TokenizerError(f"{path}: it should be a list of messages, or an object with messages, tools, documents and "
                             "template_arguments")
    extra = template_arguments(given.get("template_arguments"), f"{path}: template_arguments")
    for i, message in enumerate(plain_messages(messages)):
        raw, ids = message.get("raw", ""), message.get("ids", [])
        numbers = isinstance(ids, list) and all(type(id) is int and 0 <= id < 2**32 for id in ids)
        if not isinstance(raw, str) or not numbers:
            raise TokenizerError(f"{path}: raw of messages[{i}] should be a text and its ids a list of token ids")
    return messages, {**{name: given[name] for name in ("tools", "documents") if given.get(name)}, **extra}
