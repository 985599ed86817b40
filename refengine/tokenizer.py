"""Text to ids and back: the `tokenizers` library, a chat template, stop ids. Floor 2."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from refengine.errors import TokenizerError
from refengine.prefix import common_start
from refengine.template import ChatTemplate, plain_messages
from refengine.text_stream import TextStream

if TYPE_CHECKING:
    import tokenizers


class Rendered(NamedTuple):
    """A conversation as the model is given it."""

    text: str
    ids: list[int]


class Spoken(NamedTuple):
    """The generations of a conversation: its text up to the end of the last one, and (start, stop, ids) of each in it."""

    text: str = ""
    spans: Sequence[tuple[int, int, Sequence[int]]] = ()

    def within(self, text: str) -> list[tuple[int, int, Sequence[int]]]:
        """Those that another text has where they were, after all that was before them."""
        same = common_start(self.text, text)
        return [span for span in self.spans if span[1] <= same]

    def followed_by(self, prompt: str, answer: str, ids: Sequence[int]) -> Spoken:
        """With a generation, special tokens included, after its prompt. What that has no more is forgotten."""
        return Spoken(prompt + answer, [*self.within(prompt), *([(len(prompt), len(prompt + answer), ids)] if answer else [])])


_WORD = re.compile(r"[\w\s\u2581]*")  # an added token that is only this is a word or blanks, and controls nothing


class Tokenizer:
    """A model's text side. ``stop_ids``: the ids that end a generation.

    ``control``: text -> id of the control tokens: the special ones, and what else was added to the vocabulary and is no
    word (<think>, <tool_call>, ...). ``special``: of these, the special ones, which a decoded text leaves out.
    ``source``: the file it comes from, for errors.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None, stop_ids: Sequence[int],
                 source: str = "the tokenizer"):
        self.backend, self.template, self.stop_ids, self.source = backend, template, tuple(stop_ids), source
        backend.no_truncation()  # some files ask for either
        backend.no_padding()
        added = {id: token for id, token in backend.get_added_tokens_decoder().items() if token.content}
        self.special = {token.content: id for id, token in added.items() if token.special}
        self.control = self.special | {token.content: id for id, token in added.items() if not _WORD.fullmatch(token.content)}
        longest_first = sorted(added.values(), key=lambda token: -len(token.content))
        self._added = re.compile("(" + ("|".join(r"\s*" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip
                                                 for token in longest_first) or "(?!)") + ")")
        self._plain, self._plain_within = _without_added(backend)

    def check_fits(self, vocab: int, model: str) -> None:
        """Raise TokenizerError unless a model of so many ids knows all that this tokenizer can give, and the tokenizer all ids
        that end an answer. A model may have more ids than its tokenizer: vocabularies are padded."""
        highest = max([*self.backend.get_vocab().values(), *self.backend.encode("").ids], default=-1)
        what = "they belong to different models; give the model its own tokenizer"
        if highest >= vocab:
            raise TokenizerError(f"{self.source} can give id {highest}, but {model} has a vocabulary of {vocab}: {what}")
        for id in self.stop_ids:
            if id >= vocab or self.backend.id_to_token(id) is None:
                has = f"{model} has a vocabulary of {vocab}" if id >= vocab else f"{self.source} has no such id (its last is {highest})"
                raise TokenizerError(f"{model} ends an answer with id {id}, but {has}: {what}")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text, with special tokens where it names them. A chat template writes its own, so none are put
        around it unless asked for, and a beginning that it has already is not put there twice. Raises TokenizerError."""
        ids = _ids(self.backend, text, add_special_tokens)
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
        return self._template().render(messages, **arguments)

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise TokenizerError("this model has no chat template (chat_template.jinja, tokenizer_config.json or GGUF "
                                 "metadata); use generate instead of chat")
        return self.template

    def encode_chat(self, messages: list[dict[str, Any]], *, control_in_text: bool = False, spoken: Spoken = Spoken(),
                    **arguments: Any) -> Rendered:
        """The chat template over a history, and its ids.

        Control tokens that the template writes become their ids. Where a message, a tool or a document has the same text
        in it, that is encoded as the plain text it is, unless ``control_in_text``; but what an assistant message says and
        thinks is the model's own, and may have those that are not special: its think blocks and tool calls. What was
        ``spoken`` keeps the ids it was generated with, where the text still has it in its place. Raises TokenizerError.
        """
        messages = plain_messages(messages)                                     # JSON in them is read: it may hide some
        try:
            hidden = {} if control_in_text else self._stand_ins(messages, arguments)
            if hidden:
                messages, arguments = self._changed(messages, arguments, partial(_hide, hidden=hidden))
        except RecursionError:
            raise TokenizerError("what a chat template is given is nested too deeply") from None
        text, marked = self._template().render_marked(messages, {other: first for first, other in hidden.items()}, arguments)
        ids, at, real = [], 0, set(self.control.values())
        for start, stop, own in spoken.within(text):
            there = iter(self.encode(marked[start:stop]))
            if all(id in there for id in own if id in real):                     # control tokens in it are so in the text too
                ids += self._encode_part(marked, at, start, hidden) + list(own)
                at = stop
        return Rendered(text, ids + self._encode_part(marked, at, len(marked), hidden))

    def _encode_part(self, marked: str, start: int, stop: int, hidden: dict[str, str]) -> list[int]:
        """Ids of a part of a text in which the control tokens with a stand-in are text. What lies between two of the added
        tokens is encoded as text as a whole if there is such a one in it; the rest as ever, so that it stays as it was."""
        if not hidden and not start:
            return self.encode(marked[:stop])
        ids, rest = [], ""
        for number, piece in enumerate(self._added.split(marked[start:stop])):
            if start and number == 0 or any(other in piece for other in hidden.values()):
                ids += self.encode(rest) + self.encode_plain(_shown(piece, hidden), within=bool(start or number))
                rest = ""
            else:
                rest += piece
        return ids + self.encode(rest)

    def encode_plain(self, text: str, *, within: bool = False) -> list[int]:
        """Ids of a text in which added tokens are text like any other. within: it does not begin a text, but follows an
        added token. Raises TokenizerError when the vocabulary leaves no other way to write one than as itself."""
        ids = _ids(self._plain_within if within else self._plain, text)
        if found := set(ids) & set(self.control.values()):
            raise TokenizerError(f"{self.decode(sorted(found), skip_special_tokens=False)!r} in a text cannot be encoded as text "
                                 "by this tokenizer; control_in_text=True lets messages have control tokens")
        return ids

    def _changed(self, messages: list[dict[str, Any]], arguments: dict[str, Any],
                 change: Callable[[str, dict[str, int]], str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """A copy of what a template is given, with change(text, control tokens that it may not have) for each text."""
        def tokens(message: dict[str, Any], key: str) -> dict[str, int]:
            return self.special if message["role"] == "assistant" and key != "tool_calls" else self.control

        return ([{name: there for key, value in message.items()
                  for name, there in _mapped({key: value}, partial(change, tokens=tokens(message, key))).items()}
                 for message in messages], _mapped(arguments, partial(change, tokens=self.control)))

    def _stand_ins(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> dict[str, str]:
        """For each first character of the control tokens that texts may not have and have, another to hide it behind: one
        for private use, that occurs nowhere. It is one for one, as templates count and cut characters."""
        texts, firsts = [], set()

        def look(text: str, tokens: dict[str, int]) -> str:
            texts.append(text)
            firsts.update(token[0] for token in tokens if token in text)
            return text

        self._changed(messages, arguments, look)
        everything = "\0".join([*texts, *self.control, *(self.template.sources.values() if self.template else ())])
        free = (chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in everything and f"\\u{c:04x}" not in everything)
        hidden = dict(zip(sorted(firsts), free))
        if len(hidden) < len(firsts):
            raise TokenizerError("control tokens in a message cannot be told from the template's: there are all characters "
                                 "for private use in it too")
        return hidden

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for ids that come one by one."""
        return TextStream(partial(self.decode, skip_special_tokens=skip_special_tokens))


