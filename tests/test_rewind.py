"""Rewind, offset and positions (group A of the cases): after a trim nothing of what was forgotten shows, anywhere."""
import json

import numpy as np
import pytest
from helpers import (assert_holds, assert_identical, both_engines, cold, feed_of, ids_of, make_engine, same_bits, serve,
                     snapshots, spied, state)
from models import T_CONFIG

from refengine.chat import Chat
from refengine.engine import Engine, SequentialEngine
from refengine.errors import CapacityError, ConfigError
from refengine.model import forward, load_model, load_tokenizer


def inject(engine, tokens):
    """Put the K/V of a fresh computation into an engine's cache, without a forward."""
    engine.cache.reserve(len(tokens))
    for layer, fields in enumerate(cold(engine.model, tokens).kv):
        engine.cache.write(layer, engine.model.op.KV(**fields))
    engine.cache.commit(tokens)


@both_engines
def test_trim_to_zero_forgets_everything(kind, t_model):
    """A1: crop(0) kept everything. Length 0 in all layers, and the next prompt is as on a fresh engine."""
    engine = make_engine(kind, t_model)
    engine.prefill([5, 6, 7])
    assert engine.trim_kv_cache(0) == 0
    assert engine.tokens == [] and engine.logits is None
    assert [layer["k"].shape[1] for layer in snapshots(engine.cache)] == [0, 0]
    assert_identical(engine, [8, 6, 7, 5])


@both_engines
def test_a_trim_answers_what_is_retained_and_refuses_negative_lengths(kind, t_model):
    """A1: negative lengths fell into a Python slice. Here they are errors; more than is held keeps what is held."""
    engine = make_engine(kind, t_model)
    engine.prefill([5, 6, 7])
    before = state(engine)
    for length in (-1, -5):
        with pytest.raises(ValueError, match=rf"trim_kv_cache\({length}\)"):
            engine.trim_kv_cache(length)
        assert state(engine) == before
    for length in (3, 4, 1000):
        assert engine.trim_kv_cache(length) == 3
        assert state(engine) == before
    assert engine.trim_kv_cache(2) == 2 == engine.processed_token_count
    assert engine.logits is None  # they were of the third token


@both_engines
@pytest.mark.parametrize("k", [3, 4, 5, 255, 256, 257, 290])
def test_a_long_history_is_cut_where_the_new_prompt_differs(kind, k, t_model):
    """A2: the trim used the allocation step instead of the length, and never ran. Offset == k after the trim."""
    engine = make_engine(kind, t_model, capacity=400, chunk_size=64)
    history = ids_of(300)
    inject(engine, history)  # 300 forwards of one token would take half a second, seven times
    prompt = [*history[:k], (history[k] + 1) % 64, 1, 2]
    assert engine.trim_kv_cache(k) == k == engine.processed_token_count == engine.cache.offset
    served = assert_identical(engine, prompt)
    assert served.reused == k


@both_engines
@pytest.mark.parametrize("k", range(12))
def test_nothing_at_or_above_the_offset_is_ever_read(kind, k, t_model):
    """A3: trimmed tokens came back. Every forgotten slot is NaN, and the next token is as on a fresh engine."""
    engine = make_engine(kind, t_model, page_order=np.random.default_rng(k).permutation(32).tolist())
    history = ids_of(12)
    engine.prefill(history)
    engine.trim_kv_cache(k)
    engine.cache.poison()
    assert [{field.shape[1] for field in layer.values()} for layer in snapshots(engine.cache)] == [{k}, {k}]
    engine.prefill(feed_of(engine, [*history[:k], 63]))
    assert np.isfinite(engine.logits).all()
    assert_holds(engine, [*history[:k], 63], f"feed 12, trim_to {k}, poison, feed 1")


@pytest.mark.parametrize("changes", [{"use_sliding_window": True, "sliding_window": 8},
                                     {"layer_types": ["full_attention", "sliding_attention"]}])
