"""A second computation: Qwen3, Qwen2, Llama and Qwen3.5 in float64, as plainly as they can be written. Floor 1.

Written from the papers (RMSNorm 2019, RoPE 2021, SwiGLU 2020, GQA 2023, YaRN 2023, Llama 3.1, delta nets 2024) and
from what Hugging Face's checkpoints mean. It shares nothing with the rest of refengine, nor with refkernels: it reads
config.json and the tensors by itself, keeps no cache, and computes every position of every head in a loop. Vectors and
goldens are made of it, and tests compare with it.
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
        self.hybrid = config["model_type"] == "qwen3_5_text"

    def logits(self, ids: list[int], seen: dict[str, np.ndarray] | None = None) -> np.ndarray:
        """Logits of every position, (T, V). ``seen`` is filled with the activations of each layer by name."""
        seen = {} if seen is None else seen
        rope = self.config.get("rope_parameters") or {}
        rotated = int(self.head_dim * rope.get("partial_rotary_factor", 0.25 if self.hybrid else 1))
        frequencies, factor = rotary(self.config, rotated)
        x = self.tensors["model.embed_tokens.weight"][ids]                        # (T, E)
        for layer in range(self.config["num_hidden_layers"]):
            module = f"model.layers.{layer}"
            if f"{module}.linear_attn.A_log" in self.tensors:
                x = x + self._delta_net(module, x)
            else:
                x = x + self._attention(module, f"layers.{layer}", x, frequencies, factor, seen)
            x = x + self._mlp(f"model.layers.{layer}", x)
            seen[f"layers.{layer}.residual"] = x
        x = self._norm("model.norm", x)                                           # (T, E)
        tied = self.config.get("tie_word_embeddings", False)
        return x @ self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """Each row over its root mean square, times the gain (which Qwen3.5 stores less one, but for its delta nets')."""
        gain, eps = self.tensors[f"{name}.weight"], self.config["rms_norm_eps"]
        if self.hybrid and "linear_attn" not in name:
            gain = gain + 1
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
            if self.hybrid and part == "q":                                       # query, gate, query, gate, ...
                gates = np.concatenate([rows[:, (2 * i + 1) * d:(2 * i + 2) * d] for i in range(count)], axis=1)
                rows = np.concatenate([rows[:, 2 * i * d:(2 * i + 1) * d] for i in range(count)], axis=1)
            parts[part] = [rows[:, i * d:(i + 1) * d] for i in range(count)]      # count times (T, D)
        for part in ("q", "k"):
            _note(seen, f"{label}.{part}", parts[part])
            if self.config["model_type"] == "qwen3" or self.hybrid:                              # norm first, then rotation
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
        if self.hybrid:
            out = out / (1 + np.exp(-gates))
        seen[f"{label}.heads"] = out
        return self._linear(f"{at}.o_proj", out)

    def _delta_net(self, module: str, x: np.ndarray) -> np.ndarray:
        """Head by head and token by token. Value head j reads and writes with key head j // (Hv / Hk)."""
        c, at, t = self.config, f"{module}.linear_attn", len(x)
        key_heads, value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv, width = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
        h = self._norm(f"{module}.input_layernorm", x)
        mixed, z, b, a = (self._linear(f"{at}.in_proj_{part}", h) for part in ("qkv", "z", "b", "a"))
        kernel = self.tensors[f"{at}.conv1d.weight"][:, 0]                        # (C, W)
        conv = np.zeros_like(mixed)                                               # (T, C)
        for p in range(t):
            for j in range(width):
                if p - width + 1 + j >= 0:
                    conv[p] += kernel[:, j] * mixed[p - width + 1 + j]
        conv = conv / (1 + np.exp(-conv))
        out = np.zeros((t, value_heads * dv))                                     # (T, Hv * Dv)
        for head in range(value_heads):
            group = head // (value_heads // key_heads)
            memory = np.zeros((dk, dv))
            rate = math.exp(self.tensors[f"{at}.A_log"][head])
            for p in range(t):
                q, k = (conv[p, start + group * dk:start + (group + 1) * dk] for start in (0, key_heads * dk))
                q, k = (y / math.sqrt(sum(float(u) ** 2 for u in y) + 1e-6) for y in (q, k))
                v = conv[p, 2 * key_heads * dk + head * dv:2 * key_heads * dk + (head + 1) * dv]
                step = math.log1p(math.exp(a[p, head] + self.tensors[f"{at}.dt_bias"][head]))
                memory = memory * math.exp(-rate * step)
                beta = 1 / (1 + math.exp(-b[p, head]))
                memory = memory + np.outer(k, beta * (v - k @ memory))
                out[p, head * dv:(head + 1) * dv] = q @ memory / math.sqrt(dk)
            part = slice(head * dv, (head + 1) * dv)
            out[:, part] = self._norm(f"{at}.norm", out[:, part]) * z[:, part] / (1 + np.exp(-z[:, part]))
        return self._linear(f"{at}.out_proj", out)

    def _mlp(self, module: str, x: np.ndarray) -> np.ndarray:
        h = self._norm(f"{module}.post_attention_layernorm", x)
        gate, up = self._linear(f"{module}.mlp.gate_proj", h), self._linear(f"{module}.mlp.up_proj", h)
        return self._linear(f"{module}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)


def _note(seen: dict[str, np.ndarray], name: str, heads: list[np.ndarray]) -> None:
    seen[name] = np.stack(heads, axis=1)                                          # (T, heads, D)


def rotate(x: np.ndarray, frequencies: list[float], factor: float) -> np.ndarray:
    """Turn the pairs (x[i], x[i + R/2]) of position p by the angle p * frequency[i]; what lies beyond R stays. (T, D)."""
    half, y = len(frequencies), x.copy()
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
