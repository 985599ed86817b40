"""Where an answer ends: stop strings wherever the tokens' borders are, several stop ids, the length; and what is held then."""
import json

import pytest
import tokenizers
from helpers import Scripted, both_engines, make_chat, naive_prefix, same_turn, say
from hypothesis import example, given, strategies as st

from refengine.chat import Chat
from refengine.model import load_tokenizer
from refengine.text_stream import StopText
from refengine.tokenizer import Tokenizer

PIECES = st.lists(st.text("ab<|>", max_size=4), max_size=8)


def cut(text, stops):
    return text[:min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


@given(PIECES, st.lists(st.text("ab<|>", min_size=1, max_size=4), max_size=3))
@example(["a", "b", "<", "|", ">"], ["<|>"])
@example(["aab"], ["ab"])
@example(["aaa", "b"], ["aab", "ab", "b"])
def test_a_stop_string_cuts_the_text_however_it_comes(pieces, stops):
    stop, text = StopText(stops), ""
    for piece in pieces:
        text += stop.push(piece)
        assert cut("".join(pieces), stops).startswith(text), "what was shown cannot be taken back"
        if stop.found:
            break
    text += "" if stop.found else stop.flush()
    assert text == cut("".join(pieces), stops)
    assert bool(stop.found) == any(one in "".join(pieces) for one in stops)


def test_only_what_could_become_a_stop_string_is_held_back():
    stop = StopText(["</s>"])
    assert [stop.push(piece) for piece in ("a<", "b", "</", "x", "y</s", ">z")] == ["a", "<b", "", "</x", "y", ""]
    assert stop.found == "</s>"


@pytest.mark.parametrize("stops", [["ab", "a"], ["a", "ab"], ["b", "ab", "a"]])
def test_of_two_stop_strings_in_one_place_the_one_named_first_is_found(stops):
    stop = StopText(stops)
    assert stop.push("xab") == "x" and stop.found == next(one for one in stops if one != "b")


def test_half_a_character_after_a_stop_string_is_not_shown():
    """A space and the first byte of a character are one token in real vocabularies."""
    raw = json.loads(load_tokenizer("tiny").backend.to_str())
    model, last = raw["model"], "".join(raw["model"]["merges"][-1])
    model["merges"][-1], half = ["\u0120", "\u00e2"], model["vocab"].pop(last)    # 20 and E2, as byte-level BPE writes them
    model["vocab"]["\u0120\u00e2"] = half
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(raw)), load_tokenizer("tiny").template, ())
    ids = [*tokenizer.encode("one"), half]
    assert tokenizer.decode(ids) == "one \ufffd"
    for stop, text in ((" ", "one"), ("!", "one \ufffd")):
        chat = Chat(Scripted([ids]), tokenizer, stop=stop)
        assert say(chat, "Hello") == text


@pytest.mark.parametrize("bad", ["", None, 3, b"x"])
def test_what_is_no_stop_string_is_refused(bad):
    with pytest.raises(ValueError, match="each must be a text, and not empty"):
        make_chat(stop=[bad])


def whole(kind):
    chat = make_chat(kind, max_tokens=24)
    return chat, say(chat, "Hello")


@both_engines
@pytest.mark.parametrize("at", [0, 2, -1])
def test_an_answer_ends_before_its_stop_string_and_the_cache_holds_what_was_generated(kind, at):
    """Some begin in one token and end in another. (U+FFFD is left out: it is certain only when the next token is there.)"""
    full, text = whole(kind)
    stop = [text[i:i + 2] for i in range(len(text) - 1) if "\ufffd" not in text[i:i + 2]][at]
    chat, off = make_chat(kind, max_tokens=24, stop=["no such text", stop]), make_chat(cache=False, max_tokens=24, stop=[stop])
    pieces = list(chat.send("Hello"))
    say(off, "Hello")
    turn, want = chat.turns[-1], text[:text.index(stop)]
    assert "".join(pieces) == turn.text == chat.messages[-1]["content"] == want and turn.finish_reason == "stop"
    assert turn.ids == full.turns[0].ids[:turn.generated], "nothing else was generated"
    shorter = chat.tokenizer.decode(turn.ids[:-1])
    assert stop in chat.tokenizer.decode(turn.ids) and stop not in shorter, "and nothing after it was waited for"
    assert chat.engine.tokens == chat.prompt(chat.messages[:-1]).ids + turn.ids[:-1]
    same_turn(chat, off)
    for one in (chat, off):
        say(one, "And now?")
    same_turn(chat, off)
    prompt = chat.prompt(chat.messages[:-1]).ids
    held = chat.prompt(chat.messages[:2]).ids + turn.ids[:-1]
    assert chat.turns[-1].reused == naive_prefix(prompt, held)


