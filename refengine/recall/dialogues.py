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

from refengine.recall.words import Values


class Topic(NamedTuple):
    """Something that can be said of a key {k} with a value {v}. A key "name" is a made-up person."""

    value: str
    keys: tuple[str, ...]
    says: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    untold: str


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key.strip() for key in text.split(","))


TOPICS = (
    Topic("name", ("",), ("My name is {v}.", "I am {v}.", "I am called {v}.", "Call me {v}.", "You can call me {v}."),
          ("What is my name?", "Who am I?", "What am I called?", "Do you know my name?", "Say my name."),
          "Your name is {v}.", "your name"),
    Topic("name", _keys("dog,cat,horse,rabbit,parrot,sister,brother,mother,father,son,daughter,boss,teacher,friend,neighbour,doctor,"
                        "boat,robot,street,town,school,team,ship,village,wife,husband,cousin,uncle,aunt,band,bird,goldfish"),
          ("My {k} is called {v}.", "The name of my {k} is {v}.", "I have a {k} called {v}.", "My {k}'s name is {v}.",
           "I have a {k}. It is called {v}."),
          ("What is my {k} called?", "What is the name of my {k}?", "What is my {k}'s name?", "Do you remember the name of my {k}?",
           "Tell me the name of my {k}.", "What do I call my {k}?"),
          "Your {k} is called {v}.", "the name of your {k}"),
    Topic("number", _keys("door,gate,safe,garage,bike,locker,alarm,suitcase,phone,cellar,office,shed,printer,lift,vault,archive"),
          ("The code for the {k} is {v}.", "The code of the {k} is {v}.", "The {k} code is {v}.", "The {k} opens with {v}."),
          ("What is the code for the {k}?", "What is the code of the {k}?", "What is the {k} code?", "How do I open the {k}?",
           "Tell me the code for the {k}.", "Do you remember the code for the {k}?"),
          "The code for the {k} is {v}.", "the code for the {k}"),
    Topic("number", _keys("room,bus,flight,seat,order,account,ticket,house,phone,train,table,gate"),
          ("My {k} number is {v}.", "The number of my {k} is {v}.", "I have {k} number {v}."),
          ("What is my {k} number?", "What is the number of my {k}?", "Which {k} number do I have?", "Tell me my {k} number."),
          "Your {k} number is {v}.", "your {k} number"),
    Topic("place", ("",), ("I live in {v}.", "My home is in {v}.", "I moved to {v}."),
          ("Where do I live?", "Where is my home?", "Which town do I live in?", "In which place do I live?"),
          "You live in {v}.", "where you live"),
    Topic("place", ("",), ("I work in {v}.", "My office is in {v}.", "My job is in {v}."),
          ("Where do I work?", "Where is my office?", "Where is my job?"), "You work in {v}.", "where you work"),
    Topic("place", ("",), ("I was born in {v}.", "I come from {v}.", "I am from {v}."),
          ("Where was I born?", "Where do I come from?", "Where am I from?"), "You come from {v}.", "where you come from"),
    Topic("colour", _keys("car,coat,house,bike,door,hat,bag,kitchen,sofa,umbrella,boat,scarf"),
          ("My {k} is {v}.", "The colour of my {k} is {v}.", "I have a {v} {k}.", "I painted my {k} {v}."),
          ("What colour is my {k}?", "What is the colour of my {k}?", "Which colour does my {k} have?"),
          "Your {k} is {v}.", "the colour of your {k}"),
    *(Topic(kind, (kind,), ("My favourite {k} is {v}.", "The {k} I like best is {v}.", "I like {v} best of any {k}."),
            ("What is my favourite {k}?", "Which {k} do I like best?", "Do you know my favourite {k}?"),
            "Your favourite {k} is {v}.", "your favourite {k}") for kind in ("colour", "food", "drink", "animal", "hobby")),
    Topic("age", ("",), ("I am {v} years old.", "My age is {v}.", "I turned {v} this year."),
          ("How old am I?", "What is my age?", "Do you know how old I am?"), "You are {v} years old.", "how old you are"),
    Topic("time", _keys("train,bus,meeting,flight,party,dinner,film,concert,class,lunch,call,interview"),
          ("My {k} is at {v}.", "The {k} is at {v}.", "The {k} starts at {v}.", "I have a {k} at {v}."),
          ("When is my {k}?", "When is the {k}?", "At what time is the {k}?", "What time is my {k}?", "When does the {k} start?"),
          "The {k} is at {v}.", "when the {k} is"),
    Topic("day", _keys("exam,holiday,birthday,visit,trip,match,wedding,appointment,market"),
          ("My {k} is on {v}.", "The {k} is on {v}.", "I have a {k} on {v}."),
          ("On which day is my {k}?", "Which day is the {k}?", "What day is my {k}?", "On what day is the {k}?"),
          "The {k} is on {v}.", "the day of the {k}"),
    Topic("place", ("name",), ("My friend {k} lives in {v}.", "You should know that {k} lives in {v}.", "A certain {k} lives in {v}."),
          ("Where does {k} live?", "In which place does {k} live?", "Do you know where {k} lives?"),
          "I know that {k} lives in {v}.", "where {k} lives"),
    Topic("food", ("name",), ("My friend {k} likes {v}.", "You should know that {k} likes {v}.", "I think {k} likes {v}."),
          ("What does {k} like?", "Do you know what {k} likes?", "Tell me what {k} likes."),
          "I know that {k} likes {v}.", "what {k} likes"),
    Topic("item", _keys("key,wallet,phone,passport,glasses,book,laptop,hammer,map,letter,ring,ticket"),
          ("I put the {v} beside my {k}.", "My {k} is beside the {v}.", "The {k} is beside the {v}."),
          ("Where is my {k}?", "Where is the {k}?", "Do you know where my {k} is?"),
          "The {k} is beside the {v}.", "where the {k} is"),
)
_LIST = Topic("item", _keys("shopping,packing,wish,tool,party,garden,kitchen,holiday"),
              ("On my {k} list: {v}.", "My {k} list: {v}.", "Put {v} on my {k} list.", "I need a {k} list with {v}.", "My {k} list has {v}."),
              ("What is on my {k} list?", "Read me my {k} list.", "Tell me my {k} list.", "What does my {k} list say?",
               "Show me the {k} list."), "Your {k} list has {v}.", "your {k} list")