def test_a_model_with_a_sliding_window_is_refused_when_it_is_loaded(changes, t_folder, tmp_path):
    """A4: a ring buffer was trimmed by a logical length after it had wrapped. There is no such buffer here: refused."""
    (tmp_path / "config.json").write_text(json.dumps(T_CONFIG | changes))
    (tmp_path / "model.safetensors").write_bytes((t_folder / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=list(changes)[0]):
        load_model(tmp_path)


@both_engines
def test_rewinding_to_zero_and_going_on_is_starting_fresh(kind, t_model):
    """A5: rewind_to(0) "succeeded" in a base class that did nothing, and the next append crashed."""
    engine = make_engine(kind, t_model)
    engine.prefill([2, 5, 7, 9, 11])
    engine.trim_kv_cache(0)
    engine.prefill([2, 6, 8])
    assert_holds(engine, [2, 6, 8], "feed 5, trim_to 0, feed 3")


def test_an_engine_without_methods_of_its_own_cannot_be_made():
    """A5: a no-op rewind was inherited and forgotten. What has no sensible default is abstract."""
    class Forgetful(Engine):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Forgetful()
    assert Engine.__abstractmethods__ == {"tokens", "logits", "reset", "prefill", "generate"}


class NoRewind(SequentialEngine):
    """An engine whose state cannot be rewound: it takes the protocol's default."""

    trim_kv_cache = Engine.trim_kv_cache


def test_an_engine_that_cannot_rewind_says_so_and_changes_nothing(t_model):
    engine = NoRewind(t_model, capacity=128, page_size=4)
    engine.prefill([1, 2, 3])
    before = state(engine)
    assert engine.trim_kv_cache(2) == -1
    assert state(engine) == before
    with pytest.raises(ValueError):
        engine.trim_kv_cache(-1)


def test_chat_falls_back_to_a_reset_when_the_engine_cannot_rewind():
    """A5: and the turn says that it did, and what it cost."""
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    chat, plain = (Chat(engine, tokenizer, max_tokens=4) for engine in (NoRewind(model), SequentialEngine(model)))
    for text in ("Hello", "And of Japan?"):
        assert "".join(chat.send(text)) == "".join(plain.send(text))
    assert [(turn.fallback, turn.reused, turn.forwarded) for turn in chat.turns] == \
        [("recurrent", 0, turn.prompt) for turn in plain.turns]
    assert plain.turns[1].reused > 0 and plain.turns[1].fallback == ""
    assert chat.turns[1].record().endswith(" fallback=recurrent")


@both_engines
def test_injected_keys_and_values_stand_at_their_own_positions(kind, t_model):
    """A7: K/V came back, the offset stayed 0, and decoding went on at wrong positions."""
    history = ids_of(9)
    engine = make_engine(kind, t_model)
    inject(engine, history)
    assert engine.processed_token_count == 9 and engine.tokens == history
    assert assert_identical(engine, [*history, 4]).reused == 9


@both_engines
def test_two_turns_run_every_position_once(kind, t_model):
    """A8: turn 2 forgot turn 1, its positions did not begin where turn 1 ended. Exactly 0..n-1, no repeats, no gaps."""
    model, forwards = spied(t_model)
    engine = make_engine(kind, model)
    first = [*ids_of(6)]
    answer = serve(engine, first, 4).ids
    second = [*first, *answer, *ids_of(5, seed=1)]
    final = serve(engine, second, 3).ids
    positions = [start + i for start, ids in forwards for i in range(len(ids))]
    assert positions == list(range(len(second) + 2))
    assert [id for _, ids in forwards for id in ids] == [*second, *final[:2]]


@both_engines
def test_a_chat_turn_runs_the_positions_from_what_was_reused_to_its_end(kind):
    """A8, through the chat layer."""
    model, forwards = spied(load_model("tiny"))
    chat = Chat(make_engine(kind, model, capacity=400), load_tokenizer("tiny"), system="Be brief.", max_tokens=5)
    for text in ("Hello", "And of Japan?", "Thank you"):
        forwards.clear()
        list(chat.send(text))
        turn = chat.turns[-1]
        positions = [start + i for start, ids in forwards for i in range(len(ids))]
        assert positions == list(range(turn.reused, turn.prompt + turn.generated - 1))


@both_engines
def test_the_first_decode_step_stands_right_after_the_prompt(kind, t_model):
    """A9: offsets went 6, 12, 13: the prompt's length was added twice."""
    model, forwards = spied(t_model)
    serve(make_engine(kind, model), ids_of(6), 5)
    assert [start for start, _ in forwards] == ([0, 1, 2, 3, 4, 5] if kind == "sequential" else [0]) + [6, 7, 8, 9]


@both_engines
def test_the_last_slot_is_used_and_one_more_is_refused_without_a_write(kind, t_model):
    """A11: off by one at the end of the cache, or a wrap onto its beginning."""
    engine = make_engine(kind, t_model, capacity=128, chunk_size=32)
    history = ids_of(128)
    engine.prefill(history[:127])
    engine.prefill(feed_of(engine, history))
    assert_holds(engine, history, "feed 127, feed 1")
    before, memory = state(engine), [field.tobytes() for field in engine.cache.pool.fields]
    for call in (engine.prefill, engine.generate):
        with pytest.raises(CapacityError) as caught:
            call(feed_of(engine, [*history, 1]))
        assert (caught.value.used, caught.value.needed, caught.value.capacity) == (128, 1, 128)
    assert state(engine) == before and [field.tobytes() for field in engine.cache.pool.fields] == memory


@both_engines
def test_decoding_into_the_end_of_the_cache_hands_out_every_id_it_can(kind, t_model):
    """A11: the error comes when the next id is asked for, after the last one that fits, and is typed."""
    engine = make_engine(kind, t_model, capacity=12)
    prompt = ids_of(9)
    answer = []
    with pytest.raises(CapacityError):
        for id in engine.generate(prompt):
            answer.append(id)
    assert answer == cold(t_model, prompt, 4).ids  # three go into the cache, the fourth is the first that lags
    assert_holds(engine, [*prompt, *answer[:3]], "feed 9, generate")


@both_engines
def test_the_same_prompt_again_runs_one_token(kind, t_model):
    """A12: "regenerate" reused nothing, since the live cache is longer than the prompt."""
    engine, prompt = make_engine(kind, t_model), ids_of(10)
    answer = serve(engine, prompt, 20).ids
    served = assert_identical(engine, prompt, 20)
    assert served == (9, 1, answer)


@both_engines
def test_a_prompt_that_shares_nothing_starts_over(kind, t_model):
    """A14: the second prompt was garbage or a shape error, since the cache was not cleared at LCP 0."""
    model, forwards = spied(t_model)
    engine = make_engine(kind, model)
    serve(engine, [1, *ids_of(8)], 4)
    forwards.clear()
    assert assert_identical(engine, [2, *ids_of(8)]).reused == 0
    assert forwards[0][0] == 0


@pytest.mark.parametrize("field", ["k", "v"])
def test_a_chunk_after_cached_tokens_attends_to_just_the_past(field, t_model):
    """A15: a causal mask aligned to the wrong corner. 5 cached, then 3: they attend to 6, 7 and 8 positions.

    The support of the weights is found by changing the key or value of one position at a time (by a large factor, so
    that its grid changes too): the outputs that change are of the queries that see it.
    """
    ids = ids_of(8)
    sees = np.zeros((3, 8), bool)

    def heads(position):
        cache = t_model.new_cache(8, 4)
        seen = []

        def tap(name, x):
            if name == f"layers.0.{field}" and cache.offset <= position < cache.offset + len(x):
                x = x.copy()
                x[position - cache.offset] *= -64 if field == "v" else -1
            if name == "layers.0.heads":
                seen.append(x)
            return x

        for part in (ids[:5], ids[5:]):
            forward(t_model, cache, np.array(part), tap=tap)
            cache.commit(part)
        return seen[1]

    plain = heads(-1)
    for position in range(8):
        sees[:, position] = (heads(position) != plain).any(axis=1)
    assert sees.sum(axis=1).tolist() == [6, 7, 8]
    assert (sees == np.tri(3, 8, 5, dtype=bool)).all()
    engine = make_engine("pipelined", t_model)
    engine.prefill(ids[:5])
    engine.prefill(ids[5:])
    assert_holds(engine, ids, "feed 5, feed 3")


@both_engines
def test_every_step_equals_a_forward_over_the_whole_prefix(kind, t_model):
    """A16: output with a cache drifts from output without. The first step that differs is named."""
    engine, ids = make_engine(kind, t_model), ids_of(40)
    whole = t_model.logits(ids)
    for i in range(40):
        engine.prefill(feed_of(engine, ids[:i + 1]))
        same_bits(engine.logits, whole[i], f"step {i}", name=f"logits of step {i}")
        same_bits(whole[i], cold(t_model, ids[:i + 1]).logits, f"prefix of {i + 1}")
