"""Why a turn reused what it reused: the place, both sides, the message and the cause, each provoked on purpose."""
import datetime

import pytest
from helpers import Scripted, both_engines, change, make_chat, naive_prefix, same_turn, say
from hypothesis import given, settings, strategies as st

from refengine import template as template_module
from refengine.chat import Chat
from refengine.errors import TokenizerError
from refengine.explain import CAUSES, Prompt, _only_clock, explain
from refengine.lint_template import lint, walk
from refengine.model import load_tokenizer
from refengine.parsers import PARSERS, parser_named
from refengine.template import ChatTemplate
from refengine.tokenizer import Tokenizer

TINY = load_tokenizer("tiny")
USER, MORE = {"role": "user", "content": "Hi"}, {"role": "user", "content": "More"}
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def answer(content, **rest):
    return {"role": "assistant", "content": content, **rest}


def toy(source=PLAIN):
    return Tokenizer(TINY.backend, ChatTemplate(source), ())


def causes(tokenizer, messages, parser="plain", **arguments):
    return [found.cause for found in walk(tokenizer, PARSERS[parser], messages, arguments)]


# From real turns

@both_engines
def test_the_causes_that_a_caller_gives(kind):
    chat = make_chat(kind, max_tokens=4)

    def why(text=None):
        list(chat.regenerate()) if text is None else say(chat, text)
        found = chat.turns[-1].explain()
        assert (found.prompt, found.reused) == (chat.turns[-1].prompt, chat.turns[-1].reused) and str(found)
        return found

    assert why("Hello").cause == "cold"
    assert why().cause == "same prompt"
    chat.undo()
    assert why("Hallo").cause == "new conversation"         # but for the system prompt, nothing is left of the last
    say(chat, "And now?")
    chat.undo()
    found = why("And then?")
    assert (found.cause, found.message, found.role) == ("edited message", 3, "user") and found.avoidable > 0
    chat.messages[0]["content"] = "You are a cat."
    found = why("Hm")
    assert (found.cause, found.message) == ("system prompt", 0)
    chat.messages[0]["content"] = "It is 10:01."
    why("Hm")
    chat.messages[0]["content"] = "It is 10:02."
    found = why("Hm")
    assert (found.cause, found.detail, found.message) == ("clock", "in the system prompt", 0) and found.reused > 0, "G11"
    del chat.messages[1:3]
    assert why("Hm").cause == "truncation", "G12"
    chat.tools = [{"name": "f", "description": "x"}]
    assert why("Hm").cause in ("tool definitions", "re-tokenised text", "append-only")  # this template shows no tools
    chat.prefix_cache = False
    assert why("Hm").cause == "cache off"
    chat.prefix_cache = True
    chat.reset()
    assert why("Hello").cause == "cold"


@both_engines
def test_text_that_encodes_to_other_ids_than_were_generated_is_told_from_an_edit(kind):
    """H1, H4: the built-in model generates such ids at once."""
    chat, seen = make_chat(kind, max_tokens=12), set()
    for text in ("Hello", "And now?", "Thank you", "More"):
        say(chat, text)
        found = chat.turns[-1].explain()
        seen.add(found.cause)
        if found.cause == "re-tokenised text":
            assert found.role == "assistant" and found.avoidable > 0
            n = naive_prefix(found.held_ids, found.prompt_ids)
            assert n == 0 and TINY.decode(found.held_ids) != ""
    assert "re-tokenised text" in seen and seen <= {"cold", "append-only", "re-tokenised text"}


@settings(max_examples=max(5, settings.default.max_examples // 4))
@given(st.lists(st.tuples(st.sampled_from(["send", "edit", "delete", "swap", "undo", "regenerate", "system", "cancel"]),
                          st.integers(0, 6), st.sampled_from(["Hi", "", "漢字🙂", "<|im_end|>", "12:30", "a\n\n"])), max_size=6))
def test_it_never_fails_and_always_counts_right(script):
    chat = make_chat(max_tokens=3)
    for verb, at, text in [("send", 0, "Hello"), *script, ("send", 0, "Last")]:
        change(chat, verb, at, text)
        for turn in chat.turns[-1:]:
            found = turn.explain()
            assert found.cause in CAUSES and found.forwarded == turn.forwarded and found.reused == turn.reused
            assert 0 <= found.avoidable <= found.forwarded and str(found)


# Every cause on purpose, from turns whose answers are given: two questions and answers, then something is done

FULL = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}{{ mood or '' }}" + PLAIN
ENDING = FULL.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'user' and loop.revindex <= 2 %} /think{% endif %}")
TOOLS = [{"name": "f", "description": "x"}, {"name": "g", "description": "y"}]
SYSTEM = {"role": "system", "content": "Be brief at 10:01."}
SPELLED = [TINY.backend.token_to_id(letter) for letter in "They"]               # a text in four ids that encodes to two
THOUGHT = "<think>\nThey greet.\n</think>\n\nHello"


