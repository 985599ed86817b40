"""The dialogues of refengine.recall and the measure over them, without a model. Floor 9."""
import hashlib
import random
import re

import pytest

from refengine.cli import main
from refengine.recall.dialogues import Turn, dialogue
from refengine.recall.measure import KINDS, as_word, is_right, measure
from refengine.recall.phrases import SMALL_TALK, TOPICS
from refengine.recall.words import is_held_out


def dialogues(count, *, held_out=True, turns=6):
    return [dialogue(random.Random(f"test {i}"), turns, held_out=held_out) for i in range(count)]


class Script:
    """In place of a chat: ``answer`` of a turn, in the order of the measure's dialogues."""

    def __init__(self, answer, dialogues, turns, seed=0):
        self.answer, self.opened, self.systems = answer, 0, []
        self.said = [dialogue(random.Random(f"recall {seed} {i}"), turns, held_out=True) for i in range(dialogues)]

    def __call__(self, system):
        self.turns, self.opened = iter(self.said[self.opened].turns), self.opened + 1
        self.systems.append(system)
        return self

    def send(self, text):
        turn = next(self.turns)
        assert turn.user == text
        yield from self.answer(turn)


def test_a_seed_gives_the_same_dialogues_everywhere():
    text = repr([dialogue(random.Random(seed), 2 + seed % 6, held_out=seed % 2 == 0) for seed in range(200)])
    assert hashlib.sha256(text.encode()).hexdigest() == "0f0b7db172fce22a041ad13381167b4a5993c105812d5d751bca9a6cea6d41c1"


def test_training_and_the_measure_have_no_value_in_common():
    def values(held_out):
        turns = [turn for said in dialogues(400, held_out=held_out) for turn in said.turns]
        return {value.lower() for turn in turns for value in (*turn.recall, *turn.superseded)}

    shown, measured = values(False), values(True)
    assert len(shown) > 500 and len(measured) > 300
    assert not any(map(is_held_out, shown)) and all(map(is_held_out, measured))


def test_what_is_asked_for_was_said_so_many_turns_ago_and_not_since():
    asked = 0
    for said in dialogues(400):
        for i, turn in enumerate(said.turns):
            short = any(value.isalpha() and len(value) < 5 for value in turn.recall)        # "can" is in other sentences too
            if turn.kind in KINDS and not short:
                asked += 1
                heard = [said.system, *(other.user for other in said.turns[:i])]         # of the turn before the first: -1
                last = [max(n for n, text in enumerate(heard) if as_word(value).search(text)) for value in turn.recall]
                assert i - (max(last) - 1) == turn.distance > 0, (said, turn)
                assert all(any(as_word(old).search(text) for text in heard[:max(last) + 1]) for old in turn.superseded)
                assert bool(turn.superseded) == (turn.kind == "correction")
                assert (len(turn.recall) > 1) == (turn.kind == "list")
    assert asked > 400


def test_every_dialogue_ends_with_a_question_and_all_kinds_occur():
    all_of_them = dialogues(300, turns=4)
    assert all(len(said.turns) == 4 and said.turns[-1].kind in KINDS for said in all_of_them)
    kinds = {turn.kind for said in all_of_them for turn in said.turns}
    assert kinds == {"", "untold", *KINDS}
    assert any(said.thinks for said in all_of_them) and any(not said.system for said in all_of_them)
    with pytest.raises(ValueError, match="1 turns; at least 2"):
        dialogue(random.Random(0), 1)


def test_the_right_answers_are_right_and_others_questions_answers_are_not():
    for said in dialogues(300):
        questions = [turn for turn in said.turns if turn.kind in KINDS]
        for turn in questions:
            assert is_right(turn, turn.answer) and is_right(turn, f"<think>\n{turn.thought}\n</think>\n\n{turn.answer}")
            assert not any(is_right(turn, other.answer) for other in questions if not set(turn.recall) <= set(other.recall))
            assert not is_right(turn, "") and not is_right(turn, turn.thought + "</think>")


QUESTION = Turn("?", "", kind="list", recall=("tea", "Rex"), superseded=("Max",))


@pytest.mark.parametrize(("text", "right"), (
    ("tea and Rex", True), ("TEA, rex.", True), ("Not tea but tea and Rex, no", True),
    ("Rex and tea", False), ("teapot and Rex", False), ("tea and Rexton", False), ("tea", False),
    ("tea and Rex, once Max", False), ("tea and Rex, Maximum", True), ("<think>Max</think>tea and Rex", True),
    ("tea and 1:Rex", False), ("<think>tea and Rex</think>", False)))
def test_an_answer_is_right_with_all_values_as_words_in_order_and_nothing_that_was_corrected(text, right):
    assert is_right(QUESTION, text) == right


def test_the_measure_counts_by_kind_and_distance():
    script, wrong = Script(lambda turn: turn.answer if turn.kind != "list" else "I forgot", 60, 5), 0
    recall = measure(script, dialogues=60, turns=5)
    assert script.opened == 60 and script.systems == [said.system for said in script.said]
    asked = [turn for said in script.said for turn in said.turns if turn.kind in KINDS]
    assert [answer.turn for answer in recall.answers] == asked
    for (kind, distance), (right, of) in recall.counts().items():
        assert of == sum((turn.kind, turn.distance) == (kind, distance) for turn in asked)
        assert right == (0 if kind == "list" else of)
        wrong += of - right
    assert 0 < wrong and recall.accuracy == 1 - wrong / len(asked)


def test_a_parrot_does_not_recall():
    assert measure(Script(lambda turn: turn.user, 100, 4), dialogues=100).accuracy == 0


def test_another_seed_asks_other_questions_and_the_same_seed_the_same():
    def texts(seed):
        return [answer.turn for answer in measure(Script(lambda turn: "", 5, 4, seed), dialogues=5, seed=seed).answers]

    assert texts(1) == texts(1) != texts(2)


def test_nothing_to_ask_is_refused(capsys):
    with pytest.raises(ValueError, match="0 dialogues; at least 1"):
        measure(Script(lambda turn: "", 0, 4), dialogues=0)
    assert main(["recall", "--model", "tiny", "--dialogues", "0"]) == 2
    assert main(["recall", "--model", "tiny", "--turns", "1"]) == 2
    assert "at least 2 are needed" in capsys.readouterr().err


def test_phrases_have_the_fields_that_they_need():
    for topic in TOPICS:
        keyed = topic.keys != ("",)
        for text in (*topic.says, topic.answer):
            assert "{v}" in text and text.endswith(".")
        assert all(text[-1] in "?." and "{v}" not in text for text in topic.asks)
        fixed = len(topic.keys) == 1 and topic.keys != ("name",)        # a topic of one key may spell it out
        assert not keyed or fixed or all("{k}" in text for text in (*topic.says, *topic.asks, topic.answer, topic.untold))
    assert all(answer and not re.search(r"[{}]", answer) for _, answer in SMALL_TALK)
