"""Any way of computing the same tokens gives the same bits, and a generation that outlives its time does no harm."""
import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from helpers import (KINDS, assert_holds, assert_identical, both_engines, breaking, cold, feed_of, ids_of, make_engine,
                     run_script, same_bits, same_kv, serve, snapshots, spied, state)
from hypothesis import example, given, strategies as st

from refengine.engine import Engine
from refengine.errors import RefengineError, StaleGenerationError

PROMPT = ids_of(5)
NEXT = [*PROMPT, 50, 51]
IDS = st.integers(0, 63)


@st.composite
def engines(draw, capacity=64):
    """What an engine may be made of; none of it may show in a result."""
    kind, page_size = draw(st.sampled_from(KINDS)), draw(st.integers(1, 17))
    pages = -(-capacity // page_size)
    order = draw(st.none() | st.permutations(range(pages)))
    return kind, {"capacity": capacity, "page_size": page_size, "page_order": order, "chunk_size": draw(st.integers(1, 20))}


@st.composite
def scripts(draw):
    """Feeds, trims, generations, cancels and resets that are possible one after the other."""
    script, held = [], 0
    for _ in range(draw(st.integers(1, 7))):
        verb = draw(st.sampled_from(["feed", "feed", "trim", "generate", "cancel", "reset"])) if held else "feed"
        if held > 40 and verb != "reset":
            verb = "trim"
        if verb == "feed":
            ids = draw(st.lists(IDS, min_size=1, max_size=12))
            script.append((verb, ids))
            held += len(ids)
        elif verb == "reset":
            script.append((verb,))
            held = 0
        else:
            count = draw(st.integers(0, held)) if verb == "trim" else draw(st.integers(1, 4))
            script.append((verb, count))
            held = count if verb == "trim" else held + count - 1
    return script


@given(engines(), scripts(), st.booleans())
@example(("pipelined", {"page_size": 1, "chunk_size": 1}), [("feed", [5]), ("trim", 0), ("feed", [5, 6])], True)
def test_any_script_on_any_engine_holds_what_a_fresh_computation_gives(t_model, made, script, poison):
    """A3, A16, B2, D7: after every step tokens, last logits and all K/V are those of one forward from nothing."""
    kind, settings = made
    engine = make_engine(kind, t_model, **settings)

    def check(engine, held, done):
        if poison and engine.logits is None:
            engine.cache.poison()
        assert_holds(engine, held, done)

    run_script(engine, script, check)


@given(st.lists(IDS, min_size=1, max_size=24), st.data())
def test_any_composition_into_chunks_gives_the_same_logits_at_every_position(t_model, ids, data):
    """D7: tokens one at a time and all at once gave different logits. Every row of every chunk, byte for byte."""
    page_size = data.draw(st.integers(1, 25))
    cache, rows, cuts = t_model.new_cache(24, page_size), [], []
    while cache.offset < len(ids):
        count = data.draw(st.integers(1, len(ids) - cache.offset))
        chunk = np.array(ids[cache.offset:cache.offset + count])
        rows.append(t_model.run(cache, chunk, every=True))
        cache.commit(chunk)
        cuts.append(f"feed {count}")
    want = cold(t_model, ids)
    same_bits(np.concatenate(rows), want.rows, cuts)
    same_kv(snapshots(cache), want.kv, cuts)


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(IDS, min_size=1, max_size=8), st.integers(0, 4)), min_size=1,
                max_size=4), engines(capacity=128))
def test_turns_with_reuse_equal_turns_without(t_model, turns, made):
    """D1, D5: ON and OFF. Each turn keeps some of the last one's tokens and goes on; ids, logits and K/V are the same."""
    kind, settings = made
    on, off = make_engine(kind, t_model, **settings), make_engine("pipelined", t_model, page_size=64, chunk_size=64)
    for keep, new, count in turns:
        prompt = [*on.tokens[:keep], *new]
        a, b = serve(on, prompt, count), serve(off, prompt, count, reuse=False)
        assert a.ids == b.ids and a.reused + a.forwarded == len(prompt) == b.forwarded
        assert a.reused >= min(keep, len(prompt) - len(new), len(prompt) - 1)
        assert on.tokens == off.tokens
        same_bits(on.logits, off.logits, f"{made}: {turns}")
        same_kv(snapshots(on.cache), snapshots(off.cache), f"{made}: {turns}")


