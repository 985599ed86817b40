"""Dialogues from a seed, with the answers that are right: what is said in one turn is asked for in a later one. Floor 7.

The same generator writes what the built-in model `small` was trained on and what a model is measured on; the values
(names, numbers, words) are disjoint. Not a test of language: the sentences are few, and the answers have fixed forms.
"""
from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from refengine.recall.phrases import CORRECTED, CORRECTIONS, LIST, LIST_ADDS, SMALL_TALK, SYSTEMS, THINK, TOPICS, Topic
from refengine.recall.words import Values


class Turn(NamedTuple):
    """What the user says and what is right to answer."""

    user: str
    answer: str
    thought: str = ""                 # what to think first, of a question
    kind: str = ""                    # of a question: "fact", "correction", "list" or "untold"
    distance: int = 0                 # how many turns ago what is asked for was said, or said last
    recall: tuple[str, ...] = ()      # what the answer has, in this order
    superseded: tuple[str, ...] = ()  # what it does not have


class Dialogue(NamedTuple):
    system: str                       # "" is none
    turns: tuple[Turn, ...]

    @property
    def thinks(self) -> bool:
        """Whether the system prompt asks for thoughts before the answers to questions."""
        return THINK in self.system


@dataclass
class _Known:
    """What has been said about one thing."""

    topic: Topic
    key: str
    values: list[str]                 # one, or a list's items
    turn: int                         # when it was said last; -1 in the system prompt
    kind: str = "fact"
    first: str = ""                   # the clause before it was corrected
    superseded: tuple[str, ...] = ()

    @property
    def clause(self) -> str:
        return self.topic.answer.format(k=self.key, v=_enumerate(self.values))

    def say(self, rng: random.Random) -> str:
        bare = self.kind == "list" and rng.random() < 0.4
        return rng.choice(self.topic.says).format(k=self.key,
                                                  v=", ".join(self.values) if bare else _enumerate(self.values))


def dialogue(rng: random.Random, turns: int, *, held_out: bool = False) -> Dialogue:
    """A conversation of so many turns, of which the last asks for something said. Raises ValueError for less than two."""
    if turns < 2:
        raise ValueError(f"{turns} turns; at least 2 are needed, to say something and to ask for it")
    casual = rng.random() < 0.15
    values = Values(rng, held_out=held_out, lower=casual)
    system, written = _Writer(rng, values).write(turns)
    return Dialogue(system, tuple(turn._replace(user=_finish(turn.user, casual)) for turn in written))


def _finish(text: str, casual: bool) -> str:
    """With the article that a vowel asks for; if casual, as people type who are in a hurry."""
    text = re.sub(r"\ba (?=[aeiou])", "an ", text)
    return text.lower().replace("'", "").rstrip(".!?") if casual else text


def _enumerate(values: list[str]) -> str:
    return ", ".join(values[:-1]) + " and " * (len(values) > 1) + values[-1]


def _lower(text: str) -> str:
    """A sentence within another one."""
    return text if text.startswith("I ") else text[0].lower() + text[1:]


