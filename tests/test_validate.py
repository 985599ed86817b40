"""The checker of backends is checked itself: right ones pass, faults just above the noise are called wrong, and what cannot be
checked never passes. Floor 9.
"""
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from faults import late_keys, late_norm, tiled, with_op
from helpers import ids_of
from refengine.backends import Backend, BackendError, Precision
from refengine.cli import main
from refengine.conformance.history import load_trace
from refengine.inspect.trace import tap_of
from refengine.model import Model, load_model
from refengine.synth import write_checkpoint
from refengine.validate import Check, Report, Subject, open_subject, validate
from refengine.validate.envelope import Envelope, rounding, verdict
from refengine.validate.metrics import compare
from models import T_CONFIG

IDS = ids_of(40, seed=5)


class Recomputes(Backend):
    """A backend over one of our models that runs all ids each time; what is done to its logits is a parameter."""

    def __init__(self, model, *, after=lambda logits, engine: logits, capacity=256, precision=Precision(), see=None):
        super().__init__(model.config.vocab, capacity)
        self.model, self.after, self.precision, self.see, self.trimmed = model, after, precision, see, 0

    def _all(self, ids, tap=None):
        return self.model.run(self.model.new_cache(len(ids), 16), np.array(ids), every=True, tap=tap or self.see).astype(np.float32)

    def _forward(self, ids):
        return self.after(self._all(self._ids + ids)[-1].copy(), self)

    def _rewind(self, length):
        self.trimmed += 1

    def rows(self, ids):
        return self._all(list(ids))

    def activations(self, ids, names):
        cache, seen = self.model.new_cache(len(ids), 16), {}
        self.model.run(cache, np.array(ids), every=True, tap=tap_of(self.model, cache, names, seen, self.see))
        return seen


