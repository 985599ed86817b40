"""A model with recurrent layers: its state is a function of the tokens, is written whole or not at all, and has no rewind.
That its numbers are right is said by the goldens (test_goldens.py). Floor 9.
"""
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from helpers import make_chat, make_engine
from refengine.chat import Chat
from refengine.config import parse_config
from refengine.errors import ConfigError, NonFiniteError
from refengine.model import load_model, load_tokenizer
from refengine.safetensors_file import write_safetensors
from refengine.synth import SHAPES
from refkernels import arithmetic
from refkernels.exact import delta
from refkernels.exact.elementary import log1p

HYBRID = SHAPES["tiny-hybrid"]
IDS = [int(raw) % 512 for raw in np.random.Philox(key=5).random_raw(40)]


def all_bytes(engine):
    return [{name: array.tobytes() for name, array in layer.items()} for layer in engine.kv()]


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
@given(cuts=st.lists(st.integers(1, 39), max_size=6), page_size=st.sampled_from([1, 3, 64]))
@settings(max_examples=15)
def test_where_chunks_end_cannot_show(kind, request, cuts, page_size):
    model = request.getfixturevalue(kind)
    whole = make_engine("pipelined", model, capacity=64, chunk_size=40)
    whole.prefill(IDS)
    parts = make_engine("sequential", model, capacity=64, page_size=page_size)
    parts.chunk_size = 40
    edges = sorted({0, *cuts, 40})
    for a, b in zip(edges, edges[1:]):
        parts.prefill(IDS[:b])
    assert parts.logits.tobytes() == whole.logits.tobytes()
    assert all_bytes(parts) == all_bytes(whole)


def test_native_arithmetic_is_the_control(hybrid):
    """In plain float32 a chunk and single tokens differ, or this suite could not see it."""
    native = load_model("tiny-hybrid", "native")
    one, many = (make_engine(kind, native, capacity=64) for kind in ("sequential", "pipelined"))
    one.prefill(IDS)
    many.prefill(IDS)
    assert one.logits.tobytes() != many.logits.tobytes()
    assert np.allclose(one.logits, many.logits, atol=1e-4)


@pytest.mark.parametrize("engine", ["sequential", "pipelined"])
@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_rewind_answers_minus_one_and_changes_nothing(kind, engine, request):
    engine = make_engine(engine, request.getfixturevalue(kind), capacity=64)
    engine.prefill(IDS[:20])
    before, logits = all_bytes(engine), engine.logits.tobytes()
    feed = IDS[:20] + IDS[20:22] if engine.prefix_reuse_feeds_full_sequence else IDS[20:22]
    answer = engine.generate(feed, max_tokens=3)
    for length in (19, 1, 0):
        assert engine.trim_kv_cache(length) == -1
    assert engine.tokens == IDS[:20] and all_bytes(engine) == before and engine.logits.tobytes() == logits
    assert len(list(answer)) == 3, "a generation that was begun is not stale: nothing was changed"


@pytest.mark.parametrize("engine", ["sequential", "pipelined"])
def test_the_length_it_holds_is_retained_as_it_is(engine, hybrid):
    engine = make_engine(engine, hybrid, capacity=64)
    engine.prefill(IDS[:20])
    before = all_bytes(engine)
    assert engine.trim_kv_cache(20) == engine.trim_kv_cache(99) == 20
    assert all_bytes(engine) == before and engine.logits is not None
    assert engine.snapshots == [] and engine.snapshot_bytes == 0


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_reset_leaves_nothing_of_the_sequence_before(kind, request):
    """State that leaks between requests."""
    engine, fresh = (make_engine("pipelined", request.getfixturevalue(kind), capacity=64) for _ in range(2))
    engine.prefill(IDS)
    engine.reset()
    engine.prefill(IDS[5:12])
    fresh.prefill(IDS[5:12])
    assert all_bytes(engine) == all_bytes(fresh) and engine.logits.tobytes() == fresh.logits.tobytes()


@pytest.mark.parametrize("engine", ["sequential", "pipelined"])
@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_cancelled_answer_leaves_the_state_of_the_tokens_it_holds(kind, engine, request):
    model = request.getfixturevalue(kind)
    engine, fresh = make_engine(engine, model, capacity=64), make_engine("pipelined", model, capacity=64)
    answer = engine.generate(IDS[:12])
    for _ in range(4):
        next(answer)
    answer.close()
    fresh.prefill(engine.tokens)
    assert all_bytes(engine) == all_bytes(fresh) and engine.logits.tobytes() == fresh.logits.tobytes()


