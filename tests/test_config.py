"""config.json is read strictly: what changes the forward pass is understood or refused by name, with the file. Floor 9."""
import json
import math
import re

import numpy as np
import pytest
from models import T_CONFIG

from refengine.config import parse_config, read_config
from refengine.errors import ConfigError
from refengine.rope import Rope, yarn_attention_factor
from refengine.vectors import oracle

LLAMA = {**{key: value for key, value in T_CONFIG.items() if key != "head_dim"}, "model_type": "llama"}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 1024}


def write(folder, config, generation=None):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def read(folder, *args):
    return read_config(write(folder, *args))


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                                 "intermediate_size", "rms_norm_eps", "max_position_embeddings", "rope_theta", "head_dim"])
def test_a_missing_key_is_named_with_its_file(tmp_path, key):
    """Cases J2, J3, J4: others guess 1e-5, 10000 and hidden / heads."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, without(T_CONFIG, key))
    assert f"{key} is missing" in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


REFUSED = {
    "MoE family": ({"model_type": "qwen3_moe"}, "qwen3_moe"),
    "other MoE family": ({"model_type": "mixtral"}, "mixtral"),
    "hybrid family": ({"model_type": "qwen3_next"}, "qwen3_next"),
    "windowed family": ({"model_type": "mistral"}, "mistral"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "sliding window": ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window is True"),
    "windowed layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "partial rotation inside": ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
                                "partial_rotary_factor"),
    "unknown key": ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping: not known"),
    "unknown keys": ({"zeta": 1, "num_experts": 8}, "num_experts, zeta: not known"),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    "odd head": ({"head_dim": 15}, "head_dim 15 is odd"),
    "text for a number": ({"hidden_size": "32"}, "hidden_size is '32', not a int"),
    "truth for a number": ({"num_hidden_layers": True}, "num_hidden_layers is True, not a int"),
    "number for truth": ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not a bool"),
    "fraction for a count": ({"vocab_size": 64.0}, "vocab_size is 64.0, not a int"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not above 0"),
    "negative eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, not above 0"),
    "endless eps": ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf, not above 0"),
    "no number": ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, not above 0"),
    "rope type": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not one of"),
    "old rope type": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not one of"),
    "two rope types": ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "'yarn' and type 'linear'"),
    "scaling without factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    "llama3 without range": ({"rope_scaling": without(LLAMA3, "low_freq_factor")}, "low_freq_factor is missing"),
    "llama3 without context": ({"rope_scaling": without(LLAMA3, "original_max_position_embeddings")},
                               "original_max_position_embeddings is missing"),
    "llama3 upside down": ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4.0 is not below"),
    "key of another rope type": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}},
                                 "beta_fast: not used by rope_type 'linear'"),
    "unknown rope key": ({"rope_scaling": {**YARN, "finetuned": True}}, "finetuned: not used by rope_type 'yarn'"),
    "rope_scaling is a list": ({"rope_scaling": [2.0]}, "rope_scaling is [2.0], not an object"),
    "two thetas": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta is 10000.0 at the top"),
    "two scalings": ({"rope_scaling": {**YARN, "factor": 2.0}, "rope_parameters": YARN}, "contradict each other"),
}


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_what_is_not_computed_is_refused_by_name_and_file(tmp_path, changes):
    """Cases A4, I1, J4, J5 and more."""
    changes, words = REFUSED[changes]
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read(tmp_path, {**T_CONFIG, **changes})
    assert str(tmp_path / "config.json") in str(caught.value)


def test_no_rope_theta_in_either_place_is_an_error_and_in_both_alike_is_none(tmp_path):
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}
    assert read(tmp_path, {**T_CONFIG, **new}).rope == read(tmp_path, T_CONFIG).rope == Rope(10000.0)
    assert read(tmp_path, {**without(T_CONFIG, "rope_theta"), **new}).rope == Rope(10000.0)
    with pytest.raises(ConfigError, match="rope_theta is missing, at the top and in rope_parameters"):
        read(tmp_path, {**without(T_CONFIG, "rope_theta"), "rope_parameters": {"rope_type": "default"}})


def test_keys_without_effect_on_the_pass_change_nothing(tmp_path):
    harmless = {"torch_dtype": "bfloat16", "dtype": "float32", "use_cache": False, "initializer_range": 0.5,
                "attention_dropout": 0.1, "sliding_window": 128, "use_sliding_window": False, "max_window_layers": 1,
                "layer_types": ["full_attention"] * 2, "rope_scaling": None, "quantization_config": None, "temperature": 0.3}
    assert read(tmp_path, {**T_CONFIG, **harmless}) == read(tmp_path, T_CONFIG)


def test_head_dim_of_qwen3_is_stated_and_of_the_others_hidden_over_heads_unless_stated(tmp_path):
    """Case J2: 16 is not 32 / 4."""
    assert read(tmp_path, T_CONFIG).head_dim == 16
    for config in (LLAMA, QWEN2):
        assert read(tmp_path, config).head_dim == 8
        assert read(tmp_path, {**config, "head_dim": None}).head_dim == 8
        assert read(tmp_path, {**config, "head_dim": 20}).head_dim == 20
        with pytest.raises(ConfigError, match="head_dim is missing, and hidden_size 34 is not a multiple"):
            read(tmp_path, {**config, "hidden_size": 34})


def test_each_family_has_its_own_biases_and_norms(tmp_path):
    def parameters(config):
        names = read(tmp_path, config).tensors()
        return {name.removeprefix("model.layers.1.") for name in names if name.startswith("model.layers.1.")
                and (name.endswith("bias") or "q_norm" in name or "k_norm" in name)}

    qkv = {f"self_attn.{part}_proj.bias" for part in "qkv"}
    norms = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    mlp = {f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")}
    assert parameters(T_CONFIG) == norms
    assert parameters({**T_CONFIG, "attention_bias": True}) == norms | qkv | {"self_attn.o_proj.bias"}
    assert parameters(without(QWEN2, "attention_bias")) == parameters({**QWEN2, "attention_bias": True}) == qkv
    assert parameters(without(LLAMA, "attention_bias")) == set()
    assert parameters({**LLAMA, "attention_bias": True, "mlp_bias": True}) == qkv | {"self_attn.o_proj.bias"} | mlp


def test_every_shape_follows_from_the_configuration(tmp_path):
    shapes = read(tmp_path, {**T_CONFIG, "tie_word_embeddings": True}).tensors()
    assert "lm_head.weight" not in shapes and len(shapes) == 2 + 2 * 11
    at = "model.layers.0."
    assert [shapes[at + name] for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.o_proj.weight",
                                           "self_attn.q_norm.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight")] == [
        (64, 32), (32, 32), (32, 64), (16,), (48, 32), (32, 48)]


@pytest.mark.parametrize(("config", "generation", "stop"), [
    (5, [5, 7], (5, 7)), (5, None, (5,)), ([5, 6], None, (5, 6)), (None, 7, (7,)), (None, None, ()), (5, 7, (5, 7)),
    ([6, 5], [7, 6], (6, 5, 7)), ("absent", "absent", ()), ("absent", [9], (9,)), (0, "absent", (0,)),
], ids=str)
def test_stop_ids_of_both_files_are_joined_in_scalar_list_and_missing_form(tmp_path, config, generation, stop):
    """Case H11."""
    config = {} if config == "absent" else {"eos_token_id": config}
    generation = {} if generation == "absent" else {"eos_token_id": generation}
    assert read(tmp_path, {**T_CONFIG, **config}, generation).stop_ids == stop


def test_without_a_generation_config_the_stop_ids_are_those_of_the_configuration(tmp_path):
    assert read(tmp_path, {**T_CONFIG, "eos_token_id": [3, 4]}).stop_ids == (3, 4)


@pytest.mark.parametrize("eos", ["</s>", [1, "2"], -1, 1.5, True, [[1]]], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_stop_id_that_is_no_id_is_refused_with_the_file_it_is_in(tmp_path, eos, file):
    config, generation = ({"eos_token_id": eos}, {}) if file == "config.json" else ({}, {"eos_token_id": eos})
    with pytest.raises(ConfigError, match="eos_token_id is") as caught:
        read(tmp_path, {**T_CONFIG, **config}, generation)
    assert str(tmp_path / file) in str(caught.value)


@pytest.mark.parametrize(("text", "words"), [("{", "is not JSON"), ("[1]", "holds a list"), ("", "is not JSON"),
                                             ("\ud800".encode("utf-8", "surrogatepass"), "is not JSON")])
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path, text, words):
    (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_folder_without_a_configuration_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("config", ["[" * 100_000, json.dumps({**T_CONFIG, "rope_theta": 10**400}),
                                    json.dumps({**T_CONFIG, "layer_types": 5})],
                         ids=["deep", "huge integer", "layer_types is a number"])
def test_a_hostile_configuration_is_still_a_config_error(tmp_path, config):
    with pytest.raises(ConfigError):
        read(tmp_path, config)


# Rotary frequencies

ROPES = {
    "default": {"rope_theta": 10000.0}, "theta 1e6": {"rope_theta": 1e6}, "theta 5e5": {"rope_theta": 5e5},
    "linear": {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "yarn": {"rope_theta": 1e6, "rope_scaling": YARN},
    "yarn stated": {"rope_theta": 1e6, "rope_scaling": {**YARN, "attention_factor": 1.25}},
    "yarn mscale": {"rope_theta": 10000.0, "rope_scaling": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}},
    "yarn one mscale": {"rope_theta": 10000.0, "rope_scaling": {**YARN, "mscale": 0.7}},
    "yarn not truncated": {"rope_theta": 10000.0,
                           "rope_scaling": {**YARN, "truncate": False, "beta_fast": 24, "beta_slow": 2}},
    "yarn whose ramp is empty": {"rope_theta": 10000.0, "rope_scaling": {**YARN, "original_max_position_embeddings": 4}},
    "yarn whose ramp ends beyond the pairs": {"rope_theta": 10000.0,
                                              "rope_scaling": {**YARN, "original_max_position_embeddings": 2**20}},
    "yarn below one": {"rope_theta": 10000.0, "rope_scaling": {**YARN, "factor": 0.5}},
}


def of(kind, head_dim):
    raw = {**T_CONFIG, **ROPES[kind], "head_dim": head_dim}
    return raw, parse_config(raw, "config.json").rope


def radians(turns):
    """The fixed-point turns a position as radians, in float64."""
    return (turns[:, 0].astype(np.float64) * 2.0**-64 + turns[:, 1].astype(np.float64) * 2.0**-96) * (2 * math.pi)


@pytest.mark.parametrize("head_dim", [16, 20, 64, 128])
@pytest.mark.parametrize("kind", ROPES)
def test_turns_of_every_rope_type_are_those_of_a_computation_in_float64(kind, head_dim):
    """The yardstick is the oracle's. Its rounding, in units of 2^-53: half of one in the exponent -2i/D, which the power
    makes up to ln(theta) / 2, one for the power itself, four for the scaling, six here for turns to radians. A ramp between
    whole or given numbers is off by 8 more, one between computed dimensions (up to D) by 8 D; as a part of the slowest
    frequency it weighs ``factor`` times that.
    """
    raw, rope = of(kind, head_dim)
    want, factor = oracle.rotary(raw, head_dim)
    ramp = 8 * max(1.0, rope.factor) * (rope.type in ("yarn", "llama3")) * (1 if rope.truncate else head_dim)
    units = math.log(rope.theta) / 2 + 11 + ramp
    assert np.abs(radians(rope.turns(head_dim)) / want - 1).max() <= units * 2.0**-53
    assert rope.attention_factor == pytest.approx(factor, rel=4 * 2.0**-53)
    if not ramp:
        assert units * 2.0**-53 < 2e-15


def test_turns_are_right_far_below_float64():
    """In whole numbers of 2^-96 turns. Pair 0 makes one radian a position, 1 / 2 pi turns (pi by Machin's formula, 1706).
    Pair 1 of D = 16 makes the eighth root of 1 / theta of that."""
    turns = Rope(10000.0).turns(16)
    first, second = ((int(high) << 32) + int(low) for high, low in turns[:2])
    one = 2**200

    def arctan(n):  # of 1 / n, in units of 1 / one
        total, power, k = 0, one // n, 0
        while power:
            total += (-1)**k * (power // (2 * k + 1))
            power, k = power // n**2, k + 1
        return total

    pi = 16 * arctan(5) - 4 * arctan(239)
    assert abs(first - (2**96 * one + pi) // (2 * pi)) <= 1
    # (second / first)^8 = 1e-4. Each is off by half a unit of more than 2^91 units, eight times over.
    assert abs(second**8 * 10000 - first**8) / first**8 < 2.0**-87


def test_gguf_divisors_divide_the_frequencies_pair_by_pair():
    divisors = (1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0, 3.0)
    plain, divided = Rope(10000.0).turns(16), Rope(10000.0, divisors=divisors).turns(16)
    assert np.abs(radians(plain) / radians(divided) / divisors - 1).max() <= 4 * 2.0**-53
    assert (plain[0] == divided[0]).all() and (plain[1] != divided[1]).any()


def test_the_attention_factor_is_stated_or_inferred():
    """Case J5."""
    assert of("yarn", 16)[1].attention_factor == 0.1 * math.log(4) + 1
    assert of("yarn stated", 16)[1].attention_factor == 1.25
    assert of("yarn one mscale", 16)[1].attention_factor == 0.1 * math.log(4) + 1   # mscale alone has no effect
    assert of("yarn below one", 16)[1].attention_factor == 1.0
    assert yarn_attention_factor(40.0, 1.0, 0.707) == pytest.approx((0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1),
                                                                    rel=4 * 2.0**-53)
    assert of("linear", 16)[1].attention_factor == of("llama3", 16)[1].attention_factor == 1.0


def test_yarn_takes_the_models_context_as_the_original_one_when_none_is_stated():
    """As transformers does."""
    scaling = without(YARN, "original_max_position_embeddings")
    assert parse_config({**T_CONFIG, "rope_scaling": scaling}, "config.json").rope.original_max_position_embeddings == 4096


@pytest.mark.peers
@pytest.mark.parametrize("head_dim", [16, 20, 128])
@pytest.mark.parametrize("kind", ROPES)
def test_turns_and_factor_are_those_of_transformers(kind, head_dim):
    """transformers computes in float32: an exponent off by 2^-24 of itself, so of ln(theta) at most, and a few roundings.

    A ramp there is float32 too, and weighs ``factor`` times as much in the slowest frequency.
    """
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    raw, rope = of(kind, head_dim)
    theirs = Qwen3RotaryEmbedding(AutoConfig.for_model(**raw))
    units = math.log(rope.theta) + 8 + 8 * max(1.0, rope.factor) * (rope.type in ("yarn", "llama3"))
    error = np.abs(radians(rope.turns(head_dim)) / theirs.inv_freq.numpy().astype(np.float64) - 1)
    assert error.max() <= units * 2.0**-24
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=4 * 2.0**-53)
