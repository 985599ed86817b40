"""The built-in model `small` answers from its conversation, so that a cache that is wrong shows in what it says. Floor 9."""
import io
import json
import re
import sys
from math import prod
from pathlib import Path

import make_small_card
import pytest
from helpers import make_engine, say

import refengine
from refengine.chat import Chat
from refengine.cli import main
from refengine.model import load_model, load_tokenizer
from refengine.recall.measure import Recall, measure

FOLDER = Path(refengine.__file__).parent / "data" / "small"


class ReusesByLength(Chat):
    """A broken caller: as many tokens are reused as the engine holds, whatever they are."""

    def rewind(self, prompt: list[int]) -> tuple[int, str]:
        return self.engine.trim_kv_cache(min(len(prompt) - 1, len(self.engine.tokens))), ""


def small_chat(cache: bool = True, arithmetic: str = "exact", kind: type[Chat] = Chat, **options) -> Chat:
    engine = make_engine("pipelined", load_model("small", arithmetic), capacity=1024, page_size=16, chunk_size=64)
    return kind(engine, load_tokenizer("small"), cache, max_tokens=64, **options)


def recall_of(dialogues: int, cache: bool = True, arithmetic: str = "exact", kind: type[Chat] = Chat, **options) -> Recall:
    """Of one engine, which goes from dialogue to dialogue as it is."""
    chat = small_chat(cache, arithmetic)

    def new_chat(system: str) -> Chat:
        return kind(chat.engine, chat.tokenizer, cache, system=system or None, max_tokens=64)

    return measure(new_chat, dialogues=dialogues, **options)


def test_its_card_has_what_the_measure_gives_and_that_is_at_least_95_of_100():
    card, measured = (FOLDER / "README.md").read_text(encoding="utf-8"), make_small_card.block(make_small_card.COMMAND)
    assert measured in card, "run python tests/make_small_card.py"
    right, asked = map(int, re.search(r"exact arithmetic: (\d+) of (\d+) right", measured).groups())
    assert "in 100 dialogues of 4 turns" in measured and asked > 120 and right >= 0.95 * asked


def test_a_cache_reused_by_length_alone_shows_in_the_answers():
    right, broken = (recall_of(20, arithmetic="native", kind=kind).accuracy for kind in (Chat, ReusesByLength))
    assert right >= 0.95 and broken < 0.7


def test_an_edited_fact_is_answered_as_edited_and_by_a_broken_cache_as_it_was():
    answers = []
    for chat in (small_chat(), small_chat(kind=ReusesByLength)):
        say(chat, "My dog is called Rondo.")
        chat.undo()
        say(chat, "My dog is called Milka.")
        answers.append(say(chat, "What is my dog called?"))
    assert answers == ["Your dog is called Milka.", "Your dog is called Rondo."]


def test_answers_are_the_same_with_the_cache_off():
    on, off = (recall_of(4, cache, turns=3).answers for cache in (True, False))
    assert on == off and len(on) >= 4


FOUR_TURNS = (("My dog is called Rondo.", "Noted: your dog is called Rondo.", 0),
              ("No, it is Milka.", "Corrected: your dog is called Milka.", 32),
              ("My shopping list: lamps, plums and glue.", "Noted: your shopping list has lamps, plums and glue.", 67),
              ("What is my dog called?", "Your dog is called Milka.", 117))


@pytest.mark.parametrize("kind", ("sequential", "pipelined"))
def test_a_chat_of_four_turns_says_and_reuses_what_is_written_down(kind):
    engine = make_engine(kind, load_model("small"), capacity=512, page_size=16, chunk_size=32)
    chat = Chat(engine, load_tokenizer("small"), max_tokens=64)
    assert tuple((question, say(chat, question), chat.turns[-1].reused) for question, _, _ in FOUR_TURNS) == FOUR_TURNS


def test_it_thinks_when_it_is_asked_to_and_the_next_prompt_is_without_the_thoughts():
    chat = small_chat(system="Think before you answer.")
    say(chat, "My dog is called Rondo.")
    answer, thought = say(chat, "What is my dog called?"), "This was said: your dog is called Rondo."
    assert answer == f"<think>\n{thought}\n</think>\n\nYour dog is called Rondo." and chat.turns[-1].reasoning == thought
    say(chat, "Thank you.")
    assert "Your dog is called Rondo." in chat.prompt(chat.messages).text
    assert "This was said" not in chat.prompt(chat.messages).text
    assert "reasoning" in str(chat.turns[-1].explain())


def test_it_is_a_qwen3_of_one_to_three_million_parameters_in_less_than_8_mb():
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["torch_dtype"] == "bfloat16"
    size = (FOLDER / "model.safetensors").stat().st_size
    assert 1e6 < size / 2 < 3e6 and sum(path.stat().st_size for path in FOLDER.iterdir()) < 8e6


def test_the_card_says_how_it_was_trained():
    card, log = ((FOLDER / name).read_text(encoding="utf-8") for name in ("README.md", "training.log"))
    recipe = json.loads(log.splitlines()[0])
    assert f"Seed {recipe['seed']}, {recipe['steps']:,} steps of {recipe['tokens']:,} tokens" in card
    assert f"step {recipe['steps']:5} loss" in log.splitlines()[-1]
    parameters = sum(prod(shape) for shape in load_model("small").config.tensors().values())
    assert f"A Qwen3 of {parameters:,} parameters" in card and f"\n{parameters:,} parameters" in log


def test_a_command_measures_it(capsys):
    assert main(["recall", "--dialogues", "3", "--wrong", "--arithmetic", "native"]) == 0
    out = capsys.readouterr().out
    assert "small, native arithmetic:" in out and "in 3 dialogues of 4 turns, seed 0" in out
    assert main(["recall", "--model", "tiny", "--dialogues", "1", "--wrong", "--max-tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert "dialogue 0: " in out and " 0.0%" in out


def test_chat_and_generate_talk_with_it_unless_told_otherwise(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("My dog is called Rondo.\nWhat is my dog called?\n"))
    assert main(["chat"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("small, exact arithmetic") and "\nYour dog is called Rondo.\n" in out
    assert main(["generate", "--max-tokens", "40", "Once upon a time"]) == 0
    assert capsys.readouterr().out.startswith(" there was a sailor")
