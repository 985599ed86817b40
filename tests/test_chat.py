"""The chat turn: with reuse and without the same answer to the last bit, whatever is done to the history."""
import json

import pytest
from helpers import SYSTEM, both_engines, change, make_chat, naive_prefix, same_bits, same_kv, same_turn, say
from hypothesis import given, settings, strategies as st

from refengine.errors import CapacityError, StaleGenerationError, TokenizerError
from refengine.model import load_tokenizer
from refengine.sampling import Sampling

TOKENIZER = load_tokenizer("tiny")
SCRIPT = ["What is the capital of France?", "And of Japan?", "Thank you", "Tell me a story.", "How many tokens were reused?"]


@both_engines
def test_a_recorded_conversation_reuses_just_as_many_tokens_as_it_did(kind):
    """E11: after an upgrade every turn was prefilled from the start, and only the time showed it.

    The numbers are those of an id-by-id comparison of each prompt with what was fed and generated before it, and they
    are the same in plain float32 and float64.
    """
    chat, held = make_chat(kind, max_tokens=12), []
    for text in SCRIPT:
        prompt = chat.prompt([*chat.messages, {"role": "user", "content": text}]).ids
        say(chat, text)
        turn = chat.turns[-1]
        assert turn.prompt == len(prompt) and turn.reused == min(naive_prefix(prompt, held), len(prompt) - 1)
        held = [*prompt, *turn.ids[:-1]]
        assert chat.engine.tokens == held
    assert [turn.prompt for turn in chat.turns] == [31, 74, 110, 149, 188]
    assert [turn.reused for turn in chat.turns] == [0, 31, 74, 114, 149]  # 114: four ids into an answer


@both_engines
def test_turns_with_the_cache_equal_turns_without(kind):
    on, off = make_chat(kind), make_chat(cache=False)
    for text in SCRIPT[:3]:
        assert say(on, text) == say(off, text)
        same_turn(on, off, f"send {text!r}")
    assert on.turns[1].reused > 0


def test_the_engines_give_the_same_conversation():
    one, two = make_chat("sequential"), make_chat("pipelined")
    for text in SCRIPT[:3]:
        assert list(one.send(text)) == list(two.send(text))  # piece by piece
        assert [turn.reused for turn in one.turns] == [turn.reused for turn in two.turns]
        same_bits(one.engine.logits, two.engine.logits)
        same_kv(one.engine.kv(), two.engine.kv())


@both_engines
def test_the_repetition_penalty_sees_all_tokens_whether_they_were_cached_or_not(kind, monkeypatch):
    """D13: it saw only those that were not, so that a hit and a miss differed."""
    seen, pick = [], Sampling.pick

    def spied(self, op, logits, history):
        seen.append(list(history))
        return pick(self, op, logits, history)

    monkeypatch.setattr(Sampling, "pick", spied)
    on, off = (make_chat(kind, cache, sampling=Sampling(repetition_penalty=1.1)) for cache in (True, False))
    for _ in range(2):                                                           # the same prompt twice
        for chat in (on, off):
            seen.clear()
            say(chat, "Hello") if not chat.turns else list(chat.regenerate())
            prompt, ids = chat.prompt(chat.messages[:-1]).ids, chat.turns[-1].ids
            assert seen == [prompt + ids[:n] for n in range(len(ids))]
        same_turn(on, off)
    assert on.turns[1].forwarded == 1 and on.turns[0].ids == on.turns[1].ids


VERBS = ["edit", "delete", "swap", "undo", "reset", "regenerate", "cancel"]