@both_engines
def test_hundreds_of_greedy_ids_are_the_same_with_and_without_reuse(kind, t_model):
    """D3: greedy text differed after a few hundred tokens. 520 ids after a reused prompt; the first difference is named."""
    prompt, size = ids_of(20), {"capacity": 600, "chunk_size": 64}
    on, off = make_engine(kind, t_model, **size), make_engine("pipelined", t_model, **size)
    serve(on, [*prompt[:12], 1, 2, 3], 5)
    served, want = serve(on, prompt, 520), serve(off, prompt, 520, reuse=False).ids
    assert served.reused == 12 and len(served.ids) == 520
    first = next((i for i in range(520) if served.ids[i] != want[i]), None)
    assert first is None, f"the ids differ first at {first}: {served.ids[first]}, but should be {want[first]}"
    same_bits(on.logits, off.logits, "serve 15, serve 20, generate 520")


@both_engines
def test_unrelated_prompts_between_change_nothing(kind, t_model):
    """D4, D5: an answer changed after unrelated prompts, and with the cache. 5 times ON, 5 times OFF, others between."""
    engine, c, a, b = make_engine(kind, t_model), ids_of(9), ids_of(14, seed=4), ids_of(6, seed=5)
    want = cold(t_model, c, 6)
    for reuse in [True] * 5 + [False] * 5:
        served = serve(engine, c, 6, reuse=reuse)
        assert served.ids == want.ids
        same_bits(engine.logits, want.logits, f"reuse {reuse}")
        serve(engine, a, 3)
        serve(engine, [*a[:7], *b], 3)


@both_engines
def test_two_engines_over_one_model_take_turns_without_a_trace(kind, t_model):
    """E6: two conversations that share 6 tokens (a page and a half) append different ids in turn."""
    one, two = make_engine(kind, t_model), make_engine("pipelined", t_model)
    streams = []
    for engine, ids in ((one, [*ids_of(6), 7]), (two, [*ids_of(6), 8])):
        streams.append(engine.generate(ids, max_tokens=6))
    answers = list(zip(*streams))
    assert [list(ids) for ids in zip(*answers)] == [cold(t_model, [*ids_of(6), id], 6).ids for id in (7, 8)]
    assert_holds(one, [*ids_of(6), 7, *(a for a, _ in answers[:-1])])
    assert_holds(two, [*ids_of(6), 8, *(b for _, b in answers[:-1])])


@both_engines
def test_asking_the_model_for_logits_leaves_the_engine_alone(kind, t_model):
    """E8: a read-only forward appended to the caller's cache."""
    engine = make_engine(kind, t_model)
    engine.prefill(PROMPT)
    before = state(engine)
    same_bits(t_model.logits([*PROMPT, 1, 2])[4], engine.logits)
    assert state(engine) == before


def test_an_engine_shows_copies_of_its_keys_and_values(t_model):
    """So that two engines can be compared; one that cannot says None."""
    engine = make_engine("pipelined", t_model)
    engine.prefill(PROMPT)
    same_kv(engine.kv(), cold(t_model, PROMPT).kv)
    for layer in engine.kv():
        layer["k"][...] = 0  # a copy: writing to it is nobody's business
    same_kv(engine.kv(), cold(t_model, PROMPT).kv)
    assert Engine.kv(engine) is None


# Iterators that outlive their time

