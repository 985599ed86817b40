"""The native set in float64: the same code, fed with float64 weights and activations."""
from functools import partial

import numpy as np

from refkernels import native
from refkernels.native import KV, MAX_CONTEXT, Linear, argmax, attention, linear, pack_kv, rms_norm, rotate, swiglu
from refkernels.native import token_weights

NAME = "native64"
DTYPE = np.float64

kv_fields = partial(native.kv_fields, dtype=DTYPE)
pack_linear = partial(native.pack_linear, dtype=DTYPE)
pack_norm = partial(native.pack_norm, dtype=DTYPE)
rope_table = partial(native.rope_table, dtype=DTYPE)

__all__ = ["DTYPE", "KV", "MAX_CONTEXT", "NAME", "Linear", "argmax", "attention", "kv_fields", "linear", "pack_kv",
           "pack_linear", "pack_norm", "rms_norm", "rope_table", "rotate", "swiglu", "token_weights"]
