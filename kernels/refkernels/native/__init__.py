"""The native set: the same functions in plain float32 on the BLAS, as other engines compute.

Its results depend, in the last bits, on how many rows are computed together, on the BLAS and on the CPU. It is the
control of our proofs: what holds for ``exact`` must be able to fail here.
"""
import numpy as np

from refkernels.native.attention import KV, MAX_CONTEXT, attention, kv_fields, pack_kv, unpack_kv
from refkernels.native.delta import Gates, check_delta, conv, delta_rule, gates, pack_conv, pack_gates
from refkernels.native.delta import times_sigmoid, times_silu
from refkernels.native.mlp import Linear, linear, pack_linear, swiglu
from refkernels.native.norm import pack_norm, rms_norm
from refkernels.native.pattern import attention_pattern, softmax, weighted_values
from refkernels.native.rope import rope_table, rotate
from refkernels.native.sampling import argmax, token_weights

NAME = "native"
DTYPE = np.float32  # of activations and weights

__all__ = ["DTYPE", "Gates", "KV", "MAX_CONTEXT", "NAME", "Linear", "argmax", "attention", "attention_pattern", "check_delta", "conv",
           "delta_rule", "gates", "kv_fields", "linear", "pack_conv", "pack_gates", "pack_kv", "pack_linear", "pack_norm", "rms_norm",
           "rope_table", "rotate", "softmax", "swiglu", "times_sigmoid", "times_silu", "token_weights", "unpack_kv",
           "weighted_values"]
