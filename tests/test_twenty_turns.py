"""Twenty turns by script: how many tokens each reuses is known to the token, on the built-in model and on a real one.

E11: after an upgrade every turn was prefilled from the start, and only the time showed it. The numbers are those of an
id-by-id comparison of each prompt with what was fed and generated before it, and are written down besides: exact arithmetic
generates the same ids everywhere.
"""
import pytest
from helpers import both_engines, make_engine, naive_prefix

from refengine.chat import Chat
from refengine.model import load_model, load_tokenizer

SCRIPT = [("send", "Hello! My name is Ada. What can you do?"), ("send", "What is the capital of France?"),
          ("send", "And of Japan?"), ("regenerate", ""), ("send", "Write a word that rhymes with cat."),
          ("send", "What is 2 + 3?"), ("undo", "What is 2 + 4?"), ("send", "Say it in words."), ("send", "Thank you."),
          ("system", "You are a pirate."), ("send", "What is my name?"), ("edit", "Name a colour."),
          ("send", "Translate 'good morning' to French."), ("send", "Now to Spanish."), ("regenerate", ""),
          ("send", "List two animals."), ("send", "Which of them is bigger?"), ("undo", "Is it dangerous?"),
          ("send", "漢字 🙂?"), ("send", "Goodbye!")]


def play(chat: Chat) -> list[tuple[int, int]]:
    """(prompt, reused) of each turn; checked against an id-by-id comparison on the way."""
    held: list[int] = []
    for verb, text in SCRIPT:
        if verb == "undo":
            chat.undo()
        if verb == "system":
            chat.messages = [{"role": "system", "content": text}, *[m for m in chat.messages if m["role"] != "system"]]
            text = "Who are you?"
        if verb == "edit":                                   # the message before the last: what follows it is said again
            chat.messages[-4]["content"] = text
            text = "And another?"
        answer = chat.regenerate() if verb == "regenerate" else chat.send(text)
        assert len("".join(answer)) or chat.turns[-1].generated
        prompt, turn = chat.prompt(chat.messages[:-1]).ids, chat.turns[-1]
        assert (turn.prompt, turn.reused) == (len(prompt), min(naive_prefix(prompt, held), len(prompt) - 1)), (verb, text)
        held = prompt + turn.ids[:-1]
        assert chat.engine.tokens == held
        assert turn.explain().avoidable >= 0
    return [(turn.prompt, turn.reused) for turn in chat.turns]


TINY = [(37, 0), (75, 37), (102, 82), (102, 101), (146, 106), (178, 152), (178, 169), (209, 184), (238, 209), (287, 1),
        (318, 287), (355, 274), (410, 359), (444, 410), (444, 443), (481, 444), (526, 484), (520, 503), (559, 520),
        (598, 559)]


@both_engines
def test_twenty_turns_of_the_built_in_model(kind):
    engine = make_engine(kind, load_model("tiny"), capacity=2048, page_size=16, chunk_size=64)
    assert play(Chat(engine, load_tokenizer("tiny"), max_tokens=8)) == TINY


SMOLLM2 = [(42, 0), (84, 65), (106, 91), (106, 105), (132, 113), (161, 142), (161, 153), (189, 173), (215, 201), (228, 6),
           (256, 240), (282, 218), (314, 294), (341, 326), (341, 340), (368, 353), (397, 380), (395, 385), (424, 407),
           (450, 436)]


@pytest.mark.real
def test_twenty_turns_of_smollm2(smollm2):
    engine = make_engine("pipelined", smollm2, capacity=1024, page_size=64, chunk_size=256)
    chat = Chat(engine, load_tokenizer(smollm2), max_tokens=24)
    assert play(chat) == SMOLLM2
    assert "Paris" in chat.turns[1].text and "Tokyo" in chat.turns[2].text