def _ids(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start:error.end]
        raise TokenizerError(f"a text has half a character in it, a lone surrogate: {half!r}") from None
    return backend.encode(text, add_special_tokens=add_special_tokens).ids


def _mapped(values: Any, change: Callable[[str], str]) -> Any:
    """A copy of dicts and lists with all strings in them changed, keys included."""
    if isinstance(values, str):
        return change(values)
    if isinstance(values, dict):
        return {_mapped(key, change): _mapped(value, change) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_mapped(value, change) for value in values]
    return values


def _hide(text: str, tokens: Iterable[str], hidden: dict[str, str]) -> str:
    """Each of the tokens begins with its stand-in: it is none any more."""
    for token in tokens:
        if token[0] in hidden:
            text = text.replace(token, hidden[token[0]] + token[1:])
    return text


def _shown(marked: str, hidden: dict[str, str]) -> str:
    return marked.translate({ord(other): first for first, other in hidden.items()})


def _without_added(backend: tokenizers.Tokenizer) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """The same tokenizer without its added tokens, for the beginning of a text and for within one. They are two only where
    a text's first word alone gets a space before it (Metaspace, as in SentencePiece). The model is shared, not copied."""
    import tokenizers

    def over(pre_tokenizer: Any) -> tokenizers.Tokenizer:
        plain = tokenizers.Tokenizer(backend.model)
        plain.normalizer, plain.pre_tokenizer = backend.normalizer, pre_tokenizer
        return plain

    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    empty.pre_tokenizer = backend.pre_tokenizer
    first, never = '"prepend_scheme":"first"', '"prepend_scheme":"never"'
    stated = empty.to_str()
    plain = over(backend.pre_tokenizer)
    return plain, over(tokenizers.Tokenizer.from_str(stated.replace(first, never)).pre_tokenizer) if first in stated else plain


def load_folder_tokenizer(folder: Path, stop_ids: Sequence[int]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    from refengine.config_reader import read_json

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
    _check_added(backend, settings, path, folder / "tokenizer_config.json")
    source = _templates(settings.get("chat_template"), folder / "tokenizer_config.json")
    files = [(folder / "chat_template.jinja", "default"),
             *((path, path.stem) for path in sorted((folder / "additional_chat_templates").glob("*.jinja")))]
    for path, name in files:
        if path.is_file():
            try:
                source[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{path}: {error}") from None
    return Tokenizer(backend, ChatTemplate(source, special) if source else None, stop_ids, str(folder / "tokenizer.json"))


def _check_added(backend: tokenizers.Tokenizer, settings: dict[str, Any], path: Path, other: Path) -> None:
    """Raise when the two files have different tokens for one id. One that only the settings have is not told for certain."""
    stated = settings.get("added_tokens_decoder")
    for id, token in stated.items() if isinstance(stated, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if id.isdecimal() and len(id) < 10 and isinstance(content, str) and backend.id_to_token(int(id)) not in (None, content):
            raise TokenizerError(f"{path} has {backend.id_to_token(int(id))!r} as id {id}, and {other} has {content!r}: "
                                 "they belong to different models")


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
