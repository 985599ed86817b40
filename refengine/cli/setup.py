"""What several commands share: an engine and a sampling from the arguments. Floor 8."""
from __future__ import annotations

import argparse
from pathlib import Path

from refengine.engine import SequentialEngine
from refengine.loading import load
from refengine.model import Model, load_tokenizer
from refengine.sampling import Sampling
from refengine.tokenizer import Tokenizer, load_folder_tokenizer


def sampling(arguments: argparse.Namespace) -> Sampling:
    return Sampling(temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, min_p=arguments.min_p,
                    repetition_penalty=arguments.repetition_penalty, seed=arguments.seed)


def engine(arguments: argparse.Namespace, model: Model | str, name: str | None = None) -> SequentialEngine:
    return load(model, engine=name or arguments.engine, arithmetic=arguments.arithmetic, capacity=arguments.capacity,
                page_size=arguments.page_size, snapshot_every=arguments.snapshot_every, snapshot_bytes=arguments.snapshot_bytes)


def tokenizer(source: str) -> Tokenizer:
    """Of a model, or of a folder that has a tokenizer and no model."""
    folder = Path(source)
    if (folder / "tokenizer.json").is_file() and not (folder / "config.json").is_file():
        return load_folder_tokenizer(folder, ())
    return load_tokenizer(source)
