"""Does this process do arithmetic as the exact set needs it? Run at first use, after the imports: some libraries switch
subnormals off for the whole process when they are imported, and a BLAS may be built for speed only. Floor 1."""
import functools

import numpy as np

from refkernels.errors import ProbeError


def checks() -> dict[str, str]:
    """Name of each check -> "" when it holds, else what is wrong and what to do. Takes a few milliseconds."""
    found = {"float64 rounds to nearest, ties to even": _rounding(), "subnormals are kept": _subnormals(),
             "elementwise operations are IEEE": _elementwise()}
    for m, k, n in ((1, 96, 64), (1, 4096, 33), (7, 128, 300), (64, 1024, 96), (33, 257, 129)):
        found[f"BLAS multiplies worst-case integers exactly, {m} x {k} x {n}"] = _blas(m, k, n)
    return found


@functools.cache
def require() -> None:
    """Raise ProbeError when a check fails. The result is remembered for the process."""
    wrong = [f"{name}: {text}" for name, text in checks().items() if text]
    if wrong:
        raise ProbeError("exact arithmetic is not possible in this process. " + "; ".join(wrong))


def _rounding() -> str:
    one, half_ulp = np.array([1.0, 1.0 + 2.0**-52]), np.array([2.0**-53, 2.0**-53])
    if (one + half_ulp).tolist() != [1.0, 1.0 + 2.0**-51] or np.rint(np.array([0.5, 1.5, -2.5])).tolist() != [0, 2, -2]:
        return "the rounding mode was changed; find the library that calls fesetround and import it later or not at all"
    return ""


def _subnormals() -> str:
    for dtype, tiny in ((np.float32, 2.0**-126), (np.float64, 2.0**-1022)):
        if ((np.full(64, tiny, dtype) * dtype(0.5)) == 0).any() or ((np.full(64, tiny / 2, dtype) + dtype(0)) == 0).any():
            return ("subnormals are flushed to zero (FTZ/DAZ); a library built with -ffast-math was imported: import it in "
                    "another process")
    return ""


def _elementwise() -> str:
    x = np.full(64, 1.0 + 2.0**-30)
    if (x * x - (1.0 + 2.0**-29) != 0).any():  # a fused multiply-subtract would leave 2^-60
        return "NumPy fuses a multiplication with a subtraction"
    if (np.sqrt(np.full(64, 2.0)) != 1.4142135623730951).any() or (1.0 / np.full(64, 3.0) != 0.3333333333333333).any():
        return "sqrt or division is not correctly rounded"
    return ""


def _blas(m: int, k: int, n: int) -> str:
    bits = 52 - (k - 1).bit_length()  # a + b bits of the factors: the sums come near 2^52
    rng = np.random.Philox(key=k)
    a = _odd_integers(rng, m * k, bits // 2).reshape(m, k)
    b = _odd_integers(rng, k * n, bits - bits // 2).reshape(k, n)
    want = a @ b
    layouts = {"row major": b.astype(np.float64), "transposed": np.ascontiguousarray(b.T).astype(np.float64).T}
    for name, right in layouts.items():
        if (np.matmul(a.astype(np.float64), right).astype(np.int64) != want).any():
            return f"a product ({name}) was rounded; use another BLAS build (pip's NumPy brings a good one)"
    return ""


def _odd_integers(rng: np.random.Philox, count: int, bits: int) -> np.ndarray:
    """Odd int64 near +-2^bits, of one sign for the most part, so that sums grow as large as they can."""
    raw = rng.random_raw(count)
    magnitude = (1 << bits) - 1 - (raw & np.uint64(0x3E)).astype(np.int64)
    return np.where(raw >> np.uint64(60) == 0, -magnitude, magnitude)
