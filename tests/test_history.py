"""The token history against what is really in the cache (group B of the cases), on every way out of a call.

After an end, a stop, a limit, a cancel, an error or an interrupt: `tokens` is exactly what the K/V stands for (compared
byte for byte with a fresh computation of those tokens), and the next turn is as on a fresh engine.
"""
import signal
import threading

import numpy as np
import pytest
from helpers import (SYSTEM, assert_holds, assert_identical, both_engines, breaking, cold, feed_of, ids_of, make_chat,
                     make_engine, same_turn, say, spied, state)

from refengine.cache import Cache
from refengine.errors import CapacityError
from refengine.model import load_model, load_tokenizer

PROMPT = ids_of(5)
NEXT = [*PROMPT, 50, 51]


class Broken(Exception):
    """What a planted fault raises."""


@both_engines
@pytest.mark.parametrize("finish", ["stop", "length", "closed by the reader"])
def test_after_every_finish_the_history_is_what_was_forwarded(kind, finish, t_model):
    """B1: the stop token was put into the history though it was never forwarded, and the next turn was off by one."""
    want = cold(t_model, PROMPT, 6).ids
    end = want.index(want[4]) if finish == "stop" else 4  # where the fifth id is met first
    engine = make_engine(kind, t_model)
    ids = engine.generate(PROMPT, stop_ids={want[4]} if finish == "stop" else (),
                          max_tokens=5 if finish == "length" else None)
    answer = []
    for id in ids:
        answer.append(id)
        if finish == "closed by the reader" and len(answer) == 5:
            ids.close()
            break
    assert answer == want[:end + 1]
    assert_holds(engine, [*PROMPT, *answer[:-1]], finish)
    assert assert_identical(engine, [*PROMPT, *answer, 7]).reused == len(PROMPT) + end


def test_the_two_engines_agree_between_any_two_tokens(t_model):
    """The pipelined engine looks like the sequential one at each token: same tokens, offset and logits."""
    one, two = (make_engine(kind, t_model) for kind in ("sequential", "pipelined"))
    for a, b in zip(one.generate(PROMPT, max_tokens=8), two.generate(PROMPT, max_tokens=8), strict=True):
        assert a == b and state(one) == state(two)
    assert state(one) == state(two)


@both_engines
@pytest.mark.parametrize("count", range(7))
def test_cancel_after_any_number_of_tokens(kind, count, t_model):
    """B2: the cancel path counted differently from the stop path."""
    engine = make_engine(kind, t_model)
    ids = engine.generate(PROMPT, max_tokens=6)
    answer = [next(ids) for _ in range(count)]
    ids.close()
    assert answer == cold(t_model, PROMPT, 6).ids[:count]
    assert_holds(engine, [*PROMPT, *answer[:-1]] if count else [], f"generate, close after {count}")
    assert_identical(engine, NEXT, script=f"close after {count}, serve 7")


# Calls in one forward of T: pack_kv and attention once a layer (pack_kv raises before the layer's write, attention after
# it), linear four times a layer and once for the head.
FAULTS = [("pack_kv", 1, 2), ("pack_kv", 2, 2), ("attention", 1, 2), ("attention", 2, 2), ("linear", 9, 9)]


@both_engines
@pytest.mark.parametrize(("op", "call", "calls"), FAULTS, ids=str)
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_an_error_inside_any_forward_leaves_what_was_before_it(kind, op, call, calls, error, t_model):
    """B4: an error in the middle left the layers disagreeing. Raised in each layer at each step of a turn, it leaves
    offset, tokens and logits of the step before; the id before it was handed out; the next call is right."""
    model, kernels = breaking(t_model)
    want = cold(t_model, NEXT, 4).ids
    steps = [1] * len(NEXT) if kind == "sequential" else [3, 3, 1]  # tokens in each forward of the prompt
    for step in range(len(steps) + 3):
        engine = make_engine(kind, model, chunk_size=3)
        kernels.arm(op, calls * step + call, error("planted"))
        answer = []
        with pytest.raises(error, match="planted"):
            for id in engine.generate(NEXT, max_tokens=5):
                answer.append(id)
        assert answer == want[:max(0, step - len(steps) + 1)]  # the last good id is not swallowed by the step after it
        held = [*NEXT, *want][:sum([*steps, 1, 1, 1][:step])]
        kernels.arm("", 0, error())
        assert_holds(engine, held, f"{op} call {call} raises in forward {step}")
        assert engine.logits is not None or not held
        assert_identical(engine, [*NEXT, 9], 2, f"{op} call {call} raised in forward {step}")


