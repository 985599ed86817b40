"""The keys of Qwen3.5's text model that Qwen3 does not have: which layers are gated delta nets, and their sizes. Floor 2."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refengine.config_reader import Reader
from refengine.errors import ConfigError


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

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Name in the layer -> shape of every parameter of one net."""
        heads, values = self.value_heads, self.value_heads * self.value_dim
        return {"in_proj_qkv.weight": (self.channels, hidden), "in_proj_z.weight": (values, hidden),
                "in_proj_b.weight": (heads, hidden), "in_proj_a.weight": (heads, hidden),
                "conv1d.weight": (self.channels, 1, self.window), "A_log": (heads,), "dt_bias": (heads,),
                "norm.weight": (self.value_dim,), "out_proj.weight": (hidden, values)}


def text_part(raw: dict[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The text model's keys and their place. Qwen3.5's files are of a model that also sees; its text model is within.

    Raises ConfigError when it is not, or when the two say different things.
    """
    if raw.get("model_type") != "qwen3_5":
        return raw, where
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"{where}: text_config is {text!r}, not an object")
    text = {"model_type": "qwen3_5_text", **text}
    if text["model_type"] != "qwen3_5_text":
        raise ConfigError(f"{where}: text_config: model_type is {text['model_type']!r}, not 'qwen3_5_text'")
    for key in ("tie_word_embeddings", "eos_token_id", "quantization_config"):
        inner, outer = text.get(key), raw.get(key)
        if None not in (inner, outer) and inner != outer:
            raise ConfigError(f"{where}: {key} is {outer!r} at the top and {inner!r} in text_config")
        text[key] = outer if inner is None else inner
    return text, f"{where}: text_config"


def hybrid_fields(r: Reader, head_dim: int) -> dict[str, Any]:
    """``rotated`` and ``delta`` of a ModelConfig. Raises ConfigError."""
    r.refuse("attn_output_gate", True, why="attention without a gate is not written here")
    # What predicts further tokens stands beside these logits, and the state is float32 whatever other engines keep.
    r.seen |= {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"}
    r.refuse("mlp_only_layers", [], why="every layer's MLP is dense here")
    inner = Reader(r.raw.get("rope_parameters") or {}, f"{r.where}: rope_parameters")
    factor = inner.get("partial_rotary_factor", float, None) or r.get("partial_rotary_factor", float, 0.25)
    if r.raw.get("partial_rotary_factor") not in (None, factor):
        raise r.error(f"partial_rotary_factor is {r.raw['partial_rotary_factor']!r} at the top and {factor!r} in rope_parameters")
    r.seen.add("partial_rotary_factor")
    rotated = int(head_dim * factor) if factor <= 1 else head_dim + 1
    if not 0 < rotated <= head_dim or rotated % 2:
        raise r.error(f"partial_rotary_factor {factor!r} turns {rotated} of {head_dim} dimensions; pairs are needed")
    count, every = r.get("num_hidden_layers", int), r.get("full_attention_interval", int, 4)
    kinds = r.get("layer_types", list, ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)])
    if len(kinds) != count or not all(kind in ("linear_attention", "full_attention") for kind in kinds):
        raise r.error(f"layer_types must name linear_attention or full_attention for each of {count} layers")
    key_heads, value_heads = r.get("linear_num_key_heads", int), r.get("linear_num_value_heads", int)
    if value_heads % key_heads:
        raise r.error(f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}")
    return {"rotated": rotated, "delta": DeltaConfig(
        tuple(kind == "linear_attention" for kind in kinds), r.get("linear_conv_kernel_dim", int), key_heads, value_heads,
        r.get("linear_key_head_dim", int), r.get("linear_value_head_dim", int))}
