"""Chat templates: Jinja in a sandbox, with the settings and helpers that transformers gives them. Floor 2."""
from __future__ import annotations

import datetime
import functools
import json
from typing import Any

from refengine.errors import TokenizerError


class ChatTemplate:
    """A chat template of a model. ``special``: the token texts that templates name (bos_token, eos_token, ...)."""

    def __init__(self, source: str, special: dict[str, str] | None = None):
        self.source, self.special = source, dict(special or {})

    @functools.cached_property
    def _compiled(self):
        import jinja2
        import jinja2.sandbox  # here, not above: `import refengine` stays light

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template does not compile: {error}") from error

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **arguments: Any) -> str:
        """The text of a conversation. Raises TokenizerError when the template refuses it."""
        import jinja2

        try:
            return self._compiled.render(messages=messages, add_generation_prompt=add_generation_prompt,
                                         **{**self.special, **arguments})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TokenizerError(f"the chat template failed: {error}") from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators=None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    import jinja2

    raise jinja2.TemplateError(message)
