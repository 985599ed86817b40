"""config.json, read strictly: what changes the forward pass must be understood, or loading stops. Floor 2."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refengine.config_reader import Reader, read_ids, read_json
from refengine.delta_config import DeltaConfig, hybrid_fields, text_part
from refengine.errors import ConfigError
from refengine.rope import TYPES, Rope, yarn_attention_factor

FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_5_text")


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
    # Not in repr: a fingerprint of a model without them is what it was before there were any.
    rotated: int | None = field(default=None, repr=False)     # R, how many of D dimensions turn; None: all
    delta: DeltaConfig | None = field(default=None, repr=False)

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
                shapes |= {f"{at}.linear_attn.{name}": shape for name, shape in self.delta.tensors(e).items()}
            for name, shape, bias in mlp if recurrent else attention + mlp:
                shapes[f"{at}.{name}.weight"] = shape
                if bias:
                    shapes[f"{at}.{name}.bias"] = shape[:1]
            if self.qk_norm and not recurrent:
                shapes |= {f"{at}.self_attn.q_norm.weight": (d,), f"{at}.self_attn.k_norm.weight": (d,)}
        return shapes


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a Hugging Face folder, with the stop ids of generation_config.json. Raises ConfigError."""
    raw, _ = text_part(read_json(folder / "config.json"), str(folder / "config.json"))
    generation = folder / "generation_config.json"
    stop = read_ids(raw, "eos_token_id", folder / "config.json")
    if generation.is_file():
        stop += read_ids(read_json(generation), "eos_token_id", generation)
    return parse_config(raw, str(folder / "config.json"), tuple(dict.fromkeys(stop)))


def parse_config(raw: dict[str, Any], where: str, stop_ids: tuple[int, ...] = ()) -> ModelConfig:
    """A configuration from the keys of config.json. ``where`` names the file in errors. Raises ConfigError."""
    raw, where = text_part(raw, where)
    r = Reader(raw, where)
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
        **(hybrid_fields(r, head_dim) if hybrid else {}))
    if r.unknown():
        raise r.error(f"{', '.join(r.unknown())}: not known to be without effect on the forward pass. "
                      "Remove the key if it is harmless")
    return config


def _rope(raw: dict[str, Any], where: str, max_positions: int, partial: bool = False) -> Rope:
    """The rotary settings, from the old layout (rope_theta, rope_scaling) or the new one (rope_parameters), or both.

    ``partial``: some dimensions may stay as they are, and sections of image positions are equal for text.
    """
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{where}: {key} is {value!r}, not an object")
    r = Reader({**(old or {}), **(new or {})}, f"{where}: {'rope_parameters' if new else 'rope_scaling'}")
    if old and new and any(old[key] != new[key] for key in old.keys() & new.keys()):
        raise ConfigError(f"{where}: rope_scaling and rope_parameters contradict each other")
    top, inner = raw.get("rope_theta"), r.get("rope_theta", float, None)
    if top is not None and inner is not None and top != inner:
        raise ConfigError(f"{where}: rope_theta is {top!r} at the top and {inner!r} in rope_parameters")
    if top is None and inner is None:
        raise ConfigError(f"{where}: rope_theta is missing, at the top and in rope_parameters")
    theta = inner or Reader(raw, where).get("rope_theta", float)
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