@both_engines
@pytest.mark.parametrize("use", ["trim", "trim to the same length", "reset", "prefill", "generate"])
@pytest.mark.parametrize("started", [False, True])
def test_a_generation_whose_engine_was_used_meanwhile_does_not_go_on(kind, use, started, t_model):
    engine = make_engine(kind, t_model)
    old = engine.generate(PROMPT)
    answer = [next(old), next(old)] if started else []
    held = engine.tokens
    assert held == [*PROMPT, *answer[:-1]] * started
    if use.startswith("trim"):
        engine.trim_kv_cache(3 if use == "trim" else 100)
        held = held[:3] if use == "trim" else held
    elif use == "reset":
        engine.reset()
        held = []
    elif use == "prefill":
        held = [*held, 1, 2]
        engine.prefill(feed_of(engine, held))
    else:
        engine.generate(feed_of(engine, [*held, 1]))
    with pytest.raises(StaleGenerationError, match="since this generation began"):
        next(old)
    assert list(old) == []
    assert_holds(engine, held, f"generate, {use}")
    assert_identical(engine, NEXT)


@both_engines
def test_a_refused_call_does_not_disturb_a_generation(kind, t_model):
    engine = make_engine(kind, t_model)
    ids = engine.generate(PROMPT, max_tokens=6)
    answer = []
    for bad in ([64], [], [1] * 200):
        answer.append(next(ids))
        with pytest.raises(RefengineError):
            engine.prefill(feed_of(engine, engine.tokens) + bad)
        with pytest.raises(ValueError):
            engine.trim_kv_cache(-1)
        with pytest.raises(ValueError):
            engine.generate(feed_of(engine, [*engine.tokens, 1]), max_tokens=-1)
    assert [*answer, *ids] == cold(t_model, PROMPT, 6).ids


@both_engines
def test_a_generation_that_was_never_started_did_nothing(kind, t_model):
    model, forwards = spied(t_model)
    engine = make_engine(kind, model)
    ids = engine.generate(PROMPT)
    assert engine.tokens == [] and forwards == []
    ids.close()
    ids.close()  # twice is once
    assert list(ids) == [] and engine.tokens == [] and forwards == []
    assert list(engine.generate(PROMPT, max_tokens=0)) == [] and engine.tokens == [] and forwards == []
    assert_identical(engine, PROMPT)


@pytest.mark.parametrize("use", ["trim", "reset", "prefill"])
def test_using_the_engine_waits_for_a_step_in_flight(use, t_model):
    """The step writes above the offset: a call that began before it had landed would be written over."""
    model, kernels = breaking(t_model)
    engine = make_engine("pipelined", model)
    landed, go, attention, caller = [], threading.Event(), kernels.attention, threading.get_ident()

    def late(*args):
        if threading.get_ident() != caller:
            go.wait(60)
            landed.append(len(engine.tokens))
        return attention(*args)

    ids = engine.generate(PROMPT)
    kernels.attention = late
    next(ids)
    threading.Timer(0.05, go.set).start()
    held = {"trim": PROMPT[:2], "reset": [], "prefill": [*PROMPT, 8, 9, 10]}[use]
    engine.trim_kv_cache(2) if use == "trim" else engine.reset() if use == "reset" else engine.prefill([8, 9, 10])
    assert landed == [5, 5]  # both layers of the step ran before the state changed
    assert_holds(engine, held, f"generate, {use} with a step in flight")
    assert_identical(engine, NEXT)


def test_an_engine_with_a_step_in_flight_can_be_forgotten(t_model):
    """Neither the engine nor its thread is kept alive, and the process ends."""
    before = set(threading.enumerate())
    engine = make_engine("pipelined", t_model)
    ids = engine.generate(PROMPT)
    next(ids)
    threads, dead = set(threading.enumerate()) - before, weakref.ref(engine)
    assert len(threads) == 1
    del engine, ids
    gc.collect()
    assert dead() is None
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    program = ("import refengine; e = refengine.load('tiny', engine='pipelined', capacity=64); "
               "g = e.generate([1, 2, 3]); print(next(g))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.strip().isdigit()