_LIST_ADDS = ("Add {v} to my {k} list.", "Put {v} on my {k} list too.", "Add {v} to the {k} list, please.")
_CORRECTIONS = ("No, it is {v}.", "Sorry, it is {v}.", "No, I meant {v}.", "Wait, it is {v}, not {old}.", "Not {old}, {v}.",
                "I was wrong, it is {v}.", "No, {v}.", "Sorry, I meant {v}, not {old}.")
_CORRECTED = ("No, {said}", "Sorry, {said}", "Actually, {said}", "Correction: {said}", "I was wrong, {said}")
_SYSTEMS = ("You are a helpful assistant.", "You are a friendly assistant with a good memory.", "Answer in one sentence.",
            "You remember what the user says.", "Be brief.")
_THINK = "Think before you answer."

_HELLO = "Hello! Tell me something, and ask me for it later."
_UNKNOWN = "I do not know that. I only know what you tell me."
_SEE = "I see. Tell me more, or ask me for something that you said."
SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning.", "Good evening!", "Hello, computer."), _HELLO),
    (("How are you?", "How are you today?", "How do you do?", "Are you well?"), "I am fine, thank you. What can I remember for you?"),
    (("Thanks", "Thank you.", "Thanks a lot!", "Thank you very much.", "Great, thanks."), "You are welcome."),
    (("Who are you?", "What are you?", "What is your name?", "Are you a robot?", "Tell me about yourself."),
     "I am a very small language model. I remember what you tell me in this conversation."),
    (("What can you do?", "How does this work?", "Help", "Help me.", "What can I say?", "What can you remember?"),
     "Tell me facts, like names, numbers, places or lists. Correct them when they change. Then ask me for them."),
    (("Bye", "Goodbye.", "Good night.", "See you!"), "Goodbye! It was nice to talk to you."),
    (("Good.", "Nice.", "Very good!", "Right.", "Perfect.", "That is right.", "Yes.", "OK", "Exactly.", "Well done."),
     "I am glad to hear it."),
    (("That is wrong.", "No.", "Wrong!", "No, that is not right."), "I am sorry. Please tell me what is right."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     "What does a cache say when it forgets? Nothing. It does not remember that you asked."),
    (("Tell me a story.", "Once upon a time", "Please tell me a short story.", "Write a story."),
     "Once upon a time there was a sailor who lived in a lighthouse. Every evening he wrote down what he had seen, and every "
     "morning he read it again. So he never had to look at the same sea twice."),
    (("It is raining today.", "I am tired.", "The weather is nice.", "It was a long day.", "I had a good breakfast.", "I like music.",
      "The sun is shining.", "We went for a walk.", "I am at home now.", "It is late.", "I slept well.", "I am hungry.",
      "The train was late again.", "There is snow on the roof.", "I read a good book."), _SEE),
    (("What is the capital of {p}?", "Who wrote {p}?", "How far is {p}?", "What is the meaning of life?", "What time is it?",
      "What is two plus two?", "How is the weather in {p}?", "Who is the king of {p}?", "What is a cache?", "Why is the sky blue?",
      "When was {p} built?", "Can you explain {p} to me?", "What happened in {p}?", "And a prefix?", "How many people live in {p}?"),
     _UNKNOWN),
)


