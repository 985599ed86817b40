"""Every activation of a trace against transformers: python -m pytest -m peers. Floor 9.

Each is taken from transformers where the list says it is: module and point. The limit is that of the goldens.
"""
from contextlib import ExitStack
from unittest.mock import patch

import make_goldens
import numpy as np
import pytest

from helpers import KINDS, make_engine
from models import T_CONFIG
from refengine.inspect import activations, trace
from refengine.model import load_model

pytestmark = pytest.mark.peers
CASES = {"T": {**make_goldens.CASES["qwen3"], "config": T_CONFIG}} | {name: make_goldens.CASES[name] for name in (
    "qwen3-gqa-6-2", "qwen3-attention-bias", "qwen3-bf16", "qwen3-yarn", "qwen2-f16", "llama-biases", "qwen3.5", "qwen3.5-half")}


def transformers_activations(folder, ids, known, config):
    """Name -> float64 array in our shape, each from where the list says."""
    import sys

    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    code, seen, at = sys.modules[type(model.model).__module__], {}, []
    softmax, rotate = torch.nn.functional.softmax, code.apply_rotary_pos_emb

    def note(place, tensor):
        x = tensor.detach().clone().numpy().astype(np.float64)
        seen[place] = x if x.ndim == 2 else x[0]                                 # a delta net's norm has a row for each head

    def watched_softmax(x, *args, **kwargs):
        note((at[-1], "softmax"), x)
        return softmax(x, *args, **kwargs)

    def watched_rotate(*args, **kwargs):
        rotated = rotate(*args, **kwargs)
        for point, x in zip(("query", "key"), rotated):
            note((at[-1], point), x.transpose(1, 2))
        return rotated

    def watched(function, look):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            look(result, kwargs)
            return result
        return call

    def rule(result, given):
        note((at[-1], "beta"), given["beta"])
        note((at[-1], "decay"), given["g"].exp())

    def conv(result, given):
        note((at[-1], "conv"), result[..., :len(ids)].transpose(1, 2))

    def attended(result, given):
        note((at[-1], "attended"), result[0])

    def hook(name):
        def before(module, args, kwargs):
            at.append(name)
            if args:
                note((name, "input"), args[0])

        def after(module, args, kwargs, output):
            assert at.pop() == name
            if isinstance(output, tuple):
                note((name, "weights"), output[1])
            elif isinstance(output, torch.Tensor):
                note((name, "output"), output)
                if config.delta and name.endswith(".q_proj"):
                    halves = output.unflatten(-1, (-1, 2, config.head_dim))
                    note((name, "queries"), halves[..., 0, :])
                    note((name, "gates"), halves[..., 1, :])
        return before, after

    with ExitStack() as stack:
        for name, module in model.named_modules():
            before, after = hook(name)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        stack.enter_context(patch.object(torch.nn.functional, "softmax", watched_softmax))
        stack.enter_context(patch.object(code, "apply_rotary_pos_emb", watched_rotate))
        for function, look in (("torch_chunk_gated_delta_rule", rule), ("causal_conv1d_fn", conv), ("eager_attention_forward", attended)):
            if hasattr(code, function):
                stack.enter_context(patch.object(code, function, watched(getattr(code, function), look)))
        with torch.no_grad():
            model(torch.tensor([ids]), use_cache=False)
    return {name: seen[about.module, about.point].reshape(about.sizes(config, len(ids)))
            for name, about in known.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_activation_is_transformers_within_the_float32_distance(name, tmp_path):
    case = CASES[name]
    make_goldens.build(case, tmp_path)
    model = load_model(tmp_path)
    ids = make_goldens.prompt(case["seed"], min(case["length"], 64), model.config.vocab)
    known = activations(model.config)
    theirs = transformers_activations(tmp_path, ids, known, model.config)
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