@both_engines
@pytest.mark.parametrize("layer", [0, 1])
def test_an_error_in_the_middle_of_a_write_leaves_what_was_before_it(kind, layer, t_model, monkeypatch):
    """B4: half of a layer's K/V is there, and nothing says so, because nothing was committed."""
    engine = make_engine(kind, t_model)
    engine.prefill(PROMPT)
    before = state(engine)
    write = Cache.write

    def torn(cache, at, kv):
        if at == layer:
            kv[0][:, :, 8:] = np.nan
            write(cache, at, kv)
            raise Broken
        write(cache, at, kv)

    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(Cache, "write", torn)
        engine.prefill(feed_of(engine, NEXT))
    assert state(engine) == before
    assert assert_identical(engine, NEXT).reused == len(PROMPT)


def test_an_interrupt_while_waiting_for_a_step_in_flight_changes_nothing(t_model):
    """Ctrl-C arrives in the reader's thread while the step runs in the other."""
    model, kernels = breaking(t_model)
    engine = make_engine("pipelined", model)
    go, interrupted = threading.Event(), threading.Event()
    attention, caller = kernels.attention, threading.get_ident()

    def slow(*args):
        if threading.get_ident() != caller:
            go.wait(60)
            while not interrupted.wait(0.01):  # a signal just before the reader begins to wait does not wake it
                signal.pthread_kill(caller, signal.SIGINT)
        return attention(*args)

    def interrupt(*args):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    kernels.attention = slow
    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        ids = engine.generate(PROMPT)
        first = next(ids)
        with pytest.raises(KeyboardInterrupt):
            go.set()
            next(ids)
    finally:
        interrupted.set()
        engine.trim_kv_cache(1000)  # keeps everything, and waits for the step, which may send another signal
        signal.signal(signal.SIGINT, handler)
    assert first == cold(t_model, PROMPT, 1).ids[0]
    assert_holds(engine, PROMPT, "generate, interrupt")
    assert_identical(engine, NEXT)


@both_engines
@pytest.mark.parametrize(("page_size", "kept", "old"), [(16, 15, 28), (4, 3, 9)])
def test_a_discarded_token_is_not_found_again_in_its_slot(kind, page_size, kept, old, t_model):
    """B5: the last token of a block was replaced, its hash was kept, and a query for the old one got the K/V of the new."""
    shared = [10] * 15 if kept == 15 else [1, 2, 3]
    engine = make_engine(kind, t_model, page_size=page_size)
    engine.prefill([*shared, old])
    assert assert_identical(engine, [*shared, 11], 1).reused == kept
    assert assert_identical(engine, [*shared, old], 1).reused == kept


@both_engines
def test_the_history_is_the_ids_that_were_fed(kind, t_model):
    """B11: the untrimmed prompt was stored as the key of a trimmed one. A prompt fits, or it is refused."""
    model, forwards = spied(t_model)
    engine = make_engine(kind, model, capacity=16)
    prompt = ids_of(16)
    with pytest.raises(CapacityError):
        engine.prefill([*prompt, 1])
    assert engine.tokens == [] and forwards == []
    engine.prefill(prompt)
    assert engine.tokens == prompt == [id for _, ids in forwards for id in ids]


# The same through the chat layer

@both_engines
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_cancelled_answer_keeps_what_was_streamed(kind, pieces):
    chat = make_chat(kind, max_tokens=20)
    say(chat, "Hello")
    answer = chat.send("And of Japan?")
    shown = "".join(next(answer) for _ in range(pieces))
    answer.close()
    turn = chat.turns[-1]
    assert (turn.finish_reason, turn.text) == ("cancelled", shown) and len(chat.turns) == 2
    assert chat.messages[-2:] == [{"role": "user", "content": "And of Japan?"}, {"role": "assistant", "content": shown}]
    assert chat.engine.processed_token_count == turn.prompt + turn.generated - 1
    off = make_chat(cache=False, max_tokens=20)
    off.messages, off.turns = list(chat.messages), list(chat.turns)
    assert say(chat, "Thank you") == say(off, "Thank you")
    same_turn(chat, off, f"cancel after {pieces}")


