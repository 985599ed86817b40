"""mlx-lm: a model on MLX, on its default device, over one of mlx-lm's own prompt caches and its own trim."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refengine.backends import Backend, BackendError, Precision
from refengine.checkpoint import Checkpoint
from refengine.folder_checkpoint import FolderCheckpoint


class MLXBackend(Backend):
    """One sequence. cache: "kv" is what mlx-lm makes by default, "concatenate" its simplest one, "mixed" has the first kind in layer
    0 and the second in the others: what its trim reports is layer 0's count."""

    OPTIONS = {"dtype": ("float32", "bfloat16", "float16"), "cache": ("kv", "concatenate", "mixed")}

    def __init__(self, checkpoint: Checkpoint, capacity: int, *, dtype: str = "float32", cache: str = "kv"):
        if not isinstance(checkpoint, FolderCheckpoint):
            raise BackendError(f"{checkpoint.source}: mlx-lm is given Hugging Face folders here; this is not one")
        try:
            import mlx.core as mx
            import mlx_lm
            from mlx_lm.models import cache as caches
            from mlx_lm.utils import load_model
        except ImportError as error:
            raise BackendError(f"backend mlx needs {error.name}: pip install 'mlx[cpu]' mlx-lm (on Apple silicon: mlx-lm)") from None
        self.version = f"mlx-lm {mlx_lm.__version__}, mlx {mx.__version__}"
        self._mx, self._trim = mx, caches.trim_prompt_cache
        try:
            self._model, _ = load_model(checkpoint.folder)
        except (ValueError, OSError, KeyError) as error:
            raise BackendError(f"mlx-lm cannot open {checkpoint.source}: {error}") from error
        self._model.set_dtype(getattr(mx, dtype))
        kept = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
        self.precision = Precision(kept, kept, kept, "stored" if dtype == "float32" else kept)
        kind = {"kv": lambda: caches.make_prompt_cache(self._model),
                "concatenate": lambda: [caches.ConcatenateKVCache() for _ in self._model.layers],
                "mixed": lambda: [caches.KVCache(), *(caches.ConcatenateKVCache() for _ in self._model.layers[1:])]}[cache]
        self._make, self._cache = kind, kind()
        super().__init__(checkpoint.config.vocab, capacity)

    def _run_model(self, ids: Sequence[int], cache):
        return self._model(self._mx.array([list(ids)]), cache=cache)[0].astype(self._mx.float32)

    def _forward(self, ids: list[int]) -> np.ndarray:
        return np.array(self._run_model(ids, self._cache)[-1])

    def rows(self, ids: Sequence[int]) -> np.ndarray:
        return np.array(self._run_model(ids, self._make()))

    def _rewind(self, length: int) -> None:
        if length:
            self._trim(self._cache, len(self._ids) - length)
        else:
            self._cache = self._make()


open_backend = MLXBackend