class Fake(Subject):
    def __init__(self, make, model, precision=Precision()):
        super().__init__("fake", make(), model, precision=precision)
        self.another = make


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Wider than T, so that sums are long enough to have noise, with biases."""
    folder = tmp_path_factory.mktemp("V")
    write_checkpoint(folder, {**T_CONFIG, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "attention_bias": True,
                              "num_attention_heads": 4, "num_key_value_heads": 2}, seed=4)
    return folder


def judged(subject, **settings):
    return {check.name: check for check in validate(subject, own=[IDS, IDS[:7]], histories=0, **settings).checks}


# What is right passes

@pytest.mark.parametrize("model", ["tiny", "tiny-hybrid"])
@pytest.mark.parametrize("arithmetic", ["exact", "native"])
def test_refengine_sits_its_own_exam(model, arithmetic):
    report = validate(open_subject(f"refengine:arithmetic={arithmetic}", model, 256), longest=64, histories=6)
    checks = {check.name: check for check in report.checks}
    assert [checks[name].outcome for name in ("preflight", "forward", "location")] == ["pass"] * 3
    assert checks["forward"].figures["verdict"] == "within rounding"
    if arithmetic == "exact":
        assert report.outcome == "pass" and checks["cache"].figures["unequal"] == 0 < checks["cache"].figures["compared"]
    elif model == "tiny":
        assert checks["cache"].outcome == "fail" and "within its rounding" in checks["cache"].words and not checks["cache"].figures["violation"]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_right_arithmetic_of_a_coarse_precision_is_within_rounding(kind, checkpoint):
    """With roundings that no placement of the envelope has: another seed, and every activation at once."""
    for seed in (77, 78, 79):
        precision = Precision(kind, kind, kind, "stored")
        to = rounding(kind, seed)
        checks = judged(Fake(lambda: Recomputes(load_model(checkpoint, "native"), precision=precision,
                                                see=lambda name, x: to(x).astype(x.dtype)), checkpoint, precision))
        assert checks["forward"].figures["verdict"] == "within rounding", checks["forward"].words
        assert checks["location"].outcome == "pass", checks["location"].words


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_rounding_is_what_numpy_and_the_formats_do(kind):
    x = np.concatenate([np.random.default_rng(0).standard_normal(2000) * 10.0**np.arange(-6, 4).repeat(200), [0, -0.0, 1, np.inf]])
    got = rounding(kind)(x)
    if kind == "bf16":
        bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        want = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
        x = x.astype(np.float32)
        got = rounding(kind)(x)
    else:
        want = x.astype({"f32": np.float32, "f16": np.float16}[kind])
    assert np.array_equal(got, want.astype(np.float64))
    once = rounding(kind, 1)(x)
    near = rounding(kind)(once)
    assert np.array_equal(once, near), "a dithered number is a number of the precision"
    assert (once != got).mean() > 0.2


# Faults just above the noise are wrong, and their place is named

def swapped(model):
    def attention(q, runs, start):
        out = model.op.attention(q, runs, start).reshape(len(q), model.config.heads, -1).copy()
        out[:, [0, 1]] = out[:, [1, 0]]
        return out.reshape(len(q), -1)
    return with_op(model, attention=attention)


def theta(model):
    config = replace(model.config, rope=replace(model.config.rope, theta=10100.0))
    return Model(config, model.weights, model.op, model.checkpoint)


def eps(model):
    return replace(model, config=replace(model.config, rms_norm_eps=1e-5))


def scale(model):
    return with_op(model, attention=lambda q, runs, start: model.op.attention(q * np.float32(1.0001), runs, start))


def no_bias(model):
    layers = list(model.weights.layers)
    layers[1] = layers[1]._replace(o=layers[1].o._replace(bias=None))
    return replace(model, weights=model.weights._replace(layers=tuple(layers)))


FAULTS = {"eps 1e-5 for 1e-6": (eps, "attn_norm"), "swapped heads": (swapped, "heads"), "tiled kv heads": (tiled, "heads"),
          "theta 10100 for 10000": (theta, "q_rope"), "a scale off by 1e-4": (scale, None), "a missing bias": (no_bias, "o"),
          "a norm after the rotation": (late_norm, "k_rope"), "keys one position late": (late_keys, "k_rope")}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_just_above_the_noise_is_called_wrong_and_its_place_is_named(name, checkpoint):
    fault, place = FAULTS[name]
    checks = judged(Fake(lambda: Recomputes(fault(load_model(checkpoint, "native"))), checkpoint))
    assert checks["forward"].outcome == "fail" and checks["forward"].figures["verdict"] == "wrong", checks["forward"].words
    if place:
        assert checks["location"].figures["name"].endswith(f".{place}"), checks["location"].words
        assert checks["location"].figures["layer"] == (1 if name == "a missing bias" else 0)


@pytest.mark.parametrize("name", ["swapped heads", "tiled kv heads", "a missing bias", "a norm after the rotation"])
def test_a_large_fault_shows_through_the_noise_of_bfloat16(name, checkpoint):
    precision, to = Precision("bf16", "bf16", "bf16", "stored"), rounding("bf16", 9)
    checks = judged(Fake(lambda: Recomputes(FAULTS[name][0](load_model(checkpoint, "native")), precision=precision,
                                            see=lambda name, x: to(x).astype(x.dtype)), checkpoint, precision))
    assert checks["forward"].figures["verdict"] == "wrong", checks["forward"].words


def test_the_first_wrong_position_and_head_are_named(checkpoint):
    def see(name, x):
        if name == "layers.1.q_rope":
            x = x.copy()
            x[17:, 2] *= np.float32(1.01)
        return x

    found = judged(Fake(lambda: Recomputes(load_model(checkpoint, "native"), see=see), checkpoint))["location"].figures
    assert (found["name"], found["layer"], found["first_position"], found["head"], found["side"]) == ("layers.1.q_rope", 1, 17, 2, "queries")


def test_activations_of_the_neighbouring_position_are_called_an_alignment(checkpoint):
    class OneOff(Recomputes):
        def activations(self, ids, names):
            return {name: np.roll(x, 1, axis=0) if x.shape[0] == len(ids) else x for name, x in super().activations(ids, names).items()}

    subject = Fake(lambda: OneOff(load_model(checkpoint, "native")), checkpoint)
    found = judged(subject)["location"]
    assert found.outcome == "fail" and abs(found.figures["alignment"]) == 1 and "not aligned" in found.words


# The cache

def cache_of(make, checkpoint, tmp_path):
    report = validate(Fake(make, checkpoint), own=[IDS], histories=12, trace=tmp_path / "t.json")
    return {check.name: check for check in report.checks}["cache"]


def test_an_engine_that_is_one_ulp_off_after_a_rewind_is_not_lossless_but_within_rounding(checkpoint, tmp_path):
    model = load_model(checkpoint)

    def nudge(logits, engine):
        return np.nextafter(logits, np.float32(np.inf)) if engine.trimmed else logits

    found = cache_of(lambda: Recomputes(model, after=nudge), checkpoint, tmp_path)
    assert found.outcome == "fail" and "within its rounding" in found.words and found.figures["violation"] is None
    assert load_trace(tmp_path / "t.json", model.config.vocab)[1] == found.figures["first"]


def test_an_engine_that_keeps_what_was_trimmed_is_told_from_rounding_and_its_history_is_short(checkpoint, tmp_path):
    model = load_model(checkpoint)

    class Keeps(Recomputes):
        kept = ()

        def _forward(self, ids):
            return self._all([*self.kept, *self._ids, *ids])[-1]

        def _rewind(self, length):
            self.kept = self._ids[length:length + 1]

        def reset(self):
            super().reset()
            self.kept = ()

    found = cache_of(lambda: Keeps(model), checkpoint, tmp_path)
    assert found.outcome == "fail" and "not by rounding" in found.words
    assert len(found.figures["violating"]) <= 3 and load_trace(tmp_path / "t.json", model.config.vocab)[1] == found.figures["violating"]


def test_a_wrong_count_is_a_violation(checkpoint, tmp_path):
    class Lies(Recomputes):
        def trim_kv_cache(self, length):
            return super().trim_kv_cache(length + 1 if length else 0)

    model = load_model(checkpoint)
    assert "the retained prefix" in cache_of(lambda: Lies(model), checkpoint, tmp_path).words


# What cannot be checked does not pass

def test_a_backend_that_crashes_is_an_error(checkpoint):
    class Crashes(Recomputes):
        def rows(self, ids):
            raise RuntimeError("device lost")

    report = validate(Fake(lambda: Crashes(load_model(checkpoint, "native")), checkpoint), own=[IDS], histories=2)
    assert {check.name: check.outcome for check in report.checks} == {
        "preflight": "pass", "forward": "error", "location": "skip", "cache": "skip"}
    assert report.outcome == "error" and "RuntimeError: device lost" in report.checks[1].words


@pytest.mark.parametrize(("rows", "says"), [(lambda x: x[:, :-1], "logits have shape"), (lambda x: x * np.nan, "are not finite")])
def test_nonsense_is_a_failure(rows, says, checkpoint):
    class Nonsense(Recomputes):
        def rows(self, ids):
            return rows(super().rows(ids))

    checks = judged(Fake(lambda: Nonsense(load_model(checkpoint, "native")), checkpoint))
    assert checks["forward"].outcome == "fail" and says in checks["forward"].words


def test_another_vocabulary_ends_the_checks_before_any_figure(checkpoint):
    class Other(Recomputes):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            self.vocab = 70

    report = validate(Fake(lambda: Other(load_model(checkpoint, "native")), checkpoint), own=[IDS])
    assert [check.outcome for check in report.checks] == ["fail", "skip", "skip", "skip"]
    report = validate(Fake(lambda: Recomputes(load_model(checkpoint, "native"), capacity=20), checkpoint), own=[IDS])
    assert "longer than its context of 20" in report.checks[0].words


def test_six_outcomes_are_kept_apart():
    def outcome(*checks, expected=()):
        report = Report({}, expected=frozenset(expected))
        for name, found in checks:
            report.add(Check(name, found, ""))
        return report.outcome

    assert outcome(("a", "pass"), ("b", "skip")) == "pass" and outcome(("a", "skip")) == "skip" and outcome() == "skip"
    assert outcome(("a", "pass"), ("b", "fail")) == "fail" and outcome(("a", "fail"), ("b", "error")) == "error"
    assert outcome(("a", "fail"), ("b", "pass"), expected="a") == "pass"
    assert outcome(("a", "pass"), expected="a") == "unexpected pass" and outcome(("a", "error"), expected="a") == "error"
    with pytest.raises(ValueError, match="'ok' is not one of"):
        Check("a", "ok", "")


@pytest.mark.parametrize(("spec", "says"), [("nothing", "is not one of refengine, transformers, llama.cpp"),
                                             ("refengine:arithmetic", "'arithmetic' is not option=value"),
                                             ("refengine:arithmetic=fp8", "no option arithmetic=fp8; there are"),
                                             ("transformers:dtype=int4", "no option dtype=int4")])
def test_a_backend_that_is_none_is_refused_by_name(spec, says):
    with pytest.raises(BackendError, match=says):
        open_subject(spec, "tiny")


def test_figures_are_what_their_names_say():
    want, got = np.array([[0.0, 1, 2, 3, 4, 5], [1, 0, 0, 0, 0, 0]]), np.array([[0.0, 1, 2, 3, 5, 4], [1, 0, 0, 0, 0, 0]])
    figures = compare(want, got)
    assert figures["largest"] == 1 and figures["nmse"] == pytest.approx(2 / 56) and figures["first_parted"] == 0
    assert figures["top_1"] == 0.5 and figures["top_5"] == 1 and figures["top_5_order"] == 0.5
    p = np.exp(want[0]) / np.exp(want[0]).sum()
    q = np.exp(got[0]) / np.exp(got[0]).sum()
    assert figures["kl_forward"] == pytest.approx((p * np.log(p / q)).sum() / 2)
    assert figures["kl_backward"] == pytest.approx((q * np.log(q / p)).sum() / 2)
    assert compare(want, want)["first_parted"] is None


def test_a_verdict_has_a_band_between_right_and_wrong():
    assert [verdict(ratio, 2.0) for ratio in (1.9, 2.1, 3.9, 4.1)] == ["within rounding", "suspicious", "suspicious", "wrong"]


def test_the_command_says_what_it_found_and_writes_a_report(tmp_path, capsys):
    (tmp_path / "p.json").write_text(json.dumps([IDS[:9]]))
    arguments = ["validate", "--backend", "refengine", "--model", "tiny", "--prompts", str(tmp_path / "p.json"), "--histories", "2",
                 "--report", str(tmp_path / "r.json")]
    assert main(arguments) == 0
    assert "lossless in bits" in capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["schema"] == "refengine-validation/1" and [check["name"] for check in report["checks"]] == [
        "preflight", "forward", "location", "cache"]
    assert main([*arguments, "--html", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "lossless in bits" in text and "within rounding" in text and not re.search("https?:|src=", text)
    capsys.readouterr()
    assert main([*arguments, "--expect", "cache"]) == 1
    assert "unexpected pass" in capsys.readouterr().out
    (tmp_path / "p.json").write_text("[[]]")
    assert main(arguments) == 2 and "lists of token ids" in capsys.readouterr().err


def test_an_envelope_of_a_finer_precision_lies_within_that_of_a_coarser(checkpoint):
    floors = {kind: Envelope(load_model(checkpoint, "native").checkpoint, Precision(kind, kind, kind)).floors(IDS).floor["nmse"]
              for kind in ("f32", "f16", "bf16")}
    assert floors["f32"] * 100 < floors["f16"] < floors["bf16"] / 3
