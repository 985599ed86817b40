"""From a checkpoint's tensors to the packed weights of a kernel set, one block of rows at a time. Floor 3."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from refengine.checkpoint import Checkpoint
from refengine.errors import CheckpointError
from refkernels import BoundError

_BLOCK = 2**19  # weights converted at once, by each worker


class Layer(NamedTuple):
    """Packed weights of one layer. q, k and v are one matrix, and so are gate and up: one product instead of several."""

    attn_norm: np.ndarray
    qkv: Any
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    o: Any
    mlp_norm: np.ndarray
    gate_up: Any
    down: Any


class DeltaLayer(NamedTuple):
    """Packed weights of a layer with a gated delta net. Its q, k, v, z, b and a are one matrix."""

    attn_norm: np.ndarray
    inputs: Any
    conv: np.ndarray
    gates: Any
    head_norm: np.ndarray
    o: Any
    mlp_norm: np.ndarray
    gate_up: Any
    down: Any


class Weights(NamedTuple):
    """embed: (T,) ids -> (T, E) activations; layers; the last norm; the head."""

    embed: Callable[[np.ndarray], np.ndarray]
    layers: tuple[Layer | DeltaLayer, ...]
    norm: np.ndarray
    head: Any


def load_weights(checkpoint: Checkpoint, op: ModuleType) -> Weights:
    """Pack every parameter for a kernel set, each exactly once.

    Raises CheckpointError: missing, unexpected or misshapen tensors, weights that are not finite, a row too long for
    exact sums. Nothing is read before names and shapes fit.
    """
    config = checkpoint.config
    check_names_and_shapes(checkpoint)
    if config.tied and "lm_head.weight" in checkpoint.shapes():
        _check_same(checkpoint, "lm_head.weight", "model.embed_tokens.weight")
    if not config.tied:  # a tied embedding is looked at as the head
        for _ in _row_blocks(checkpoint, "model.embed_tokens.weight"):
            pass
    pack = _Packer(checkpoint, op)

    def layer(i: int) -> Layer | DeltaLayer:
        at = f"model.layers.{i}"
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        if config.delta and config.delta.layers[i]:
            net = f"{at}.linear_attn"
            return DeltaLayer(attn_norm=pack.norm(f"{at}.input_layernorm"),
                              inputs=pack.linear(*(f"{net}.in_proj_{part}" for part in ("qkv", "z", "b", "a"))),
                              conv=op.pack_conv(_vector(checkpoint, f"{net}.conv1d.weight")),
                              gates=op.pack_gates(_vector(checkpoint, f"{net}.A_log"),
                                                  _vector(checkpoint, f"{net}.dt_bias")),
                              head_norm=pack.norm(f"{net}.norm", centre=0),
                              o=pack.linear(f"{net}.out_proj"),
                              mlp_norm=pack.norm(f"{at}.post_attention_layernorm"),
                              gate_up=pack.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                              down=pack.linear(f"{mlp}.down_proj"))
        return Layer(attn_norm=pack.norm(f"{at}.input_layernorm"),
                     qkv=pack.linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj", bias=config.qkv_bias),
                     q_norm=pack.norm(f"{attn}.q_norm") if config.qk_norm else None,
                     k_norm=pack.norm(f"{attn}.k_norm") if config.qk_norm else None,
                     o=pack.linear(f"{attn}.o_proj", bias=config.o_bias),
                     mlp_norm=pack.norm(f"{at}.post_attention_layernorm"),
                     gate_up=pack.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias),
                     down=pack.linear(f"{mlp}.down_proj", bias=config.mlp_bias))

    def embed(ids: np.ndarray) -> np.ndarray:
        return checkpoint.tensor("model.embed_tokens.weight", ids).astype(op.DTYPE, copy=False)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # NumPy converts outside the interpreter lock
        head = pool.submit(pack.linear, "model.embed_tokens" if config.tied else "lm_head")
        layers = tuple(pool.map(layer, range(config.layers)))
        return Weights(embed, layers, pack.norm("model.norm"), head.result())


def check_names_and_shapes(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError listing what is missing, unexpected or of another shape than the configuration says."""
    want, have = checkpoint.config.tensors(), checkpoint.shapes()
    allowed = {"lm_head.weight"} if checkpoint.config.tied else set()
    missing = sorted(set(want) - set(have))
    unexpected = sorted(name for name in set(have) - set(want) - allowed if not name.endswith(".rotary_emb.inv_freq"))
    wrong = [f"{name} is {have[name]}, should be {shape}" for name, shape in want.items()
             if name in have and have[name] != shape]
    if missing == ["lm_head.weight"]:
        raise CheckpointError(f"{checkpoint.source}: lm_head.weight is missing, and tie_word_embeddings is not true")
    problems = [f"{label}: {', '.join(names[:6])}{f' and {len(names) - 6} more' if len(names) > 6 else ''}"
                for label, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong)) if names]
    if problems:
        raise CheckpointError(f"{checkpoint.source}: the tensors do not fit the configuration. {'; '.join(problems)}")


