"""config.json, read strictly: what changes the forward pass must be understood, or loading stops. Floor 2."""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refengine.errors import ConfigError
from refengine.rope import TYPES, Rope, yarn_attention_factor

FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_5_text")

# Keys that are known not to change the forward pass of these families. Any other key stops the loading by name.
WITHOUT_EFFECT = frozenset("""
    architectures model_type torch_dtype dtype transformers_version auto_map _name_or_path name_or_path _commit_hash
    use_cache initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop pretraining_tp
    max_window_layers sliding_window use_sliding_window layer_types output_attentions output_hidden_states return_dict
    use_return_dict torchscript use_bfloat16 is_encoder_decoder is_decoder add_cross_attention chunk_size_feed_forward
    cross_attention_hidden_size tie_encoder_decoder pruned_heads finetuning_task id2label label2id num_labels
    problem_type task_specific_params tokenizer_class prefix bos_token_id eos_token_id pad_token_id sep_token_id
    decoder_start_token_id min_length max_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens tf_legacy_loss rope_interleaved is_llama_config transformers.js_config unsloth_version
    unsloth_fixed max_position_embeddings rope_theta rope_scaling rope_parameters default_theta
""".split())


@dataclass(frozen=True)
class DeltaConfig:
    """The gated delta nets of a hybrid. ``layers``: for each layer, whether it is one (the others are attention)."""

    layers: tuple[bool, ...]
    window: int                    # W, of the convolution
    key_heads: int                 # Hk
    value_heads: int               # Hv
    key_dim: int                   # Dk
    value_dim: int                 # Dv

    @property
    def channels(self) -> int:
        """C: q, k and v go through the convolution side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, in our names. E hidden, L layers, H query heads, N kv heads, D head size, F mlp, V vocabulary."""

    family: str
    hidden: int                    # E
    layers: int                    # L
    heads: int                     # H
    kv_heads: int                  # N
    head_dim: int                  # D, not E / H in general
    mlp: int                       # F
    vocab: int                     # V
    rms_norm_eps: float
    rope: Rope
    tied: bool                     # the head is the embedding
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    max_positions: int             # what the model was made for; the cache's capacity may be less or more
    stop_ids: tuple[int, ...] = ()
    rotated: int | None = None     # R, how many of D dimensions turn; None: all
    delta: DeltaConfig | None = None

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.rotated is None else self.rotated

    @property
    def gain_centre(self) -> float:
        """What norm gains are stored as a distance from."""
        return 0.0 if self.delta is None else 1.0

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name (as Hugging Face has it) and shape."""
        e, d, f = self.hidden, self.head_dim, self.mlp
        q, kv = self.heads * d, self.kv_heads * d
        queries = q if self.delta is None else 2 * q          # a gate beside each query
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, e), "model.norm.weight": (e,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, e)
        for i in range(self.layers):
            at = f"model.layers.{i}"
            shapes |= {f"{at}.input_layernorm.weight": (e,), f"{at}.post_attention_layernorm.weight": (e,)}
            recurrent = self.delta is not None and self.delta.layers[i]
            attention = (("self_attn.q_proj", (queries, e), self.qkv_bias), ("self_attn.k_proj", (kv, e), self.qkv_bias),
                         ("self_attn.v_proj", (kv, e), self.qkv_bias), ("self_attn.o_proj", (e, q), self.o_bias))
            mlp = (("mlp.gate_proj", (f, e), self.mlp_bias), ("mlp.up_proj", (f, e), self.mlp_bias),
                   ("mlp.down_proj", (e, f), self.mlp_bias))
            if recurrent:
                shapes |= {f"{at}.linear_attn.{name}": shape for name, shape in self._delta_tensors().items()}
            for name, shape, bias in mlp if recurrent else attention + mlp:
                shapes[f"{at}.{name}.weight"] = shape
                if bias:
                    shapes[f"{at}.{name}.bias"] = shape[:1]
            if self.qk_norm and not recurrent:
                shapes |= {f"{at}.self_attn.q_norm.weight": (d,), f"{at}.self_attn.k_norm.weight": (d,)}
        return shapes

    def _delta_tensors(self) -> dict[str, tuple[int, ...]]:
        n, e = self.delta, self.hidden
        values = n.value_heads * n.value_dim
        return {"in_proj_qkv.weight": (n.channels, e), "in_proj_z.weight": (values, e),
                "in_proj_b.weight": (n.value_heads, e), "in_proj_a.weight": (n.value_heads, e),
                "conv1d.weight": (n.channels, 1, n.window), "A_log": (n.value_heads,), "dt_bias": (n.value_heads,), "norm.weight": (n.value_dim,), "out_proj.weight": (e, values)}


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a Hugging Face folder, with the stop ids of generation_config.json. Raises ConfigError."""
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    stop = _ids(raw, "eos_token_id", folder / "config.json")
    if generation.is_file():
        stop += _ids(read_json(generation), "eos_token_id", generation)
    return parse_config(raw, str(folder / "config.json"), tuple(dict.fromkeys(stop)))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError when it is missing or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


