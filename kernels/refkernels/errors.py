"""What can go wrong inside a kernel. Floor 1."""


class KernelError(Exception):
    """Root of the errors of this package."""


class BoundError(KernelError, ValueError):
    """A reduction of this shape could pass 2^53, beyond which float64 no longer holds every integer."""


class NonFiniteError(KernelError, ArithmeticError):
    """A weight holds an infinity or a NaN. ``row`` is its first such row."""

    def __init__(self, row: int):
        super().__init__(f"row {row} holds an infinity or a NaN")
        self.row = row


class ProbeError(KernelError, RuntimeError):
    """This process does not do IEEE arithmetic as the exact set needs it."""
