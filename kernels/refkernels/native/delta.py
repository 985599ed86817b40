"""Gated delta net (Yang, Kautz and Hatamizadeh 2024), as Qwen3.5 uses it. Shapes as in the exact set."""
from typing import NamedTuple

import numpy as np

EPS = 1e-6


class Gates(NamedTuple):
    """What turns a head's input into its decay. rate: (Hv,), bias: (Hv,)."""

    rate: np.ndarray
    bias: np.ndarray


def pack_gates(a_log: np.ndarray, dt_bias: np.ndarray, dtype=np.float32) -> Gates:
    """(Hv,) twice. The rate is exp(a_log)."""
    return Gates(np.exp(a_log.astype(dtype)), dt_bias.astype(dtype))


def pack_conv(weight: np.ndarray, dtype=np.float32) -> np.ndarray:
    """The convolution's weights as the set wants them. (C, 1, W) -> (W, C)."""
    return np.array(weight[:, 0].T, dtype, order="C")


def check_delta(key_dim: int, value_dim: int) -> None:
    """Any size will do."""


def conv(x: np.ndarray, before: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """silu of a causal convolution of each channel. (T, C), the inputs before (W - 1, C) -> (T, C), the next ``before``."""
    inputs = np.concatenate([before, x])                      # (W - 1 + T, C)
    y = inputs[:len(x)] * weight[0]                           # (T, C)
    for j in range(1, len(weight)):
        y += inputs[j:j + len(x)] * weight[j]
    return times_silu(x.dtype.type(1), y), inputs[len(x):].copy()


def gates(b: np.ndarray, a: np.ndarray, packed: Gates) -> tuple[np.ndarray, np.ndarray]:
    """What of a token is written, sigmoid(b), and what of the state stays, exp(-rate softplus(a + bias)). (T, Hv)."""
    a = a + packed.bias
    return times_sigmoid(b.dtype.type(1), b), np.exp(-packed.rate * (np.maximum(a, 0) + np.log1p(np.exp(-np.abs(a)))))


def delta_rule(q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, decay: np.ndarray,
               state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read and write an associative memory token by token: what a key recalls is replaced by ``beta`` of the value.

    q, k: (T, Hk, Dk), made unit length here; v: (T, Hv, Dv); beta, decay: (T, Hv); state: (Hv, Dv, Dk).
    -> (T, Hv, Dv), the state after the last token. ``state`` itself is not changed.
    """
    t, groups, d = k.shape
    repeats = v.shape[1] // groups
    q = np.repeat(_unit(q) * q.dtype.type(1 / d**0.5), repeats, axis=1)              # (T, Hv, Dk)
    k = np.repeat(_unit(k), repeats, axis=1)                  # (T, Hv, Dk)
    out = np.empty(v.shape, v.dtype)                          # (T, Hv, Dv)
    for i in range(t):
        state = state * decay[i][:, None, None]               # (Hv, Dv, Dk)
        written = (v[i] - (state @ k[i][..., None])[..., 0]) * beta[i][:, None]      # (Hv, Dv)
        state = state + written[..., None] * k[i][:, None]    # (Hv, Dv, Dk)
        out[i] = (state @ q[i][..., None])[..., 0]
    return out, state


def times_silu(x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """x * silu(gate)."""
    return x * gate * times_sigmoid(gate.dtype.type(1), gate)


def times_sigmoid(x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """x * sigmoid(gate)."""
    with np.errstate(over="ignore"):                          # exp(-gate) = inf: the gate is shut
        return x / (1 + np.exp(-gate))


def _unit(x: np.ndarray) -> np.ndarray:
    """x over its length. (..., D)."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + x.dtype.type(EPS))
