"""Activations by name: a trace shows what an untraced forward computes, changes nothing, and a patch changes what follows and
nothing before. Floor 9.
"""
import json
import re

import numpy as np
import pytest

from helpers import both_engines, ids_of, make_chat, make_engine, same_bits, state
from models import T_CONFIG
from refengine.cli import main
from refengine.errors import CapacityError, FeedError, InspectError, NonFiniteError
from refengine.inspect import activations, kv, logit_lens, read_trace, trace, write_trace
from refengine.model import load_model
from refengine.safetensors_file import SafetensorsFile, write_safetensors
from refengine.synth import SHAPES, write_checkpoint

IDS = ids_of(30, seed=3)


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama", "qwen3_5_text"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config = {**SHAPES["tiny-hybrid"], "vocab_size": 64, "eos_token_id": 63} if request.param == "qwen3_5_text" else {
        **T_CONFIG, "model_type": request.param, "num_hidden_layers": 3}
    write_checkpoint(folder, config, seed=2)
    return load_model(folder)


def holding(kind, model, ids):
    engine = make_engine(kind, model, snapshot_every=1)       # so that recurrent layers can go back anywhere too
    if len(ids):
        engine.prefill(ids)
    return engine


def everything(engine):
    """All memory of the cache with what lies above the offset, the page table, tokens and logits."""
    states = [getattr(engine.cache, name, None) for name in ("_states", "_snapshots", "_written", "_written_for")]
    kept = [{layer: id(state) for layer, state in part.items()} if isinstance(part, dict) else part for part in states]
    return state(engine), kept, engine.cache.pages, [field.tobytes() for field in engine.cache.pool.fields], list(engine.cache.pool.holders)


def same_traces(got, want):
    assert list(got) == list(want)
    for name in want:
        same_bits(got[name], want[name], name=name)


# What a trace shows

def test_every_activation_that_forward_shows_has_a_name_and_every_name_is_shown_in_order(model):
    shown = []

    attended = "attended" if model.config.delta else "heads"

    def tap(name, x):
        whole = {"gate_up": ("gate", "up"), attended: ("scores", "weights", attended)}
        at, _, last = name.rpartition(".")
        shown.extend(f"{at}.{part}" for part in whole[last]) if last in whole else shown.append(name)
        return x

    model.run(model.new_cache(8, 4), np.array([1, 2]), tap=tap)
    assert shown == list(activations(model.config)) == list(trace(holding("sequential", model, []), [1, 2]))


@both_engines
def test_arrays_have_the_listed_shapes_at_any_offset(model, kind):
    for held in (0, 1, 9):
        seen = trace(holding(kind, model, IDS[:held]), IDS[held:held + 5])
        known = activations(model.config)
        assert {name: x.shape for name, x in seen.items()} == {name: known[name].sizes(model.config, 5, held) for name in known}
        assert {x.dtype for x in seen.values()} == {np.dtype(np.float32)}


@both_engines
def test_a_trace_in_parts_is_a_trace_of_the_whole(model, kind):
    whole = trace(holding(kind, model, []), IDS)
    engine, parts = make_engine(kind, model), []
    for a, b in ((0, 1), (1, 12), (12, 30)):
        parts.append(trace(engine, IDS[a:b]))
        engine.prefill(IDS[engine.processed_token_count if kind == "pipelined" else 0:b])
    for name in whole:
        if name.endswith((".scores", ".weights")):
            for (a, b), part in zip(((0, 1), (1, 12), (12, 30)), parts):
                same_bits(part[name], np.ascontiguousarray(whole[name][:, a:b, :b]), name=name)
        else:
            same_bits(np.concatenate([part[name] for part in parts]), whole[name], name=name)
    same_bits(engine.logits, whole["logits"][-1])


@both_engines
def test_positions_that_are_held_can_be_traced_from_any_start_and_after_a_trim(model, kind):
    engine = holding(kind, model, IDS)
    fresh = trace(holding(kind, model, IDS[:11]), IDS[11:20])
    before = everything(engine)
    same_traces(trace(engine, engine.tokens[11:20], start=11), fresh)
    assert everything(engine) == before
    engine.trim_kv_cache(11)
    same_traces(trace(engine, IDS[11:20]), fresh)


