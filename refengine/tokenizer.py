"""Text to ids and back: the `tokenizers` library, a chat template, the stop ids, and text streamed in whole characters.
Floor 2."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refengine.errors import TokenizerError
from refengine.template import ChatTemplate

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """A model's text side. ``stop_ids``: the ids that end a generation."""

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None, stop_ids: Sequence[int]):
        self.backend, self.template, self.stop_ids = backend, template, tuple(stop_ids)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text. A chat template writes its own specials, so none are added unless asked for."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        """The chat template over a history, with the generation prompt. Raises TokenizerError."""
        if self.template is None:
            raise TokenizerError("this model has no chat template (chat_template.jinja, tokenizer_config.json or GGUF "
                                 "metadata); use generate instead of chat")
        return self.template.render(messages, **arguments)

    def stream(self) -> TextStream:
        """A decoder for ids that come one by one."""
        return TextStream(self)


class TextStream:
    """Text of ids as they arrive, never half a character: ``"".join(pushes) + flush() == decode(all ids)``.

    NOTE: a decoder with byte fallback (Llama 2) takes a whole run of bytes for broken when its end is; what was handed out
    of such a run before it broke cannot be taken back.
    """

    _WINDOW = 24

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []   # the last few ids, enough context to decode the next
        self._shown = 0             # characters of their text already handed out

    def push(self, token: int) -> str:
        """The text that this id completes, possibly empty."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # An unfinished character decodes to U+FFFD at the end, one or (with byte fallback) one a byte of the whole run of
        # bytes; the next id may complete it.
        done = len(text.rstrip("\ufffd"))
        new, self._shown = text[self._shown:done], max(self._shown, done)
        if len(self._ids) > self._WINDOW and done == len(text):
            # Keep a context that reads alone as it does here: it has something visible (some decoders treat that specially)
            # and does not begin inside a character.
            for keep in range(4, 13):
                context = self._tokenizer.decode(self._ids[-keep:])
                if context and text.endswith(context):
                    self._ids, self._shown = self._ids[-keep:], len(context)
                    break
        return new

    def flush(self) -> str:
        """What is left: U+FFFD when the ids ended inside a character."""
        text = self._tokenizer.decode(self._ids)
        new, self._shown = text[self._shown:], len(text)
        return new


def load_folder_tokenizer(folder: Path, stop_ids: Sequence[int]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    from refengine.config import read_json

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{path}: not found; a tokenizer.json is needed (tokenizer.model alone is not read)")
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: {error}") from None
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    special = {key: text for key, value in settings.items()
               if key.endswith("_token") and isinstance(text := value["content"] if isinstance(value, dict) else value, str)}
    source = settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return Tokenizer(backend, ChatTemplate(source, special) if source else None, stop_ids)
