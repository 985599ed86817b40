"""One run of the built-in model as a SHA-256, here or in a process with another BLAS core or without SIMD. Floor 9."""
from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from refengine.machine import describe
from refengine.model import Model, load_model
from refengine.pipelined import PipelinedEngine
from refkernels import arithmetic

PROMPT = [(37 * i + 11) % 509 for i in range(100)]
# Cores that OpenBLAS can be told to use on x86-64: the processor flag each needs, and the names OpenBLAS then gives.
CORES = {"Prescott": ("pni", {"Prescott", "Katmai"}), "Sandybridge": ("avx", {"Sandybridge"}),
         "Haswell": ("avx2", {"Haswell"}), "SkylakeX": ("avx512f", {"SkylakeX"})}


def digest(model: Model, chunk_size: int, prompt: list[int] = PROMPT) -> str:
    """Of all logits of the prompt, and of the last logits and all layers' K/V after a prefill in chunks."""
    engine = PipelinedEngine(model, chunk_size=chunk_size, capacity=128, page_size=8)
    engine.prefill(prompt)
    parts = {"logits": model.logits(prompt), "last": engine.logits}
    for layer in range(model.config.layers):
        parts |= {f"{layer}.{name}": field for name, field in engine.cache.snapshot(layer).items()}
    sha = hashlib.sha256()
    for name, array in parts.items():
        sha.update(f"{name} {array.shape} {array.dtype.itemsize} ".encode())
        sha.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()


def digests(set_name: str, *chunk_sizes: int) -> dict[int, str]:
    """Chunk size -> digest, of the built-in model in an arithmetic."""
    model = load_model("tiny", set_name)
    return {chunk_size: digest(model, chunk_size) for chunk_size in chunk_sizes}


def rows_that_differ(set_name: str, k: int, n: int = 96, most: int = 64) -> list[int]:
    """The M for which `linear` of M rows is not what `linear` of ``most`` rows gives for the first M. D8 of the cases."""
    op, rng = arithmetic(set_name), np.random.default_rng(k)
    w = op.pack_linear((n, k), [rng.standard_normal((n, k)).astype(np.float32)])
    x = rng.standard_normal((most, k)).astype(op.DTYPE)       # (most, K)
    whole = op.linear(x, w)                                   # (most, N)
    return [m for m in range(1, most + 1) if op.linear(x[:m], w).tobytes() != whole[:m].tobytes()]


def simd() -> list[str]:
    """The SIMD extensions above its baseline that NumPy uses in this process."""
    return np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])


def missing(core: str) -> str:
    """Why this machine cannot be told to use an OpenBLAS core; "" when it can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"{core} is a core of x86-64, this is {platform.machine()}"
    if "blas_core" not in describe():
        return "the BLAS is not NumPy's bundled OpenBLAS, whose core can be chosen"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return "/proc/cpuinfo does not say what the processor can do"
    return "" if CORES[core][0] in flags else f"the processor has no {CORES[core][0]}, which {core} needs"


def elsewhere(expression: str, **environment: str) -> Any:
    """The value of an expression over this module, from a new process with these environment variables."""
    return python(f"import json\nfrom digest import *\nprint(json.dumps(({expression})))", **environment)


@functools.cache
def python(code: str, **environment: str) -> Any:
    """The JSON that code prints in a new Python process."""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, cwd=Path(__file__).parent,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
