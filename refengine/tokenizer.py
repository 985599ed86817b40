"""Text to ids and back: the `tokenizers` library, a chat template, stop ids and strings, text in whole characters. Floor 2."""
from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from refengine.errors import TokenizerError
from refengine.template import ChatTemplate

if TYPE_CHECKING:
    import tokenizers


class Rendered(NamedTuple):
    """A conversation as the model is given it."""

    text: str
    ids: list[int]


class Spoken(NamedTuple):
    """A generation: the text of its prompt, its own text with special tokens, its ids."""

    prompt: str
    text: str
    ids: Sequence[int]


def _in_place(text: str, spoken: Sequence[Spoken]) -> list[tuple[int, int, Sequence[int]]]:
    """(start, stop, ids) of the generations that a text has where they were; of two in one place, the later."""
    found: list[tuple[int, int, Sequence[int]]] = []
    for prompt, answer, ids in spoken:
        start = len(prompt)
        if answer and text.startswith(prompt) and text.startswith(answer, start):
            found = [span for span in found if span[1] <= start]
            found.append((start, start + len(answer), ids))
    return found


class Tokenizer:
    """A model's text side. ``stop_ids``: the ids that end a generation. ``control``: texts of the special tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None, stop_ids: Sequence[int]):
        self.backend, self.template, self.stop_ids = backend, template, tuple(stop_ids)
        added = backend.get_added_tokens_decoder()
        self.control = {token.content: id for id, token in added.items() if token.special and len(token.content) > 1}
        self._lock = threading.RLock()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text, with special tokens where it names them. A chat template writes its own, so none are put
        around it unless asked for, and a beginning that it has already is not put there twice."""
        with self._lock:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens:
            plain = self.encode(text)
            extra = len(ids) - len(plain)
            if plain and 0 < extra < len(ids) and ids[extra:] == plain and ids[:extra] == plain[:extra]:
                return plain
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        """The chat template over a history, with the generation prompt. Raises TokenizerError. See `ChatTemplate.render`."""
        if self.template is None:
            raise TokenizerError("this model has no chat template (chat_template.jinja, tokenizer_config.json or GGUF "
                                 "metadata); use generate instead of chat")
        return self.template.render(messages, **arguments)

    def encode_chat(self, messages: list[dict[str, Any]], *, control_in_text: bool = False, spoken: Sequence[Spoken] = (),
                    **arguments: Any) -> Rendered:
        """The chat template over a history, and its ids.

        Special tokens that the template writes become their ids. Where a message, a tool or a document has the same text
        in it, that is encoded as the plain text it is, unless ``control_in_text``. What was ``spoken`` keeps the ids it was
        generated with, where the text still has it in its place. Raises TokenizerError.
        """
        marker = None if control_in_text else self._marker([messages, arguments])
        if marker is None:
            text = marked = self.render(messages, **arguments)
        else:
            marked = self.render(_mark(messages, self.control, marker), **_mark(arguments, self.control, marker))
            marked = marked.replace(f"\\u{ord(marker):04x}", marker)             # a template may write JSON in ASCII
            text = marked.replace(marker, "")
        marks = [i for i, character in enumerate(marked) if character == marker] if marker else []
        ids, at = [], 0
        for start, stop, own in [*_in_place(text, spoken), (len(text), len(text), [])]:
            part = text[at:start]
            for i in reversed([mark - n for n, mark in enumerate(marks) if at < mark - n < start]):
                part = part[:i - at] + marker + part[i - at:]
            ids += self._encode_marked(part, marker) + list(own)
            at = stop
        return Rendered(text, ids)

    def _encode_marked(self, text: str, marker: str | None) -> list[int]:
        """Ids of a text in which broken special tokens are text."""
        if marker is None or marker not in text:
            return self.encode(text)
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, sorted(self.control, key=len, reverse=True))) + ")", text):
            # NOTE: a tokenizer that treats the beginning of a text in its own way (SentencePiece) does so at each piece.
            ids += [self.control[piece]] if piece in self.control else self._encode_plain(piece.replace(marker, ""))
        return ids

    def _marker(self, values: Any) -> str | None:
        """A character that no text in values has, to break special tokens with; None when there are none to break."""
        texts = "\0".join(_texts(values))
        if not any(token in texts for token in self.control):
            return None
        return next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in texts)  # for private use

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are text like any other."""
        with self._lock:  # the switch is the library's, for all who use this tokenizer
            self.backend.encode_special_tokens = True
            try:
                return self.encode(text)
            finally:
                self.backend.encode_special_tokens = False

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for ids that come one by one."""
        return TextStream(self, skip_special_tokens)