def test_one_text_is_one_stop_string():
    _, text = whole("pipelined")
    assert say(make_chat(max_tokens=24, stop=text[4:6]), "Hello") == text[:text.index(text[4:6])]


def test_a_stop_string_that_does_not_come_changes_nothing_and_loses_nothing():
    full, text = whole("pipelined")
    chat = make_chat(max_tokens=24, stop=[text[-2:] + "!"])  # its beginning is held back until the end
    assert say(chat, "Hello") == text and chat.turns[-1].ids == full.turns[-1].ids
    assert chat.turns[-1].finish_reason == "length"


@both_engines
@pytest.mark.parametrize("count", [0, 3])
def test_any_of_several_stop_ids_ends_an_answer(kind, count):
    """H11: config named one id, generation_config two; whoever reads one runs past the end."""
    full, _ = whole(kind)
    last = full.turns[0].ids[count]
    end = full.turns[0].ids.index(last)
    chat = make_chat(kind, max_tokens=24)
    chat.tokenizer.stop_ids = (511, last)
    text = say(chat, "Hello")
    assert (chat.turns[-1].ids, chat.turns[-1].finish_reason) == (full.turns[0].ids[:end + 1], "stop")
    assert text == chat.tokenizer.decode(full.turns[0].ids[:end])
    assert chat.engine.processed_token_count == chat.turns[-1].prompt + end


@both_engines
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_cancelled_answer_keeps_what_was_shown_and_the_cache_what_was_generated(kind, pieces):
    """Also while the beginning of a stop string is held back: that was generated, but not shown."""
    _, text = whole(kind)
    chat, off = (make_chat(kind, cache, max_tokens=24, stop=[text[5:8] + "?"]) for cache in (True, False))
    for one in (chat, off):
        stream = one.send("Hello")
        shown = "".join(next(stream) for _ in range(pieces))
        stream.close()
        turn = one.turns[-1]
        assert (turn.text, turn.finish_reason, one.messages[-1]["content"]) == (shown, "cancelled", shown)
        assert text.startswith(shown) and one.tokenizer.decode(turn.ids).startswith(shown)
        assert one.engine.tokens == one.prompt(one.messages[:2]).ids + turn.ids[:-1]
    same_turn(chat, off)
    held = chat.engine.tokens
    for one in (chat, off):
        say(one, "And now?")
    same_turn(chat, off)
    assert chat.turns[-1].reused == naive_prefix(chat.prompt(chat.messages[:4]).ids, held)


@both_engines
def test_at_the_limit_the_cache_holds_all_but_the_last_id(kind):
    chat = make_chat(kind, max_tokens=5)
    say(chat, "Hello")
    turn = chat.turns[-1]
    assert (turn.generated, turn.finish_reason) == (5, "length")
    assert chat.engine.tokens == chat.prompt(chat.messages[:2]).ids + turn.ids[:4]


@both_engines
def test_a_full_cache_ends_an_answer_and_keeps_it(kind):
    full, _ = whole(kind)
    chat = make_chat(kind, max_tokens=24, capacity=full.turns[0].prompt + 4)
    say(chat, "Hello")
    turn = chat.turns[-1]
    assert turn.finish_reason == "capacity" and turn.ids == full.turns[0].ids[:turn.generated] and turn.generated >= 4
    assert chat.engine.tokens == chat.prompt(chat.messages[:2]).ids + turn.ids[:4]
