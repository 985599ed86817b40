"""transformers in float32: scaled-dot-product attention over a DynamicCache that is cropped."""
from __future__ import annotations

import inspect

import numpy as np

from refengine.backends import Backend, BackendError
from refengine.checkpoint import Checkpoint
from refengine.folder_checkpoint import FolderCheckpoint


class TransformersBackend(Backend):
    """A causal language model of transformers, the whole prompt in one forward, as its `generate` does."""

    def __init__(self, checkpoint: Checkpoint, capacity: int):
        if not isinstance(checkpoint, FolderCheckpoint):
            raise BackendError(f"{checkpoint.source}: transformers is given Hugging Face folders here; this is not one")
        try:
            import torch
            import transformers
        except ImportError as error:
            raise BackendError(f"backend transformers needs {error.name}: pip install 'refengine[peers]'") from None
        transformers.utils.logging.disable_progress_bar()
        self._torch, self._cache_type = torch, transformers.DynamicCache
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoint.folder, dtype=torch.float32, attn_implementation="sdpa")
        except (OSError, ValueError) as error:
            raise BackendError(f"transformers cannot open {checkpoint.source}: {error}") from error
        self._model = model.eval()
        # transformers 5 renames the argument
        self._argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._cache = self._cache_type()
        super().__init__(model.config.vocab_size, capacity)

    def _forward(self, ids: list[int]) -> np.ndarray:
        with self._torch.inference_mode():
            out = self._model(input_ids=self._torch.tensor([ids]), use_cache=True, logits_to_keep=1,
                              **{self._argument: self._cache})
        return out.logits[0, -1].float().numpy()

    def _rewind(self, length: int) -> None:
        if length:
            self._cache.crop(length - len(self._ids))  # a negative count means the same in every release; crop(n) does not
        else:
            self._cache = self._cache_type()


open_backend = TransformersBackend