@both_engines
def test_an_answer_that_was_never_begun_leaves_no_trace(kind):
    chat = make_chat(kind)
    say(chat, "Hello")
    history = list(chat.messages)
    chat.send("And of Japan?").close()
    assert chat.messages == history and len(chat.turns) == 1


@both_engines
@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_error_takes_the_message_back(kind, step):
    """B4, through the chat layer: in the first forward, in the first step, later. Then all is as if nothing had been."""
    model, kernels = breaking(load_model("tiny"))
    chat, plain, off = make_chat(kind, model=model), make_chat(), make_chat(cache=False)
    for text in ("Hello", "And of Japan?"):
        say(plain, text), say(off, text)
    say(chat, "Hello")
    history = list(chat.messages)
    answer, turn = chat.send("And of Japan?"), plain.turns[1]
    forwards = turn.forwarded if kind == "sequential" else -(-turn.forwarded // 32)  # of the prompt; four layers each
    kernels.arm("attention", 4 * (forwards + step - 1 if step else 0) + 2, Broken())
    with pytest.raises(Broken):
        list(answer)
    assert chat.messages == history and len(chat.turns) == 1
    assert chat.engine.processed_token_count == (turn.prompt + step - 1 if step else turn.reused)
    kernels.arm("", 0, Broken())
    assert say(chat, "And of Japan?") == off.turns[1].text
    same_turn(chat, off, f"error at step {step}")


@both_engines
def test_an_interrupt_keeps_the_answer_so_far(kind):
    model, kernels = breaking(load_model("tiny"))
    chat = make_chat(kind, model=model, max_tokens=30)
    answer = chat.send("Hello")
    shown = next(answer)
    kernels.arm("attention", 4 * 9, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        for piece in answer:
            shown += piece
    assert chat.turns[-1].finish_reason == "cancelled" and 1 < chat.turns[-1].generated < 30
    assert chat.messages[-1] == {"role": "assistant", "content": shown}


@both_engines
def test_a_full_cache_ends_the_answer_and_keeps_it(kind):
    n = len(make_chat().prompt([{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]).ids)
    chat, whole = make_chat(kind, capacity=n + 4, max_tokens=20), make_chat(kind, max_tokens=5)
    text = say(chat, "Hello")
    assert text == say(whole, "Hello") == chat.messages[-1]["content"]
    assert (chat.turns[0].finish_reason, chat.turns[0].generated) == ("capacity", 5)  # four fit, the fifth needs no slot yet
    assert chat.engine.processed_token_count == n + 4
    history = list(chat.messages)
    with pytest.raises(CapacityError) as caught:
        chat.send("And of Japan?")
    assert caught.value.capacity == n + 4 and caught.value.used + caught.value.needed > n + 4
    assert chat.messages == history and len(chat.turns) == 1
    chat.undo()
    assert say(chat, "Hello") == text


@both_engines
def test_a_stop_id_ends_the_answer_and_is_not_in_its_text(kind):
    """B1: stop without draining past the stop token. Its K/V is not there, and the next turn does not think so."""
    first = make_chat(kind)
    say(first, "Hello")
    stop = first.turns[0].ids[3]
    chat = make_chat(kind)
    chat.tokenizer = load_tokenizer("tiny")
    chat.tokenizer.stop_ids = (*load_tokenizer("tiny").stop_ids, stop)
    say(chat, "Hello")
    turn = chat.turns[0]
    end = first.turns[0].ids.index(stop) + 1
    assert (turn.finish_reason, turn.ids) == ("stop", first.turns[0].ids[:end])
    assert turn.text == load_tokenizer("tiny").decode(turn.ids[:-1])
    assert chat.engine.tokens == [*chat.prompt(chat.messages[:2]).ids, *turn.ids[:-1]]
