"""keep_ids: an answer keeps the ids it was generated with where the template renders the same text in the same place."""
import pytest
from helpers import both_engines, change, make_chat, same_turn, say
from hypothesis import given, settings, strategies as st

from refengine.sampling import Sampling
from refengine.tokenizer import Spoken, _in_place

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
    spoken = chat._spoken[0]
    chat._spoken[0] = Spoken(spoken.prompt, spoken.text + "<|im_end|>", [*spoken.ids, end])
    plain = chat.prompt(chat.messages).ids
    assert plain[chat.turns[0].prompt:][:13] == [*chat.turns[0].ids, end] and plain.count(end) == 3
    chat.messages[-1]["content"] += "<|im_end|>"
    assert chat.prompt(chat.messages).ids.count(end) == 3 + control_in_text


@pytest.mark.parametrize(("text", "spoken", "found"), [
    ("ab<cd>e", [("ab<", "cd", [1, 2])], [(3, 5, [1, 2])]), ("ab<cd>e", [("ab<", "ce", [1])], []),
    ("ab<cd>e", [("a<", "cd", [1])], []),
    ("xb<cd>e", [("ab<", "cd", [1])], []), ("ab<cd>e", [("ab<", "cd", [1]), ("ab<", "cd", [2])], [(3, 5, [2])]),
    ("abcdef", [("a", "bcd", [1]), ("abc", "de", [2])], [(3, 5, [2])]),
    ("abcdef", [("a", "b", [1]), ("abc", "de", [2])], [(1, 2, [1]), (3, 5, [2])]), ("ab", [("ab", "", [1])], [])])
def test_what_was_spoken_is_found_where_it_was(text, spoken, found):
    assert _in_place(text, [Spoken(*one) for one in spoken]) == found