def set_(name, value):
    return lambda chat: setattr(chat, name, value)


def message(i, **changes):
    return lambda chat: chat.messages.__setitem__(i, {**chat.messages[i], **changes})


def replaced(*messages):
    return lambda chat: setattr(chat, "messages", list(messages))


PROVOKED = [  # cause, the message where they part, template (None: the built-in one), options, the two answers, what is done
    ("cold", None, FULL, {}, "", lambda chat: chat.reset()),
    ("cache off", None, FULL, {"prefix_cache": False}, "", None),
    ("cannot rewind", None, FULL, {}, "", lambda chat: setattr(chat.engine, "rewinds", False)),
    ("append-only", None, FULL, {}, "", None),
    ("same prompt", None, FULL, {}, "", "regenerate"),
    ("new conversation", 0, FULL, {}, "", replaced({"role": "user", "content": "Zebra?"})),
    ("new conversation", 1, FULL, {}, "", replaced(SYSTEM, {"role": "user", "content": "Zebra?"})),
    ("re-tokenised text", 2, FULL, {}, SPELLED, None),
    ("tool definitions", 0, FULL, {"tools": TOOLS}, "", set_("tools", TOOLS[:1])),
    ("tool definitions", 0, FULL, {"tools": TOOLS}, "", set_("tools", None)),
    ("tool order", 0, FULL, {"tools": TOOLS}, "", set_("tools", TOOLS[::-1])),
    ("tool order", 0, FULL, {"tools": TOOLS}, "", set_("tools", [{"description": "x", "name": "f"}, TOOLS[1]])),
    ("documents", 0, FULL, {"documents": [{"text": "a"}]}, "", set_("documents", [{"text": "b"}])),
    ("documents", 0, FULL, {"documents": [{"text": "a"}]}, "", set_("documents", None)),
    ("append-only", None, PLAIN, {"documents": [{"text": "a"}]}, "", set_("documents", [{"text": "b"}])),   # it shows none
    ("edited message", 1, PLAIN, {"tools": TOOLS}, "", lambda chat: (set_("tools", None)(chat), message(1, content="Howdy")(chat))),
    ("template arguments", 0, FULL, {"template_arguments": {"mood": "sad"}}, "", set_("template_arguments", {"mood": "glad"})),
    ("system prompt", 0, FULL, {}, "", message(0, content="Be brief or else.")),
    ("system prompt", 0, FULL, {}, "", lambda chat: chat.messages.pop(0)),
    ("system prompt", 0, FULL, {"system": None}, "", lambda chat: chat.messages.insert(0, SYSTEM)),
    ("clock", 0, FULL, {}, "", message(0, content="Be brief at 10:02.")),
    ("system prompt", 0, FULL, {"system": "Use 10 words at 10:01."}, "", message(0, content="Use 12 words at 10:01.")),
    ("system prompt", 0, FULL, {"system": "Use 10 words at 10:01."}, "", message(0, content="Use 12 words at 10:02.")),
    ("template re-rendering", 0, "{{ messages | length }} messages\n" + FULL, {}, "", None),               # a number is no clock
    ("clock", 0, "{{ strftime_now('%H:%M') }}\n" + FULL, {}, "", None),
    ("truncation", 1, FULL, {}, "", lambda chat: chat.messages.__delitem__(slice(1, 3))),
    ("truncation", 0, FULL, {"system": None}, "", lambda chat: chat.messages.__delitem__(slice(2))),
    ("edited message", 1, FULL, {}, "", message(1, content="Howdy")),
    ("edited message", 2, FULL, {}, "", message(2, content="Hallo")),
    ("edited message", 3, FULL, {}, "", message(3, role="tool")),
    ("edited message", 4, FULL, {}, SPELLED, message(4, content="Xhey")),       # where the ids are not those of the text either
    ("edited message", 4, FULL, {}, "", lambda chat: chat.messages.pop(4)),
    ("generation-prompt think block", 4, None, {"template_arguments": {"enable_thinking": False}}, "", None),
    ("stripped reasoning", 4, None, {}, THOUGHT, None),
    ("stripped reasoning", 4, None, {}, THOUGHT.replace("<think>", "<think>" + "\n" * 60), None),         # however far it begins
    ("stripped reasoning", 4, None, {}, "<think>Hello</think>Hello you", None),                            # a word that is said too
    ("stripped reasoning", 4, None, {"template_arguments": {"x": 1}}, THOUGHT, lambda chat: (
        message(2, note="never shown")(chat), set_("template_arguments", {"x": 2})(chat))),               # changes that do not show
    ("template re-rendering", 4, FULL.replace("{{ m.content }}", "{{ m.content | replace('\n\n', '\n') }}"), {"parser": "qwen3"}, THOUGHT, None),
    ("template re-rendering", 4, FULL.replace("{{ m.content }}", "{{ m.content | replace('<think>\n', '<think>\n\n') }}"), {"parser": "qwen3"}, THOUGHT, None),
    ("re-tokenised text", 2, FULL, {"parser": "qwen3"}, TINY.encode_plain("<think>a</think>b"), None),      # spelled, and then read as one
    ("template re-rendering", 4, FULL.replace("{{ m.content }}", "{% if m.role == 'assistant' %}then) {% endif %}{{ m.content.split('</think>')[-1] }}")
     .replace("assistant\n{% endif", "assistant\nnow) {% endif"), {"parser": "qwen3"}, THOUGHT, None),    # stripped too, but they part before
    ("template re-rendering", 3, ENDING, {}, "", None),
    ("template re-rendering", 3, ENDING + "{% if add_generation_prompt %}<think>{% endif %}", {}, "", None),
    ("template re-rendering", 3, ENDING + "{% if not add_generation_prompt %}{{ raise_exception('never so') }}{% endif %}", {}, "", None),
    ("template re-rendering", 4, FULL + "{% if add_generation_prompt %}>> {% endif %}", {}, "", None),
]


