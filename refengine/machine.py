"""What a report must name: Python, NumPy, its BLAS and the BLAS core in use, threads, processor. Floor 2."""
from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np


def describe() -> dict[str, Any]:
    """A JSON-able description of this process' numeric environment."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {"python": platform.python_version(), "numpy": np.__version__, "system": platform.system(),
            "machine": platform.machine(), "cpus": os.cpu_count(), "processor": _processor(),
            "blas": f"{blas.get('name')} {blas.get('version')}", **_openblas()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _openblas() -> dict[str, Any]:
    """The core that a bundled OpenBLAS chose (or was told to use), and its threads; nothing for another BLAS."""
    for library in Path(np.__file__).parent.parent.glob("numpy.libs/lib*openblas*"):
        loaded = ctypes.CDLL(str(library))
        for name in ("scipy_openblas_get_{}64_", "scipy_openblas_get_{}", "openblas_get_{}64_", "openblas_get_{}"):
            core, threads = (getattr(loaded, name.format(what), None) for what in ("corename", "num_threads"))
            if core and threads:
                core.restype = ctypes.c_char_p
                return {"blas_core": core().decode(), "blas_threads": int(threads())}
    return {}
