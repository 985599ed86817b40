"""Real backends under `refengine validate`: python -m pytest -m peers. Floor 9."""
import importlib.util

import pytest

from models import T_CONFIG
from refengine.model import load_model
from refengine.synth import write_checkpoint
from refengine.validate import open_subject, validate

pytestmark = pytest.mark.peers
LLAMA = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed: it is built from source")

MLX = pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a width that llama.cpp can quantise."""
    made = tmp_path_factory.mktemp("P")
    write_checkpoint(made, {**T_CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}, seed=6)
    return made


@pytest.mark.parametrize("spec", ["transformers", "transformers:attention=eager", "transformers:dtype=bfloat16", "transformers:dtype=float16",
                                  *(pytest.param(f"llama.cpp:{options}", marks=LLAMA) for options in (
                                      "kv=f32", "kv=f16", "weights=f16", "weights=bf16", "weights=q8_0")),
                                  *(pytest.param(f"mlx:dtype={kind}", marks=MLX) for kind in ("float32", "bfloat16", "float16"))])
def test_a_right_backend_is_within_the_noise_of_its_precision(spec, folder):
    checks = {check.name: check for check in validate(open_subject(spec, folder, 256), longest=140, histories=3).checks}
    assert checks["forward"].outcome == "pass" and checks["forward"].figures["verdict"] == "within rounding", checks["forward"].words
    assert checks["location"].outcome == ("pass" if "transformers" in spec else "skip"), checks["location"].words
    assert checks["cache"].outcome in ("pass", "fail") and checks["cache"].figures["violation"] is None, checks["cache"].words


def test_transformers_with_a_planted_fault_is_wrong_and_located(folder):
    subject = open_subject("transformers", folder, 256)
    layer = subject.engine._model.model.layers[1]
    layer.self_attn.q_norm.variance_epsilon = 1e-4
    checks = {check.name: check for check in validate(subject, own=[list(range(40))], histories=0).checks}
    assert checks["forward"].figures["verdict"] == "wrong"
    assert checks["location"].figures["name"] == "layers.1.q_norm" and checks["location"].figures["side"] == "queries"


@LLAMA
def test_a_mixture_of_k_quants_is_within_its_noise(tmp_path):
    """Their blocks are 256 wide, and so must be the model."""
    write_checkpoint(tmp_path, {**T_CONFIG, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16,
                                "num_key_value_heads": 16}, seed=8)
    subject = open_subject("llama.cpp:weights=q4_k", tmp_path, 256)
    assert subject.precision.inputs == "q8_k"
    checks = {check.name: check for check in validate(subject, longest=70, histories=3).checks}
    assert checks["forward"].figures["verdict"] == "within rounding", checks["forward"].words


@MLX
@pytest.mark.parametrize("kind", ["concatenate", "mixed"])
def test_a_cache_of_mlx_whose_trimmed_tokens_come_back_is_found(kind, folder):
    """ConcatenateKVCache of mlx-lm 0.32: its trim lowers a number, and the next append counts from the arrays again. Of several
    kinds of cache trim_prompt_cache reports the count of layer 0, which is right."""
    report = validate(open_subject(f"mlx:cache={kind}", folder, 256), own=[list(range(40))], histories=12)
    cache = report.checks[-1]
    assert cache.outcome == "fail" and "not by rounding" in cache.words and len(cache.figures["violating"]) <= 4


def test_transformers_that_loses_its_rewind_is_told_from_rounding(folder):
    """What its crop would do if a zero meant "no limit"."""
    subject = open_subject("transformers", folder, 256)
    engine = subject.engine
    engine._rewind = lambda length: engine._cache.crop(length - len(engine._ids)) if length else None
    checks = {check.name: check for check in validate(subject, own=[list(range(40))], histories=20).checks}
    assert checks["cache"].outcome == "fail" and "not by rounding" in checks["cache"].words
    assert len(checks["cache"].figures["violating"]) <= 3
    assert load_model(folder).config.vocab == 64
