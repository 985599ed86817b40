"""exp2, log1p and sin/cos from + - * and exponent bits: no libm, so the same bits on every machine."""
import numpy as np

# Constants are arrays without axes: NumPy takes those faster than scalars, which shows when a row is short.
LOG2E = np.array(1.4426950408889634, np.float32)
TINY = np.array(-126.0, np.float32)  # exp2 below this would be subnormal

# 2^f on [-1/2, 1/2], constant term 1, fitted for the smallest relative error (2e-9); highest power first.
_EXP2 = [np.array(c, np.float32) for c in (1.53533605e-4, 1.33988750e-3, 9.61843692e-3, 5.55033237e-2, 2.40226477e-1,
                                           6.93147182e-1, 1.0)]
# Taylor series, highest power first, in x^2; on |x| <= pi/4 the first omitted terms are below 5e-17.
_SIN = [-1 / 1307674368000, 1 / 6227020800, -1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1.0]
_COS = [1 / 20922789888000, -1 / 87178291200, 1 / 479001600, -1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -1 / 2, 1.0]
# 2 artanh(z) = log((1 + z) / (1 - z)) over z, highest power first, in z^2 <= 1/9; the first omitted term is below 1e-17.
_LOG = [2 / n for n in (33, 31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1)]
_RADIANS = 6.283185307179586 / 2.0**64  # of one unit in the last place of a 64-bit turn


def _polynomial(coefficients, x):
    p = x * coefficients[0]
    p += coefficients[1]
    for c in coefficients[2:]:
        p *= x
        p += c
    return p


def exp2(t: np.ndarray) -> np.ndarray:
    """2^t for float32 t <= 126; t is raised to -126 first. Relative error below 1.1e-7."""
    t = np.maximum(t, TINY)
    n = np.rint(t)
    t -= n
    p = _polynomial(_EXP2, t)
    bits = p.view(np.int32)  # multiply by 2^n: add n to the exponent field
    bits += n.astype(np.int32) << 23
    return p


def log1p(u: np.ndarray) -> np.ndarray:
    """log(1 + u) for float32 u in [0, 1]. Relative error below 1e-7."""
    z = u.astype(np.float64)
    z /= z + 2.0
    return (_polynomial(_LOG, z * z) * z).astype(np.float32)


def cos_sin_turns(turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of an angle given as uint64, 2^64 = one full turn. Float64, absolute error below 1e-15."""
    # Nearest quarter turn q, and the rest in [-1/8, 1/8) turn: exact, in integers.
    shifted = turns + np.uint64(1 << 61)
    q = (shifted >> np.uint64(62)).astype(np.int8)
    rest = (shifted & np.uint64((1 << 62) - 1)).astype(np.int64) - np.int64(1 << 61)
    x = rest.astype(np.float64) * _RADIANS
    xx = x * x
    sin, cos = _polynomial(_SIN, xx) * x, _polynomial(_COS, xx)
    odd = (q & 1).astype(bool)
    c, s = np.where(odd, sin, cos), np.where(odd, cos, sin)
    return np.where((q == 1) | (q == 2), -c, c), np.where(q >= 2, -s, s)
