"""Models with one mistake, for the checkers to find. Floor 9."""
from dataclasses import replace

import numpy as np

from refengine.model import Model


def with_op(model, **kernels):
    """The model with some kernels replaced."""
    class Op:
        def __getattr__(self, name):
            return kernels.get(name) or getattr(model.op, name)
    return replace(model, op=Op())


def tiled(model):
    """Query head h looks at kv head h % N."""
    n, h = model.config.kv_heads, model.config.heads
    order = np.arange(h).reshape(n, h // n).T.ravel()

    def attention(q, runs, start):
        out = model.op.attention(np.ascontiguousarray(q[:, np.argsort(order)]), runs, start)
        return np.ascontiguousarray(out.reshape(len(q), h, -1)[:, order]).reshape(len(q), -1)
    return with_op(model, attention=attention)


def late_norm(model):
    """Keys are normalised after the rotation, not before it."""
    calls = iter(range(10**9))
    gains = [layer.k_norm for layer in model.weights.layers]

    def rotate(x, cos, sin):
        turned, call = model.op.rotate(x, cos, sin), next(calls)
        return turned if call % 2 == 0 else model.op.rms_norm(turned, gains[call // 2 % len(gains)], 1e-6)
    return with_op(model, rotate=rotate)


def late_keys(model):
    """Keys stand one position further than queries."""
    rows, calls = [], iter(range(10**9))

    class Shifted(Model):
        def rope_rows(self, start, stop):
            cos, sin = Model.rope_rows(self, start, stop + 1)
            rows[:] = cos[1:], sin[1:]
            return cos[:-1], sin[:-1]

    def rotate(x, cos, sin):
        return model.op.rotate(x, *((cos, sin) if next(calls) % 2 == 0 else rows))
    return Shifted(model.config, model.weights, with_op(model, rotate=rotate).op, model.checkpoint)
