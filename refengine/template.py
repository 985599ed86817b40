"""Chat templates: messages in, text out, byte for byte as transformers renders them. Floor 2.

The rendering happens in a process of its own (template_process.py), because a template comes with somebody's model.
"""
from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from refengine.errors import TokenizerError

SECONDS = 20.0  # most that one rendering may take
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that people give to it; templates read the first two


class ChatTemplate:
    """The chat templates of a model. ``special``: the token texts that templates name (bos_token, eos_token, ...).

    sources: one template, or several by name. "tool_use" is taken when tools are given, else "default".
    """

    def __init__(self, sources: str | dict[str, str], special: dict[str, str] | None = None):
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.special = dict(special or {})

    def render(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
               documents: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True, **arguments: Any) -> str:
        """The text of a conversation. ``arguments`` are the template's own (enable_thinking, ...), of JSON types.

        Raises TokenizerError: the template refuses it, fails, reaches for Python, takes too long or too much memory.
        """
        return self.render_marked(messages, {}, {"tools": tools, "documents": documents,
                                                 "add_generation_prompt": add_generation_prompt, **arguments})[0]

    def render_marked(self, messages: list[dict[str, Any]], stand_ins: dict[str, str], arguments: dict[str, Any]) -> tuple[str, str]:
        """(text, the same with stand-ins). stand_ins: character -> another that it stands for within messages and arguments;
        the text is what it would be without them, and shows none. Raises TokenizerError, also when that cannot be told apart.
        """
        tools = arguments.get("tools")
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise TokenizerError(f"there is no default chat template, only {', '.join(self.sources)}")
        variables = {"messages": plain_messages(messages), "tools": None, "documents": None, "add_generation_prompt": True,
                     **self.special, **arguments}
        request = {"source": self.sources[name], "variables": variables, "stand_ins": stand_ins, "now": now().isoformat(),
                   "seconds": 2 * SECONDS}
        try:
            text = json.dumps(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise TokenizerError(f"what a chat template is given must be of JSON types: {error}") from None
        reply = _process.render(text)
        return reply["text"], reply["marked"]


def now() -> datetime.datetime:
    """The clock that ``strftime_now`` shows to templates."""
    return datetime.datetime.now()


def template_arguments(given: Any, where: str = "template_arguments") -> dict[str, Any]:
    """A copy of the arguments that somebody has for a template. Raises TokenizerError when they are no dict of names, or have
    one that is given otherwise."""
    ours = ("self", "messages", "spoken", "control_in_text")
    given = {} if given is None else given
    if not isinstance(given, dict) or any(not isinstance(name, str) or name in ours for name in given):
        raise TokenizerError(f"{where} is {given!r:.80}; it should be a dict of the template's own arguments, none of them named "
                             f"{', '.join(ours[:-1])} or {ours[-1]}")
    return dict(given)


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of a history as templates want it. Raises TokenizerError naming the message and the field.

    Keys without a value (None) are left out; reasoning is under ``reasoning_content`` and ``thinking``, whatever it was
    called; the arguments of a tool call, which the OpenAI API writes as a JSON text, are an object.
    """
    try:
        return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
    except RecursionError:
        raise TokenizerError("the messages are nested too deeply") from None


def _plain(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TokenizerError(f"{where} is {message!r:.80}, not a dict with a role")
    message = {key: value for key, value in message.items() if value is not None}
    for name in REASONING:
        if name in message:
            message = {"thinking": message[name], **message, "reasoning_content": message[name]}
            break
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            raise TokenizerError(f"{where}.tool_calls is {message['tool_calls']!r:.80}, not a list")
        message["tool_calls"] = [_plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message["tool_calls"])]
    return message


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise TokenizerError(f"{where} is {call!r:.80}, not a dict")
    if "function" in call:
        return {**call, "function": _plain_call(call["function"], f"{where}.function")}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise TokenizerError(f"{where}.arguments is no JSON: {error}") from None
    if not isinstance(arguments, dict | None):
        raise TokenizerError(f"{where}.arguments is {arguments!r:.80}, not an object")
    return call if arguments is None else {**call, "arguments": arguments}


class _Process:
    """The rendering process of this process, started when it is needed and again when it had to be killed."""

    def __init__(self):
        self._child: subprocess.Popen | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def render(self, request: str) -> dict[str, str]:
        """The reply to a request, both as template_process.py has them. Raises TokenizerError."""
        with self._lock:
            late = threading.Event()
            try:
                child = self._started()
                timer = threading.Timer(SECONDS, lambda: (late.set(), child.kill()))
                timer.start()
                try:
                    child.stdin.write(request + "\n")
                    child.stdin.flush()
                    line = child.stdout.readline()
                except OSError:
                    line = ""
                finally:
                    timer.cancel()
            except BaseException:  # interrupted: what comes back belongs to nobody
                self.stop()
                raise
            if not line.endswith("\n"):
                self.stop()
                why = f"it took longer than {SECONDS:g} s" if late.is_set() else "its process died, probably for want of memory"
                raise TokenizerError(f"the chat template was stopped: {why}")
        reply = json.loads(line)
        if "error" in reply:
            raise TokenizerError(f"the chat template failed: {reply['error']}")
        return reply

    def _started(self) -> subprocess.Popen:
        if self._child is None or self._child.poll() is not None or self._owner != os.getpid():  # a fork has its own
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("template_process.py"))], text=True, encoding="utf-8",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            self._owner = os.getpid()
            if self._child.stdout.readline() != "ready\n":
                self.stop()
                raise TokenizerError("the process that renders chat templates did not start; "
                                     "is jinja2 3.1.6 or newer installed?")
        return self._child

    def stop(self) -> None:
        if self._child is not None and self._owner == os.getpid():
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(OSError):  # a request that nobody will read
                    pipe.close()
        self._child = None


_process = _Process()
atexit.register(_process.stop)
if hasattr(os, "register_at_fork"):  # another thread may have been rendering: in the fork nobody will release its lock
    os.register_at_fork(after_in_child=lambda: setattr(_process, "_lock", threading.Lock()))