@pytest.mark.parametrize("where", ["layers.0.conv", "layers.2.recalled", "layers.3.q_rope", "layers.3.head_gate", "norm"])
def test_a_forward_that_fails_leaves_k_v_and_states_as_they_were(where, hybrid):
    engine = make_engine("sequential", hybrid, capacity=64)
    engine.prefill(IDS[:7])
    before = all_bytes(engine)

    def poison(name, x):
        return np.where(np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == 1, np.nan, x) if name == where else x

    with pytest.raises(NonFiniteError, match=where.replace(".", r"\.")):
        hybrid.run(engine.cache, np.array(IDS[7:10]), every=True, tap=poison)
    assert all_bytes(engine) == before
    engine.prefill(IDS)
    fresh = make_engine("pipelined", hybrid, capacity=64)
    fresh.prefill(IDS)
    assert all_bytes(engine) == all_bytes(fresh)


def test_a_commit_without_the_states_of_its_tokens_is_refused(hybrid):
    cache = hybrid.new_cache(16, 4)
    hybrid.run(cache, np.array(IDS[:4]))
    with pytest.raises(ValueError, match="no state in every recurrent layer"):
        cache.commit(IDS[:3])
    cache.commit(IDS[:4])
    with pytest.raises(ValueError, match="no state in every recurrent layer"):
        cache.commit(IDS[:4])
    assert cache.offset == 4


@pytest.mark.parametrize("engine", ["sequential", "pipelined"])
def test_a_chat_falls_back_to_a_reset_and_says_so(engine, hybrid):
    on, off = (make_chat(engine, cache, model=hybrid) for cache in (True, False))
    for chat in (on, off):
        for text in ("What is the capital of France?", "And of Japan?"):
            list(chat.send(text))
        list(chat.regenerate())
    for ours, cold in zip(on.turns, off.turns):
        assert ours.text == cold.text and cold.reused == 0
    assert on.turns[2].reused == 0 and on.turns[2].fallback == "recurrent"
    assert " reused=0 " in on.turns[2].record() and on.turns[2].record().endswith(" fallback=recurrent")
    assert all_bytes(on.engine) == all_bytes(off.engine) and on.engine.logits.tobytes() == off.engine.logits.tobytes()


# Snapshots

@pytest.mark.parametrize("engine", ["sequential", "pipelined"])
@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
@given(rewinds=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 12)), min_size=1, max_size=4),
       every=st.sampled_from([1, 4, 7]), most=st.sampled_from([1, 2, 100]))
@settings(max_examples=8)  # each forwards hundreds of tokens
def test_what_follows_a_rewind_to_a_snapshot_is_a_full_recompute(kind, engine, request, rewinds, every, most):
    """Off: see above. On, and evicting (at most one or two are kept): K/V, states and logits, byte for byte."""
    model = request.getfixturevalue(kind)
    size = model.new_cache(1, 1).state_bytes
    engine = make_engine(engine, model, capacity=64, snapshot_every=every, snapshot_bytes=most * size)
    engine.prefill(IDS[:30])
    for length, more in rewinds:
        held, kept = engine.tokens, engine.cache.snapshots
        retained = engine.trim_kv_cache(length)
        want = len(held) if length >= len(held) else max([0, *(at for at in kept if at <= length)])
        assert retained == want == engine.processed_token_count and engine.tokens == held[:want]
        new = IDS[-more:]
        engine.prefill([*held[:want], *new] if engine.prefix_reuse_feeds_full_sequence else new)
        fresh = make_engine("pipelined", model, capacity=64)
        fresh.prefill(engine.tokens)
        assert all_bytes(engine) == all_bytes(fresh) and engine.logits.tobytes() == fresh.logits.tobytes()
        if engine.processed_token_count > 50:
            engine.reset()
            engine.prefill(IDS[:30])


def test_snapshots_lie_at_every_multiple_whatever_the_chunks_and_the_oldest_go_first(hybrid):
    size = hybrid.new_cache(1, 1).state_bytes
    engine = make_engine("pipelined", hybrid, capacity=64, chunk_size=32, snapshot_every=6, snapshot_bytes=3 * size + 5)
    engine.prefill(IDS[:20])
    assert engine.cache.snapshots == [6, 12, 18]
    for _ in engine.generate([1, 2, 3], max_tokens=4):
        pass
    assert engine.tokens[:23] == [*IDS[:20], 1, 2, 3] and engine.cache.snapshots == [12, 18, 24]
    assert engine.trim_kv_cache(17) == 12 and engine.cache.snapshots == [12], "what lay beyond was of another sequence"
    assert engine.trim_kv_cache(11) == 0 and engine.cache.snapshots == []


