"""Where two arrays, or two sequences, first differ. Bits are compared: -0.0 is not 0.0, a NaN equals itself. Floor 7."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def bits(x: np.ndarray) -> np.ndarray:
    """The same array as unsigned integers."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def first_difference(a: Sequence, b: Sequence) -> int:
    """Index of the first difference of two sequences (the shorter length when one begins the other)."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def first_kv_difference(want: list[dict[str, np.ndarray]], got: list[dict[str, np.ndarray]],
                        length: int) -> tuple[str, Any, Any] | None:
    """(where, wanted value, other value) of the first differing position of the lowest layer, below ``length``.

    None when all bytes agree.
    """
    for layer, (a, b) in enumerate(zip(want, got)):
        places = []
        for name in a:
            x, y = a[name][:, :length], b[name][:, :length]
            if x.tobytes() != y.tobytes():
                index = min(np.argwhere(bits(x) != bits(y)).tolist(), key=lambda i: (i[1], i[0], *i[2:]))
                where = f"layer {layer}, position {index[1]}, {name}, head {index[0]}"
                places.append((index[1], where + (f", dimension {index[2]}" if len(index) > 2 else ""),
                               x[tuple(index)], y[tuple(index)]))
        if places:
            return min(places, key=lambda place: place[0])[1:]
    return None
