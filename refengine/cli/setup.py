"""What several commands share: an engine and a sampling from the arguments. Floor 8."""
from __future__ import annotations

import argparse

from refengine.engine import SequentialEngine
from refengine.loading import load
from refengine.model import Model
from refengine.sampling import Sampling


def sampling(arguments: argparse.Namespace) -> Sampling:
    return Sampling(temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, min_p=arguments.min_p,
                    repetition_penalty=arguments.repetition_penalty, seed=arguments.seed)


def engine(arguments: argparse.Namespace, model: Model | str, name: str | None = None) -> SequentialEngine:
    return load(model, engine=name or arguments.engine, arithmetic=arguments.arithmetic, capacity=arguments.capacity,
                page_size=arguments.page_size)
