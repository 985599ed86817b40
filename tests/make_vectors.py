"""Makes tests/vectors/v1 anew, or adds to it: python tests/make_vectors.py. No torch.

The models and the scripts of the set are written here; `refengine vectors make` does the same for a plan of your own.
"""
import hashlib
import tempfile
from pathlib import Path

import numpy as np

from refengine.synth import write_checkpoint
from refengine.vectors.make import PLAN, make

FOLDER = Path(__file__).parent / "vectors" / "v1"
_BASE = {"hidden_act": "silu", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "intermediate_size": 64, "vocab_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
         "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False}
_HYBRID = {key: value for key, value in _BASE.items() if key != "rope_theta"} | {
    "model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
MODELS = {
    "qwen3": {"model_type": "qwen3", **_BASE},
    "qwen3-tied": {"model_type": "qwen3", **_BASE, "tie_word_embeddings": True, "num_attention_heads": 6, "rope_theta": 1000000.0},
    "qwen3-yarn": {"model_type": "qwen3", **_BASE, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                                   "original_max_position_embeddings": 64},
                   "max_position_embeddings": 256},
    "qwen2": {"model_type": "qwen2", **{key: value for key, value in _BASE.items() if key not in ("head_dim", "attention_bias")},
              "hidden_size": 64},
    "llama3": {"model_type": "llama", **_BASE, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5,
               "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 64}},
    "qwen3_5": _HYBRID,
    "recurrent": {**_HYBRID, "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2},
}
RECURRENT = ("qwen3_5", "recurrent")
# What each model is there for, beside what its scripts are.
FORWARD = {"qwen3": ["tiled kv heads", "eps of another model", "norm after the rotation", "keys one position late"],
           "qwen3-tied": ["tiled kv heads", "base of the rotation"], "qwen3-yarn": ["no scaling of the rotation"],
           "qwen2": ["no bias"], "llama3": ["no bias", "no scaling of the rotation"],
           "qwen3_5": ["gains are not less one", "all dimensions turn"], "recurrent": ["the decay is left out", "eps of another model"]}
BETWEEN = ("norm after the rotation", "keys one position late", "base of the rotation", "all dimensions turn",
           "the decay is left out")  # what a single row cannot show


def tokens(model: str, start: int, count: int) -> list[int]:
    """Ids from a counter-based generator: the same everywhere."""
    key = int.from_bytes(hashlib.sha256(model.encode()).digest()[:4], "little")
    return [int(raw) % 96 for raw in np.random.Philox(key=[key, 7]).random_raw(start + count)[start:]]


def scripts(model: str) -> dict[str, tuple[list[str], str, str, list[dict]]]:
    """Name -> (faults of the cache that it hunts, why, source, steps without what is to be expected)."""
    def feed(start: int, count: int) -> dict:
        return {"op": "feed", "tokens": tokens(model, start, count)}

    def trim(length: int) -> dict:
        return {"op": "trim", "length": length}

    made = {
        "one token": ([], "a forward of a single row from nothing", "cases A1", [feed(0, 1)]),
        "a prompt": ([], "more rows than a small page", "cases A1", [feed(0, 21)]),
        "beyond a page of 64": ([], "positions over a page border, and beyond what a scaled rotation was trained on", "cases B",
                                [feed(0, 70)]),
        "in parts": (["positions restart in each chunk"] * (model != "recurrent"), "a prompt in chunks is the prompt", "cases B", [feed(0, 5), feed(5, 12)]),
        "greedy": (["the last token is fed twice"], "decoding one by one", "cases D", [feed(0, 9), {"op": "generate", "count": 6}]),
    }
    if model in RECURRENT:
        return made | {
            "no way back": (["a rewind cuts attention only", "a rewind that cannot be is promised"], "-1, and nothing is changed", "cases F",
                            [feed(0, 12), trim(7), feed(30, 4)]),
            "back to nothing": (["a rewind that cannot be is promised"], "0 is a length like any other: -1", "cases F",
                                [feed(0, 6), trim(0), feed(20, 4)]),
            "all of it": ([], "a trim to what is held is retained", "cases F", [feed(0, 12), trim(12), feed(12, 3)]),
            "reset": (["reset leaves the state"], "state of one request in the next", "cases F", [feed(0, 12), {"op": "reset"}, feed(40, 6)])}
    return made | {
        "to zero": (["trim to zero keeps everything", "trim does nothing"], "crop(0) shares a branch with no limit", "cases C",
                    [feed(0, 12), trim(0), feed(40, 5)]),
        "to itself": ([], "nothing is forgotten", "cases C", [feed(0, 12), trim(12), feed(12, 5)]),
        "before a page border": (["trim rounds up to a page", "trim does nothing"], "15 of 20, pages of 16", "cases C",
                                 [feed(0, 20), trim(15), feed(40, 4)]),
        "at a page border": (["trim does nothing"], "16 of 20", "cases C", [feed(0, 20), trim(16), feed(40, 4)]),
        "behind a page border": (["trim rounds up to a page"], "17 of 20", "cases C", [feed(0, 20), trim(17), feed(40, 2)]),
        "twice": (["trimmed tokens come back"], "trim, trim again, feed less than was forgotten", "cases C; a cache class whose offset "
                  "is recomputed", [feed(0, 14), trim(11), trim(6), feed(50, 2), feed(60, 2)]),
        "beyond": (["trim beyond what is held moves the offset"], "a length that is not held retains what is", "cases C",
                   [feed(0, 8), trim(30), feed(8, 3)]),
        "the same again": (["positions go on after a trim"], "what was forgotten, fed again, is what it was", "cases C",
                           [feed(0, 14), trim(5), feed(5, 9)]),
        "an edit": (["trimmed tokens come back", "positions go on after a trim"], "another end of the prompt, then an answer", "cases D",
                    [feed(0, 16), {"op": "generate", "count": 3}, trim(10), feed(70, 4), {"op": "generate", "count": 3}])}


def plan(folder: Path) -> dict:
    """The plan of the set; its models are written to the folder."""
    cases = []
    for seed, (model, config) in enumerate(MODELS.items(), 1):
        (folder / model).mkdir(parents=True)
        write_checkpoint(folder / model, config, seed=seed)
        for name, (faults, why, source, steps) in scripts(model).items():
            hunts = [fault for fault in FORWARD[model] if name != "one token" or fault not in BETWEEN] + faults
            cases.append({"title": f"{model}: {name}", "model": model, "hunts": hunts, "why": why, "source": source, "script": steps})
    return {"schema": PLAN, "models": {model: folder / model for model in MODELS}, "cases": cases}


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        count = make(plan(Path(made)), FOLDER, on_case=print)
    print(count, "cases,", sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()), "bytes")


if __name__ == "__main__":
    main()