def _ids(raw: dict[str, Any], key: str, path: Path) -> list[int]:
    """A token id, a list of them, or nothing."""
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"{path}: {key} is {value!r}, not a token id or a list of them")
    return list(ids)


class _Reader:
    """Takes keys out of a configuration, and knows afterwards which were never asked for."""

    def __init__(self, raw: dict[str, Any], where: str):
        self.raw, self.where, self.seen = raw, where, set()

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.where}: {text}")

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        self.seen.add(key)
        value = self.raw.get(key)
        if value is None:
            if default is ...:
                raise self.error(f"{key} is missing")
            return default
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{key} is {value!r}, not a {kind.__name__}")
        if kind in (int, float) and not 0 < value < float("inf"):
            raise self.error(f"{key} is {value!r}, not above 0")
        return value

    def refuse(self, key: str, *harmless: Any, why: str) -> None:
        self.seen.add(key)
        if self.raw.get(key) not in (None, *harmless):
            raise self.error(f"{key} is {self.raw[key]!r}: {why}")

    def unknown(self) -> list[str]:
        return sorted(set(self.raw) - self.seen - WITHOUT_EFFECT)


def parse_config(raw: dict[str, Any], where: str, stop_ids: tuple[int, ...] = ()) -> ModelConfig:
    """A configuration from the keys of config.json. ``where`` names the file in errors. Raises ConfigError."""
    r = _Reader(raw, where)
    family = r.get("model_type", str)
    if family not in FAMILIES:
        raise r.error(f"model_type {family!r} is not one of {', '.join(FAMILIES)}; "
                      "mixtures of experts, sliding windows and recurrent layers are other forward passes")
    r.refuse("hidden_act", "silu", why="only silu is computed")
    r.refuse("use_sliding_window", False, why="a sliding window forgets positions; every position is kept here")
    r.refuse("quantization_config", why="quantised safetensors are not read; use a GGUF file")
    hybrid = family == "qwen3_5_text"
    if not hybrid:
        r.refuse("partial_rotary_factor", 1, 1.0, why="only full rotation is computed")
        if any(kind != "full_attention" for kind in r.get("layer_types", list, [])):
            raise r.error("layer_types has other kinds than full_attention")
    hidden, heads = r.get("hidden_size", int), r.get("num_attention_heads", int)
    kv_heads = r.get("num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise r.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if family in ("qwen3", "qwen3_5_text"):  # stated by each; hidden / heads would be a wrong guess (128 is not 1024 / 16)
        head_dim = r.get("head_dim", int)
    else:
        head_dim = r.get("head_dim", int, hidden // heads)
        if raw.get("head_dim") is None and hidden % heads:
            raise r.error(f"head_dim is missing, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if head_dim % 2:
        raise r.error(f"head_dim {head_dim} is odd; rotation needs pairs")
    attention_bias = r.get("attention_bias", bool, False)
    max_positions = r.get("max_position_embeddings", int)
    config = ModelConfig(
        family=family, hidden=hidden, layers=r.get("num_hidden_layers", int), heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, mlp=r.get("intermediate_size", int), vocab=r.get("vocab_size", int),
        rms_norm_eps=r.get("rms_norm_eps", float), rope=_rope(raw, where, max_positions, hybrid),
        tied=r.get("tie_word_embeddings", bool, False), qk_norm=family == "qwen3" or hybrid,
        qkv_bias=attention_bias or family == "qwen2", o_bias=attention_bias and family != "qwen2",
        mlp_bias=r.get("mlp_bias", bool, False) and family == "llama", max_positions=max_positions, stop_ids=stop_ids,
        **(_hybrid(r, head_dim) if hybrid else {}))
    if r.unknown():
        raise r.error(f"{', '.join(r.unknown())}: not known to be without effect on the forward pass. "
                      "Remove the key if it is harmless")
    return config


def _hybrid(r: _Reader, head_dim: int) -> dict[str, Any]:
    """The fields that only hybrids have."""
    r.refuse("attn_output_gate", True, why="attention without a gate is not written here")
    r.refuse("mtp_num_hidden_layers", 0, why="layers that predict several tokens are not computed")
    factor = (r.raw.get("rope_parameters") or {}).get("partial_rotary_factor", r.get("partial_rotary_factor", float, 0.25))
    rotated = int(head_dim * factor)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise r.error(f"partial_rotary_factor {factor!r} turns {rotated} of {head_dim} dimensions; pairs are needed")
    count, every = r.get("num_hidden_layers", int), r.get("full_attention_interval", int, 4)
    kinds = r.get("layer_types", list, ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)])
    if len(kinds) != count or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise r.error(f"layer_types must name linear_attention or full_attention for each of {count} layers")
    key_heads, value_heads = r.get("linear_num_key_heads", int), r.get("linear_num_value_heads", int)
    if value_heads % key_heads:
        raise r.error(f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}")
    return {"rotated": rotated, "delta": DeltaConfig(
        tuple(kind == "linear_attention" for kind in kinds), r.get("linear_conv_kernel_dim", int), key_heads, value_heads,
        r.get("linear_key_head_dim", int), r.get("linear_value_head_dim", int))}


def _rope(raw: dict[str, Any], where: str, max_positions: int, partial: bool = False) -> Rope:
    """The rotary settings, from the old layout (rope_theta, rope_scaling) or the new one (rope_parameters), or both.

    ``partial``: some dimensions may stay as they are, and sections of image positions are equal for text.
    """
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{where}: {key} is {value!r}, not an object")
    r = _Reader({**(old or {}), **(new or {})}, f"{where}: {'rope_parameters' if new else 'rope_scaling'}")
    if old and new and any(old[key] != new[key] for key in old.keys() & new.keys()):
        raise ConfigError(f"{where}: rope_scaling and rope_parameters contradict each other")
    top, inner = raw.get("rope_theta"), r.get("rope_theta", float, None)
    if top is not None and inner is not None and top != inner:
        raise ConfigError(f"{where}: rope_theta is {top!r} at the top and {inner!r} in rope_parameters")
    if top is None and inner is None:
        raise ConfigError(f"{where}: rope_theta is missing, at the top and in rope_parameters")
    theta = inner or _Reader(raw, where).get("rope_theta", float)
    kind, other = r.get("rope_type", str, None), r.get("type", str, None)
    if kind and other and kind != other:
        raise r.error(f"rope_type {kind!r} and type {other!r} contradict each other")
    kind = kind or other or "default"
    if kind not in TYPES:
        raise r.error(f"rope_type {kind!r} is not one of {', '.join(TYPES)}")
    if partial:
        r.seen |= {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    else:
        r.refuse("partial_rotary_factor", 1, 1.0, why="only full rotation is computed")
    fields: dict[str, Any] = {}
    if kind != "default":
        fields["factor"] = r.get("factor", float)
    if kind in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        fields[key] = r.get(key, int) if kind == "llama3" else r.get(key, int, max_positions)
    if kind == "llama3":
        low, high = r.get("low_freq_factor", float), r.get("high_freq_factor", float)
        if low >= high:
            raise r.error(f"low_freq_factor {low} is not below high_freq_factor {high}")
        fields |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        inferred = yarn_attention_factor(fields["factor"], r.get("mscale", float, None), r.get("mscale_all_dim", float, None))
        fields |= {"beta_fast": r.get("beta_fast", float, 32.0), "beta_slow": r.get("beta_slow", float, 1.0),
                   "attention_factor": r.get("attention_factor", float, inferred), "truncate": r.get("truncate", bool, True)}
    if unknown := sorted(set(r.raw) - r.seen):
        raise r.error(f"{', '.join(unknown)}: not used by rope_type {kind!r}")
    return Rope(theta=theta, type=kind, **fields)
