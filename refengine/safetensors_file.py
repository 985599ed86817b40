"""Reading a safetensors file: the library checks the header before any data is touched, the data is memory-mapped. Floor 2.

The library's NumPy reader returns no BF16, since NumPy has no such type: here it is widened by a 16-bit shift.
"""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors

from refengine.errors import CheckpointError

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class SafetensorsFile:
    """A mapped file. ``entries``: name -> (dtype, shape, begin, end); ``metadata``: name -> text.

    Raises CheckpointError on a broken file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safetensors.safe_open(str(path), framework="numpy"):
                pass  # sizes, shapes, gaps, overlaps: refused by the library
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length), object_pairs_hook=self._unique)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file ({error}; {_size(path)} bytes)") from error
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise CheckpointError(f"{path}: {name}: dtype {entry['dtype']} is not one of {', '.join(_DTYPES)}")
            self.entries[name] = (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
        self._data = np.memmap(path, np.uint8, "r", offset=8 + length) if any(e[3] for e in self.entries.values()) else \
            np.empty(0, np.uint8)

    def _unique(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise CheckpointError(f"{self.path}: the header names a tensor twice")
        return dict(pairs)

    def raw(self, name: str) -> np.ndarray:
        """A tensor in its stored type (BF16 as uint16), mapped, not read."""
        dtype, shape, begin, end = self.entries[name]
        return self._data[begin:end].view(_DTYPES[dtype]).reshape(shape)

    def tensor(self, name: str, rows=slice(None)) -> np.ndarray:
        """A tensor, or some rows of it, as float32."""
        return widen(self.raw(name)[rows], self.entries[name][0])


def widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Stored values as float32. BF16 is the upper half of a float32."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]], *,
                      metadata: dict[str, str] | None = None) -> None:
    """Write float32 arrays as name -> (stored dtype, array), one after the other: only one is held in its stored form."""
    header, at = {"__metadata__": {"format": "pt", **(metadata or {})}}, 0
    for name, (dtype, array) in tensors.items():
        size = array.size * np.dtype(_DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dtype, array in tensors.values():
            file.write(narrow(array, dtype).tobytes())


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as stored. BF16 rounds to nearest, ties to even."""
    if dtype == "BF16":
        bits = x.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    return x.astype(_DTYPES[dtype])


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
