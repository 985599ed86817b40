"""The exact set: order-free reductions, and between them only operations that IEEE 754 rounds correctly.

Activations between operations are float32; each operation ends with one rounding to float32.
"""
import numpy as np

from refkernels.exact.attention import KV, MAX_CONTEXT, attention, kv_fields, pack_kv, unpack_kv
from refkernels.exact.delta import Gates, check_delta, conv, delta_rule, gates, pack_conv, pack_gates
from refkernels.exact.delta import times_sigmoid, times_silu
from refkernels.exact.mlp import Linear, linear, pack_linear, swiglu
from refkernels.exact.norm import pack_norm, rms_norm
from refkernels.exact.pattern import attention_pattern, softmax, weighted_values
from refkernels.exact.rope import rope_table, rotate
from refkernels.exact.sampling import argmax, token_weights

NAME = "exact"
DTYPE = np.float32  # of activations

__all__ = ["DTYPE", "Gates", "KV", "MAX_CONTEXT", "NAME", "Linear", "argmax", "attention", "attention_pattern", "check_delta", "conv",
           "delta_rule", "gates", "kv_fields", "linear", "pack_conv", "pack_gates", "pack_kv", "pack_linear", "pack_norm", "rms_norm",
           "rope_table", "rotate", "softmax", "swiglu", "times_sigmoid", "times_silu", "token_weights", "unpack_kv",
           "weighted_values"]