def test_a_chat_with_snapshots_reuses_what_lies_before_the_nearest_one(hybrid):
    tokenizer = load_tokenizer("tiny-hybrid")
    chats = [Chat(make_engine("pipelined", hybrid, capacity=512, **snapshots), tokenizer, cache, max_tokens=6)
             for cache, snapshots in ((True, {"snapshot_every": 8}), (True, {}), (False, {}))]
    for chat in chats:
        for text in ("What is the capital of France?", "And of Japan?"):
            list(chat.send(text))
        list(chat.regenerate())
    kept, none, off = chats
    assert [turn.text for turn in kept.turns] == [turn.text for turn in none.turns] == [turn.text for turn in off.turns]
    assert kept.turns[2].fallback == "" and kept.turns[2].reused == (kept.turns[2].prompt - 1) // 8 * 8
    assert none.turns[2].reused == off.turns[2].reused == 0
    assert all_bytes(kept.engine) == all_bytes(off.engine)


@pytest.mark.parametrize("engine", ["sequential", "pipelined"])
def test_states_kept_where_the_parts_of_a_turn_begin_are_where_the_messages_and_the_answers_end(engine, hybrid):
    """An answer that is taken back or rendered otherwise leaves the messages before it, and these are reused whole."""
    tokenizer = load_tokenizer("tiny-hybrid")
    chat, off = (Chat(make_engine(engine, hybrid, capacity=512, snapshot_every=every), tokenizer, cache, max_tokens=6)
                 for cache, every in ((True, "turn"), (False, None)))
    ends = []
    for text in ("What is the capital of France?", "And of Japan?"):
        for each in (chat, off):
            list(each.send(text))
        ends.append(len(tokenizer.encode_chat(chat.messages[:-1], add_generation_prompt=False).ids))
    assert set(ends) <= set(chat.engine.snapshots)
    for each in (chat, off):
        list(each.regenerate())
        each.undo()
        list(each.send("And of Peru?"))
    again, other = chat.turns[2:]
    assert again.reused == ends[1] and ends[0] <= other.reused < ends[1]
    assert [turn.text for turn in chat.turns] == [turn.text for turn in off.turns] and all_bytes(chat.engine) == all_bytes(off.engine)
    assert other.record().endswith(f" snapshots={len(chat.engine.snapshots)} snapshot_bytes={chat.engine.snapshot_bytes}")
    assert other.snapshot_bytes == other.snapshots * chat.engine.cache.state_bytes > 0
    chat.reset()
    assert chat.engine.snapshots == []


@pytest.mark.parametrize("wrong", [{"snapshot_every": 0}, {"snapshot_every": "turns"}, {"snapshot_every": True},
                                   {"snapshot_every": 4, "snapshot_bytes": 10}, {"snapshot_every": "turn", "snapshot_bytes": 10}])
def test_snapshots_that_cannot_be_kept_are_refused(wrong, hybrid):
    with pytest.raises(ValueError, match="snapshot_"):
        make_engine("sequential", hybrid, **wrong)


# Kernels

@pytest.mark.parametrize("name", ["exact", "native", "native64"])
def test_a_memory_that_is_told_a_value_for_a_key_recalls_it(name):
    """beta 1 and decay 1: what a key recalls is the value that was written last, whatever was there before."""
    op = arithmetic(name)
    raw = (np.random.Philox(key=9).random_raw(3 * 2 * 8 + 3 * 4 * 6) / 2.0**63 - 1).astype(op.DTYPE)
    k, v = raw[:48].reshape(3, 2, 8), raw[48:].reshape(3, 4, 6)
    ones = np.ones((3, 4), op.DTYPE)
    out, state = op.delta_rule(k, k, v, ones, ones, np.zeros((4, 6, 8), op.DTYPE))
    # q is k over its length and over sqrt(Dk); eps keeps the length a little below 1
    assert np.allclose(out * np.sqrt(8), v, atol=1e-5)
    assert state.shape == (4, 6, 8)


def test_gates_are_near_their_float64_values_over_their_whole_range():
    op = arithmetic("exact")
    x = np.linspace(-80, 80, 4001).astype(np.float32)[:, None]
    packed = op.pack_gates(np.array([0.5], np.float32), np.array([0.25], np.float32))
    beta, decay = op.gates(x, x, packed)
    wide = x.astype(np.float64)
    assert np.abs(beta * (1 + np.exp(-wide)) - 1).max() < 1e-5        # exp's argument is rounded: 80 * 2^-24
    truth = np.exp(-np.exp(0.5) * np.logaddexp(0, (x + np.float32(0.25)).astype(np.float64)))
    assert np.abs(decay - truth).max() < 3e-7


