"""refengine chat. Floor 8."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from refengine.chat import Chat, Turn
from refengine.cli import setup
from refengine.errors import RefengineError
from refengine.inspect import Recorder
from refengine.model import load_tokenizer
from refengine.sampling import GREEDY

_HELP = """/regen        answer the last message again   /undo         take back the last message and its answer
/edit TEXT    say this instead                /system TEXT  another system prompt (none: without one)
/why          why the last turn reused what it reused
/stats        what each turn cost             /reset        start over          /quit  leave (or Ctrl-D)
Ctrl-C stops an answer and keeps what was said."""


def run(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    tokenizer = load_tokenizer(arguments.model)
    chat = Chat(setup.engine(arguments, arguments.model), tokenizer, not arguments.no_prefix_cache, system=arguments.system,
                sampling=GREEDY if arguments.greedy else setup.sampling(arguments), max_tokens=arguments.max_tokens,
                stop=arguments.stop, parser=arguments.parser, keep_ids=arguments.keep_ids, reanchor=arguments.reanchor,
                stats_log=arguments.stats_log,
                template_arguments={"enable_thinking": False} if arguments.no_thinking else None)
    recorder = Recorder(chat, Path(arguments.record)) if arguments.record else None
    console.print(f"[dim]{arguments.model}, {arguments.arithmetic} arithmetic, {arguments.engine} engine, prefix cache "
                  f"{'on' if chat.prefix_cache else 'off'}. /help for commands.[/]", soft_wrap=True)
    while True:
        try:
            line = input("> ")
            if not sys.stdin.isatty():
                print(line)  # a script's transcript reads like a conversation
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if line.strip() == "/quit":
            return 0
        try:
            _line(console, chat, line)
        except (RefengineError, ValueError) as error:
            console.print(str(error), style="red", markup=False)
        except KeyboardInterrupt:  # before there was an answer to stop
            print()
        if recorder and chat.turns:
            recorder.save()


def _line(console: Console, chat: Chat, line: str) -> None:
    """Do what a line asks for."""
    command, _, text = line.strip().partition(" ")
    if not command:
        return
    if command == "/regen":
        _answer(console, chat, chat.regenerate())
    elif command == "/undo":
        chat.undo()
    elif command == "/edit":
        if not text.strip():
            raise ValueError("/edit needs the new text: /edit TEXT")
        chat.undo()
        _answer(console, chat, chat.send(text.strip()))
    elif command == "/system":
        chat.messages = [message for message in chat.messages if message["role"] != "system"]
        if text.strip():
            chat.messages.insert(0, {"role": "system", "content": text.strip()})
    elif command == "/reset":
        chat.reset()
    elif command == "/why":
        console.print(str(chat.turns[-1].explain()) if chat.turns else "there is no turn yet", style="dim", markup=False,
                      soft_wrap=True)
    elif command == "/stats":
        for turn in chat.turns:
            console.print(turn.record(), style="dim", soft_wrap=True)
    elif command.startswith("/") and command.isascii():
        console.print(_HELP, style="dim", markup=False)
    else:
        _answer(console, chat, chat.send(line))


def _answer(console: Console, chat: Chat, stream) -> None:
    turns = len(chat.turns)
    try:
        for text in stream:
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    print()
    if len(chat.turns) > turns:
        console.print(status(chat.turns[-1]), soft_wrap=True)


def status(turn: Turn) -> str:
    """The line under an answer, in rich markup."""
    each = (turn.seconds - turn.ttft) / (turn.generated - 1) * 1e3 if turn.generated > 1 else 0.0
    return (f"[dim]{turn.prompt} prompt ·[/] [green]{turn.reused} cached[/] [dim]· {turn.forwarded} forwarded · first token "
            f"{turn.ttft:.3f} s · {turn.generated} tokens, {each:.0f} ms each · {turn.finish_reason}"
            + f" · {turn.fallback}: no rewind" * bool(turn.fallback)
            + (f" · {turn.snapshots} snapshots, {turn.snapshot_bytes / 1e6:.1f} MB" if turn.snapshots is not None else "") + "[/]")