@settings(max_examples=max(5, settings.default.max_examples // 3))
@given(st.lists(st.tuples(st.none() | st.sampled_from(VERBS), st.integers(0, 8),
                          st.sampled_from([*SCRIPT, "漢字🙂", ""])), min_size=1, max_size=6),
       st.sampled_from([Sampling(), Sampling(temperature=0.8, top_k=40, repetition_penalty=1.1, seed=4)]))
def test_whatever_is_done_to_the_history_the_cache_does_not_show(script, sampling):
    """G14: message-level caches gave broken histories. Edit, delete, swap, undo, reset, regenerate, cancel; then send."""
    on, off = make_chat(max_tokens=4, sampling=sampling), make_chat(cache=False, max_tokens=4, sampling=sampling)
    for verb, at, text in [*script, (None, 0, "Last")]:
        for chat in (on, off):
            change(chat, verb or "send", at, text)
        assert on.messages == off.messages
        if not verb or verb in ("regenerate", "cancel") and on.turns:
            same_turn(on, off, script)


@both_engines
def test_an_edited_message_keeps_what_lies_before_it(kind):
    chat = make_chat(kind)
    for text in SCRIPT[:2]:
        say(chat, text)
    edited = [dict(message) for message in chat.messages]
    edited[3]["content"] = "And of Italy?"
    want = naive_prefix(chat.prompt(edited).ids, chat.engine.tokens)
    chat.messages[3]["content"] = "And of Italy?"
    say(chat, SCRIPT[2])
    assert chat.turns[-1].reused == want > chat.turns[0].prompt - 1
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 3]


@both_engines
def test_regenerate_puts_another_answer_in_place_of_the_present_one(kind):
    chat = make_chat(kind, sampling=Sampling(temperature=1.0, seed=1))
    say(chat, "Hello")
    before = [dict(message) for message in chat.messages]
    list(chat.regenerate())
    assert chat.messages[:-1] == before[:-1] and len(chat.messages) == len(before)
    assert chat.turns[0].ids != chat.turns[1].ids
    assert chat.messages[-1]["content"] == chat.turns[1].text
    assert (chat.turns[1].reused, chat.turns[1].forwarded) == (chat.turns[1].prompt - 1, 1)


def test_undo_takes_back_the_last_question_and_reset_all_but_the_system_prompt():
    chat = make_chat()
    with pytest.raises(ValueError, match="no user message"):
        chat.undo()
    with pytest.raises(ValueError, match="no user message"):
        chat.regenerate()
    say(chat, "Hello")
    history = list(chat.messages)
    say(chat, "Again")
    chat.undo()
    assert chat.messages == history
    chat.reset()
    assert chat.messages == [{"role": "system", "content": SYSTEM}] and chat.turns == [] and chat.engine.tokens == []
    plain = make_chat(system=None)
    say(plain, "Hello")
    plain.reset()
    assert plain.messages == []


def test_a_history_that_the_template_refuses_changes_nothing():
    chat = make_chat()
    say(chat, "Hello")
    held, history = chat.engine.tokens, list(chat.messages)
    chat.messages.append({"role": "user"})
    with pytest.raises(TokenizerError):
        chat.send("And of Japan?")
    assert chat.messages == [*history, {"role": "user"}] and chat.engine.tokens == held and len(chat.turns) == 1


@both_engines
def test_two_answers_at_once_are_refused_and_only_the_second_is_kept(kind):
    chat = make_chat(kind)
    first = chat.send("Hello")
    next(first)
    text = say(chat, "And of Japan?")
    with pytest.raises(StaleGenerationError):
        list(first)
    assert [m["content"] for m in chat.messages] == [SYSTEM, "And of Japan?", text] and len(chat.turns) == 1


@both_engines
def test_an_answer_that_is_closed_after_another_was_given_does_not_undo_it(kind):
    """A suspended answer is closed when its last reference goes, which may be late: then it put its old history back."""
    chat = make_chat(kind)
    first = chat.send("Hello")
    next(first)
    text = say(chat, "And of Japan?")
    first.close()
    assert [m["content"] for m in chat.messages] == [SYSTEM, "And of Japan?", text] and len(chat.turns) == 1


@pytest.mark.parametrize("back", ["reset", "undo"])
def test_an_answer_that_is_closed_after_a_reset_or_an_undo_does_not_come_back(back):
    chat = make_chat()
    say(chat, "Hello")
    open_answer = chat.send("And of Japan?")
    next(open_answer)
    chat.reset() if back == "reset" else chat.undo()
    open_answer.close()
    assert chat.messages == [{"role": "system", "content": SYSTEM}]
    assert len(chat.turns) == (back == "undo")  # undo keeps the record of the answer that it took back


def test_an_answer_that_is_begun_after_an_undo_does_not_bring_back_what_was_taken_back():
    chat = make_chat()
    say(chat, "Hello")
    late = chat.send("And of Japan?")
    chat.undo()
    list(late)
    assert "Hello" not in [m["content"] for m in chat.messages]


# Switches and logs

def read_log(path):
    """[(kind, {key: value} or the text)] of a stats log."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        kind, _, rest = line.partition(" ")
        entries.append((kind, dict(pair.split("=") for pair in rest.split(" ")) if kind == "PFXCACHE" else json.loads(rest)))
    return entries


@both_engines
def test_the_log_has_a_line_for_each_turn_and_one_for_each_greedy_answer(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("REFENGINE_STATS_LOG", str(tmp_path / "log"))
    chat = make_chat(kind)
    for text in SCRIPT[:3]:
        say(chat, text)
    cancelled = chat.send("Once more")
    next(cancelled)
    cancelled.close()
    entries = read_log(tmp_path / "log")
    assert [kind for kind, _ in entries] == ["PFXCACHE", "PFXANSWER"] * 4
    for turn, (_, values), (_, text) in zip(chat.turns, entries[::2], entries[1::2], strict=True):
        assert list(values)[:3] == ["prompt", "reused", "ttft"]  # as the seed note has them
        assert (int(values["prompt"]), int(values["reused"]), int(values["forwarded"])) == \
            (turn.prompt, turn.reused, turn.forwarded)
        assert int(values["generated"]) == turn.generated and values["finish"] == turn.finish_reason
        assert values["ttft"] == f"{turn.ttft:.6f}" and text == turn.text
    assert entries[0][1]["reused"] == "0" < entries[2][1]["reused"]
    assert entries[-2][1]["finish"] == "cancelled"


@both_engines
def test_the_answers_logged_with_and_without_the_cache_are_equal_byte_for_byte(kind, tmp_path, monkeypatch):
    for name in ("on", "off"):
        if name == "off":
            monkeypatch.setenv("REFENGINE_NO_PREFIX_CACHE", "1")
        chat = make_chat(kind, stats_log=tmp_path / name)
        for text in [*SCRIPT[:2], "漢字 🙂 \"quoted\"\n"]:
            say(chat, text)
    on, off = ([line for line in (tmp_path / name).read_bytes().splitlines() if line.startswith(b"PFXANSWER ")]
               for name in ("on", "off"))
    assert len(on) == 3 and on == off
    reused = [[int(values["reused"]) for kind, values in read_log(tmp_path / name) if kind == "PFXCACHE"]
              for name in ("on", "off")]
    assert min(reused[0][1:]) > 0 and reused[1] == [0] * 3


@pytest.mark.parametrize(("value", "cache"), [("1", False), ("yes", False), ("0", True), ("", True)])
def test_the_switch_for_the_old_path(value, cache, monkeypatch):
    monkeypatch.setenv("REFENGINE_NO_PREFIX_CACHE", value)
    chat = make_chat()
    say(chat, "Hello"), say(chat, "Hello again")
    assert (chat.turns[1].reused > 0) == cache == chat.prefix_cache
    monkeypatch.delenv("REFENGINE_NO_PREFIX_CACHE")
    assert not make_chat(cache=False).prefix_cache


def test_the_switch_for_greedy_overrides_the_sampling_and_logs_answers(tmp_path, monkeypatch):
    sampling = Sampling(temperature=1.0, seed=3)
    sampled = make_chat(sampling=sampling, stats_log=tmp_path / "sampled")
    say(sampled, "Hello")
    monkeypatch.setenv("REFENGINE_GREEDY", "1")
    greedy, want = make_chat(sampling=sampling, stats_log=tmp_path / "greedy"), make_chat()
    assert say(greedy, "Hello") == say(want, "Hello") != sampled.turns[0].text
    assert [kind for kind, _ in read_log(tmp_path / "sampled")] == ["PFXCACHE"]
    assert [kind for kind, _ in read_log(tmp_path / "greedy")] == ["PFXCACHE", "PFXANSWER"]


def test_an_argument_goes_before_the_environment_and_no_log_is_the_default(tmp_path, monkeypatch):
    assert make_chat().stats_log is None
    monkeypatch.setenv("REFENGINE_STATS_LOG", str(tmp_path / "environment"))
    say(make_chat(stats_log=tmp_path / "argument"), "Hello")
    assert (tmp_path / "argument").is_file() and not (tmp_path / "environment").exists()


def test_template_arguments_reach_the_template():
    messages = [{"role": "user", "content": "Hello"}]
    thinking, plain = make_chat(), make_chat(template_arguments={"enable_thinking": False})
    assert TOKENIZER.decode(plain.prompt(messages).ids) == TOKENIZER.decode(thinking.prompt(messages).ids) + \
        "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("arguments", [{"messages": []}, {"spoken": 1}, {"control_in_text": True}, {"self": 1}, {1: 2}, [1], "x"])
def test_template_arguments_that_are_not_the_templates_are_refused_when_the_chat_is_made_and_later(arguments):
    """Some were a TypeError of the first turn."""
    with pytest.raises(TokenizerError, match="template_arguments is .* none of them named self, messages, spoken or control_in_text"):
        make_chat(template_arguments=arguments)
    chat = make_chat()
    chat.template_arguments = arguments
    with pytest.raises(TokenizerError, match="template_arguments is"):
        chat.send("Hello")
    assert len(chat.messages) == 1 and chat.engine.tokens == []


@both_engines
def test_a_prompt_of_one_token_too_many_is_refused_before_anything_is_rewound(kind):
    """I5: an over-long prompt was cut without a word. At capacity it fits; one more is an error with the numbers."""
    chat = make_chat(kind, max_tokens=1)
    say(chat, "Hello")
    prompt = chat.prompt([*chat.messages, {"role": "user", "content": "And of Japan?"}]).ids
    fits, short = make_chat(kind, max_tokens=1, capacity=len(prompt)), make_chat(kind, max_tokens=1, capacity=len(prompt) - 1)
    for one in (fits, short):
        say(one, "Hello")
    say(fits, "And of Japan?")
    assert fits.engine.tokens == prompt
    held, history = short.engine.tokens, list(short.messages)
    with pytest.raises(CapacityError) as refused:
        short.send("And of Japan?")
    assert (refused.value.needed, refused.value.capacity) == (len(prompt), len(prompt) - 1)
    assert short.engine.tokens == held and short.messages == history and len(short.turns) == 1
