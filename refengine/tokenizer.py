"""Text to ids and back: the `tokenizers` library, a chat template, stop ids and strings, text in whole characters. Floor 2."""
from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from refengine.errors import TokenizerError
from refengine.template import ChatTemplate, plain_messages

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
        backend.no_truncation()  # some files ask for either
        backend.no_padding()
        special = [(id, token) for id, token in backend.get_added_tokens_decoder().items() if token.special and token.content]
        self.control = {token.content: id for id, token in special}
        longest_first = sorted((token for _, token in special), key=lambda token: -len(token.content))
        self._special = re.compile("(" + "|".join(r"\s*" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip
                                                  for token in longest_first) + ")")
        self._lock = threading.RLock()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text, with special tokens where it names them. A chat template writes its own, so none are put
        around it unless asked for, and a beginning that it has already is not put there twice. Raises TokenizerError."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start:error.end]
            raise TokenizerError(f"a text has half a character in it, a lone surrogate: {half!r}") from None
        with self._lock:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens:
            plain = self.encode(text)
            for n in range(1, len(ids) - len(plain) + 1):
                if ids[n:n + len(plain)] == plain and ids[:n] == plain[:n]:
                    return ids[n:]
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
        messages = plain_messages(messages)                                     # JSON in them is read: it may hide some
        try:
            hidden = {} if control_in_text else self._stand_ins([messages, arguments])
            if hidden:
                messages, arguments = (_hide(value, self.control, hidden) for value in (messages, arguments))
        except RecursionError:
            raise TokenizerError("what a chat template is given is nested too deeply") from None
        marked = self.render(messages, **arguments)
        for other in hidden.values():
            marked = marked.replace(_in_ascii(other), other)                    # a template may write JSON in ASCII
        text = _shown(marked, hidden)
        ids, at, real = [], 0, set(self.control.values())
        for start, stop, own in _in_place(text, spoken):                        # kept if the same special tokens are real
            if [id for id in self.encode(marked[start:stop]) if id in real] == [id for id in own if id in real]:
                ids += self._encode_hidden(marked[at:start], hidden) + list(own)
                at = stop
        return Rendered(text, ids + self._encode_hidden(marked[at:], hidden))

    def _encode_hidden(self, marked: str, hidden: dict[str, str]) -> list[int]:
        """Ids of a text in which the special tokens with a stand-in are text. What lies between two of the others is
        encoded as text as a whole if there is such a token in it; the rest as ever, so that it stays as it was."""
        if not hidden:
            return self.encode(marked)
        ids, rest = [], ""
        for piece in self._special.split(marked):
            if any(other in piece for other in hidden.values()):
                # NOTE: a tokenizer that treats the beginning of a text in its own way (SentencePiece) does so here.
                ids += self.encode(rest) + self._encode_plain(_shown(piece, hidden))
                rest = ""
            else:
                rest += piece
        return ids + self.encode(rest)

    def _stand_ins(self, values: Any) -> dict[str, str]:
        """For each first character of the special tokens that are within values, another to hide it behind: one for
        private use, that occurs nowhere. It is one for one, as templates count and cut characters."""
        texts = "\0".join(_texts([values, self.control, self.template.sources if self.template else {}]))
        given = "\0".join(_texts(values))
        firsts = sorted({token[0] for token in self.control if token in given})
        free = (chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in texts and _in_ascii(chr(c)) not in texts)
        hidden = dict(zip(firsts, free))
        if len(hidden) < len(firsts):
            raise TokenizerError("special tokens in a message cannot be told from the template's: there are all characters "
                                 "for private use in it too")
        return hidden

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


def _hide(values: Any, control: Iterable[str], hidden: dict[str, str]) -> Any:
    """A copy in which each control token begins with its stand-in: it is none any more."""
    if isinstance(values, str):
        for token in control:
            if token[0] in hidden:
                values = values.replace(token, hidden[token[0]] + token[1:])
        return values
    if isinstance(values, dict):
        return {_hide(key, control, hidden): _hide(value, control, hidden) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_hide(value, control, hidden) for value in values]
    return values


def _shown(marked: str, hidden: dict[str, str]) -> str:
    return marked.translate({ord(other): first for first, other in hidden.items()})


def _in_ascii(character: str) -> str:
    """As JSON writes it in ASCII."""
    return f"\\u{ord(character):04x}"


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
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items()}
    special = {key: text for key, text in named.items() if key.endswith("_token") and isinstance(text, str)}
    source = _templates(settings.get("chat_template"), folder / "tokenizer_config.json")
    files = [(folder / "chat_template.jinja", "default"),
             *((path, path.stem) for path in sorted((folder / "additional_chat_templates").glob("*.jinja")))]
    for path, name in files:
        if path.is_file():
            try:
                source[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{path}: {error}") from None
    return Tokenizer(backend, ChatTemplate(source, special) if source else None, stop_ids)


def _templates(value: Any, path: Path) -> dict[str, str]:
    """Templates by name: of one, which is a text, or of a list of {"name", "template"}."""
    named = [{"name": "default", "template": value}] if isinstance(value, str) else [] if value is None else value
    try:
        source = {each["name"]: each["template"] for each in named}
        if all(isinstance(text, str) for item in source.items() for text in item):
            return source
    except (TypeError, KeyError):
        pass
    raise TokenizerError(f"{path}: chat_template is {value!r:.80}, neither a text nor a list of names and templates")