def _row_blocks(checkpoint: Checkpoint, name: str) -> Iterator[np.ndarray]:
    """A matrix as float32 blocks of rows. Raises CheckpointError naming the first row that is not finite."""
    rows, columns = checkpoint.shapes()[name]
    step = max(1, _BLOCK // columns)
    for row in range(0, rows, step):
        block = checkpoint.tensor(name, slice(row, row + step))
        finite = np.isfinite(block)
        if not finite.all():
            row += int(np.flatnonzero(~finite.all(axis=1))[0])
            raise CheckpointError(f"{checkpoint.source}: {name}: row {row} holds an infinity or a NaN")
        yield block


def _vector(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A gain or a bias as float32. Raises CheckpointError when it is not finite."""
    vector = checkpoint.tensor(name)
    if not np.isfinite(vector).all():
        raise CheckpointError(f"{checkpoint.source}: {name} holds an infinity or a NaN")
    return vector


def _check_same(checkpoint: Checkpoint, a: str, b: str) -> None:
    """Raise unless two matrices hold the same values."""
    same = checkpoint.shapes()[a] == checkpoint.shapes()[b] and all(
        np.array_equal(x, y) for x, y in zip(_row_blocks(checkpoint, a), _row_blocks(checkpoint, b)))
    if not same:
        raise CheckpointError(f"{checkpoint.source}: tie_word_embeddings is true, but {a} differs from {b}")


class _Packer:
    """Reads parameters by their module name and packs them; errors name the parameter."""

    def __init__(self, checkpoint: Checkpoint, op: ModuleType):
        self.checkpoint, self.op = checkpoint, op

    def norm(self, module: str, centre: float | None = None) -> np.ndarray:
        """A gain, stored as its distance from ``centre`` (the family's: 0, or 1 in Qwen3.5)."""
        centre = self.checkpoint.config.gain_centre if centre is None else centre
        return self._named(module, lambda: self.op.pack_norm(
            _vector(self.checkpoint, f"{module}.weight").astype(np.float64) + centre))

    def linear(self, *modules: str, bias: bool = False) -> Any:
        """One packed matrix from the rows of several."""
        shapes = [self.checkpoint.shapes()[f"{module}.weight"] for module in modules]
        blocks = (block for module in modules for block in _row_blocks(self.checkpoint, f"{module}.weight"))
        values = np.concatenate([_vector(self.checkpoint, f"{module}.bias") for module in modules]) if bias else None
        shape = (sum(rows for rows, _ in shapes), shapes[0][1])
        return self._named(", ".join(modules), lambda: self.op.pack_linear(shape, blocks, values))

    def _named(self, name: str, pack: Callable[[], Any]) -> Any:
        try:
            return pack()
        except BoundError as error:
            raise CheckpointError(f"{self.checkpoint.source}: {name}: {error}") from error