@pytest.mark.parametrize(("cause", "at", "source", "options", "second", "then"), PROVOKED,
                         ids=[f"{one[0]} {i}" for i, one in enumerate(PROVOKED)])
def test_every_cause_with_its_place_both_sides_and_what_it_cost(cause, at, source, options, second, then, monkeypatch):
    hour = iter(range(1000))
    monkeypatch.setattr(template_module, "now", lambda: datetime.datetime(2024, 1, 1) + datetime.timedelta(hours=next(hour)))
    tokenizer = toy(source) if source else TINY
    ids = second if isinstance(second, list) else tokenizer.encode(second or "Very well, thank you.")
    answers = [tokenizer.encode("Hello to you"), ids, tokenizer.encode("!")]
    if cause == "re-tokenised text":
        answers = [ids, answers[0], answers[2]]                               # it shows one turn later
        chat = Chat(Scripted(answers), tokenizer, **{"system": SYSTEM["content"]} | options)
        say(chat, "Hi")
    else:
        chat = Chat(Scripted(answers), tokenizer, **{"system": SYSTEM["content"]} | options)
        say(chat, "Hi"), say(chat, "How are you?")
    held = chat.engine.tokens
    if then and then != "regenerate":
        then(chat)
        held = chat.engine.tokens
    list(chat.regenerate()) if then == "regenerate" else say(chat, "More")
    turn, found = chat.turns[-1], chat.turns[-1].explain()
    prompt = chat._trail.turn(turn._explain.args[0])[1].ids                   # the clock has gone on since
    assert found.cause == cause and (found.message, found.role) == (at, chat.messages[at]["role"] if at is not None else "")
    common = naive_prefix(prompt, held)
    lost = cause in ("cache off", "cannot rewind", "cold")
    assert (found.prompt, found.held, found.reused) == (len(prompt), len(held), 0 if lost else min(common, len(prompt) - 1))
    assert (found.reused, found.forwarded) == (turn.reused, turn.forwarded)
    assert found.avoidable == max(0, min(len(held), len(prompt) - 1) - found.reused)
    assert (found.avoidable == 0) == (cause in ("cold", "append-only", "same prompt"))
    if at is None:
        assert (found.held_ids, found.prompt_ids) == ([], [])
    else:
        assert (found.held_ids, found.prompt_ids) == (held[common:common + 8], prompt[common:common + 8])
        assert found.held_text == tokenizer.decode(held[common:common + 8], skip_special_tokens=False)
        assert found.prompt_text == tokenizer.decode(prompt[common:common + 8], skip_special_tokens=False)
    lines = str(found).splitlines()
    assert lines[0].startswith(f"{found.reused} of {len(prompt)} prompt tokens reused, {found.forwarded} forwarded")
    assert lines[1].startswith(f"{cause}: {CAUSES[cause]}") and (f"at message {at} ({found.role})" in lines) == (at is not None)


