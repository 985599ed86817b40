"""The native set in float64: the same code, fed with float64 weights and activations."""
from functools import partial

import numpy as np

from refkernels import native
from refkernels.native import KV, MAX_CONTEXT, Gates, Linear, argmax, attention, check_delta, conv, delta_rule, gates, linear
from refkernels.native import pack_kv, rms_norm, rotate, swiglu, times_sigmoid, times_silu, token_weights

NAME = "native64"
DTYPE = np.float64

kv_fields = partial(native.kv_fields, dtype=DTYPE)
pack_conv = partial(native.pack_conv, dtype=DTYPE)
pack_gates = partial(native.pack_gates, dtype=DTYPE)
pack_linear = partial(native.pack_linear, dtype=DTYPE)
pack_norm = partial(native.pack_norm, dtype=DTYPE)
rope_table = partial(native.rope_table, dtype=DTYPE)

__all__ = native.__all__
