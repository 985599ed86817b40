"""Re-anchoring: what the next prompt will begin with is prefilled in idle time, and a message that comes meanwhile stops it."""
import threading

import pytest
from helpers import KINDS, both_engines, change, make_chat, make_engine, naive_prefix, same_bits, same_kv, same_turn, say
from hypothesis import given, settings, strategies as st

from refengine.chat import Chat
from refengine.errors import CapacityError
from refengine.model import load_model, load_tokenizer
from refengine.template import ChatTemplate
from refengine.tokenizer import Tokenizer

SCRIPT = ["What is the capital of France?", "And of Japan?", "Thank you", "Tell me a story."]
# The history leaves out what was answered up to its third character: as a template does that strips reasoning.
STRIPPING = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content[3:] if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def stripping() -> Tokenizer:
    tokenizer = load_tokenizer("tiny")
    return Tokenizer(tokenizer.backend, ChatTemplate(STRIPPING), tokenizer.stop_ids)


def chat_of(kind="pipelined", cache=True, model="tiny", snapshot_every=None, **options):
    engine = make_engine(kind, load_model(model), capacity=512, page_size=16, chunk_size=8, snapshot_every=snapshot_every)
    return Chat(engine, stripping(), cache, system="Be brief.", max_tokens=12, **options)


def canonical(chat):
    """The ids that the next prompt will begin with, whatever is said."""
    a, b = (chat.prompt([*chat.messages, {"role": "user", "content": text}]).ids for text in ("x", "Z"))
    return a[:naive_prefix(a, b)]


@pytest.mark.parametrize(("model", "every"), [("tiny", None), ("tiny-hybrid", None), ("tiny-hybrid", 16)])
@both_engines
def test_the_next_turn_forwards_only_what_is_new(kind, model, every):
    """Where the state cannot be rewound that far, or not at all, idle time is for what lies before it too."""
    plain, anchored = chat_of(kind, model=model), chat_of(kind, model=model, snapshot_every=every, reanchor=True)
    off = chat_of(cache=False, model=model)
    for text in SCRIPT:
        for chat in (plain, anchored, off):
            say(chat, text)
        anchored.settle()
        turn = anchored.turns[-1]
        assert turn.anchored > 0 and anchored.engine.tokens == canonical(anchored)
    for mine, without, none in zip(anchored.turns[1:], plain.turns[1:], off.turns[1:]):
        assert (mine.text, mine.ids, mine.prompt) == (without.text, without.ids, without.prompt) == (none.text, none.ids, none.prompt)
        assert mine.forwarded < without.forwarded
    new = [len(chat_of().tokenizer.encode(text)) for text in SCRIPT[1:]]
    tail = len(chat_of().tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n"))
    assert [turn.forwarded for turn in anchored.turns[1:]] == [count + tail for count in new]


@both_engines
def test_what_it_leaves_is_what_a_cold_engine_has(kind):
    chat, cold = chat_of(kind), make_engine(kind, load_model("tiny"), capacity=512)
    say(chat, SCRIPT[0])
    before = chat.engine.tokens
    count = chat.anchor()
    assert chat.engine.tokens == canonical(chat) and count == len(canonical(chat)) - naive_prefix(canonical(chat), before)
    cold.prefill(canonical(chat))
    same_bits(chat.engine.logits, cold.logits)
    same_kv(chat.engine.kv(), cold.kv())
    assert chat.anchor() == 0, "it is there already"


class Anchored(Chat):
    """Anchors before each turn, on this thread."""

    def _answer(self, *arguments):
        if self.prefix_cache and self.messages:
            self.anchor()
        return super()._answer(*arguments)


@settings(max_examples=max(5, settings.default.max_examples // 4))
@given(st.lists(st.tuples(st.sampled_from(["send", "regenerate", "undo", "edit", "cancel"]), st.sampled_from([*SCRIPT, "漢字🙂", ""])),
                min_size=1, max_size=5), st.sampled_from(KINDS), st.booleans())
def test_whatever_is_done_to_the_history_anchoring_does_not_show(script, kind, keep_ids):
    engine = make_engine(kind, load_model("tiny"), capacity=512, page_size=16, chunk_size=8)
    on = Anchored(engine, stripping(), system="Be brief.", max_tokens=4, keep_ids=keep_ids)
    off = chat_of(cache=False, keep_ids=keep_ids)
    off.max_tokens = 4
    for verb, text in [("send", "Hello"), *script, ("send", "Last")]:
        for chat in (on, off):
            change(chat, verb, -1, text)
        if verb in ("send", "cancel"):
            same_turn(on, off, script)


@both_engines
def test_a_message_that_comes_while_it_runs_stops_it_and_reuses_what_it_did(kind, monkeypatch):
    chat, off = chat_of(kind, reanchor=True), chat_of(cache=False)
    began, go_on = threading.Event(), threading.Event()
    prefill = type(chat.engine).prefill

    def slow(engine, tokens):
        prefill(engine, tokens)
        if engine is chat.engine and threading.current_thread().name == "refengine-anchor":
            began.set()
            assert go_on.wait(60)

    monkeypatch.setattr(type(chat.engine), "prefill", slow)
    for one in (chat, off):
        say(one, SCRIPT[0])
    assert began.wait(60)
    waiting = threading.Timer(0.2, go_on.set)
    waiting.start()
    chat.reanchors = False
    say(chat, SCRIPT[1])                                    # must wait for the piece at hand, and for no more
    say(off, SCRIPT[1])
    first, second = chat.turns
    assert 0 < first.anchored <= chat.engine.chunk_size
    same_turn(chat, off)
    kept = naive_prefix(chat.prompt(chat.messages[:4]).ids, off.prompt(off.messages[:2]).ids + first.ids[:-1])
    assert second.reused == kept + first.anchored


@both_engines
def test_a_chat_that_sends_at_once_equals_one_that_waits(kind):
    at_once, waits, off = chat_of(kind, reanchor=True), chat_of(kind, reanchor=True), chat_of(cache=False)
    for text in SCRIPT:
        for chat in (at_once, waits, off):
            say(chat, text)
        waits.settle()
    for chat in (at_once, waits):
        assert [(turn.text, turn.ids) for turn in chat.turns] == [(turn.text, turn.ids) for turn in off.turns]
    at_once.reset()
    assert at_once.engine.tokens == [] and at_once._idle is None


def test_a_full_cache_is_told_by_the_turn_and_not_by_the_idle_work():
    chat = chat_of(reanchor=True)
    first = chat.prompt([*chat.messages, {"role": "user", "content": SCRIPT[0]}]).ids
    small = make_engine("pipelined", load_model("tiny"), capacity=len(first) + 12, page_size=1)
    chat.engine = small
    say(chat, SCRIPT[0])
    chat.settle()
    with pytest.raises(CapacityError):
        chat.send("x" * 50)
    assert len(chat.messages) == 3 and len(chat.turns) == 1


def test_without_the_prefix_cache_there_is_nothing_to_anchor():
    chat = chat_of(cache=False, reanchor=True)
    say(chat, SCRIPT[0])
    assert chat._idle is None and chat.turns[0].anchored == 0


def test_it_is_off_unless_asked_for():
    chat = make_chat()
    say(chat, "Hello")
    assert chat._idle is None and chat.turns[0].anchored == 0