@pytest.mark.parametrize(("old", "new"), [
    ("10:01", "10:02"), ("9:59", "10:00"), ("It is 23:59:59 now", "It is 0:00:00 now"), ("2024-02-29", "2024-03-01"), ("at 3 PM.", "at 4 PM."),
    ("2024-02-29T23:59:59Z", "2024-03-01T00:00:00Z"), ("29 Feb 2024", "1 March 2024"), ("Thu 29 Feb", "Fri 1 Mar"), ("May 9th, 2024", "May 10th, 2024"),
    ("Thursday, 29.02.2024", "Friday, 01.03.2024"), ("2/28/2024", "2/29/2024"), ("February 2024", "March 2024"), ("(10:01 a.m.)", "(10:02 a.m.)"),
    ("Today is Monday, May 31, 2024, 23:59+02:00", "Today is Saturday, June 1, 2024, 00:00+02:00")])
def test_what_reads_as_a_date_or_a_time_is_a_clock(old, new):
    assert _only_clock(old, new) and not _only_clock(old, old) and not _only_clock(old, new + "!")
    assert not _only_clock(f"Use 10 words. {old}", f"Use 11 words. {new}")


@pytest.mark.parametrize(("old", "new"), [
    ("10 words", "11 words"), ("version 1.2.3", "version 1.2.4"), ("10.0.0.1", "10.0.0.2"), ("Mark", "March"), ("2048 tokens", "2049 tokens"),
    ("I may 1", "I may 2"), ("10:61", "10:62"), ("25:00", "26:00"), ("ratio 1:2", "ratio 1:3"), ("2024-13-01", "2024-14-01"), ("x10:01", "x10:02"),
    ("a/10:01", "a/10:02"), ("The Sun", "The Mon"), ("10:01", "soon"), ("at 0", "at 10:01"), ("10 amps", "11 amps"), ("1/2", "1/3")])
def test_any_other_number_is_none(old, new):
    assert not _only_clock(old, new)


def test_every_cause_there_is_was_provoked():
    assert {one[0] for one in PROVOKED} == set(CAUSES)


def test_on_an_engine_that_another_chat_used_it_is_a_new_conversation():
    engine = Scripted([TINY.encode("Yes.")] * 2)
    for text in ("Apple?", "Banana?"):
        chat, held = Chat(engine, toy(), system="Be brief."), engine.tokens
        say(chat, text)
    found = chat.turns[0].explain()
    assert (found.cause, found.message, found.reused) == ("new conversation", 1, naive_prefix(chat.prompt(chat.messages[:2]).ids, held))


@pytest.mark.parametrize(("held", "cause"), [([1, 2, 3, 9], "same prompt"), ([1, 2, 3], "same prompt"), ([1, 2], "append-only"),
                                             ([1, 2, 4], "new conversation"), ([1], "append-only"), ([], "cold")])
def test_a_prompt_is_held_whole_only_with_its_last_token(held, cause):
    prompt = Prompt([USER], {}, TINY.decode([1, 2, 3]), [1, 2, 3])
    assert explain(toy(), PARSERS["plain"], held, prompt).cause == cause


