"""The activations of a model: names, shapes, and where transformers has them."""
from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from refengine.config import ModelConfig
from refengine.errors import InspectError


class Activation(NamedTuple):
    """One of them.

    shape: letters of the legend: T new tokens, S = offset + T, H query heads, N kv heads, D head size, E hidden, F mlp,
    V vocabulary; of a delta net C channels of the convolution, Hv value heads, Dv their size.
    module: transformers' name of a module; point: what it is there: its "output" or "input", the attention "weights" that it
    returns beside its output (eager), the input of its "softmax", its "query" or "key" after the rotation; in a hybrid also
    the "queries" or "gates" of a joint output, what was "attended" before the gate, and of a delta net what goes into its
    rule: the convolution's output "conv", "beta", and "decay" (transformers has its logarithm).
    """

    name: str
    shape: tuple[str, ...]
    module: str
    point: str = "output"

    def sizes(self, config: ModelConfig, count: int, offset: int = 0) -> tuple[int, ...]:
        """The shape in numbers, for ``count`` tokens at ``offset``."""
        letters = {"T": count, "S": offset + count, "H": config.heads, "N": config.kv_heads, "D": config.head_dim,
                   "H*D": config.heads * config.head_dim, "E": config.hidden, "F": config.mlp, "V": config.vocab}
        if d := config.delta:
            letters |= {"C": d.channels, "Hv": d.value_heads, "Dv": d.value_dim, "Hv*Dv": d.value_heads * d.value_dim}
        return tuple(letters[letter] for letter in self.shape)


_ATTENTION = """
attn_norm      T E    input_layernorm           output
q              T H D  self_attn.q_proj          output
k              T N D  self_attn.k_proj          output
v              T N D  self_attn.v_proj          output
q_norm         T H D  self_attn.q_norm          output
k_norm         T N D  self_attn.k_norm          output
q_rope         T H D  self_attn                 query
k_rope         T N D  self_attn                 key
scores         H T S  self_attn                 softmax
weights        H T S  self_attn                 weights
heads          T H*D  self_attn.o_proj          input
o              T E    self_attn.o_proj          output
"""
_GATED_ATTENTION = """
attn_norm      T E    input_layernorm           output
q              T H D  self_attn.q_proj          queries
head_gate      T H D  self_attn.q_proj          gates
k              T N D  self_attn.k_proj          output
v              T N D  self_attn.v_proj          output
q_norm         T H D  self_attn.q_norm          output
k_norm         T N D  self_attn.k_norm          output
q_rope         T H D  self_attn                 query
k_rope         T N D  self_attn                 key
scores         H T S  self_attn                 softmax
weights        H T S  self_attn                 weights
attended       T H*D  self_attn                 attended
heads          T H*D  self_attn.o_proj          input
o              T E    self_attn.o_proj          output
"""
_DELTA_NET = """
attn_norm      T E      input_layernorm          output
mixed          T C      linear_attn.in_proj_qkv  output
conv           T C      linear_attn              conv
beta           T Hv     linear_attn              beta
decay          T Hv     linear_attn              decay
recalled       T Hv Dv  linear_attn.norm         input
z              T Hv*Dv  linear_attn.in_proj_z    output
heads          T Hv*Dv  linear_attn.out_proj     input
o              T E      linear_attn.out_proj     output
"""
_MLP = """
attn_residual  T E    post_attention_layernorm  input
mlp_norm       T E    post_attention_layernorm  output
gate           T F    mlp.gate_proj             output
up             T F    mlp.up_proj               output
act            T F    mlp.down_proj             input
down           T E    mlp.down_proj             output
"""


def activations(config: ModelConfig) -> dict[str, Activation]:
    """All activations of a model by name, in the order of its forward pass."""
    found = [Activation("embed", ("T", "E"), "model.embed_tokens")]
    for i in range(config.layers):
        mix = _ATTENTION if config.delta is None else _DELTA_NET if config.delta.layers[i] else _GATED_ATTENTION
        for line in (mix + _MLP).split("\n"):
            if line:
                name, *shape, module, point = line.split()
                if config.qk_norm or name not in ("q_norm", "k_norm"):
                    found.append(Activation(f"layers.{i}.{name}", tuple(shape), f"model.layers.{i}.{module}", point))
        found.append(Activation(f"layers.{i}.residual", ("T", "E"), f"model.layers.{i}"))
    found += [Activation("norm", ("T", "E"), "model.norm"), Activation("logits", ("T", "V"), "lm_head")]
    return {activation.name: activation for activation in found}


def select(patterns: str | Iterable[str] | None, known: Iterable[str]) -> set[str]:
    """The names that match any of some patterns, as of files: "layers.*.residual". None: all.

    Raises InspectError when a pattern matches none.
    """
    known = list(known)
    if patterns is None:
        return set(known)
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = [name for name in known if fnmatchcase(name, pattern)]
        if not found:
            raise unknown(pattern, known)
        chosen.update(found)
    return chosen


def unknown(name: str, known: Iterable[str]) -> InspectError:
    """The error for a name that is none, with those that are like it."""
    close = difflib.get_close_matches(name, list(known), 3)
    return InspectError(f"no activation is called {name!r}" + (f"; there are {', '.join(close)}" if close else ""))
