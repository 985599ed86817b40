"""transformers: scaled-dot-product attention over a DynamicCache that is cropped."""
from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from refengine.backends import Backend, BackendError, Precision
from refengine.checkpoint import Checkpoint
from refengine.folder_checkpoint import FolderCheckpoint


class TransformersBackend(Backend):
    """A causal language model of transformers, the whole prompt in one forward, as its `generate` does."""

    OPTIONS = {"dtype": ("float32", "bfloat16", "float16"), "attention": ("sdpa", "eager")}

    def __init__(self, checkpoint: Checkpoint, capacity: int, *, dtype: str = "float32", attention: str = "sdpa"):
        if not isinstance(checkpoint, FolderCheckpoint):
            raise BackendError(f"{checkpoint.source}: transformers is given Hugging Face folders here; this is not one")
        try:
            import torch
            import transformers
        except ImportError as error:
            raise BackendError(f"backend transformers needs {error.name}: pip install 'refengine[peers]'") from None
        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoint.folder, dtype=getattr(torch, dtype), attn_implementation=attention)
        except (OSError, ValueError) as error:
            raise BackendError(f"transformers cannot open {checkpoint.source}: {error}") from error
        kept = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
        self.precision = Precision(kept, kept, kept, "stored" if dtype == "float32" else kept)
        self._model, self._checkpoint = model.eval(), checkpoint
        # transformers 5 renames the argument
        self._argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        recurrent = checkpoint.config.delta is not None       # such a cache has to know which layers keep a state
        self._new_cache = lambda: transformers.DynamicCache(config=model.config) if recurrent else transformers.DynamicCache()
        self._recurrent, self._cache = recurrent, self._new_cache()
        super().__init__(model.config.vocab_size, capacity)

    def _forward(self, ids: list[int]) -> np.ndarray:
        with self._torch.inference_mode():
            out = self._model(input_ids=self._torch.tensor([ids]), use_cache=True, logits_to_keep=1,
                              **{self._argument: self._cache})
        return out.logits[0, -1].float().numpy()

    def rows(self, ids: Sequence[int]) -> np.ndarray:
        with self._torch.inference_mode():
            return self._model(input_ids=self._torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()

    def activations(self, ids: Sequence[int], names: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        """Each from where the list of names says that transformers has it: a module, and a point of it. Attention is eager."""
        config, seen = self._checkpoint.config, _Seen(self._torch, self._checkpoint.config.head_dim)
        before, self._model.config._attn_implementation = self._model.config._attn_implementation, "eager"
        try:
            with ExitStack() as stack, self._torch.no_grad():
                seen.watch(self._model, stack, len(ids))
                self._model(input_ids=self._torch.tensor([list(ids)]), use_cache=False)
        finally:
            self._model.config._attn_implementation = before
        return {name: seen.found[about.module, about.point].reshape(about.sizes(config, len(ids)))
                for name, about in names.items() if (about.module, about.point) in seen.found}

    def _rewind(self, length: int) -> None:
        if length:
            self._cache.crop(length - len(self._ids))  # a negative count means the same in every release; crop(n) does not
        else:
            self._cache = self._new_cache()

    def trim_kv_cache(self, length: int) -> int:
        """-1 where there are recurrent layers: crop cuts attention, and no state."""
        return -1 if self._recurrent and 0 <= length < len(self._ids) else super().trim_kv_cache(length)

    def reset(self) -> None:
        self._cache, self._ids, self._logits = self._new_cache(), [], None


class _Seen:
    """What modules were given and made, and what lies between them: (module, point) -> float32 array of the one sequence."""

    def __init__(self, torch, head_dim: int):
        self.torch, self.head_dim = torch, head_dim
        self.found: dict[tuple[str, str], np.ndarray] = {}
        self._inside: list[str] = []

    def note(self, module: str, point: str, tensor) -> None:
        x = tensor.detach().float().clone().numpy()
        self.found[module, point] = x if x.ndim == 2 else x[0]      # a delta net's norm has a row for each head

    def watch(self, model, stack: ExitStack, count: int) -> None:
        code, softmax = sys.modules[type(model.model).__module__], self.torch.nn.functional.softmax
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(self._before(name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(self._after(name), with_kwargs=True).remove)

        def watched_softmax(x, *args, **kwargs):
            self.note(self._inside[-1], "softmax", x)
            return softmax(x, *args, **kwargs)

        def rotated(result, given):
            for point, x in zip(("query", "key"), result):
                self.note(self._inside[-1], point, x.transpose(1, 2))

        def attended(result, given):
            self.note(self._inside[-1], "attended", result[0])

        def rule(result, given):
            self.note(self._inside[-1], "beta", given["beta"])
            self.note(self._inside[-1], "decay", given["g"].exp())

        def conv(result, given):
            self.note(self._inside[-1], "conv", result[..., :count].transpose(1, 2))

        stack.enter_context(patch.object(self.torch.nn.functional, "softmax", watched_softmax))
        for function, look in (("apply_rotary_pos_emb", rotated), ("eager_attention_forward", attended),
                               ("torch_chunk_gated_delta_rule", rule), ("causal_conv1d_fn", conv)):
            if hasattr(code, function):
                stack.enter_context(patch.object(code, function, _looking(getattr(code, function), look)))

    def _before(self, name: str):
        def hook(module, args, kwargs):
            self._inside.append(name)
            if args:
                self.note(name, "input", args[0])
        return hook

    def _after(self, name: str):
        def hook(module, args, kwargs, output):
            self._inside.pop()
            if isinstance(output, tuple) and len(output) > 1 and output[1] is not None:
                self.note(name, "weights", output[1])
            elif isinstance(output, self.torch.Tensor):
                self.note(name, "output", output)
                if name.endswith(".q_proj") and output.shape[-1] % (2 * self.head_dim) == 0:   # of a hybrid: each head's query and gate
                    halves = output.unflatten(-1, (-1, 2, self.head_dim))
                    self.note(name, "queries", halves[..., 0, :])
                    self.note(name, "gates", halves[..., 1, :])
        return hook


def _looking(function, look):
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        look(result, kwargs)
        return result
    return call


open_backend = TransformersBackend
