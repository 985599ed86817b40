"""The measure of recall: play held-out dialogues to a chat and look for what was said in its answers. Floor 7."""
from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from refengine.chat import Chat
from refengine.recall.dialogues import Turn, dialogue

KINDS = ("fact", "correction", "list")


class Answer(NamedTuple):
    """One question of a dialogue and what the model said. ``dialogue`` counts from 0."""

    dialogue: int
    turn: Turn
    text: str
    right: bool


class Recall(NamedTuple):
    """All answers to questions about what was said."""

    answers: tuple[Answer, ...]

    @property
    def accuracy(self) -> float:
        """The share of right answers, 0 to 1."""
        return sum(answer.right for answer in self.answers) / len(self.answers)

    def counts(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(kind, distance) -> (right, asked)."""
        asked = Counter((answer.turn.kind, answer.turn.distance) for answer in self.answers)
        right = Counter((answer.turn.kind, answer.turn.distance) for answer in self.answers if answer.right)
        return {place: (right[place], asked[place]) for place in sorted(asked)}


def is_right(turn: Turn, text: str) -> bool:
    """Whether an answer has all that is asked for, in order, as whole words, and nothing that was corrected. Its thoughts do
    not count, nor does its case."""
    said, at = text.rpartition("</think>")[2], 0
    for value in turn.recall:
        found = as_word(value).search(said, at)
        if not found:
            return False
        at = found.end()
    return not any(as_word(value).search(said) for value in turn.superseded)


def as_word(value: str) -> re.Pattern:
    """Finds a value that is not a part of a longer one: 05 is not in 12:05."""
    return re.compile(rf"(?<![\w:]){re.escape(value)}(?![\w:])", re.IGNORECASE)


def measure(new_chat: Callable[[str], Chat], *, dialogues: int, turns: int = 4, seed: int = 0,
            on_dialogue: Callable[[], object] = lambda: None) -> Recall:
    """Play dialogues whose values no training has shown; the model's own answers are the history of its next one.

    new_chat: system prompt ("" is none) -> a chat without history. It may use one engine for all.
    Raises ValueError when there is nothing to ask, and what the chat raises.
    """
    if dialogues < 1:
        raise ValueError(f"{dialogues} dialogues; at least 1 is needed")
    answers: list[Answer] = []
    for number in range(dialogues):
        answers += _play(new_chat, number, turns, seed)
        on_dialogue()
    return Recall(tuple(answers))


def _play(new_chat: Callable[[str], Chat], number: int, turns: int, seed: int) -> Iterator[Answer]:
    said = dialogue(random.Random(f"recall {seed} {number}"), turns, held_out=True)
    chat = new_chat(said.system)
    for turn in said.turns:
        text = "".join(chat.send(turn.user))
        if turn.kind in KINDS:
            yield Answer(number, turn, text, is_right(turn, text))