def test_arguments_of_a_tool_call_that_were_edited_are_found_at_their_message():
    source = FULL.replace("{{ m.content }}", "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}")
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat = Chat(Scripted([TINY.encode("Yes.")] * 2), toy(source))
    chat.messages = [USER, answer("I ask.", tool_calls=[call]), {"role": "tool", "content": "t"}, answer("So.")]
    say(chat, "Apple?")
    chat.messages[1]["tool_calls"] = [{**call, "function": {"name": "f", "arguments": {"a": 2}}}]
    say(chat, "Banana?")
    found = chat.turns[1].explain()
    assert (found.cause, found.message, found.detail) == ("edited message", 1, "message 1")


def test_a_window_that_slides_keeps_its_head_only():
    """G12: each turn the oldest question and answer are dropped, and each turn all but the system prompt runs again."""
    on, off = (Chat(Scripted([TINY.encode("Yes.")] * 5), toy(), cache, system="Be brief.") for cache in (True, False))
    head = len(TINY.encode("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"))
    for number, text in enumerate(["Apple?", "Banana?", "Cherry?", "Date?", "Elder?"]):
        for chat in (on, off):
            if number > 1:
                del chat.messages[1:3]
            say(chat, text)
        same_turn(on, off)
        if number > 1:
            found = on.turns[-1].explain()
            assert (found.cause, found.detail, found.message, found.reused) == ("truncation", "2 messages", 1, head)


def test_what_was_generated_is_the_raw_text_if_the_conversation_has_it():
    messages = [USER, answer("Hello", raw="<think>\nThey greet.\n</think>\n\nHello"), MORE]
    assert causes(toy(), messages, "qwen3") == ["cold", "stripped reasoning"]
    assert causes(toy(), [USER, answer("Hello"), MORE], "qwen3") == ["cold", "append-only"]


def test_a_message_is_found_though_the_template_allows_one_tool_call_only():
    """As Llama 3.1's does."""
    source = FULL.replace("{{ m.content }}", "{% for call in m.tool_calls or [] %}"
                          "{% if loop.last and not loop.first %}{{ raise_exception('one') }}{% endif %}{{ call | tojson }}{% endfor %}{{ m.content }}")
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    found = list(walk(toy(source), PARSERS["plain"], [USER, answer("", tool_calls=[call]), MORE], {}))[1]
    assert (found.cause, found.message, found.role) == ("template re-rendering", 1, "assistant")


def test_a_message_is_found_though_the_template_does_not_show_its_tool_calls():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = list(walk(TINY, PARSERS["qwen3"], [USER, answer("", tool_calls=[call]), MORE], {}))[1]
    assert (found.cause, found.message, found.role) == ("template re-rendering", 1, "assistant")


# From written conversations, on templates of our own

ROUGH = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"])}, optional={
    "content": st.none() | st.sampled_from(["", "Hi", "\n\n", "<think>a</think>\n\nb", "<|im_end|>", "漢字🙂",
    "12:30"]) | st.lists(st.just({"text": "x"})),
    "reasoning": st.sampled_from(["", "hm", 3]), "raw": st.sampled_from(["", "<think>a</think>", "Hi"]),
    "ids": st.lists(st.integers(0, 511), max_size=3), "tool_calls": st.lists(st.sampled_from([
        {"function": {"name": "f"}}, {"name": "f", "arguments": "{}"}, {"function": {"name": "f", "arguments": {"a": "</tool_call>"}}},
        {}, 3]), max_size=2)})


@given(st.lists(ROUGH | st.sampled_from([3, {"content": "x"}]), max_size=6),
       st.sampled_from([None, FULL, ENDING, FULL + "{{ messages[-1].content[3:] }}", "{{ messages | tojson }}"]),
       st.sampled_from([*PARSERS]))
def test_what_is_said_of_a_written_conversation_is_always_counted_right(messages, source, parser):
    """Whatever it holds. What no template renders is a TokenizerError."""
    tokenizer = toy(source) if source else TINY
    try:
        found = list(walk(tokenizer, PARSERS[parser], messages, {}))
    except TokenizerError:
        return
    assert len(found) == sum(one["role"] == "assistant" for one in messages) + (bool(messages) and messages[-1]["role"] != "assistant")
    for one in found:
        assert one.cause in CAUSES and 0 <= one.avoidable <= one.forwarded and str(one)
        assert one.message is None or one.role == messages[one.message]["role"]

