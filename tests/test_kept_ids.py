"""keep_ids: an answer keeps the ids it was generated with where the template renders the same text in the same place."""
import gc
from types import FunctionType, ModuleType

import pytest
from helpers import both_engines, change, make_chat, same_turn, say
from hypothesis import given, settings, strategies as st

from refengine.chat import Chat
from refengine.engine import Engine
from refengine.model import load_tokenizer
from refengine.parsers import Parser
from refengine.sampling import Sampling
from refengine.tokenizer import Spoken, Tokenizer

SCRIPT = ["Hello", "And of Japan?", "Thank you", "Tell me a story."]


@both_engines
def test_the_next_turn_reuses_the_whole_answer_though_its_text_encodes_to_other_ids(kind):
    """H1: without it the prefix ends inside every answer of the built-in model. Its text is the same."""
    kept, plain = make_chat(kind, max_tokens=12, keep_ids=True), make_chat(kind, max_tokens=12)
    for chat in (kept, plain):
        for text in SCRIPT:
            say(chat, text)
    for last, turn in zip(kept.turns, kept.turns[1:]):
        assert turn.reused >= last.prompt + last.generated - 1
    assert any(turn.reused < last.prompt + last.generated - 1 for last, turn in zip(plain.turns, plain.turns[1:]))
    messages = [*kept.messages, {"role": "user", "content": "x"}]
    kept_prompt = kept.prompt(messages)
    kept.keep_ids = False
    again = kept.prompt(messages)
    assert kept_prompt.text == again.text and kept_prompt.ids != again.ids
    decode = kept.tokenizer.decode
    assert decode(kept_prompt.ids, skip_special_tokens=False) == decode(again.ids, skip_special_tokens=False)


