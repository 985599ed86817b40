"""Text that comes piece by piece: ids to whole characters, and the first stop string. Floor 2."""
from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Text of ids as they arrive, never half a character: ``"".join(pushes) + flush() == decode(all ids)``.

    NOTE: a decoder with byte fallback (Llama 2) takes a whole run of bytes for broken when its end is; what was handed out
    of such a run before it broke cannot be taken back.
    """

    _WINDOW = 24

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
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
