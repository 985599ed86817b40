"""The golden vectors: right engines give them, each fault that a case hunts fails it, and a broken set is refused. Floor 9."""
import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from faults import late_keys, late_norm, tiled, with_op
from refengine import vectors
from refengine.cache import Cache
from refengine.cli import main
from refengine.loading import load
from refengine.model import Model, load_model
from refengine.pipelined import PipelinedEngine
from refengine.recurrent import RecurrentCache
from refengine.vectors import VectorsError, oracle
from refengine.vectors.make import make, read_plan

SET = Path(__file__).parent / "vectors" / "v1"
FOUND = vectors.read(SET)
model_of = cache(lambda name: load_model(SET / "models" / name))


def engine_over(model, cache_kind=None, engine_kind=PipelinedEngine):
    engine = engine_kind(model, capacity=128, page_size=16, chunk_size=8)
    if cache_kind:
        old = engine.cache
        engine.cache = cache_kind(old.pool, 128, old._start) if issubclass(cache_kind, RecurrentCache) else cache_kind(old.pool, 128)
    return engine


# Right engines

@pytest.mark.parametrize(("settings", "bits"), [({"engine": "pipelined"}, True), ({"engine": "sequential"}, True),
                                                ({"engine": "pipelined", "chunk_size": 3, "page_size": 5}, True),
                                                ({"engine": "pipelined", "arithmetic": "native"}, False)])
def test_every_case_is_what_our_engines_give(settings, bits):
    outcomes = vectors.run_all(FOUND, lambda folder: load(folder, capacity=128, **settings), bits=bits)
    assert len(outcomes) >= 60 and [outcome for outcome in outcomes if outcome.wrong] == []


def test_the_set_is_small_and_of_each_family():
    assert sum(path.stat().st_size for path in SET.rglob("*") if path.is_file()) < 3_000_000
    families = {json.loads((SET / "models" / name / "config.json").read_text())["model_type"] for name in {
        case["model"] for case in FOUND.cases.values()}}
    assert families == {"qwen3", "qwen2", "llama", "qwen3_5_text"}


# The hunted faults, planted

def other_rope(model, **change):
    config = replace(model.config, rope=replace(model.config.rope, **change))
    return Model(config, model.weights, model.op, model.checkpoint)


def no_bias(model):
    layers = [layer._replace(qkv=layer.qkv._replace(bias=None)) for layer in model.weights.layers]
    return replace(model, weights=model.weights._replace(layers=tuple(layers)))


def plain_gains(model):
    layers = [layer._replace(mlp_norm=layer.mlp_norm - 1) for layer in model.weights.layers]
    return replace(model, weights=model.weights._replace(layers=tuple(layers)))


def whole_turn(model):
    return Model(replace(model.config, rotated=model.config.head_dim), model.weights, model.op, model.checkpoint)


def no_decay(model):
    return with_op(model, gates=lambda b, a, packed: (model.op.gates(b, a, packed)[0], np.ones_like(model.op.gates(b, a, packed)[1])))


class KeepsAllAtZero(Cache):
    def trim_to(self, length):
        super().trim_to(length or self.offset)


class NoTrim(PipelinedEngine):
    def trim_kv_cache(self, length):
        return min(length, self.cache.offset)