def test_a_template_that_changes_an_earlier_message_is_caught_at_its_index():
    """G4: an earlier user message lost its suffix when a new one arrived."""
    source = PLAIN.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'user' and loop.revindex <= 2 %} /think{% endif %}")
    found = list(walk(toy(source), PARSERS["plain"], [USER, answer("Hello"), MORE, answer("Yes"), MORE], {}))
    assert [one.cause for one in found] == ["cold", "template re-rendering", "template re-rendering"]
    assert [one.message for one in found[1:]] == [0, 2]


def test_an_append_only_template_is_found_to_be_one():
    assert causes(toy(), [USER, answer("Hello"), MORE, answer("Yes"), MORE]) == ["cold", "append-only", "append-only"]
    assert all(finding.append_only for finding in lint(toy(), PARSERS["plain"], conversations=5) if finding.kind in ("plain", "whitespace"))


def test_lint_names_the_first_message_that_changes_and_says_what_it_refuses():
    """G4. On a shortest conversation, and with a seed always on the same."""
    found = {finding.kind: finding for finding in lint(toy(ENDING), PARSERS["plain"], conversations=6)}
    for finding in found.values():
        users = [i for i, one in enumerate(finding.conversation) if one["role"] == "user"]
        assert not finding.append_only and finding.message in users[:2] and finding.explanation.cause == "template re-rendering"
        assert finding.breaks < finding.turns and ("tools" in finding.kind or finding.breaks == finding.turns - 6), \
            "the first turn has nothing to break"
    short, long = ([len(one.conversation) for one in lint(toy(ENDING), PARSERS["plain"], conversations=count)] for count in (12, 1))
    assert all(a <= b for a, b in zip(short, long)) and short != long
    again = {finding.kind: finding for finding in lint(toy(ENDING), PARSERS["plain"], conversations=6)}
    assert found == again != {finding.kind: finding for finding in lint(toy(ENDING), PARSERS["plain"], conversations=6, seed=1)}
    no_tools = toy("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + PLAIN)
    refused = {finding.kind: finding.refused for finding in lint(no_tools, PARSERS["plain"], conversations=2)}
    assert {kind for kind in refused if refused[kind]} == {"tools", "thinking and tools"} and "no tools here" in refused["tools"]


def test_the_clock_of_a_template_is_found(monkeypatch):
    minutes = iter(range(1000))
    monkeypatch.setattr(template_module, "now", lambda: datetime.datetime(2024, 1, 1) + datetime.timedelta(minutes=next(minutes)))
    found = list(walk(toy("{{ strftime_now('%H:%M') }}\n" + PLAIN), PARSERS["plain"], [USER, answer("Hello"), MORE], {}))[1]
    assert (found.cause, found.detail) == ("clock", "written by the template")


def test_harmonys_analysis_is_stripped_reasoning():
    source = PLAIN.replace("{{ m.content }}", "{% if m.role == 'assistant' %}<|channel|>final<|message|>{% endif %}{{ m.content }}")
    found = list(walk(toy(source), PARSERS["harmony"], [USER, answer("Hello", thinking="They greet."), MORE], {}))[1]
    assert (found.cause, found.message, found.role) == ("stripped reasoning", 1, "assistant")


# On Qwen3's

def qwen3_walk(tokenizer, messages, **arguments):
    return list(walk(tokenizer, parser_named(None, tokenizer), messages, arguments))


@pytest.mark.real
def test_thinking_off_costs_the_think_block_of_the_generation_prompt(qwen3):
    """G1: the prompt ends in ids 151667 271 151668 271, and the history has them not: LCP is 4 short."""
    messages = [USER, answer("Hello!"), MORE]
    found = qwen3_walk(qwen3, messages, enable_thinking=False)[1]
    first = qwen3.encode_chat(messages[:1], enable_thinking=False).ids
    assert first[-4:] == [151667, 271, 151668, 271] and found.reused == len(first) - 4
    assert (found.cause, found.message, found.held_ids[:4]) == ("generation-prompt think block", 1, first[-4:])


@pytest.mark.real
def test_reasoning_is_stripped_from_the_history(qwen3):
    """G2: reuse ends at the first think token of that turn."""
    messages = [USER, answer("<think>a</think>\n\nb", raw="<think>a</think>\n\nb"), MORE]
    found = qwen3_walk(qwen3, messages)[1]
    assert found.reused == len(qwen3.encode_chat(messages[:1]).ids) and found.held_ids[0] == 151667
    assert (found.cause, found.message) == ("stripped reasoning", 1)


@pytest.mark.real
def test_a_new_question_drops_the_reasoning_of_all_rounds_of_the_last(qwen3):
    """G3: within one question it grows, and then falls back to the first answer of that question."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"path": "x", "edits": 1}}}
    rounds = [answer("", reasoning_content="r1", tool_calls=[call]), {"role": "tool", "content": "t1"},
              answer("", reasoning_content="r2", tool_calls=[call]), {"role": "tool", "content": "t2"}, answer("Done", reasoning_content="r3")]
    found = qwen3_walk(qwen3, [{"role": "system", "content": "S"}, USER, *rounds, MORE])
    assert [one.cause for one in found] == ["cold", "append-only", "append-only", "stripped reasoning"]
    assert found[3].message == 2 and found[1].reused < found[2].reused
    assert found[3].reused == len(qwen3.encode_chat([{"role": "system", "content": "S"}, USER]).ids)


@pytest.mark.real
@pytest.mark.parametrize(("generated", "content", "part"), [([198, 198], "\n\n", [198, 198]), ([13, 271], ".\n\n", [13, 271])])
def test_two_spellings_of_one_text(qwen3, generated, content, part):
    """H2, H3: 198 198 at generation, 271 when it is encoded again; the engine does not repair it by comparing text."""
    messages = [USER, answer("x" + content + "y", ids=[87, *generated, 88], raw=""), MORE]
    found = qwen3_walk(qwen3, messages)[1]
    assert (found.cause, found.message) == ("re-tokenised text", 1) and found.held_ids[:1] == part[:1]
    assert found.reused == len(qwen3.encode_chat(messages[:1]).ids) + 1


@pytest.mark.real
def test_the_order_of_keys_is_the_callers(qwen3):
    """G7: arguments that were sorted parted at the first of them."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"path": "x", "edits": [1]}}}
    assert [one.cause for one in qwen3_walk(qwen3, [USER, answer("", tool_calls=[call]), {"role": "tool", "content": "t"}])] == \
        ["cold", "append-only"]


@pytest.mark.real
@pytest.mark.parametrize(("content", "rest", "short"), [("", "", None), ("x\n", "x\n\n", None), ("\n\n", "\n\n\n", 1), ("\nx", "\nx\n", 1)])
def test_newlines_around_the_content_of_a_tool_call(qwen3, content, rest, short):
    """G6: 244 tokens ran again. All that the template writes is what was generated, but for the ids: the prompt's own last
    newline and those that the answer begins with encode to one id together."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [USER, answer(content, tool_calls=[call]), {"role": "tool", "content": "t"}]
    first = qwen3.encode_chat(messages[:1])
    generated = f'{rest}<tool_call>\n{{"name": "f", "arguments": {{"a": 1}}}}\n</tool_call>'
    assert qwen3.render(messages).startswith(first.text + generated + "<|im_end|>")
    found = qwen3_walk(qwen3, messages)[1]
    assert found.held == len(first.ids) + len(qwen3.encode(generated))
    assert (found.cause, found.reused) == (("re-tokenised text", len(first.ids) - short) if short else ("append-only", found.held))


@pytest.mark.real
def test_what_lint_says_of_qwen3s_template(qwen3):
    found = {finding.kind: finding for finding in lint(qwen3, parser_named(None, qwen3), conversations=8)}
    assert found["plain"].append_only and found["tools"].append_only
    assert {kind: found[kind].explanation.cause for kind in found if not found[kind].append_only} == {
        "whitespace": "re-tokenised text", "thinking": "stripped reasoning", "no thinking": "generation-prompt think block",
        "thinking and tools": "stripped reasoning"}
    for kind, finding in found.items():
        assert finding.append_only or finding.conversation[finding.message]["role"] == "assistant"
        if "thinking" in kind:
            first = [message["role"] for message in finding.conversation].index("assistant")
            assert finding.message == first and finding.explanation.message == first and not finding.append_only
