"""`load`: an engine over a model, by name. Floor 6."""
from __future__ import annotations

import os

from refengine.engine import SequentialEngine
from refengine.model import Model, load_model
from refengine.pipelined import PipelinedEngine


def load(model: str | os.PathLike | Model, *, engine: str = "sequential", arithmetic: str | None = None,
         capacity: int = 4096, page_size: int = 64, chunk_size: int | None = None,
         snapshot_every: int | str | None = None, snapshot_bytes: int = 2**28) -> SequentialEngine:
    """An engine over a model: a path, a hub id, a built-in name, or a Model that is already loaded.

    engine: "sequential" (one token a forward) or "pipelined" (chunks of ``chunk_size`` tokens, 256 unless said, and a
    step in flight). arithmetic: "exact" (default), "native", "native64". capacity: most tokens the cache may hold.
    snapshot_every: of a model with recurrent layers, keep the states after every so many tokens, or where prefill and generate
    begin ("turn"), at most snapshot_bytes of them, so that it can be rewound to the nearest. Raises CheckpointError,
    ConfigError, ValueError.
    """
    settings = {"capacity": capacity, "page_size": page_size, "snapshot_every": snapshot_every,
                "snapshot_bytes": snapshot_bytes}
    if engine == "sequential":
        if chunk_size not in (None, 1):
            raise ValueError("the sequential engine feeds one token a forward; chunk_size is for the pipelined one")
        return SequentialEngine(load_model(model, arithmetic), **settings)
    if engine == "pipelined":
        chunks = 256 if chunk_size is None else chunk_size
        return PipelinedEngine(load_model(model, arithmetic), chunk_size=chunks, **settings)
    raise ValueError(f"engine {engine!r} is not one of sequential, pipelined")
