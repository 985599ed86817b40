"""Every reduction of the exact set, and the rounding that makes it exact.

The idea: put the numbers of a reduction on a common grid of a power of two. Then every product is an integer number of
(product) grid steps, and as long as no partial sum can pass 2^53 steps, float64 adds them without any rounding: in any
order, blocked in any way, with or without fused multiply-add. The bit budget of a reduction of length K is

    bits of one factor + bits of the other + log2(K) <= 53.

Nothing outside this file may sum, multiply matrices or take a maximum over an axis (tests/test_kernel_lint.py).
"""
import numpy as np

from refkernels.errors import BoundError, NonFiniteError

BITS = 53  # integers up to 2^53 are exact in float64
_EXPONENT = np.array(0x7FF << 52)  # the exponent field of a float64


def log2_ceil(n: int) -> int:
    """The smallest b with 2^b >= n."""
    return (n - 1).bit_length()


def bit_budget(length: int, other: int, most: int, least: int, what: str) -> int:
    """Bits left for one factor when the other has ``other`` and ``length`` products are summed, at most ``most``.

    Raises BoundError when fewer than ``least`` are left: the reduction would be exact, but too coarse to be of use.
    """
    bits = min(most, BITS - other - log2_ceil(length))
    if bits < least:
        raise BoundError(f"{what}: {length} products leave {bits} bits a factor below 2^{BITS}, {least} are needed")
    return bits


def power_below(x: np.ndarray) -> np.ndarray:
    """The largest power of two not above each x >= 0, read off its exponent field; 0 gives 0. float64 -> float64.

    An infinity or a NaN gives an infinity: a row with one of them turns into NaN on its grid, and so does all that follows.
    """
    return (x.view(np.int64) & _EXPONENT).view(np.float64)


def row_power(x: np.ndarray) -> np.ndarray:
    """`power_below` of each row's largest magnitude. (..., K) float32 -> (..., 1) float64."""
    return power_below(row_max(np.abs(x)).astype(np.float64))


def snap(x: np.ndarray, bits: int) -> np.ndarray:
    """Each row of x rounded to a grid of its own, 2^bits steps below its largest magnitude. (..., K) float32 -> float64."""
    # Near 1.5 * 2^52 steps, neighbouring doubles are one step apart: adding and subtracting that rounds to the grid.
    magic = row_power(x)
    magic *= float(3 << BITS - 1 - bits)
    y = x.astype(np.float64)
    y += magic
    y -= magic
    return y


def integers(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The same grid as integers and step: x ~ ints * step. (..., K) float32 -> (..., K), (..., 1) float64."""
    step = row_power(x)
    step /= float(1 << bits - 1)
    step[step == 0] = 1.0 / float(1 << bits)                  # a row of zeros
    y = x / step
    return np.rint(y, out=y), step


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Matrix product of numbers on grids. The caller owes the bit budget.

    NOTE: the sign of a zero sum is the one thing left to the BLAS; callers whose result is named add ``+ 0.0``.
    """
    return np.matmul(a, b, out=out)


def row_sum(x: np.ndarray) -> np.ndarray:
    """Sum of each row, kept as a column; x on a grid."""
    return np.add.reduce(x, axis=-1, keepdims=True)


def running_sum(x: np.ndarray) -> np.ndarray:
    """Prefix sums of an integer vector (integers do not round)."""
    return np.add.accumulate(x)


def row_max(x: np.ndarray) -> np.ndarray:
    return np.maximum.reduce(x, axis=-1, keepdims=True)


def running_max(x: np.ndarray) -> np.ndarray:
    """Prefix maxima along the last axis."""
    return np.maximum.accumulate(x, axis=-1)


def l1_bound(w: np.ndarray) -> np.ndarray:
    """An upper bound of each row's L1 norm, the same on every machine. (N, K) float32 -> (N, 1) float64.

    The magnitudes are rounded UP to a grid of 2^-40 of the row's maximum (coarser for rows over 2^13 long) and summed
    as integers: a float sum would depend on its order. Raises NonFiniteError on an infinity or a NaN.
    """
    top = row_max(np.abs(w))
    if not np.isfinite(top).all():
        raise NonFiniteError(int(np.flatnonzero(~np.isfinite(top))[0]))
    e = np.frexp(top)[1] - min(40, BITS - log2_ceil(w.shape[-1]))
    magnitude = w * np.ldexp(1.0, -e)                         # (N, K) float64
    np.abs(magnitude, out=magnitude)
    np.ceil(magnitude, out=magnitude)
    return np.ldexp(row_sum(magnitude), e)