def _texts(values: Any) -> Iterator[str]:
    """All strings within dicts and lists, keys included."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict):
        for item in values.items():
            yield from _texts(item)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _texts(value)


def _mark(values: Any, control: Iterable[str], marker: str) -> Any:
    """A copy in which each control token has a marker after its first character: it is none any more."""
    if isinstance(values, str):
        for token in control:
            values = values.replace(token, token[0] + marker + token[1:])
        return values
    if isinstance(values, dict):
        return {_mark(key, control, marker): _mark(value, control, marker) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_mark(value, control, marker) for value in values]
    return values


class TextStream:
    """Text of ids as they arrive, never half a character: ``"".join(pushes) + flush() == decode(all ids)``.

    NOTE: a decoder with byte fallback (Llama 2) takes a whole run of bytes for broken when its end is; what was handed out
    of such a run before it broke cannot be taken back.
    """

    _WINDOW = 24

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []   # the last few ids, enough context to decode the next
        self._shown = 0             # characters of their text already handed out

    def push(self, token: int) -> str:
        """The text that this id completes, possibly empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        # An unfinished character decodes to U+FFFD at the end, one or (with byte fallback) one a byte of the whole run of
        # bytes; the next id may complete it.
        done = len(text.rstrip("\ufffd"))
        new, self._shown = text[self._shown:done], max(self._shown, done)
        if len(self._ids) > self._WINDOW and done == len(text):
            # Keep a context that reads alone as it does here: it has something visible (some decoders treat that specially)
            # and does not begin inside a character.
            for keep in range(4, 13):
                context = self._decode(self._ids[-keep:])
                if context and text.endswith(context):
                    self._ids, self._shown = self._ids[-keep:], len(context)
                    break
        return new

    def flush(self) -> str:
        """What is left: U+FFFD when the ids ended inside a character."""
        text = self._decode(self._ids)
        new, self._shown = text[self._shown:], len(text)
        return new


class StopText:
    """Cuts a stream of text at the first stop string, wherever the pieces' borders are.

    ``"".join(pushes) + flush()`` is the text up to the stop string, which ``found`` then names. What could still become one
    is held back.
    """

    def __init__(self, stops: Sequence[str]):
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stop strings are {stops!r}; each must be a text, and not empty")
        self._stops, self._held = tuple(stops), ""
        self.found = ""

    def push(self, text: str) -> str:
        """The part of the text that is certain."""
        self._held += text
        ends = {at: stop for stop in reversed(self._stops) if (at := self._held.find(stop)) >= 0}
        if ends:
            at = min(ends)
            self.found, text, self._held = ends[at], self._held[:at], ""
            return text
        held = max((n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
        cut = len(self._held) - held
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """What was held back, when no more comes."""
        text, self._held = self._held, ""
        return text


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
    if isinstance(source, str):
        source = {"default": source}
    elif isinstance(source, list):  # several, by name
        source = {template["name"]: template["template"] for template in source}
    source = source or {}
    if (folder / "chat_template.jinja").is_file():
        source["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        source[path.stem] = path.read_text(encoding="utf-8")
    return Tokenizer(backend, ChatTemplate(source, special) if source else None, stop_ids)
