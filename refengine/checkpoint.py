"""A model's files, whatever their format, behind one interface. Floor 3."""
from __future__ import annotations

import abc
import hashlib

import numpy as np

from refengine.config import ModelConfig
from refengine.tokenizer import Tokenizer


class Checkpoint(abc.ABC):
    """Configuration, weights under their Hugging Face names, tokenizer."""

    source: str
    config: ModelConfig

    @abc.abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter in the files."""

    @abc.abstractmethod
    def raw(self, name: str) -> np.ndarray:
        """A parameter's bytes as stored, mapped where possible."""

    @abc.abstractmethod
    def tensor(self, name: str, rows=slice(None)) -> np.ndarray:
        """A parameter, or some of its rows (slice or ids), as float32."""

    @abc.abstractmethod
    def _tokenizer(self) -> Tokenizer:
        """The tokenizer of the files, whatever model it is of."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer with template and stop ids. Raises TokenizerError, also when it is certainly another model's."""
        tokenizer = self._tokenizer()
        tokenizer.check_fits(self.config.vocab, f"the model of {self.source}")
        return tokenizer

    def fingerprint(self) -> str:
        """SHA-256 over the configuration and every stored parameter: reads all of the file."""
        hybrid = repr((self.config.rotated, self.config.delta)) if self.config.delta else ""
        digest = hashlib.sha256(f"{self.config!r}{hybrid}".encode())
        for name in sorted(self.shapes()):
            digest.update(f"{name}{self.shapes()[name]}".encode())
            digest.update(np.ascontiguousarray(self.raw(name)).view(np.uint8))
        return digest.hexdigest()
