"""refkernels: the arithmetic of refengine, as pure functions on arrays.

Two sets with the same function names:

- ``exact``: every reduction is a sum of integers below 2^53 held in float64, so it has no rounding and no order.
  A result is a pure function of (weights, tokens), whatever the chunking, thread count, BLAS or CPU.
- ``native``: plain float32 (``native64``: float64) on the BLAS. Fast, ordinary, and the control of our proofs.

No state, no configuration, no cache; NumPy is the only import. Floor 1.
"""
from importlib import import_module
from types import ModuleType

from refkernels.errors import BoundError, KernelError, NonFiniteError, ProbeError

SETS = ("exact", "native", "native64")


def arithmetic(name: str) -> ModuleType:
    """The kernel set of that name: ``"exact"``, ``"native"`` (float32) or ``"native64"`` (float64)."""
    if name not in SETS:
        raise ValueError(f"arithmetic {name!r} is not one of {', '.join(SETS)}")
    return import_module(f"refkernels.{name}")


__all__ = ["SETS", "BoundError", "KernelError", "NonFiniteError", "ProbeError", "arithmetic"]