def test_weights_times_values_are_the_heads_that_the_kernel_made(model):
    """The kernel rounds weights times values' steps to 2^-28 of their sum and the result to float32; weights here are rounded
    to float32 too: in all less than 2^-22 of the largest value."""
    engine = holding("sequential", model, IDS[:12])
    seen, c = trace(engine, IDS[12:]), model.config
    engine.prefill(IDS)
    values = kv(engine)
    attended = "attended" if c.delta else "heads"
    for i in (int(name.split(".")[1]) for name in values if name.endswith(".v")):
        weights, v = seen[f"layers.{i}.weights"].astype(np.float64), values[f"layers.{i}.v"].astype(np.float64)
        v = v.repeat(c.heads // c.kv_heads, axis=1)                               # (S, H, D)
        heads = np.einsum("hts,shd->thd", weights, v).reshape(len(IDS) - 12, -1)
        assert np.abs(heads - seen[f"layers.{i}.{attended}"]).max() <= 2.0**-22 * np.abs(v).max()
        scores = seen[f"layers.{i}.scores"].astype(np.float64)
        assert np.array_equal(np.isneginf(scores), np.broadcast_to(~np.tri(18, 30, 12, dtype=bool), scores.shape))
        e = np.exp(scores - scores.max(-1, keepdims=True))
        assert np.abs(e / e.sum(-1, keepdims=True) - weights).max() <= 2e-6
        assert not weights[np.isneginf(scores)].any()


@pytest.mark.parametrize("pages", [[0, 1, 2, 3], [3, 1, 2, 0]])
def test_pages_in_any_order_show_the_same(t_model, pages):
    engine = make_engine("sequential", t_model, capacity=32, page_size=8, page_order=pages)
    engine.prefill(IDS[:20])
    same_traces(trace(engine, IDS[20:]), trace(holding("pipelined", t_model, IDS[:20]), IDS[20:]))


def test_native_arithmetic_is_traced_too(t_native, t_model):
    seen, exact = trace(holding("pipelined", t_native, IDS[:9]), IDS[9:]), trace(holding("pipelined", t_model, IDS[:9]), IDS[9:])
    for name in exact:
        finite = np.isfinite(exact[name])
        assert np.array_equal(np.isfinite(seen[name]), finite) and np.abs(seen[name][finite] - exact[name][finite]).max() <= 2e-5, name


def test_names_are_chosen_by_patterns(t_model):
    engine = make_engine("sequential", t_model)
    assert list(trace(engine, [1], ["layers.1.?_rope", "embed"])) == ["embed", "layers.1.q_rope", "layers.1.k_rope"]
    assert list(trace(engine, [1], "layers.*.up")) == ["layers.0.up", "layers.1.up"]
    assert trace(engine, [1, 2], "logits")["logits"].shape == (2, 64)


# What it leaves

@both_engines
def test_a_trace_leaves_an_engine_as_an_untraced_run_does(t_model, kind):
    """Also with what lies above its offset, its pages, and what another sequence of the pool may take."""
    engine = holding(kind, t_model, IDS[:10])
    engine.trim_kv_cache(6)
    for tokens, more in ((IDS[6:9], {}), (IDS[6:], {}), (IDS[2:6], {"start": 2}), (IDS, {"start": 0}),
                         (IDS, {"start": 3, "patch": {"layers.0.k_rope": lambda x: x + 1}})):
        before = everything(engine)
        trace(engine, tokens, **more)
        assert everything(engine) == before


@both_engines
def test_a_generation_goes_on_after_a_trace_in_its_midst_as_if_there_had_been_none(t_model, kind):
    quiet = list(make_engine(kind, t_model).generate(IDS[:7], max_tokens=12))
    engine, ids = make_engine(kind, t_model), []
    for id in engine.generate(IDS[:7], max_tokens=12):
        ids.append(id)
        trace(engine, IDS[7:12], ["layers.*.weights", "logits"], patch={"layers.1.v": np.zeros_like})
        trace(engine, engine.tokens[3:], "layers.*.residual", start=3)
    assert ids == quiet
    other = make_engine(kind, t_model)
    assert list(other.generate(IDS[:7], max_tokens=12)) == ids and state(engine) == state(other)


def test_a_chat_is_traced_between_its_answers():
    chat, quiet = make_chat(), make_chat()
    for text in ("Hello", "And you?", "Why?"):
        same = "".join(quiet.send(text)), "".join(chat.send(text))
        assert same[0] == same[1]
        last = chat.engine.tokens[-1:]
        seen = trace(chat.engine, last, start=len(chat.engine.tokens) - 1)
        same_bits(seen["logits"][0], chat.engine.logits)
        assert state(chat.engine) == state(quiet.engine)


@both_engines
def test_a_trace_that_is_refused_changes_nothing(t_model, kind):
    engine = holding(kind, t_model, IDS[:10])
    before = everything(engine)
    for error, says, arguments in (
            (InspectError, "'layers.0.Q'; there are ", {"names": "layers.0.Q"}),
            (InspectError, "'layers.*.q'", {"patch": {"layers.*.q": np.copy}}),
            (InspectError, "layers.0.q made shape (1,) of shape (2, 4, 16)", {"patch": {"layers.0.q": lambda x: x[0, 0, :1]}}),
            (NonFiniteError, "the patch of layers.1.o made", {"patch": {"layers.1.o": lambda x: x * np.nan}}),
            (NonFiniteError, "the patch of layers.1.scores made", {"patch": {"layers.1.scores": lambda x: x * np.nan}}),
            (NonFiniteError, "leaves a query no key", {"patch": {"layers.1.scores": lambda x: x - np.inf}}),
            (ValueError, "trim_to(11)", {"start": 11}), (ValueError, "trim_to(-1)", {"start": -1}),
            (FeedError, "outside the vocabulary", {"tokens": [1, 64]}), (FeedError, "no tokens", {"tokens": []}),
            (CapacityError, "119 more tokens do not fit", {"tokens": [1] * 119})):
        with pytest.raises(error, match=re.escape(says)):
            trace(engine, **{"tokens": [1, 2]} | arguments)
        assert everything(engine) == before, arguments


def test_another_engine_is_refused_by_name():
    from refengine.engine import Engine

    class Other(Engine):
        tokens, logits, reset, prefill, generate = [], None, None, None, None

    with pytest.raises(InspectError, match="Other does not show its activations"):
        trace(Other(), [1])


def test_recurrent_layers_are_traced_only_from_where_a_state_is_kept(hybrid):
    engine = make_engine("pipelined", hybrid)
    engine.prefill(IDS[:9])
    before = everything(engine)
    with pytest.raises(ValueError, match=r"trim_to\(4\): of 9 positions, a state is kept of \[0\]"):
        trace(engine, IDS[4:9], start=4)
    assert everything(engine) == before
    assert len(trace(engine, IDS[9:12])["layers.0.decay"]) == 3 and everything(engine) == before


# Patches

@pytest.mark.parametrize("arithmetic", ["exact", "native"])
def test_a_patch_that_changes_nothing_changes_no_bit(t_folder, arithmetic):
    model = load_model(t_folder, arithmetic)
    engine = holding("sequential", model, IDS[:12])
    plain = trace(engine, IDS[12:])
    same_traces(trace(engine, IDS[12:], patch={name: np.copy for name in activations(model.config)}), plain)


def test_a_patch_changes_what_follows_and_nothing_before(model):
    """At one position of one activation: nothing before it in the forward pass and no earlier position changes, and the logits
    of its position do."""
    engine, known = holding("pipelined", model, IDS[:12]), list(activations(model.config))
    plain, at = trace(engine, IDS[12:]), 5
    for place, name in enumerate(known):
        def nudge(x):
            positions = x[:, at] if name.endswith((".scores", ".weights")) else x[at]
            positions[..., :3] += np.float32(0.25)
            return x

        seen = trace(engine, IDS[12:], patch={name: nudge})
        for i, other in enumerate(known):
            a, b = seen[other], plain[other]
            if other.endswith((".scores", ".weights")):
                a, b = a.swapaxes(0, 1), b.swapaxes(0, 1)
            clean = len(a) if i < place else at
            assert np.array_equal(a[:clean], b[:clean]), (name, other)
        assert not np.array_equal(seen[name], plain[name]), name
        changed = np.flatnonzero((seen["logits"] != plain["logits"]).any(axis=1))
        if name.startswith(f"layers.{model.config.layers - 1}.k"):                # a later query sees it, if not its own
            assert len(changed) and changed[0] >= at, name
        else:
            assert len(changed) and changed[0] == at, name


@pytest.mark.parametrize("arithmetic", ["exact", "native"])
def test_patched_weights_reach_the_heads_that_they_belong_to_and_no_other(t_folder, arithmetic):
    model = load_model(t_folder, arithmetic)
    engine = holding("sequential", model, IDS[:12])

    def only_first(x):
        x[3, 4], x[3, 4, 0] = 0, 1
        return x

    plain = trace(engine, IDS[12:])
    seen = trace(engine, IDS[12:], patch={"layers.0.weights": only_first})
    heads, before = (x["layers.0.heads"].reshape(18, 4, 16) for x in (seen, plain))
    first_value = kv(engine, 0, 1)["layers.0.v"][0, 1]                            # query head 3 looks at kv head 1
    assert np.abs(heads[4, 3] - first_value).max() <= 2.0**-22 * np.abs(first_value).max()
    changed = (heads != before).any(axis=-1)
    assert changed[4, 3] and changed.sum() == 1


def test_a_score_of_minus_infinity_takes_a_key_away(t_model):
    """The others' weights are what a softmax over them is."""
    engine = holding("sequential", t_model, IDS[:12])

    def without_key_2(x):
        x[:, :, 2] = -np.inf
        return x

    plain = trace(engine, IDS[12:])["layers.0.weights"].astype(np.float64)
    seen = trace(engine, IDS[12:], patch={"layers.0.scores": without_key_2})
    plain[..., 2] = 0
    want = plain / plain.sum(-1, keepdims=True)
    assert np.abs(seen["layers.0.weights"] - want).max() <= 1e-6 and not seen["layers.0.weights"][..., 2].any()


def test_weights_of_any_size_and_sign_are_summed_in_any_order(t_model):
    """A patched row far from a probability is exact all the same: parts of a trace are the whole."""
    def wild(x):
        keys = np.arange(x.shape[-1])
        return (x > 0) * np.ldexp(np.cos(keys * 7.0), keys % 40 - 20).astype(np.float32)

    patch = {"layers.0.weights": wild, "layers.1.weights": wild}
    whole = trace(holding("sequential", t_model, []), IDS, "layers.*.heads", patch=patch)
    engine = holding("sequential", t_model, [])
    first = trace(engine, IDS[:29], "layers.0.heads", patch=patch)
    same_bits(first["layers.0.heads"], whole["layers.0.heads"][:29], name="heads")


def test_a_patched_gate_goes_through_the_activation(t_model):
    seen = trace(make_engine("sequential", t_model), IDS, patch={"layers.0.gate": np.zeros_like})
    assert not seen["layers.0.act"].any() and seen["layers.1.act"].any()


# The logit lens, and K/V

@pytest.mark.parametrize("arithmetic", ["exact", "native", "native64"])
def test_the_lens_of_the_last_residual_is_the_logits(t_folder, arithmetic):
    model = load_model(t_folder, arithmetic)
    seen = trace(make_engine("sequential", model), IDS)
    lens = logit_lens(model, seen["layers.1.residual"])
    assert lens.dtype == np.float32
    if arithmetic == "exact":
        same_bits(lens, seen["logits"])
    else:
        assert np.abs(lens - seen["logits"]).max() <= 1e-5
    assert np.abs(logit_lens(model, seen["embed"]) - lens).max() > 1e-3
    assert np.abs(logit_lens(model, seen["layers.1.residual"][7]) - lens[7]).max() <= (0 if arithmetic == "exact" else 1e-5)
    with pytest.raises(InspectError, match=r"ends with 32 numbers a position; this has shape \(30, 64\)"):
        logit_lens(model, seen["logits"])


@pytest.mark.parametrize("arithmetic", ["exact", "native", "native64"])
def test_kv_of_a_position_is_what_the_forward_wrote(t_folder, arithmetic):
    """Keys and values to the bits of their grid; and packed again they are what the cache has. Native ones were computed in
    chunks of 8, and are traced at once."""
    model = load_model(t_folder, arithmetic)
    engine = holding("pipelined", model, IDS)
    engine.trim_kv_cache(25)
    seen, values = trace(engine, IDS[:25], start=0), kv(engine)
    for i in range(2):
        k, v = values[f"layers.{i}.k"], values[f"layers.{i}.v"]
        for got, want in ((k, seen[f"layers.{i}.k_rope"]), (v, seen[f"layers.{i}.v"])):
            assert got.shape == want.shape and got.dtype == np.float32
            assert (np.abs(got - want) <= (2.0**-21 if arithmetic == "exact" else 1e-5) * np.abs(want).max(axis=-1, keepdims=True)).all()
        if arithmetic == "exact":
            for name, x in model.op.pack_kv(k, v)._asdict().items():
                same_bits(np.ascontiguousarray(x), engine.kv()[i][name], name=name)
    some = kv(engine, 7, 9)
    assert all(np.array_equal(some[name], values[name][7:9]) for name in values)
    with pytest.raises(ValueError, match=r"snapshot\(0, 26\)"):
        kv(engine, 0, 26)


# The file, and the command

def test_a_trace_file_says_of_what_it_is_and_notices_another_byte(t_model, tmp_path):
    engine, path = holding("pipelined", t_model, IDS[:9]), tmp_path / "t.safetensors"
    arrays = trace(engine, IDS[9:])
    written = write_trace(path, arrays, engine, IDS[9:])
    back, header = read_trace(path)
    same_traces(back, arrays)
    assert header == written and header["offset"] == 9 and header["held"] == IDS[:9] and header["tokens"] == IDS[9:]
    assert header["arithmetic"] == "exact" and header["model"]["fingerprint"] == t_model.checkpoint.fingerprint()
    assert header["activations"]["layers.0.weights"]["shape"] == ["H", "T", "S"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InspectError, match="logits is not what was written"):
        read_trace(path)
    for broken in (bytes(data[:-1]), b"", b"{}"):
        path.write_bytes(broken)
        with pytest.raises(InspectError, match="not a whole trace"):
            read_trace(path)
    for metadata in ({}, {"refengine": "{"}, {"refengine": "[1]"}, {"refengine": '{"schema": "refengine-trace/1"}'},
                     {"refengine": '{"schema": "refengine-trace/1", "activations": {"x": {}}}'}):
        write_safetensors(path, {}, metadata=metadata)
        with pytest.raises(InspectError, match="trace"):
            read_trace(path)


def test_the_command_writes_what_the_function_returns(tmp_path, capsys):
    path = tmp_path / "t.safetensors"
    assert main(["trace", "tiny", "Once upon a time", "-o", str(path), "--from", "4", "--names", "layers.*.weights", "--names",
                 "logits"]) == 0
    assert "at offset 4, exact arithmetic" in capsys.readouterr().out
    arrays, header = read_trace(path)
    model = load_model("tiny")
    engine = holding("sequential", model, header["held"])
    same_traces(arrays, trace(engine, header["tokens"], ["layers.*.weights", "logits"]))
    assert json.loads(SafetensorsFile(path).metadata["refengine"]) == header and len(header["held"]) == 4


def test_the_command_lists_names_and_refuses_mistakes(capsys):
    assert main(["trace", "tiny", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(activations(load_model("tiny").config)) and "(H, T, S)" in lines[9]
    for arguments, says in ((["tiny"], "PROMPT and -o FILE"), (["tiny", "Hi", "-o", "x", "--from", "2"], "positions 0..1"),
                            (["tiny", "Hi", "-o", "x", "--names", "nothing"], "no activation is called 'nothing'")):
        assert main(["trace", *arguments]) == 2
        assert says in capsys.readouterr().err