@settings(max_examples=max(5, settings.default.max_examples // 4))
@given(st.lists(st.tuples(st.sampled_from(["send", "edit", "delete", "undo", "regenerate", "cancel"]), st.integers(0, 6),
                          st.sampled_from([*SCRIPT, "漢字🙂", "", "<|im_end|>"])), max_size=6),
       st.sampled_from([Sampling(), Sampling(temperature=1.0, seed=3, repetition_penalty=1.1)]))
def test_with_the_cache_and_without_it_the_same_ids_are_kept(script, sampling):
    on, off = (make_chat(cache=cache, max_tokens=4, sampling=sampling, keep_ids=True) for cache in (True, False))
    for verb, at, text in [("send", 0, "Hello"), *script, ("send", 0, "Last")]:
        for chat in (on, off):
            change(chat, verb, at, text)
        if verb in ("send", "regenerate", "cancel"):
            same_turn(on, off, script)


def test_an_answer_that_was_edited_is_encoded_anew():
    chat = make_chat(max_tokens=12, keep_ids=True)
    say(chat, "Hello")
    chat.messages[-1]["content"] = "Something else"
    prompt = chat.prompt([*chat.messages, {"role": "user", "content": "x"}])
    assert prompt.ids == chat.tokenizer.encode(prompt.text)


def test_kept_ids_and_special_tokens_in_text_go_together():
    chat = make_chat(max_tokens=12, keep_ids=True)
    say(chat, "x<|im_end|>y")
    prompt = chat.prompt([*chat.messages, {"role": "user", "content": "<|im_end|>z<|im_start|>"}])
    at = len(chat.prompt(chat.messages[:-1]).ids)
    assert prompt.ids[at:at + 12] == chat.turns[0].ids
    assert prompt.ids.count(chat.tokenizer.control["<|im_end|>"]) == 4
    assert chat.tokenizer.decode(prompt.ids, skip_special_tokens=False) == prompt.text


@pytest.mark.parametrize("control_in_text", [False, True])
def test_a_special_token_that_was_put_into_a_kept_answer_does_not_become_the_one_that_ended_it(control_in_text):
    """Generated: an answer and its end, one id. Written by hand: the answer and the end's text, which is text."""
    chat = make_chat(max_tokens=12, keep_ids=True, control_in_text=control_in_text)
    say(chat, "Hello")
    end = chat.tokenizer.control["<|im_end|>"]
    (start, stop, ids), = chat._spoken.spans
    chat._spoken = Spoken(chat._spoken.text + "<|im_end|>", [(start, stop + len("<|im_end|>"), [*ids, end])])
    plain = chat.prompt(chat.messages).ids
    assert plain[chat.turns[0].prompt:][:13] == [*chat.turns[0].ids, end] and plain.count(end) == 3
    chat.messages[-1]["content"] += "<|im_end|>"
    assert chat.prompt(chat.messages).ids.count(end) == 3 + control_in_text


@pytest.mark.parametrize(("text", "found"), [
    ("ab<cd>e<fg>", [(3, 5, [1]), (8, 10, [2])]), ("ab<cd>e<fg", [(3, 5, [1]), (8, 10, [2])]), ("ab<cd>e<fx>", [(3, 5, [1])]), ("ab<cd", [(3, 5, [1])]),
    ("ab<ce>e<fg>", []), ("xb<cd>e<fg>", []), ("", [])])
def test_what_was_spoken_is_found_where_it_was_after_what_was_before_it(text, found):
    spoken = Spoken().followed_by("ab<", "cd", [1]).followed_by("ab<cd>e<", "fg", [2])
    assert spoken.text == "ab<cd>e<fg" and spoken.within(text) == found
    assert spoken.followed_by(text, "", [3]) == (text, found), "an empty answer has no place"
    assert spoken.followed_by("ab<cd>", "h", [3]).spans == [(3, 5, [1]), (6, 7, [3])], "and of two in one place the later is kept"


class Echo(Engine):
    """Holds ids and computes nothing; says the same ids to everything."""

    def __init__(self, answer):
        self.held, self.answer = [], answer

    tokens = property(lambda self: list(self.held))
    logits = None

    def trim_kv_cache(self, length):
        del self.held[length:]
        return len(self.held)

    def reset(self):
        self.held = []

    def prefill(self, tokens):
        self.held = list(tokens)

    def generate(self, tokens, **_):
        self.prefill([*tokens, *self.answer[:-1]])
        yield from self.answer


def kept(chat):
    """Characters and list entries that a chat holds, each object once."""
    count, seen, todo = 0, set(), [chat]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (Engine, Tokenizer, Parser, type, ModuleType, FunctionType)):
            continue
        seen.add(id(value))
        count += len(value) if isinstance(value, (str, list, tuple)) else 0
        todo += gc.get_referents(value)
    return count


@pytest.mark.parametrize("source", [None, "thinking"])
def test_two_hundred_turns_keep_twice_what_a_hundred_do(source):
    """Every turn kept its whole prompt, its ids and those that were held before it."""
    tokenizer = load_tokenizer("tiny")
    answer = tokenizer.encode("<think>so</think>I see<|im_end|>" if source else "I see<|im_end|>")
    chat, counts = Chat(Echo(answer), tokenizer, keep_ids=True, system="Be brief.", template_arguments={"x": ["y"] * 2000}), []
    for number in range(200):
        say(chat, f"Question {number}?")
        if number in (0, 49, 99, 149, 199):
            counts.append(kept(chat))
    steps = [b - a for a, b in zip(counts, counts[1:])]
    assert max(steps[1:]) < 1.05 * min(steps[1:]), steps
    assert counts[-1] < 12 * len(chat.prompt(chat.messages).text)
    for turn in (chat.turns[0], chat.turns[77], chat.turns[199]):
        found = turn.explain()
        assert (found.prompt, found.reused) == (turn.prompt, turn.reused)
        assert found.cause == ("cold" if turn is chat.turns[0] else "stripped reasoning" if source else "append-only")


@settings(max_examples=max(5, settings.default.max_examples // 4))
@given(st.lists(st.tuples(st.sampled_from(["send", "edit", "delete", "swap", "undo", "regenerate", "cancel", "system"]), st.integers(0, 6),
                          st.sampled_from([*SCRIPT, "漢字🙂", "", "<|im_end|>"])), max_size=8))
def test_what_each_turn_was_given_comes_back_whole(script):
    chat, given = make_chat(max_tokens=3), []
    add = chat._trail.add

    def spied(held, prompt):
        before = chat._trail._last
        given.append((list(held), prompt, before[0] if given else None, before[1]))
        return add(held, prompt)

    chat._trail.add = spied
    for verb, at, text in [("send", 0, "Hello"), *script, ("send", 0, "Last")]:
        change(chat, verb, at, text)
    assert [chat._trail.turn(number) for number in range(len(given))] == given and len(given) > 1
