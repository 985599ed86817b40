"""What is judged: a backend by name, a program that speaks our protocol, a file, or refengine itself, which sits its own exam."""
from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refengine.backends import KINDS, NAMES, Backend, BackendError, Precision, open_backend
from refengine.backends.openai import ServerBackend, whether_it_caches
from refengine.backends.worker import WorkerBackend
from refengine.engine import Engine
from refengine.errors import InspectError, TokenizerError
from refengine.inspect import activations, read_trace, trace
from refengine.loading import load
from refengine.model import Model, load_model
from refengine.sources import open_checkpoint

OURS = {"arithmetic": ("exact", "native", "native64"), "engine": ("sequential", "pipelined")}


class Subject:
    """name, version, precision; an engine to feed and rewind; logits of all positions; activations where it can show them.

    model: what was asked for. source: the files that the backend really reads, and the reference with it.
    """

    def __init__(self, name: str, engine: Engine, model: str | os.PathLike, *, source: str | os.PathLike | None = None,
                 version: str = "", precision: Precision = Precision()):
        self.name, self.engine, self.model, self.source = name, engine, model, source or model
        self.version, self.precision = version, precision
        self.scores = getattr(engine, "scores", "logits")

    as_text = False
    """Whether prompts go to it as text."""
    no_cache = ""
    """Why its cache cannot be judged."""

    def takes(self, ids: Sequence[int]) -> bool:
        """Whether it can be given these ids."""
        return True

    def rows(self, ids: Sequence[int]) -> np.ndarray:
        """(T, V) scores of ids from nothing: logits, or log-probabilities, minus infinity where they are not told."""
        return self.engine.rows(ids)

    def activations(self, ids: Sequence[int], names: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        return self.engine.activations(ids, names)

    def another(self) -> Engine:
        """A second engine of the same kind, that shares no state with the first."""
        raise BackendError(f"{self.name} cannot be opened twice")


class _Theirs(Subject):
    engine: Backend

    def __init__(self, name: str, model: str | os.PathLike, capacity: int, options: Mapping[str, str]):
        self._open = lambda: open_backend(name, model, capacity=capacity, **options)
        engine = self._open()
        super().__init__(name, engine, model, source=engine.source, version=engine.version, precision=engine.precision)

    def another(self) -> Engine:
        return self._open()


class _Ours(Subject):
    def __init__(self, model: str | os.PathLike | Model, capacity: int, options: Mapping[str, str]):
        for option, value in options.items():
            if value not in OURS.get(option, ()):
                known = "; ".join(f"{key}={'|'.join(values)}" for key, values in OURS.items())
                raise BackendError(f"backend refengine has no option {option}={value}; there are {known}")
        self._model = load_model(model, options.get("arithmetic"))
        self._settings = {"engine": options.get("engine", "pipelined"), "capacity": capacity}
        super().__init__("refengine", load(self._model, **self._settings), self._model.checkpoint.source,
                         version=f"{self._model.op.NAME}, {self._settings['engine']}")

    def rows(self, ids):
        return self._model.logits(ids)

    def activations(self, ids, names):
        self.engine.reset()
        return trace(self.engine, ids, list(names))

    def another(self):
        return load(self._model, **self._settings)


class _Server(Subject):
    """A server at an address; OPTIONS beside it, and the fields of its `Precision`, which it cannot tell itself."""

    OPTIONS = {"top": int, "model": str}

    def __init__(self, url: str, model: str | os.PathLike, capacity: int, options: Mapping[str, str]):
        checkpoint, settings, precision = open_checkpoint(model), {"capacity": capacity}, {}
        try:
            for option, value in options.items():
                if option in Precision._fields and value in KINDS:
                    precision[option] = value
                else:
                    settings[option] = self.OPTIONS[option](value)
            if settings.get("top", 1) < 1:
                raise ValueError
        except (KeyError, ValueError):
            raise BackendError(f"backend openai has no option {option}={value}; there are top=NUMBER, model=NAME and, of its "
                               f"precision, {', '.join(Precision._fields)}={'|'.join(KINDS)}") from None
        try:
            tokenizer = checkpoint.tokenizer()
        except TokenizerError:
            tokenizer = None
        self._open = lambda cache: ServerBackend(url, tokenizer, checkpoint.config.vocab, cache=cache,
                                                 precision=Precision(**precision), **settings)
        engine = self._open(True)
        super().__init__("openai", engine, model, version=f"{engine.version} at {url}, top {engine.top} log-probabilities, prompts "
                         f"as {'ids' if engine.takes_ids else 'text'}", precision=engine.precision)
        self.as_text = not engine.takes_ids

    def takes(self, ids):
        return self.engine.takes(ids)

    @property
    def no_cache(self):
        rng = random.Random(1)
        prompt = [rng.randrange(self.engine.vocab) for _ in range(min(64, self.engine.capacity))]  # vLLM reuses blocks of 16
        return whether_it_caches(self.engine, self._open(False), prompt)

    def another(self):
        return self._open(False)


class _Worker(Subject):
    def __init__(self, command: str, model: str | os.PathLike):
        self._open = lambda: WorkerBackend(command)
        engine = self._open()
        super().__init__(f"worker {engine.name}", engine, model, version=engine.version, precision=engine.precision)

    def another(self) -> Engine:
        return self._open()


class _File(Subject):
    """A trace file of `refengine.inspect`, by whoever wrote it: the logits and activations of one prompt, from nothing.

    Its header may have "precision", as `Precision`.
    """

    engine: None
    no_cache = "a file has no cache"

    def __init__(self, path: Path, model: str | os.PathLike):
        self._arrays, header = read_trace(path)
        if header.get("offset", 0) != 0:
            raise InspectError(f"{path}: offset is {header['offset']}; only a trace from nothing can be judged")
        ids = header.get("tokens")
        if not isinstance(ids, list) or not ids or not all(type(id) is int for id in ids):
            raise InspectError(f"{path}: tokens is {ids!r:.60}, not a list of ids")
        self.ids, known = ids, activations(open_checkpoint(model).config)
        if unknown := sorted(set(self._arrays) - set(known)):
            raise InspectError(f"{path}: {', '.join(unknown)}: no activations of this model")
        super().__init__("files", None, model, version=path.name, precision=Precision(**header.get("precision", {})))

    def rows(self, ids):
        if "logits" not in self._arrays:
            raise InspectError("the file has no logits")
        return self._arrays["logits"]

    def activations(self, ids, names):
        return self._arrays if list(ids) == self.ids else None


def open_subject(spec: str, model: str | os.PathLike, capacity: int = 1024) -> Subject:
    """"NAME", "NAME:option=value,...", "openai:URL,option=value,...", "worker:COMMAND" or "files:TRACE.safetensors", over a model.

    Raises BackendError, InspectError, CheckpointError, ConfigError.
    """
    name, _, rest = spec.partition(":")
    if name == "worker":
        return _Worker(rest, model)
    if name == "files":
        return _File(Path(rest), model)
    options = {}
    url, _, rest = rest.partition(",") if name == "openai" else ("", "", rest)
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise BackendError(f"backend {spec!r}: {part!r} is not option=value")
        options[option] = value
    if name == "refengine":
        return _Ours(model, capacity, options)
    if name == "openai":
        return _Server(url, model, capacity, options)
    if name not in NAMES:
        raise BackendError(f"backend {name!r} is not one of refengine, {', '.join(NAMES)}, openai, worker, files")
    return _Theirs(name, model, capacity, options)
