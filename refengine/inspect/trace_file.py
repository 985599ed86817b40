"""A trace as a safetensors file, with a JSON header that says of what it is."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import refengine
from refengine.engine import SequentialEngine
from refengine.errors import CheckpointError, InspectError
from refengine.inspect.names import activations
from refengine.safetensors_file import SafetensorsFile, write_safetensors

SCHEMA = "refengine-trace/1"
_KEY = "refengine"  # of the file's metadata: texts only, so that the header is a text of JSON


def write_trace(path: Path, arrays: Mapping[str, np.ndarray], engine: SequentialEngine, tokens: Sequence[int],
                offset: int | None = None) -> dict[str, Any]:
    """Write a trace of tokens that was made at ``offset`` (default: at what the engine holds). Returns the header:

    schema, refengine's version, model (source, family, fingerprint of its files), arithmetic, offset, held (the ids before
    it), tokens, and for each activation its shape in letters, transformers' module and point, and the SHA-256 of its bytes.
    """
    model, known = engine.model, activations(engine.model.config)
    offset = engine.processed_token_count if offset is None else offset
    header = {"schema": SCHEMA, "refengine": refengine.__version__,
              "model": {"source": model.checkpoint.source, "family": model.config.family,
                        "fingerprint": model.checkpoint.fingerprint()},
              "arithmetic": model.op.NAME, "offset": offset, "held": engine.tokens[:offset], "tokens": [int(id) for id in tokens],
              "activations": {name: {"shape": list(known[name].shape), "module": known[name].module, "point": known[name].point,
                                     "sha256": _digest(x)} for name, x in arrays.items()}}
    write_safetensors(Path(path), {name: ("F32", x) for name, x in arrays.items()}, metadata={_KEY: json.dumps(header)})
    return header


def read_trace(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, header) of a file that `write_trace` wrote, or somebody else: of the header, schema, tokens and the names of the
    activations are needed, hashes are compared where there are any. Raises InspectError when it is none, or a hash differs."""
    try:
        file = SafetensorsFile(Path(path))
        header = json.loads(file.metadata.get(_KEY, "null"))
        if not isinstance(header, dict) or header.get("schema") != SCHEMA:
            raise InspectError(f"{path}: not a trace of refengine ({SCHEMA})")
        arrays = {name: file.tensor(name) for name in header["activations"]}
    except (CheckpointError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise error if isinstance(error, InspectError) else InspectError(f"{path}: not a whole trace ({error})") from None
    for name, x in arrays.items():
        if _digest(x) != header["activations"][name].get("sha256", _digest(x)):
            raise InspectError(f"{path}: {name} is not what was written; its hash is another")
    return arrays, header


def _digest(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x, "<f4").tobytes()).hexdigest()
