"""Makes tests/goldens/*.json anew: python tests/make_goldens.py. Needs torch and transformers; its result is committed.

A golden holds logits in float64 from the oracle (refengine/vectors/oracle.py). Two independent computations must agree before one is
written: the oracle, and transformers in float32 with eager attention. The code under test is not asked; it only makes
the random checkpoints, whose hash the golden keeps.

Agreement is max |oracle - transformers| over all positions, divided by max |logit| where that is above 1. The limit
2e-5 is 168 roundings of float32 (2^-23): a pass of two or three layers is some 40 operations deep, and an error of the
arithmetic that anyone would call one (an epsilon, a swapped pair, a wrong base) is thousands of times larger.
"""
import hashlib
import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from refengine.synth import write_checkpoint
from refengine.vectors import oracle

FOLDER = Path(__file__).parent / "goldens"
LIMIT = 2e-5

def _without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


_BASE = {"hidden_act": "silu", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 48, "vocab_size": 64, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
         "rope_theta": 10000.0, "tie_word_embeddings": False}
_QWEN3 = {"model_type": "qwen3", **_BASE, "head_dim": 16, "attention_bias": False}
_LLAMA = {"model_type": "llama", **_BASE, "head_dim": 16, "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5}
_HYBRID = {"model_type": "qwen3_5_text", **_without(_BASE, "rope_theta"), "head_dim": 16,
           "attention_bias": False, "num_hidden_layers": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
           "linear_value_head_dim": 12}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def _case(hunts: str, config: dict[str, Any], seed: int, length: int, positions: list[int], **more: Any) -> dict[str, Any]:
    return {"hunts": hunts, "config": config, "seed": seed, "length": length, "positions": positions,
            "dtype": "F32", "outlier": 1.0, "embed_power": 0, "activations_at": [], **more}


CASES: dict[str, dict[str, Any]] = {
    "qwen3": _case("the whole pass of T: heads x head_dim is not hidden, norm before rotation, two kv heads", _QWEN3, 1, 24,
                   [0, 7, 15, 23], activations_at=[0, 7]),
    "qwen3-gqa-6-2": _case("three query heads a kv head, head_dim 20 (no power of two)",
                           {**_QWEN3, "hidden_size": 48, "num_attention_heads": 6, "head_dim": 20, "intermediate_size": 80,
                            "num_hidden_layers": 3}, 2, 40, [0, 7, 39], activations_at=[0, 7]),
    "qwen3-tied": _case("the head is the embedding", {**_QWEN3, "tie_word_embeddings": True}, 3, 24, [0, 7, 23]),
    "qwen3-attention-bias": _case("biases of q, k, v and o", {**_QWEN3, "attention_bias": True}, 4, 24, [0, 7, 23]),
    "qwen3-bf16": _case("weights stored as BF16", _QWEN3, 5, 24, [0, 7, 23], dtype="BF16"),
    "qwen2-f16": _case("biases of q, k, v but not o, no q/k norm, head_dim from hidden / heads, stored as F16",
                       {"model_type": "qwen2", **_BASE}, 6, 24, [0, 7, 23], dtype="F16"),
    "llama-llama3-1500": _case("llama3 frequencies, 1,500 positions",
                               {**_LLAMA, "rope_theta": 500000.0, "rope_scaling": {
                                   "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 256}}, 7, 1500, [0, 255, 256, 1000, 1499]),
    "llama-linear": _case("linear scaling, the old key 'type', as many kv heads as heads",
                          {**_LLAMA, "num_key_value_heads": 4, "rope_scaling": {"type": "linear", "factor": 2.5}}, 8, 200,
                          [0, 7, 199]),
    "llama-biases": _case("biases everywhere (attention_bias, mlp_bias), one kv head",
                          {**_LLAMA, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}, 9, 24, [0, 7, 23]),
    "qwen3-yarn": _case("yarn, attention factor inferred from the factor",
                        {**_QWEN3, "rope_scaling": _YARN}, 10, 240, [0, 63, 64, 239]),
    "qwen3-yarn-factor-1": _case("yarn with the attention factor stated as 1.0: the same weights as qwen3-yarn",
                                 {**_QWEN3, "rope_scaling": {**_YARN, "attention_factor": 1.0}}, 10, 240, [0, 63, 64, 239]),
    "qwen3-yarn-mscale": _case("yarn with mscale and mscale_all_dim, no truncation, own betas",
                               {**_QWEN3, "max_position_embeddings": 16384, "rope_scaling": {
                                   **_YARN, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False,
                                   "beta_fast": 24.0, "beta_slow": 2.0}}, 11, 240, [0, 63, 64, 239]),
    "qwen3-outlier-400": _case("norm gains 400 times larger in every eleventh channel", _QWEN3, 12, 24, [0, 7, 23],
                               outlier=400.0),
    "qwen3-new-layout": _case("the layout of transformers 5: rope_parameters and dtype",
                              {**_without(_QWEN3, "rope_theta"), "dtype": "float32",
                               "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, 13, 24, [0, 7, 23]),
    "qwen3-theta-1e6": _case("base 1e6, at positions where a base of 1e4 shows", {**_QWEN3, "rope_theta": 1000000.0}, 14,
                             1100, [0, 7, 1000, 1024, 1099]),
    "qwen3.5": _case("three delta nets and one gated attention: state, convolution, gates, gains less one, a quarter turns",
                    {**_HYBRID, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                    "partial_rotary_factor": 0.25}}, 16, 80, [0, 3, 7, 79]),
    "qwen3.5-half": _case("every other layer attention, half of the dimensions turn, one key head, a window of 3",
                          {**_HYBRID, "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 3,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                                               "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
                          17, 80, [0, 2, 7, 79]),
    "qwen3-small-inputs": _case("embeddings of 1e-3: their mean square is near eps", _QWEN3, 15, 24, [0, 7, 23],
                                embed_power=-10),
}


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    """Token ids from a counter-based generator's raw integers: the same with any NumPy."""
    return [int(raw) % vocab for raw in np.random.Philox(key=[seed, 0x70726F6D7074]).random_raw(length)]


def build(case: dict[str, Any], folder: Path) -> str:
    """Write a case's checkpoint. Returns the SHA-256 of its safetensors file."""
    write_checkpoint(folder, case["config"], seed=case["seed"], dtype=case["dtype"], outlier=case["outlier"])
    path = folder / "model.safetensors"
    if case["embed_power"]:
        _scale_embedding(path, case["embed_power"])
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _scale_embedding(path: Path, power: int) -> None:
    """Multiply the embedding by a power of two in the file itself, so that no library's writer shows in the hash."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:start])["model.embed_tokens.weight"]
    a, b = (start + offset for offset in entry["data_offsets"])
    data[a:b] = np.ldexp(np.frombuffer(data[a:b], "<f4"), power).astype("<f4").tobytes()
    path.write_bytes(data)


def transformers_logits(folder: Path, ids: list[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits of transformers in float32, and q and k around the rotation under the oracle's names."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with _watched_rotation(model, json.loads((folder / "config.json").read_text())) as seen, torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.numpy().astype(np.float64), seen


def attention_layers(config: dict[str, Any]) -> list[int]:
    """The layers that are not recurrent."""
    every = config.get("full_attention_interval", 4) if "linear_num_key_heads" in config else 1
    return [i for i in range(config["num_hidden_layers"]) if (i + 1) % every == 0]


@contextmanager
def _watched_rotation(model, config):
    """Notes what goes into and comes out of the rotation of each layer."""
    module, seen, layer = sys.modules[type(model.model).__module__], {}, attention_layers(config)
    original = module.apply_rotary_pos_emb
    before = "_norm" if model.config.model_type.startswith("qwen3") else ""

    def watched(q, k, *args, **kwargs):
        rotated, i = original(q, k, *args, **kwargs), layer.pop(0)
        for name, tensor in zip((f"q{before}", f"k{before}", "q_rope", "k_rope"), (q, k, *rotated)):
            seen[f"layers.{i}.{name}"] = tensor[0].transpose(0, 1).numpy().astype(np.float64)  # (T, heads, D)
        return rotated

    module.apply_rotary_pos_emb = watched
    try:
        yield seen
    finally:
        module.apply_rotary_pos_emb = original


def agreement(truth: np.ndarray, other: np.ndarray) -> float:
    """max |truth - other|, relative to the largest |logit| where that is above 1."""
    return float(np.abs(truth - other).max() / max(1.0, np.abs(truth).max()))


def golden(name: str, folder: Path) -> dict[str, Any]:
    """A case's golden. Raises SystemExit when the oracle and transformers disagree."""
    case = CASES[name]
    digest = build(case, folder)
    ids = prompt(case["seed"], case["length"], case["config"]["vocab_size"])
    seen: dict[str, np.ndarray] = {}
    truth = oracle.read(folder).logits(ids, seen)
    theirs, their_seen = transformers_logits(folder, ids)
    agreed = agreement(truth, theirs)
    if not agreed <= LIMIT:
        raise SystemExit(f"{name}: the oracle and transformers differ by {agreed:.3g}, more than {LIMIT}; nothing written")
    at, rows = case["positions"], case["activations_at"]
    distances = {key: float(np.abs(seen[key][rows] - their_seen[key][rows]).max()) for key in their_seen if rows}
    if not all(distance <= LIMIT * max(1.0, np.abs(seen[key]).max()) for key, distance in distances.items()):
        raise SystemExit(f"{name}: activations of the oracle and transformers differ: {distances}; nothing written")
    import torch
    import transformers

    return {"case": name, **case, "made": f"tests/make_goldens.py; oracle.py in float64 against transformers "
            f"{transformers.__version__} with torch {torch.__version__} in float32, eager attention",
            "prompt": ids, "safetensors_sha256": digest,
            "agreement": agreed,                                  # all positions, relative where logits are above 1
            "float32_distance": float(np.abs(truth[at] - theirs[at]).max()),   # these positions, absolute
            "logits": truth[at].tolist(),
            "activations": {key: {"float32_distance": distance, "values": seen[key][rows].tolist()}
                            for key, distance in distances.items()}}


def main() -> None:
    made = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            made[name] = golden(name, Path(folder))
        print(f"{name:24} agreement {made[name]['agreement']:.2e}  float32 distance {made[name]['float32_distance']:.2e}")
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, result in made.items():
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
        (FOLDER / f"{name}.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    print(f"{sum(path.stat().st_size for path in FOLDER.glob('*.json')):,} bytes in {len(made)} files")


if __name__ == "__main__":
    main()
