"""THEOREM. An engine that cannot rewind loses nothing but time: -1, a reset, and the same answer.

Statement: when `trim_kv_cache` answers -1 (a recurrent state has no past to go back to), the engine holds what it held, bit
for bit, and a chat that resets it and feeds all of the prompt gives the text, ids, logits and K/V of a chat that reuses.
Where the prompt goes on from all that is held, nothing has to be rewound, and all of it is reused.

Argument: answering is not acting; after the reset, prove_state_is_a_function_of_the_tokens says the rest.

Run on two engines: ours with its rewind taken away, and one over a model with recurrent layers, which has none.

Not shown here: snapshots, by which it can (prove_a_snapshot_is_a_full_recompute).
"""
import functools

import pytest
from engines_of_others import NoRewind
from hypothesis import given, settings, strategies as st

from refengine.conformance.history import Player, model_truth
from refengine.conformance.prove import Side, prove
from refengine.model import load_model, load_tokenizer
from refengine.pipelined import PipelinedEngine
from refengine.prefix import common_prefix

IDS = st.lists(st.integers(0, 63), min_size=1, max_size=20)

load = functools.cache(load_model)
ENGINES = {"no rewind": lambda capacity: NoRewind(load("tiny"), capacity=capacity, page_size=4),
           "recurrent": lambda capacity: PipelinedEngine(load("tiny-hybrid"), capacity=capacity, page_size=4, chunk_size=8)}
every_engine = pytest.mark.parametrize("kind", ENGINES)


@every_engine
@given(held=IDS, length=st.integers(0, 25), rest=IDS)
def prove_a_refused_rewind_changes_nothing(kind, held, length, rest):
    engine = ENGINES[kind](64)
    truth = model_truth(engine.model)
    engine.prefill(held)
    before, logits = engine.kv(), engine.logits.tobytes()
    assert engine.trim_kv_cache(length) == (-1 if length < len(held) else len(held))
    assert engine.tokens == held and engine.logits.tobytes() == logits
    for layer, was in zip(engine.kv(), before):
        assert all(layer[name].tobytes() == was[name].tobytes() for name in was)
    engine.prefill(rest)
    assert engine.logits.tobytes() == truth(tuple(held + rest)).logits.tobytes()


@every_engine
@given(prompts=st.lists(IDS, min_size=2, max_size=4))
def prove_turns_that_fall_back_hold_what_turns_that_reuse_hold(kind, prompts):
    engine = ENGINES[kind](64)
    player = Player(engine, model_truth(engine.model))
    player.play([{"op": "turn", "prompt": prompt, "max_tokens": 2, "cancel": None} for prompt in prompts])


@every_engine
@settings(max_examples=max(1, settings.default.max_examples // 6))  # a chat is four turns on two engines
@given(seed=st.integers(0, 2**32))
def prove_chats_that_fall_back_equal_chats_without_reuse(kind, seed):
    engine, tokenizer = ENGINES[kind](1024), load_tokenizer("tiny")
    sides = [Side("pipelined OFF", PipelinedEngine(engine.model, capacity=1024), tokenizer, False),
             Side("ON", engine, tokenizer, True)]
    result = prove(sides, seed=seed, chats=1, turns=4, long_words=8, max_tokens=6)
    assert not result.differences, result.differences[0]
    for row, last in zip(result.rows[1:], result.rows):
        turn, before = row.turns["ON"], last.turns["ON"]
        if turn and before:
            assert turn.fallback == ("recurrent" if turn.reused == 0 else ""), "reused is all that was held, or nothing"


@every_engine
def prove_what_goes_on_from_all_that_is_held_is_reused_whole(kind):
    engine = ENGINES[kind](64)
    engine.prefill([1, 2, 3])
    assert engine.trim_kv_cache(common_prefix([1, 2, 3, 4], engine.tokens)) == 3
    engine.prefill([4])
    assert engine.tokens == [1, 2, 3, 4]
