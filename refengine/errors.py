"""The errors that refengine raises on purpose. One root; each says what was wrong with what, and what to do. Floor 1."""


class RefengineError(Exception):
    """Root of every error of this package."""


class ConfigError(RefengineError, ValueError):
    """config.json (or GGUF metadata) is missing a key, contradicts itself, or asks for what we do not compute."""


class CheckpointError(RefengineError):
    """A checkpoint's files are missing, broken, or do not hold what the configuration says."""


class TokenizerError(RefengineError, ValueError):
    """A tokenizer or chat template cannot be built or applied."""


class CapacityError(RefengineError):
    """More tokens than the cache can hold. Nothing was changed."""

    def __init__(self, used: int, needed: int, capacity: int):
        super().__init__(f"{needed} more tokens do not fit: {used} of {capacity} are used. "
                         f"Trim or reset the cache, or load the engine with capacity={used + needed} or more")
        self.used, self.needed, self.capacity = used, needed, capacity


class FeedError(RefengineError, ValueError):
    """The tokens given to an engine do not fit its feed contract. Nothing was changed."""


class StaleGenerationError(RefengineError, RuntimeError):
    """A generation was resumed after its engine had been used for something else."""


class NonFiniteError(RefengineError, ArithmeticError):
    """An activation became infinite or NaN. Names the first operation, layer and position."""


class InspectError(RefengineError, ValueError):
    """An activation that the model does not have, a patch that does not fit, a trace or record that cannot be used."""
