"""The native set in float64: the same code, fed with float64 weights and activations."""
from functools import partial

import numpy as np

from refkernels import native
from refkernels.native import KV, MAX_CONTEXT, Gates, Linear, argmax, attention, attention_pattern, check_delta, conv, delta_rule
from refkernels.native import gates, linear, pack_kv, rms_norm, rotate, softmax, swiglu, times_sigmoid, times_silu, token_weights
from refkernels.native import unpack_kv, weighted_values

NAME = "native64"
DTYPE = np.float64

kv_fields = partial(native.kv_fields, dtype=DTYPE)
pack_conv = partial(native.pack_conv, dtype=DTYPE)
pack_gates = partial(native.pack_gates, dtype=DTYPE)
pack_linear = partial(native.pack_linear, dtype=DTYPE)
pack_norm = partial(native.pack_norm, dtype=DTYPE)
rope_table = partial(native.rope_table, dtype=DTYPE)

__all__ = native.__all__
