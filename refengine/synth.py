"""Checkpoints with random weights: the real shapes without the real files. Floor 4.

Speed and exactness do not depend on the values. The numbers come from a counter-based generator's raw integers, so the
same seed gives the same bytes with any NumPy.
"""
from __future__ import annotations

import json
import shutil
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from refengine.config import parse_config
from refengine.safetensors_file import write_safetensors

_QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "attention_bias": False,
          "rms_norm_eps": 1e-6}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**_QWEN3, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 160, "vocab_size": 512, "max_position_embeddings": 4096,
             "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 511,
             "torch_dtype": "bfloat16"},
    "tiny-hybrid": {**_QWEN3, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 64,
                    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                    "intermediate_size": 160, "vocab_size": 512, "max_position_embeddings": 4096,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
                    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
                    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "tie_word_embeddings": False,
                    "eos_token_id": 511, "torch_dtype": "bfloat16"},
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
                   "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": True,
                   "eos_token_id": 151645, "torch_dtype": "bfloat16"},
}


def synthesize(shape: str, folder: Path, *, seed: int = 0) -> None:
    """Write a checkpoint of a named shape, in BF16, with the tiny tokenizer (its ids are valid in every shape here)."""
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r} is not one of {', '.join(SHAPES)}")
    write_checkpoint(folder, SHAPES[shape], seed=seed, dtype="BF16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        source = files("refengine") / "data" / "tiny" / name
        if Path(str(source)) != folder / name:
            shutil.copyfile(str(source), folder / name)


def write_checkpoint(folder: Path, raw_config: dict[str, Any], *, seed: int = 0, dtype: str = "F32",
                     outlier: float = 1.0) -> None:
    """Write config.json and model.safetensors for any configuration. dtype: "F32", "F16" or "BF16".

    ``outlier`` multiplies the norm gain of every eleventh channel: some trained models have such channels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = parse_config(raw_config, "config.json")
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n", encoding="utf-8")
    centres = {name: 0.0 if "linear_attn" in name else config.gain_centre for name in config.tensors()}
    write_safetensors(folder / "model.safetensors", {name: (dtype, random_tensor(name, shape, seed, outlier, centres[name]))
                                                     for name, shape in config.tensors().items()})


def random_tensor(name: str, shape: tuple[int, ...], seed: int, outlier: float = 1.0, centre: float = 0.0) -> np.ndarray:
    """Uniform float32 values around a mean that suits the parameter: gains near 1 (stored less ``centre``), weights that keep variances near 1."""
    count = int(np.prod(shape))
    raw = np.random.Philox(key=[seed, zlib.crc32(name.encode())]).random_raw(-(-count // 2))
    unit = raw.view(np.uint32)[:count].astype(np.float32) * np.float32(2.0**-31) - np.float32(1)  # [-1, 1]
    if name.endswith("norm.weight"):
        gain = np.float32(1 - centre) + np.float32(0.5) * unit
        if "q_norm" not in name and "k_norm" not in name:
            gain[::11] *= np.float32(outlier)
        return gain.reshape(shape)
    std = 1.0 if "embed" in name else 0.3 if name.endswith("bias") else shape[-1] ** -0.5
    return (unit * np.float32(3**0.5 * std)).reshape(shape)