def test_softplus_of_very_negative_inputs_keeps_its_relative_precision():
    u = np.ldexp(np.float32(1), -np.arange(0, 60)).astype(np.float32)
    assert np.abs(log1p(u) / np.log1p(u.astype(np.float64)) - 1).max() < 1e-7


def test_the_sign_of_a_zero_sum_cannot_show(monkeypatch):
    """It is the one thing that a BLAS may choose."""
    op, k, v, ones = arithmetic("exact"), np.full((2, 1, 4), -1, np.float32), np.zeros((2, 1, 4), np.float32), np.ones((2, 1))
    v[:] = -0.0
    results = []
    for sign in (1.0, -1.0):
        monkeypatch.setattr(delta, "matmul", lambda a, b: np.where((y := np.matmul(a, b)) == 0, np.copysign(0.0, sign), y))
        results.append([array.tobytes() for array in op.delta_rule(k, k, v, ones, ones, np.full((1, 4, 4), -0.0, np.float32))])
    assert results[0] == results[1]


def test_a_rate_beyond_float32_forgets_at_once_instead_of_wrapping_round():
    op, x = arithmetic("exact"), np.zeros((1, 1), np.float32)
    assert op.gates(x, x, op.pack_gates(np.array([200.0], np.float32), x[0]))[1][0, 0] < 1e-30


# Configuration

@pytest.mark.parametrize(("change", "message"), [
    ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple"),
    ({"layer_types": ["full_attention"] * 3}, "each of 4 layers"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types must name"),
    ({"attn_output_gate": False}, "attn_output_gate"),
    ({"linear_key_head_dim": None}, "linear_key_head_dim is missing"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.2}}, "turns 3 of 16"),
    ({"model_type": "qwen3_5_moe_text"}, "mixtures of experts"),
    ({"model_type": "qwen3_next"}, "qwen3_next"),
    ({"num_experts": 8}, "num_experts"),
    ({"mlp_only_layers": [1]}, "mlp_only_layers"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": "half"}}, "partial_rotary_factor is 'half'"),
    ({"partial_rotary_factor": 0.5}, "0.5 at the top and 0.25 in rope_parameters"),
    ({"layer_types": [["linear_attention"]] * 4}, "layer_types must name"),
])
def test_a_configuration_that_is_not_this_model_is_refused_by_its_key(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({**HYBRID, **change}, "config.json")


def with_vision(text):
    """The configuration of a hub's Qwen3.5, which also sees."""
    text = {**text, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32"}
    return {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text,
            "vision_config": {"model_type": "qwen3_5", "depth": 2}, "image_token_id": 5, "tie_word_embeddings": False}


def test_the_text_model_inside_one_that_sees_is_the_text_model(hybrid, tmp_path):
    """Names begin with model.language_model; what sees and what predicts further tokens is left alone."""
    (tmp_path / "config.json").write_text(json.dumps(with_vision(HYBRID)))
    stored = {name.replace("model.", "model.language_model.", 1): ("F32", hybrid.checkpoint.tensor(name))
              for name in hybrid.checkpoint.shapes()}
    other = {name: ("F32", np.ones((2, 2), np.float32)) for name in ("model.visual.merger.norm.weight", "mtp.fc.weight")}
    write_safetensors(tmp_path / "model.safetensors", stored | other)
    model = load_model(tmp_path)
    assert model.config == replace(hybrid.config, stop_ids=(511,))
    assert model.logits(IDS).tobytes() == hybrid.logits(IDS).tobytes()


@pytest.mark.parametrize(("change", "message"), [
    ({"text_config": None}, "text_config is None"), ({"text_config": {**HYBRID, "model_type": "qwen3"}}, "'qwen3', not"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is True at the top and False"),
])
def test_a_model_that_sees_and_contradicts_its_text_model_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({**with_vision(HYBRID), **change}, "config.json")


@pytest.mark.parametrize("family", ["qwen35", "qwen3next", "qwen3_5_text"])
def test_a_gguf_file_of_a_hybrid_is_refused_by_its_architecture(family, tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", family)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=f"'{family}' is not one of qwen3, qwen2, llama"):
        load_model(tmp_path / "x.gguf")


def test_without_layer_types_every_fourth_layer_is_attention():
    raw = {key: value for key, value in HYBRID.items() if key != "layer_types"}
    assert parse_config(raw, "c").delta.layers == (True, True, True, False)
    assert parse_config({**raw, "full_attention_interval": 2}, "c").delta.layers == (True, False, True, False)
    json.dumps(raw)
