"""The truth for tests: Qwen3, Qwen2 and Llama in float64, as plainly as they can be written. Floor 9.

Written from the papers (RMSNorm 2019, RoPE 2021, SwiGLU 2020, GQA 2023, YaRN 2023, Llama 3.1) and from what Hugging
Face's checkpoints mean. It shares nothing with refengine or refkernels: it reads config.json and the tensors by itself,
keeps no cache, and computes every position of every head in a loop.
"""
import json
import math
from pathlib import Path

import numpy as np
import safetensors


class Oracle:
    """A model in float64. ``config``: the keys of config.json; ``tensors``: name -> array under Hugging Face's names."""

    def __init__(self, config: dict, tensors: dict[str, np.ndarray]):
        self.config, self.tensors = config, tensors
        self.heads = config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads

    def logits(self, ids: list[int], seen: dict[str, np.ndarray] | None = None) -> np.ndarray:
        """Logits of every position, (T, V). ``seen`` is filled with the activations of each layer by name."""
        seen = {} if seen is None else seen
        frequencies, factor = rotary(self.config, self.head_dim)
        x = self.tensors["model.embed_tokens.weight"][ids]                        # (T, E)
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attention(f"model.layers.{layer}", f"layers.{layer}", x, frequencies, factor, seen)
            x = x + self._mlp(f"model.layers.{layer}", x)
            seen[f"layers.{layer}.residual"] = x
        x = self._norm("model.norm", x)                                           # (T, E)
        tied = self.config.get("tie_word_embeddings", False)
        return x @ self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """Each row over its root mean square, times the gain."""
        gain, eps = self.tensors[f"{name}.weight"], self.config["rms_norm_eps"]
        return np.array([row / math.sqrt(sum(float(v) ** 2 for v in row) / len(row) + eps) * gain for row in x])

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """x W^T, plus the bias where the checkpoint has one."""
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def _attention(self, module, label, x, frequencies, factor, seen):
        """Every head by itself: query head h looks at kv head h // (H / N)."""
        at, t, d = f"{module}.self_attn", len(x), self.head_dim
        h = self._norm(f"{module}.input_layernorm", x)
        parts = {}
        for part, count in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            rows = self._linear(f"{at}.{part}_proj", h)                           # (T, count * D)
            parts[part] = [rows[:, i * d:(i + 1) * d] for i in range(count)]      # count times (T, D)
        for part in ("q", "k"):
            _note(seen, f"{label}.{part}", parts[part])
            if self.config["model_type"] == "qwen3":                              # norm first, then rotation
                parts[part] = [self._norm(f"{at}.{part}_norm", one) for one in parts[part]]
                _note(seen, f"{label}.{part}_norm", parts[part])
            parts[part] = [rotate(one, frequencies, factor) for one in parts[part]]
            _note(seen, f"{label}.{part}_rope", parts[part])
        out = np.zeros((t, self.heads * d))                                       # (T, H * D)
        future = np.triu(np.ones((t, t), bool), 1)
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            scores = parts["q"][head] @ parts["k"][kv].T / math.sqrt(d)           # (T, T)
            scores[future] = -math.inf
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head * d:(head + 1) * d] = p @ parts["v"][kv] / p.sum(axis=1, keepdims=True)
        seen[f"{label}.heads"] = out
        return self._linear(f"{at}.o_proj", out)

    def _mlp(self, module: str, x: np.ndarray) -> np.ndarray:
        h = self._norm(f"{module}.post_attention_layernorm", x)
        gate, up = self._linear(f"{module}.mlp.gate_proj", h), self._linear(f"{module}.mlp.up_proj", h)
        return self._linear(f"{module}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)


def _note(seen: dict[str, np.ndarray], name: str, heads: list[np.ndarray]) -> None:
    seen[name] = np.stack(heads, axis=1)                                          # (T, heads, D)


def rotate(x: np.ndarray, frequencies: list[float], factor: float) -> np.ndarray:
    """Turn the pairs (x[i], x[i + D/2]) of position p by the angle p * frequency[i]. (T, D) -> (T, D)."""
    half, y = len(frequencies), np.zeros_like(x)
    for p in range(len(x)):
        for i, frequency in enumerate(frequencies):
            c, s = math.cos(p * frequency) * factor, math.sin(p * frequency) * factor
            y[p, i] = x[p, i] * c - x[p, i + half] * s
            y[p, i + half] = x[p, i + half] * c + x[p, i] * s
    return y


def rotary(config: dict, dim: int) -> tuple[list[float], float]:
    """Radians a position for each pair of dimensions, and the factor of cos and sin."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    base = float(rope.get("rope_theta") or config["rope_theta"])
    kind = rope.get("rope_type") or rope.get("type") or "default"
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return [f / rope["factor"] for f in plain], 1.0
    if kind == "llama3":
        return [_llama3(f, rope, original) for f in plain], 1.0
    if kind == "yarn":
        return _yarn(plain, base, dim, rope, original)
    raise ValueError(f"rope type {kind!r} is not written here")


def _llama3(frequency: float, rope: dict, original: int) -> float:
    """By wavelength: short waves as they are, long ones stretched, those between blended."""
    wavelength = 2 * math.pi / frequency
    if wavelength < original / rope["high_freq_factor"]:
        return frequency
    if wavelength > original / rope["low_freq_factor"]:
        return frequency / rope["factor"]
    smooth = (original / wavelength - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def _yarn(plain: list[float], base: float, dim: int, rope: dict, original: int) -> tuple[list[float], float]:
    """Dimensions that turn more than beta_fast times in the original context are kept, fewer than beta_slow stretched."""
    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    frequencies = []
    for i, f in enumerate(plain):
        stretched = min(1.0, max(0.0, (i - low) / (high - low)))
        frequencies.append(f / rope["factor"] * stretched + f * (1 - stretched))

    def scale(m: float) -> float:
        return 0.1 * m * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return frequencies, float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return frequencies, scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return frequencies, scale(1.0)


def read(folder: Path) -> Oracle:
    """The model of a folder with config.json and one model.safetensors."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Oracle(config, read_tensors(folder / "model.safetensors"))


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Name -> float64 array. BF16 is the upper half of a float32."""
    tensors = {}
    for name, entry in safetensors.deserialize(path.read_bytes()):
        data, dtype = bytes(entry["data"]), entry["dtype"]
        if dtype == "BF16":
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype])
        tensors[name] = values.astype(np.float64).reshape(entry["shape"])
    return tensors
