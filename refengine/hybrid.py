"""The other model: one forward pass for Qwen3.5, gated delta nets between layers of gated attention. Floor 4.

T new tokens, S = offset + T, H query heads, N kv heads, D head size, R of it rotated, E hidden, F mlp, V vocabulary.
Of a delta net: C channels of the convolution, Hk key heads, Hv value heads, Dk and Dv their sizes.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from refengine.errors import NonFiniteError
from refengine.recurrent import RecurrentCache, State
from refengine.weights import DeltaLayer, Layer

Tap = Callable[[str, np.ndarray], np.ndarray]


def forward(model: Any, cache: RecurrentCache, tokens: np.ndarray, *, every: bool = False,
            tap: Tap = lambda name, x: x) -> np.ndarray:
    """Logits of the last of T tokens that follow the cache's, (1, V), or with ``every`` of all of them, (T, V).

    ``model`` is a `refengine.model.Model`. Writes their K/V above the offset and the states after them, and does NOT commit.
    Raises NonFiniteError.
    """
    op, c, w = model.op, model.config, model.weights
    cache.reserve(len(tokens))
    x = tap("embed", w.embed(tokens))                                             # (T, E)
    for i, layer in enumerate(w.layers):
        at = f"layers.{i}."
        h = tap(at + "attn_norm", op.rms_norm(x, layer.attn_norm, c.rms_norm_eps))        # (T, E)
        mix = delta_net if isinstance(layer, DeltaLayer) else gated_attention
        heads = tap(at + "heads", mix(model, cache, i, layer, h, tap))            # (T, H * D or Hv * Dv)
        x = tap(at + "attn_residual", x + tap(at + "o", op.linear(heads, layer.o)))       # (T, E)
        h = tap(at + "mlp_norm", op.rms_norm(x, layer.mlp_norm, c.rms_norm_eps))  # (T, E)
        h = tap(at + "act", op.swiglu(tap(at + "gate_up", op.linear(h, layer.gate_up))))  # (T, F)
        x = tap(at + "residual", x + tap(at + "down", op.linear(h, layer.down)))  # (T, E)
    if not np.isfinite(x).all():
        raise NonFiniteError("an activation is infinite or NaN")
    x = tap("norm", op.rms_norm(x if every else x[-1:], w.norm, c.rms_norm_eps))  # (T or 1, E)
    return tap("logits", op.linear(x, w.head))                                    # (T or 1, V)


def gated_attention(model: Any, cache: RecurrentCache, i: int, layer: Layer, h: np.ndarray, tap: Tap) -> np.ndarray:
    """Attention as in Qwen3, but only R of D dimensions turn, and a gate of each head's own scales what it found."""
    op, c, at = model.op, model.config, f"layers.{i}."
    start, T, H, N, D = cache.offset, len(h), c.heads, c.kv_heads, c.head_dim
    cos, sin = model.rope_rows(start, start + T)                                  # (T, R/2)
    qkv = op.linear(h, layer.qkv).reshape(T, 2 * H + 2 * N, D)                    # (T, 2H + 2N, D)
    pairs = qkv[:, :2 * H].reshape(T, H, 2, D)                                    # each head's query, and its gate
    q, gate = tap(at + "q", pairs[:, :, 0]), tap(at + "head_gate", pairs[:, :, 1])     # (T, H, D)
    k, v = tap(at + "k", qkv[:, 2 * H:2 * H + N]), tap(at + "v", qkv[:, 2 * H + N:])      # (T, N, D)
    q = tap(at + "q_norm", op.rms_norm(q, layer.q_norm, c.rms_norm_eps))          # (T, H, D)
    k = tap(at + "k_norm", op.rms_norm(k, layer.k_norm, c.rms_norm_eps))          # (T, N, D)
    q, k = (tap(at + name, np.concatenate([op.rotate(y[..., :c.rotary_dim], cos, sin), y[..., c.rotary_dim:]], axis=-1))
            for name, y in (("q_rope", q), ("k_rope", k)))
    cache.write(i, op.pack_kv(k, v))
    found = tap(at + "attended", op.attention(q, cache.read(i, T), start))        # (T, H * D)
    return op.times_sigmoid(found, gate.reshape(T, H * D))                        # (T, H * D)


def delta_net(model: Any, cache: RecurrentCache, i: int, layer: DeltaLayer, h: np.ndarray, tap: Tap) -> np.ndarray:
    """A short convolution, then the delta rule over the state, then a norm of each head and a gate."""
    op, c, d, at = model.op, model.config, model.config.delta, f"layers.{i}."
    T, keys, values = len(h), d.key_heads * d.key_dim, d.value_heads * d.value_dim
    before = cache.state(i)
    ends = np.cumsum([2 * keys + values, values, d.value_heads])
    mixed, z, b, a = np.split(op.linear(h, layer.inputs), ends, axis=-1)          # (T, C), (T, Hv * Dv), (T, Hv) twice
    mixed, conv = op.conv(tap(at + "mixed", mixed), before.conv, layer.conv)      # (T, C)
    q, k, v = np.split(tap(at + "conv", mixed), [keys, 2 * keys], axis=-1)
    beta, decay = op.gates(b, a, layer.gates)                                     # (T, Hv)
    out, memory = op.delta_rule(q.reshape(T, d.key_heads, d.key_dim), k.reshape(T, d.key_heads, d.key_dim),
                                v.reshape(T, d.value_heads, d.value_dim), tap(at + "beta", beta), tap(at + "decay", decay),
                                before.memory)                                    # (T, Hv, Dv)
    cache.write_state(i, State(conv, memory), T)
    out = op.rms_norm(tap(at + "recalled", out), layer.head_norm, c.rms_norm_eps) # (T, Hv, Dv)
    return op.times_silu(out.reshape(T, values), tap(at + "z", z))                # (T, Hv * Dv)
