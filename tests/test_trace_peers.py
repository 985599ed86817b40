"""Every activation of a trace against transformers: python -m pytest -m peers. Floor 9.

Each is taken from transformers where the list says it is: module and point. The limit is that of the goldens.
"""
import make_goldens
import numpy as np
import pytest

from helpers import KINDS, make_engine
from models import T_CONFIG
from refengine.backends import open_backend
from refengine.inspect import activations, trace
from refengine.model import load_model

pytestmark = pytest.mark.peers
CASES = {"T": {**make_goldens.CASES["qwen3"], "config": T_CONFIG}} | {name: make_goldens.CASES[name] for name in (
    "qwen3-gqa-6-2", "qwen3-attention-bias", "qwen3-bf16", "qwen3-yarn", "qwen2-f16", "llama-biases", "qwen3.5", "qwen3.5-half")}


def transformers_activations(folder, ids, known):
    """Name -> float64 array in our shape, each from where the list says."""
    backend = open_backend("transformers", folder)
    return {name: x.astype(np.float64) for name, x in backend.activations(ids, known).items()}


@pytest.mark.parametrize("name", CASES)
def test_every_activation_is_transformers_within_the_float32_distance(name, tmp_path):
    case = CASES[name]
    make_goldens.build(case, tmp_path)
    model = load_model(tmp_path)
    ids = make_goldens.prompt(case["seed"], min(case["length"], 64), model.config.vocab)
    known = activations(model.config)
    theirs = transformers_activations(tmp_path, ids, known)
    half = len(ids) // 2
    for kind in KINDS:
        engine = make_engine(kind, model, snapshot_every=1)
        engine.prefill(ids[:half])                                               # at an offset, and after a trim
        engine.trim_kv_cache(half - 3)
        seen = trace(engine, ids[half - 3:])
        assert list(seen) == list(theirs)
        for activation, x in seen.items():
            rows = theirs[activation]
            rows = rows[:, half - 3:] if activation.endswith((".scores", ".weights")) else rows[half - 3:]
            finite = np.isfinite(x)                                              # transformers masks with a large number
            assert (rows[~finite] < -1e30).all(), activation
            angles = 4 * len(ids) * 2.0**-24 if activation.endswith((".q_rope", ".k_rope", ".scores")) else 0
            distance = make_goldens.agreement(rows[finite], x[finite])
            assert distance <= make_goldens.LIMIT + angles, (activation, distance)
