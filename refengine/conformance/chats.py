"""Random chats from a seed: what people do to a conversation, as plain data that any engine can replay. Floor 7."""
from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from refengine.chat import Chat
from refengine.sampling import GREEDY, Sampling

KINDS = ("send", "edit", "edit-last", "delete", "regenerate", "system")
_WORDS = """the a of and to in is you that it he was for on are as with his they at be this have from or one had by word but
not what all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than first
water been call who oil its now find long down day did get come made may part cache token page prefix Paris 42 1,024""".split()
_ODD = ("", " ", "\n\n", "漢字", "🙂🙂", "naïve café", "x" * 40, "<think>hm</think>", "\t tab", "1234567890")


@dataclass(frozen=True)
class Step:
    """One thing done to a chat, which ends in an answer.

    kind: "send" text · "edit" user message number ``index``, keep what follows, then send · "edit-last" replaces the last
    user message and drops its answer · "delete" user message ``index`` with its answer, then send · "regenerate" ·
    "system" changes the system prompt, then send. cancel: stop after so many pieces of text (None: let it end).
    """

    kind: str
    text: str
    index: int = 0
    edit: str = ""
    cancel: int | None = None
    sampling: Sampling = GREEDY
    max_tokens: int = 24


def random_steps(rng: random.Random, turns: int, *, long_words: int, max_tokens: int) -> Iterator[Step]:
    """A conversation of so many turns. ``long_words``: words of a long message."""
    for turn in range(turns):
        kind = rng.choices(KINDS, (8, 2, 2, 2, 2, 1))[0] if turn else "send"
        sampling = GREEDY if rng.random() < 0.6 else Sampling(
            temperature=rng.choice((0.3, 0.8, 1.5)), top_k=rng.choice((0, 5, 40)), top_p=rng.choice((1.0, 0.9)),
            min_p=rng.choice((0.0, 0.05)), repetition_penalty=rng.choice((1.0, 1.1)), seed=rng.randrange(2**32))
        yield Step(kind=kind, text=_message(rng, long_words), index=rng.randrange(8), edit=_message(rng, long_words // 2),
                   cancel=rng.randrange(6) if rng.random() < 0.2 else None, sampling=sampling,
                   max_tokens=rng.randint(1, max_tokens))


def _message(rng: random.Random, long_words: int) -> str:
    if rng.random() < 0.1:
        return rng.choice(_ODD)
    count = rng.randint(long_words // 2, long_words) if rng.random() < 0.2 else rng.randint(1, 8)
    return " ".join(rng.choices(_WORDS, k=count))


def apply(step: Step, chat: Chat) -> Iterator[str]:
    """Do the step to a chat; returns the stream of its answer, not yet begun."""
    chat.sampling, chat.max_tokens = step.sampling, step.max_tokens
    users = [i for i, message in enumerate(chat.messages) if message["role"] == "user"]
    if step.kind == "system":
        rest = [message for message in chat.messages if message["role"] != "system"]
        chat.messages = [{"role": "system", "content": step.edit}, *rest]
    elif users and step.kind == "edit":
        chat.messages[users[step.index % len(users)]]["content"] = step.edit
    elif users and step.kind == "edit-last":
        del chat.messages[users[-1]:]
    elif users and step.kind == "delete":
        first = users[step.index % len(users)]
        last = first + 1
        while last < len(chat.messages) and chat.messages[last]["role"] != "user":
            last += 1
        del chat.messages[first:last]
    elif users and step.kind == "regenerate":
        return chat.regenerate()
    return chat.send(step.text)
