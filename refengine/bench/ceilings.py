"""What this machine can do at best, measured beside everything else: a time means little without them."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from refengine.config import ModelConfig
from refengine.machine import describe


def measure_ceilings(*, rounds: int = 5, megabytes: int = 512) -> dict[str, float | str]:
    """Matrix products in GFLOP/s (512 x 1,024 x 3,072, as in a layer) and the memory's reading speed in GB/s."""
    single = np.ones((512, 1024), np.float32), np.ones((1024, 3072), np.float32)
    double = tuple(a.astype(np.float64) for a in single)
    flops = 2 * 512 * 1024 * 3072
    matrix = np.ones((megabytes * 2**17 // 1024, 1024))       # the BLAS reads it on all its threads
    row = np.ones((1, 1024))
    return {"sgemm": round(flops / _median(lambda: single[0] @ single[1], rounds) / 1e9, 1),
            "dgemm": round(flops / _median(lambda: double[0] @ double[1], rounds) / 1e9, 1),
            "read": round(matrix.nbytes / _median(lambda: row @ matrix.T, rounds) / 1e9, 2),
            "core": describe().get("blas_core", "")}


def _median(run: Callable[[], object], rounds: int) -> float:
    run()                                                     # pages touched, threads started
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def linear_weights(config: ModelConfig) -> int:
    """Weights that every token of a prefill is multiplied with: all matrices but the embedding and the head."""
    return sum(rows * columns for name, (rows, columns) in _matrices(config) if name.startswith("model.layers."))


def attention_layers(config: ModelConfig) -> int:
    return config.layers - sum(config.delta.layers) if config.delta else config.layers


def prefill_flops(config: ModelConfig, start: int, count: int) -> float:
    """Of ``count`` tokens after ``start``: the layers' matrices, causal scores and values, one row of the head.

    Of gated delta nets three products a token: what a key recalls, what is written, what a query reads.
    """
    pairs = count * start + count * (count + 1) / 2
    memory = config.delta.value_heads * config.delta.value_dim * config.delta.key_dim if config.delta else 0
    return (2 * linear_weights(config) * count + 4 * attention_layers(config) * config.heads * config.head_dim * pairs
            + 6 * (config.layers - attention_layers(config)) * memory * count + 2 * config.vocab * config.hidden)


def decode_bytes(config: ModelConfig, context: int, item: int) -> int:
    """Bytes that one token must read: the layers' matrices, the head, and K/V of the context. item: bytes a number."""
    kv = 2 * attention_layers(config) * config.kv_heads * config.head_dim * context
    return item * (linear_weights(config) + config.vocab * config.hidden + kv)


def _matrices(config: ModelConfig):
    return ((name, shape) for name, shape in config.tensors().items() if len(shape) == 2)