class _Writer:
    """One dialogue while it is written."""

    def __init__(self, rng: random.Random, values: Values):
        self.rng, self.values = rng, values
        self.known: list[_Known] = []
        self.used: set[tuple[Topic, str]] = set()
        self.turn = -1
        self.it: _Known | None = None        # the one fact of the turn before, which a correction can mean by "it"

    def write(self, turns: int) -> tuple[str, list[Turn]]:
        system, written = self._system(), []
        for self.turn in range(turns):
            if self.turn == turns - 1:
                act = self._ask
            elif self.turn == turns - 2 and not self.known:
                act = self.rng.choice((self._say, self._list))    # so that there is something to ask for
            else:
                act = self._any()
            before, turn = self.it, act()
            self.it = None if self.it is before else self.it
            written.append(turn)
        return system, written

    def _any(self) -> Callable[[], Turn]:
        acts = {self._say: 5.0, self._list: 2.0, self._talk: 2.0, self._untold: 1.0, self._repeat: 0.5}
        if self.known:
            acts[self._ask] = 3.0
        if any(known.kind != "list" for known in self.known):
            acts[self._correct] = 4.0
        if any(known.kind == "list" and len(known.values) < 6 for known in self.known):
            acts[self._add] = 2.0
        return self.rng.choices(list(acts), list(acts.values()))[0]

    def _system(self) -> str:
        kind = self.rng.choices(("none", "plain", "thinks", "facts"), (60, 20, 10, 10))[0]
        if kind != "facts":
            return {"none": "", "plain": self.rng.choice(SYSTEMS), "thinks": THINK}[kind]
        return "What you know: " + " ".join(self._learn().clause for _ in range(self.rng.choice((1, 1, 2))))

    def _unused(self) -> tuple[Topic, str]:
        """Something of which nothing was said yet."""
        while True:
            topic = self.rng.choice(TOPICS)
            key = self.rng.choice(topic.keys)
            key = self.values.draw("name") if key == "name" else key
            if (topic, key) not in self.used:
                return topic, key

    def _learn(self) -> _Known:
        topic, key = self._unused()
        self.used.add((topic, key))
        self.known.append(_Known(topic, key, [self.values.draw(topic.value)], self.turn))
        return self.known[-1]

    def _say(self) -> Turn:
        rng, known = self.rng, self._learn()
        text, answer, self.it = known.say(rng), _lower(known.clause), known
        if rng.random() < 0.25:
            other = self._learn()
            more = other.say(rng)
            text = f"{text} {more}" if rng.random() < 0.6 else f"{text.rstrip('.')}, and {_lower(more)}"
            answer, self.it = f"{answer} And {_lower(other.clause)}", None
        elif rng.random() < 0.1:
            text = rng.choice(("Remember this: ", "By the way, ", "Please remember: ", "You know, ")) + _lower(text)
        return Turn(text, f"Noted: {answer}")

    def _correct(self) -> Turn:
        """Another value: of what was just said, which may be "it", or of any fact in full."""
        rng = self.rng
        facts = [known for known in self.known if known.kind != "list"]
        known = self.it if self.it and rng.random() < 0.8 else rng.choice(facts)
        old, new = known.values[0], self.values.draw(known.topic.value)
        known.first, known.superseded = known.first or known.clause, (*known.superseded, old)
        known.values, known.turn, known.kind = [new], self.turn, "correction"
        if known is self.it and rng.random() < 0.7:
            text = rng.choice(CORRECTIONS).format(v=new, old=old)
        else:
            text = rng.choice(CORRECTED).format(said=_lower(known.say(rng)))
        return Turn(text, f"Corrected: {_lower(known.clause)}")

    def _list(self) -> Turn:
        free = [key for key in LIST.keys if (LIST, key) not in self.used]
        if not free:
            return self._talk()
        key = self.rng.choice(free)
        self.used.add((LIST, key))
        known = _Known(LIST, key, [self.values.draw("item") for _ in range(self.rng.randint(2, 4))], self.turn, "list")
        self.known.append(known)
        return Turn(known.say(self.rng), f"Noted: {_lower(known.clause)}")

    def _add(self) -> Turn:
        known = self.rng.choice([known for known in self.known if known.kind == "list" and len(known.values) < 6])
        item = self.values.draw("item")
        known.values, known.turn = [*known.values, item], self.turn
        return Turn(self.rng.choice(LIST_ADDS).format(k=known.key, v=item), f"Noted: {_lower(known.clause)}")

    def _ask(self) -> Turn:
        known = self.rng.choice(self.known)
        thought = f"This was said: {_lower(known.first or known.clause)}"
        if known.superseded:
            thought += f" Then it was corrected: {_lower(known.clause)}"
        return Turn(self.rng.choice(known.topic.asks).format(k=known.key), known.clause, thought, known.kind,
                    self.turn - known.turn, tuple(known.values), known.superseded)

    def _untold(self) -> Turn:
        topic, key = self._unused()
        return Turn(self.rng.choice(topic.asks).format(k=key), f"You have not told me {topic.untold.format(k=key)}.",
                    "This was not said.", "untold")

    def _talk(self) -> Turn:
        forms, answer = self.rng.choice(SMALL_TALK)
        return Turn(self.rng.choice(forms).format(p=self.values.draw("place")), answer)

    def _repeat(self) -> Turn:
        count = self.rng.randint(1, 3)
        words = " ".join(self.values.draw(self.rng.choice(("name", "item", "number"))) for _ in range(count))
        return Turn(self.rng.choice(("Say {v}.", "Repeat: {v}.", "Say this again: {v}.")).format(v=words), f"{words}.")