class Turn(NamedTuple):
    """What the user says and what is right to answer. Of a question, ``kind`` is "fact", "correction", "list" or "untold"."""

    user: str
    answer: str
    thought: str = ""                 # what to think first, of a question
    kind: str = ""
    distance: int = 0                 # how many turns ago what is asked for was said, or said last
    recall: tuple[str, ...] = ()      # what the answer has, in this order
    superseded: tuple[str, ...] = ()  # what it does not have


class Dialogue(NamedTuple):
    system: str                       # "" is none
    turns: tuple[Turn, ...]

    @property
    def thinks(self) -> bool:
        """Whether the system prompt asks for thoughts before the answers to questions."""
        return _THINK in self.system


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
        return rng.choice(self.topic.says).format(k=self.key, v=", ".join(self.values) if bare else _enumerate(self.values))


def dialogue(rng: random.Random, turns: int, *, held_out: bool = False) -> Dialogue:
    """A conversation of so many turns, of which the last asks for something said. Raises ValueError for less than two turns."""
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
            return {"none": "", "plain": self.rng.choice(_SYSTEMS), "thinks": _THINK}[kind]
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
        known = self.it if self.it and rng.random() < 0.8 else rng.choice([known for known in self.known if known.kind != "list"])
        old, new = known.values[0], self.values.draw(known.topic.value)
        known.first, known.superseded = known.first or known.clause, (*known.superseded, old)
        known.values, known.turn, known.kind = [new], self.turn, "correction"
        if known is self.it and rng.random() < 0.7:
            text = rng.choice(_CORRECTIONS).format(v=new, old=old)
        else:
            text = rng.choice(_CORRECTED).format(said=_lower(known.say(rng)))
        return Turn(text, f"Corrected: {_lower(known.clause)}")

    def _list(self) -> Turn:
        free = [key for key in _LIST.keys if (_LIST, key) not in self.used]
        if not free:
            return self._talk()
        key = self.rng.choice(free)
        self.used.add((_LIST, key))
        known = _Known(_LIST, key, [self.values.draw("item") for _ in range(self.rng.randint(2, 4))], self.turn, "list")
        self.known.append(known)
        return Turn(known.say(self.rng), f"Noted: {_lower(known.clause)}")

    def _add(self) -> Turn:
        known = self.rng.choice([known for known in self.known if known.kind == "list" and len(known.values) < 6])
        item = self.values.draw("item")
        known.values, known.turn = [*known.values, item], self.turn
        return Turn(self.rng.choice(_LIST_ADDS).format(k=known.key, v=item), f"Noted: {_lower(known.clause)}")

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
        words = " ".join(self.values.draw(self.rng.choice(("name", "item", "number"))) for _ in range(self.rng.randint(1, 3)))
        return Turn(self.rng.choice(("Say {v}.", "Repeat: {v}.", "Say this again: {v}.")).format(v=words), f"{words}.")
