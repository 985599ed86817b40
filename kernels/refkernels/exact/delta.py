"""Gated delta net (Yang, Kautz and Hatamizadeh 2024), as Qwen3.5 uses it: a state instead of a cache of keys and values.

The recurrence goes token by token in a fixed order, its reductions are exact, and the state is rounded to float32 after
every token. So a state is a function of the tokens alone: where a chunk ends, or a rewind restarts, cannot show.
C channels, W window of the convolution, Hk key heads, Hv value heads, Dk and Dv their sizes.
"""
from typing import NamedTuple

import numpy as np

from refkernels.exact.elementary import LOG2E, exp2, log1p
from refkernels.exact.reduce import BITS, bit_budget, log2_ceil, matmul, row_sum, snap

EPS = 1e-6  # of the unit length of queries and keys; fixed in the architecture
_ONE, _HUGE, _ZERO = np.array(1.0, np.float32), np.array(126.0, np.float32), np.array(0.0)


class Gates(NamedTuple):
    """What turns a head's input into its decay. rate: (Hv,), bias: (Hv,) float32."""

    rate: np.ndarray
    bias: np.ndarray


def pack_gates(a_log: np.ndarray, dt_bias: np.ndarray) -> Gates:
    """(Hv,) float32 twice. The rate is exp(a_log), at most 2^126: a decay is long 0 there."""
    return Gates(exp2(np.minimum(a_log.astype(np.float32) * LOG2E, _HUGE)), dt_bias.astype(np.float32))


def pack_conv(weight: np.ndarray) -> np.ndarray:
    """The convolution's weights as the set wants them. (C, 1, W) float32 -> (W, C) float64."""
    return np.array(weight[:, 0].T, np.float64, order="C")


def check_delta(key_dim: int, value_dim: int) -> None:
    """Raises BoundError when heads are too large for exact sums."""
    _bits(key_dim)
    _bits(value_dim)


def conv(x: np.ndarray, before: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """silu of a causal convolution of each channel. (T, C), the inputs before (W - 1, C) -> (T, C), the next ``before``.

    The few products of an output are added one after the other, elementwise in float64: their order is fixed.
    """
    inputs = np.concatenate([before, x])                      # (W - 1 + T, C)
    y = inputs[:len(x)] * weight[0]                           # (T, C) float64
    for j in range(1, len(weight)):
        y += inputs[j:j + len(x)] * weight[j]
    y = (y + _ZERO).astype(np.float32)
    return times_silu(_ONE, y), inputs[len(x):].copy()


def gates(b: np.ndarray, a: np.ndarray, packed: Gates) -> tuple[np.ndarray, np.ndarray]:
    """What of a token is written, sigmoid(b), and what of the state stays, exp(-rate softplus(a + bias)). (T, Hv)."""
    a = a + packed.bias
    softplus = np.maximum(a, np.array(0.0, np.float32)) + log1p(exp2(-np.abs(a) * LOG2E))
    return times_sigmoid(_ONE, b), exp2(-(packed.rate * softplus) * LOG2E)


def delta_rule(q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, decay: np.ndarray,
               state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read and write an associative memory token by token: what a key recalls is replaced by ``beta`` of the value.

    q, k: (T, Hk, Dk), made unit length here; v: (T, Hv, Dv); beta, decay: (T, Hv); state: (Hv, Dv, Dk) float32.
    -> (T, Hv, Dv) float32, the state after the last token. ``state`` itself is not changed.
    """
    t, groups, d = k.shape
    bits, repeats = _bits(d), v.shape[1] // groups
    q = np.repeat(_unit(q) * np.array(1 / np.sqrt(d), np.float32), repeats, axis=1)  # (T, Hv, Dk)
    k = np.repeat(_unit(k), repeats, axis=1)                  # (T, Hv, Dk)
    q_grid, k_grid = snap(q, bits)[..., None], snap(k, bits)[..., None]             # (T, Hv, Dk, 1)
    out = np.empty(v.shape, np.float32)                       # (T, Hv, Dv)
    for i in range(t):
        state = state * decay[i][:, None, None]               # (Hv, Dv, Dk)
        recalled = matmul(snap(state, bits), k_grid[i])[..., 0] + _ZERO             # (Hv, Dv) float64
        written = ((v[i] - recalled) * beta[i][:, None]).astype(np.float32)         # (Hv, Dv)
        state = state + written[..., None] * k[i][:, None]    # (Hv, Dv, Dk)
        out[i] = matmul(snap(state, bits), q_grid[i])[..., 0] + _ZERO
    return out, state


def times_silu(x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """x * silu(gate), float32."""
    return x * (gate / (exp2(np.minimum(-gate * LOG2E, _HUGE)) + _ONE))


def times_sigmoid(x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """x * sigmoid(gate), float32."""
    return x / (exp2(np.minimum(-gate * LOG2E, _HUGE)) + _ONE)


def _unit(x: np.ndarray) -> np.ndarray:
    """x over its length. (..., D) float32 -> float32."""
    y = snap(x, _bits(x.shape[-1]))                           # (..., D)
    y *= y
    r = row_sum(y)                                            # (..., 1)
    r += EPS
    return (x / np.sqrt(r)).astype(np.float32)


def _bits(length: int) -> int:
    half = (BITS - log2_ceil(length)) // 2
    return bit_budget(length, half, half, 12, "delta rule")
