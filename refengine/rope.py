"""Rotary frequencies in fixed point, for every rope type we know. Floor 2.

Computed with the decimal module (its ln and exp are correctly rounded), so that no libm can show in a result.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np

TYPES = ("default", "linear", "llama3", "yarn")
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")


@dataclass(frozen=True)
class Rope:
    """What rotates queries and keys. The scaling fields have the names that config.json gives them."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0                     # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0                          # yarn (Peng et al. 2023)
    beta_slow: float = 1.0
    attention_factor: float = 1.0                    # multiplies cos and sin
    truncate: bool = True
    divisors: tuple[float, ...] = ()                 # GGUF's rope_freqs: one divisor a pair of dimensions

    def turns(self, head_dim: int) -> np.ndarray:
        """Turns a position for each pair of dimensions, (D/2, 2) uint64: units of 2^-64, and of 2^-96 below them."""
        with localcontext(prec=50):
            frequency = getattr(self, f"_{self.type}")(self._plain(head_dim))
            for i, divisor in enumerate(self.divisors):
                frequency[i] /= Decimal(divisor)
            fixed = [int((f / (2 * _PI) * 2**96).to_integral_value()) for f in frequency]
        return np.array([(f >> 32, f & 0xFFFFFFFF) for f in fixed], np.uint64)

    def _plain(self, dim: int) -> list[Decimal]:
        log_theta = Decimal(self.theta).ln()
        return [(-log_theta * 2 * i / dim).exp() for i in range(dim // 2)]

    def _default(self, frequency: list[Decimal]) -> list[Decimal]:
        return frequency

    def _linear(self, frequency: list[Decimal]) -> list[Decimal]:
        return [f / Decimal(self.factor) for f in frequency]

    def _llama3(self, frequency: list[Decimal]) -> list[Decimal]:
        """Slow pairs are slowed by ``factor``, fast ones kept, those between blended (Llama 3.1)."""
        low, high, factor = Decimal(self.low_freq_factor), Decimal(self.high_freq_factor), Decimal(self.factor)
        scaled = []
        for f in frequency:
            turns = Decimal(self.original_max_position_embeddings) * f / (2 * _PI)  # in the original context
            keep = min(Decimal(1), max(Decimal(0), (turns - low) / (high - low)))
            scaled.append((1 - keep) * f / factor + keep * f)
        return scaled

    def _yarn(self, frequency: list[Decimal]) -> list[Decimal]:
        """Pairs that turn often in the original context are kept, rare ones slowed, a linear ramp between."""
        half, log_theta = len(frequency), Decimal(self.theta).ln()

        def pair(rotations: float) -> Decimal:
            """The (fractional) pair that makes so many rotations in the original context."""
            return half * (Decimal(self.original_max_position_embeddings) / (Decimal(rotations) * 2 * _PI)).ln() / log_theta

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = Decimal(math.floor(low)), Decimal(math.ceil(high))
        low, high = max(low, Decimal(0)), min(high, Decimal(2 * half - 1))
        if low == high:
            high += Decimal("0.001")
        scaled = []
        for i, f in enumerate(frequency):
            slow = min(Decimal(1), max(Decimal(0), (i - low) / (high - low)))
            scaled.append(slow * f / Decimal(self.factor) + (1 - slow) * f)
        return scaled


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What multiplies cos and sin when the configuration does not say: 0.1 ln(factor) + 1, or a ratio of two such."""
    with localcontext(prec=50):
        def scale(m: float) -> Decimal:
            return Decimal("0.1") * Decimal(m) * Decimal(factor).ln() + 1 if factor > 1 else Decimal(1)

        return float(scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1))