class RoundsUp(Cache):
    def trim_to(self, length):
        super().trim_to(min(self.offset, -(-length // 16) * 16))


class ComesBack(Cache):
    longest = 0

    def commit(self, tokens):
        if self.longest > self.offset:                        # the offset is counted from the arrays again
            self.offset = self.longest
            self.reserve(len(tokens))
        super().commit(tokens)
        self.longest = self.offset


class Beyond(PipelinedEngine):
    def trim_kv_cache(self, length):
        super().trim_kv_cache(length)
        return length


def positions_go_on(model):
    class Counts(Model):
        seen = 0

        def rope_rows(self, start, stop):
            at, Counts.seen = Counts.seen, Counts.seen + stop - start
            return Model.rope_rows(self, at, at + stop - start)
    Counts.seen = 0
    return engine_over(Counts(model.config, model.weights, model.op, model.checkpoint))


def positions_restart(model):
    class Restarts(Model):
        def rope_rows(self, start, stop):
            return Model.rope_rows(self, 0, stop - start)
    return engine_over(Restarts(model.config, model.weights, model.op, model.checkpoint))


class Twice(PipelinedEngine):
    def prefill(self, tokens):
        super().prefill(list(tokens) * 2 if len(tokens) == 1 and self.cache.offset else tokens)


class CutsAttention(RecurrentCache):
    def reachable(self, length):
        return min(length, self.offset)

    def trim_to(self, length):
        Cache.trim_to(self, length)


class Promises(PipelinedEngine):
    def trim_kv_cache(self, length):
        kept = super().trim_kv_cache(length)
        return length if kept < 0 else kept


class KeepsState(RecurrentCache):
    def trim_to(self, length):
        states = self._states
        super().trim_to(length)
        self._states = states


FAULTS = {
    "tiled kv heads": lambda m: engine_over(tiled(m)), "norm after the rotation": lambda m: engine_over(late_norm(m)),
    "eps of another model": lambda m: engine_over(replace(m, config=replace(m.config, rms_norm_eps=1e-5))),
    "keys one position late": lambda m: engine_over(late_keys(m)), "base of the rotation": lambda m: engine_over(other_rope(m, theta=10000.0)),
    "no scaling of the rotation": lambda m: engine_over(other_rope(m, type="default", divisors=None)),
    "no bias": lambda m: engine_over(no_bias(m)), "gains are not less one": lambda m: engine_over(plain_gains(m)),
    "all dimensions turn": lambda m: engine_over(whole_turn(m)), "the decay is left out": lambda m: engine_over(no_decay(m)),
    "positions restart in each chunk": positions_restart, "positions go on after a trim": positions_go_on,
    "the last token is fed twice": lambda m: engine_over(m, engine_kind=Twice),
    "trim to zero keeps everything": lambda m: engine_over(m, KeepsAllAtZero), "trim does nothing": lambda m: engine_over(m, engine_kind=NoTrim),
    "trim rounds up to a page": lambda m: engine_over(m, RoundsUp), "trimmed tokens come back": lambda m: engine_over(m, ComesBack),
    "trim beyond what is held moves the offset": lambda m: engine_over(m, engine_kind=Beyond),
    "a rewind cuts attention only": lambda m: engine_over(m, CutsAttention),
    "a rewind that cannot be is promised": lambda m: engine_over(m, engine_kind=Promises), "reset leaves the state": lambda m: engine_over(m, KeepsState),
}


def outcome(case, fault):
    return vectors.run(case, FOUND.rows[case["id"]], FAULTS[fault](model_of(case["model"])))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_case_that_hunts_a_fault_finds_it(fault):
    hunting = [case for case in FOUND.cases.values() if fault in case["hunts"]]
    missed = [case["id"] for case in hunting if not outcome(case, fault).wrong]
    assert hunting and not missed


def test_every_case_hunts_something_that_is_known():
    for case in FOUND.cases.values():
        assert case["hunts"] and set(case["hunts"]) <= set(FAULTS), case["id"]


# A broken set

@pytest.mark.parametrize(("change", "says"), [
    (lambda w, l: w.update(schema="x"), "schema is 'x'"), (lambda w, l: w["cases"][0].update(why=""), "why is ''"),
    (lambda w, l: w["cases"][1].update(id=w["cases"][0]["id"]), "its id is there twice"),
    (lambda w, l: w["cases"][0].update(id="v1-999"), "not one that the ledger gave"),
    (lambda w, l: l["retired"].append(w["cases"][3]["id"]), "or is retired"),
    (lambda w, l: w["cases"][0]["script"].append({"op": "jump"}), "is not known"),
    (lambda w, l: w["cases"][0]["script"].append({"op": "feed", "tokens": [1]}), "a row of logits for each"),
    (lambda w, l: w["cases"].pop(0), "which are no cases"), (lambda w, l: w["models"].update(qwen3="0"), "model qwen3 is missing, or not"),
    (lambda w, l: w["models"].pop("qwen2"), "no model qwen2"),
])
def test_a_set_that_is_not_whole_is_refused(change, says, tmp_path, capsys):
    shutil.copytree(SET, tmp_path / "v")
    whole, ledger = (json.loads((tmp_path / "v" / name).read_text()) for name in ("cases.json", "ledger.json"))
    change(whole, ledger)
    (tmp_path / "v" / "cases.json").write_text(json.dumps(whole))
    (tmp_path / "v" / "ledger.json").write_text(json.dumps(ledger))
    with pytest.raises(VectorsError, match=says):
        vectors.read(tmp_path / "v")
    assert main(["vectors", "lint", str(tmp_path / "v")]) == 2


def test_the_commands(capsys):
    assert main(["vectors", "lint", str(SET)]) == 0
    assert main(["vectors", "run", str(SET), "--backend", "refengine:engine=sequential"]) == 0
    assert f"{len(FOUND.cases)} of {len(FOUND.cases)} cases as they should be, in bits; 0 wrong" in capsys.readouterr().out


def test_an_engine_that_cannot_be_opened_or_raises_is_an_error_and_neither_right_nor_wrong():
    def refuses(folder):
        if folder.name == "qwen2":
            raise VectorsError("no such family")
        engine = load(folder, capacity=128)
        if folder.name == "llama3":
            engine.prefill = lambda tokens: 1 / 0
        return engine

    outcomes = vectors.run_all(FOUND, refuses)
    assert {FOUND.cases[outcome.id]["model"] for outcome in outcomes if outcome.error} == {"qwen2", "llama3"}
    assert not [outcome for outcome in outcomes if outcome.wrong and not outcome.error]


@pytest.mark.peers
def test_transformers_gives_them_within_the_bound_of_float32(capsys):
    assert main(["vectors", "run", str(SET), "--backend", "transformers"]) == 2
    said = capsys.readouterr().out
    assert "79 of 88 cases as they should be, within the bounds of f32; 0 wrong, 9 could not be played" in said
    assert {line.split("(")[1].split(";")[0] for line in said.splitlines()[:-1]} == {"recurrent"}, "its cache wants one attention layer"


# A set of a plan

def plan_of(folder, *titles, **changes):
    case = {"model": "tiny", "hunts": ["stale keys"], "why": "an edit", "source": "ours",
            "script": [{"op": "feed", "tokens": [5, 6, 7, 8]}, {"op": "trim", "length": 2}, {"op": "feed", "tokens": [9]},
                       {"op": "generate", "count": 2}, {"op": "trim", "length": 9}, {"op": "reset"}, {"op": "feed", "tokens": [1]}]}
    path = folder / "plan.json"
    path.write_text(json.dumps({"schema": "refengine-vectors-plan/1", "models": {"tiny": "models/qwen3"},
                                "cases": [case | {"title": title} | changes for title in titles]}))
    return path


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(SET / "models" / "qwen3", tmp_path / "models" / "qwen3")
    return tmp_path


def test_a_set_is_made_of_a_plan_and_made_again_with_the_same_ids(folder, capsys):
    out = str(folder / "mine")
    assert main(["vectors", "make", out, "--plan", str(plan_of(folder, "one", "two"))]) == 0
    assert main(["vectors", "make", out, "--plan", str(plan_of(folder, "two", "three"))]) == 0
    found = vectors.read(folder / "mine")
    assert {id: json.loads((folder / "mine" / "ledger.json").read_text())["given"][id] for id in found.cases} == {
        "mine-002": "two", "mine-003": "three"}
    assert json.loads((folder / "mine" / "ledger.json").read_text())["retired"] == ["mine-001"]
    script = found.cases["mine-002"]["script"]
    assert [step.get("retained") for step in script] == [None, 2, None, None, 5, None, None]
    engine = load(folder / "models" / "qwen3")
    engine.prefill([5, 6, 9])
    assert script[3]["ids"][0] == engine.logits.argmax() and len(script[3]["ids"]) == 2
    capsys.readouterr()
    assert main(["vectors", "run", out]) == 0 and "2 of 2 cases as they should be, in bits" in capsys.readouterr().out


@pytest.mark.parametrize(("changes", "says"), [
    ({"hunts": []}, "case 'one': hunts is missing"), ({"why": 3}, "why is missing, or not a str"),
    ({"model": "big"}, "there is no model 'big'"), ({"script": [{"op": "trim", "length": 1}]}, "a script begins with a feed"),
    ({"script": [{"op": "feed", "tokens": [1], "note": 1}]}, "is not known"),
    ({"script": [{"op": "feed", "tokens": [1]}, {"op": "jump"}]}, "is not known"),
    ({"script": [{"op": "feed", "tokens": [96]}]}, "step 1: "), ({"script": [{"op": "feed", "tokens": []}]}, "needs numbers"),
    ({"script": [{"op": "feed", "tokens": [1]}, {"op": "trim", "length": -1}]}, "needs numbers"),
    ({"script": [{"op": "feed", "tokens": [1]}, {"op": "generate", "count": "x"}]}, "needs numbers")])
def test_a_plan_that_is_not_right_is_refused_and_nothing_is_written(folder, changes, says):
    with pytest.raises(VectorsError) as caught:
        make(read_plan(plan_of(folder, "one", **changes)), folder / "mine")
    assert says in str(caught.value) and not (folder / "mine").exists()


def test_a_title_is_there_once_and_a_plan_is_a_plan(folder):
    with pytest.raises(VectorsError, match="its title is there twice"):
        make(read_plan(plan_of(folder, "one", "one")), folder / "mine")
    for text, says in (("{", "not a plan"), ("[]", "schema is None"), ('{"schema": "refengine-vectors-plan/1"}', "models is None")):
        (folder / "plan.json").write_text(text)
        with pytest.raises(VectorsError, match=says):
            read_plan(folder / "plan.json")
    path = plan_of(folder, "one")
    (folder / "models" / "qwen3" / "model.safetensors").unlink()
    with pytest.raises(VectorsError, match="no model.safetensors"):
        make(read_plan(path), folder / "mine")


def test_a_case_on_which_two_computations_do_not_agree_is_not_written(folder, monkeypatch):
    right = oracle.Oracle.logits
    monkeypatch.setattr(oracle.Oracle, "logits", lambda self, ids: right(self, ids) * 1.001)
    with pytest.raises(VectorsError, match="the two computations are .* apart, more than .*; nothing is written"):
        make(read_plan(plan_of(folder, "one")), folder / "mine")
    assert not (folder / "mine").exists()
