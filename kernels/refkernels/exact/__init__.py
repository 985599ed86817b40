"""The exact set: order-free reductions, and between them only operations that IEEE 754 rounds correctly.

Activations between operations are float32; each operation ends with one rounding to float32.
"""
import numpy as np

from refkernels.exact.attention import KV, MAX_CONTEXT, attention, kv_fields, pack_kv
from refkernels.exact.mlp import Linear, linear, pack_linear, swiglu
from refkernels.exact.norm import pack_norm, rms_norm
from refkernels.exact.rope import rope_table, rotate
from refkernels.exact.sampling import argmax, token_weights

NAME = "exact"
DTYPE = np.float32  # of activations

__all__ = ["DTYPE", "KV", "MAX_CONTEXT", "NAME", "Linear", "argmax", "attention", "kv_fields", "linear", "pack_kv",
           "pack_linear", "pack_norm", "rms_norm", "rope_table", "rotate", "swiglu", "token_weights"]
