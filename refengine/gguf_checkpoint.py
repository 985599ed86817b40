"""GGUF files through the `gguf` package: configuration, weights and tokenizer from one file. Floor 3."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from refengine.checkpoint import Checkpoint
from refengine.config import ModelConfig
from refengine.errors import CheckpointError, ConfigError, TokenizerError
from refengine.rope import Rope, yarn_attention_factor
from refengine.template import ChatTemplate
from refengine.tokenizer import Tokenizer

FAMILIES = ("qwen3", "qwen2", "llama")
RECURRENT = ("qwen35", "qwen35moe", "qwen3next")
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
                "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
                "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
                "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_INVERSE = {hf: ours for ours, hf in (_NAMES | _LAYER_NAMES).items()}
_QWEN2_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
                r"\s+(?!\S)|\s+")
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


class GGUFCheckpoint(Checkpoint):
    """One .gguf file of architecture llama, qwen2 or qwen3. Raises CheckpointError, ConfigError."""

    def __init__(self, path: Path):
        try:
            import gguf
        except ImportError:
            raise CheckpointError(f"{path}: reading GGUF needs the package gguf: pip install 'refengine[gguf]'") from None
        self._gguf, self.path, self.source = gguf, path, str(path)
        try:
            reader = gguf.GGUFReader(path)
            self._meta = reader.fields
            found = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # the package raises whatever NumPy and struct raise
            raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from error
        self._tensors = {_hf_name(name): tensor for name, tensor in found.items() if name != "rope_freqs.weight"}
        self.config = self._config(found.get("rope_freqs.weight"))

    def _get(self, key: str, default: Any = ...) -> Any:
        if key not in self._meta:
            if default is ...:
                raise ConfigError(f"{self.path}: {key} is missing")
            return default
        return self._meta[key].contents()

    def _config(self, rope_freqs) -> ModelConfig:
        family = self._get("general.architecture")
        if family not in FAMILIES:
            raise ConfigError(f"{self.path}: general.architecture {family!r} is not one of {', '.join(FAMILIES)}"
                              + "; models with recurrent layers are read from safetensors only" * (family in RECURRENT))

        def get(key: str, default: Any = ...) -> Any:
            return self._get(f"{family}.{key}", default)

        def count(key: str, default: Any = ...) -> int:
            value = get(key, default)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{self.path}: {family}.{key} is {value!r}, not a number from 1 up")
            return value

        for key in ("expert_count", "attention.sliding_window", "attention.scale", "attention.clamp_kqv", "logit_scale",
                    "residual_scale", "embedding_scale", "attn_logit_softcapping"):
            if get(key, 0):
                raise ConfigError(f"{self.path}: {family}.{key} is {get(key)!r}, which is another forward pass")
        hidden, heads = count("embedding_length"), count("attention.head_count")
        head_dim = count("attention.key_length", hidden // heads)
        if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
            raise ConfigError(f"{self.path}: key, value and rotary sizes of a head differ")
        if "model.embed_tokens.weight" not in self._tensors:
            raise CheckpointError(f"{self.path}: token_embd.weight is missing")
        stop = [self._get(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]

        def has(name: str) -> bool:  # GGUF does not say whether there are biases, it just has them
            return f"model.layers.0.{name}" in self._tensors

        return ModelConfig(
            family=family, hidden=hidden, layers=count("block_count"), heads=heads, kv_heads=count("attention.head_count_kv", heads),
            head_dim=head_dim, mlp=count("feed_forward_length"), vocab=self.shapes()["model.embed_tokens.weight"][0],
            # Written as float32: 1e-5 comes back as 9.99999975e-06. Its shortest float32 form is what was meant.
            rms_norm_eps=float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
            rope=self._rope(get, rope_freqs, head_dim), tied="lm_head.weight" not in self._tensors,
            qk_norm=has("self_attn.q_norm.weight"), qkv_bias=has("self_attn.q_proj.bias"), o_bias=has("self_attn.o_proj.bias"),
            mlp_bias=has("mlp.gate_proj.bias"), max_positions=count("context_length"),
            stop_ids=tuple(dict.fromkeys(i for i in stop if i is not None)))

    def _rope(self, get, rope_freqs, head_dim: int) -> Rope:
        theta, kind = float(get("rope.freq_base")), get("rope.scaling.type", "none")
        divisors = () if rope_freqs is None else tuple(float(d) for d in rope_freqs.data.ravel())
        if divisors and len(divisors) != head_dim // 2:
            raise CheckpointError(f"{self.path}: rope_freqs.weight has {len(divisors)} divisors, should have {head_dim // 2}")
        if kind == "none":
            return Rope(theta, divisors=divisors)
        factor = float(get("rope.scaling.factor"))
        for key in ("yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
            if get(f"rope.scaling.{key}", None) is not None:
                raise ConfigError(f"{self.path}: rope.scaling.{key} is set, and its effect is not computed here")
        if kind == "linear":
            return Rope(theta, "linear", factor=factor, divisors=divisors)
        if kind == "yarn":
            return Rope(theta, "yarn", factor=factor, divisors=divisors,
                        original_max_position_embeddings=get("rope.scaling.original_context_length"),
                        beta_fast=float(get("rope.scaling.yarn_beta_fast", 32.0)),
                        beta_slow=float(get("rope.scaling.yarn_beta_slow", 1.0)),
                        attention_factor=float(get("rope.scaling.attn_factor", 1.0)) * yarn_attention_factor(factor))
        raise ConfigError(f"{self.path}: rope.scaling.type {kind!r} is not one of none, linear, yarn")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def types(self) -> set[Any]:
        """gguf.GGMLQuantizationType of every tensor."""
        return {tensor.tensor_type for tensor in self._tensors.values()}

    def raw(self, name: str) -> np.ndarray:
        return self._tensors[name].data

    def tensor(self, name: str, rows=slice(None)) -> np.ndarray:
        stored, heads = self._tensors[name], self._interleaved_heads(name)
        if heads:
            rows = _half_split_rows(stored.data.shape[0], heads)[rows]
        try:
            return self._gguf.quants.dequantize(stored.data[rows], stored.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError:
            raise CheckpointError(f"{self.path}: {name} has type {stored.tensor_type.name}, which the gguf package "
                                  "cannot dequantise") from None

    def _interleaved_heads(self, name: str) -> int:
        """Heads of a projection whose rows were permuted for interleaved rotation: llama's q and k. 0 for all others."""
        if self.config.family != "llama" or not (found := re.search(r"\.([qk])_proj\.", name)):
            return 0
        return self.config.heads if found[1] == "q" else self.config.kv_heads

    def _tokenizer(self) -> Tokenizer:
        template = self._get("tokenizer.chat_template", None)
        tokens = self._get("tokenizer.ggml.tokens")
        special = {f"{name}_token": tokens[i] for name in ("bos", "eos", "unknown", "padding")
                   if (i := self._get(f"tokenizer.ggml.{name}_token_id", None)) is not None and i < len(tokens)}
        return Tokenizer(self._backend(tokens), ChatTemplate(template, special) if template else None, self.config.stop_ids,
                         f"{self.path}: tokenizer.ggml.tokens")

    def _backend(self, tokens: list[str]):
        """A byte-level BPE from the file's tokens, merges and pre-tokenizer name."""
        from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
        from tokenizers import Tokenizer as Backend

        model, pre = self._get("tokenizer.ggml.model"), self._get("tokenizer.ggml.pre", "default")
        if model != "gpt2":
            raise TokenizerError(f"{self.path}: tokenizer.ggml.model {model!r} is not rebuilt, only byte-level BPE (gpt2) is")
        try:
            merges = [tuple(merge.split(" ", 1)) for merge in self._get("tokenizer.ggml.merges")]
            bpe = models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre in ("llama-bpe", "llama3"))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{self.path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({error})") from None
        backend = Backend(bpe)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        if pre in ("gpt-2", "default"):
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        elif pre == "smollm":
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
        elif pre in ("qwen2", "llama-bpe", "llama3"):
            words = _QWEN2_WORDS if pre == "qwen2" else _QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), byte_level])
        else:
            raise TokenizerError(f"{self.path}: tokenizer.ggml.pre {pre!r} is not one of gpt-2, smollm, qwen2, llama-bpe")
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        types = self._get("tokenizer.ggml.token_type", [])
        backend.add_special_tokens([AddedToken(t, normalized=False, special=True)
                                    for t, kind in zip(tokens, types) if kind == _CONTROL])
        backend.add_tokens([AddedToken(t, normalized=False, special=False)
                            for t, kind in zip(tokens, types) if kind == _USER_DEFINED])
        bos = self._get("tokenizer.ggml.bos_token_id", None)
        if self._get("tokenizer.ggml.add_bos_token", pre in ("llama-bpe", "llama3")) and bos is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)])
        return backend


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. Unknown names stay, and loading lists them."""
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        return f"model.layers.{found[1]}.{_LAYER_NAMES.get(found[2], found[2])}.{found[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES.get(stem, stem)}.{kind}"


def gguf_name(name: str) -> str:
    """The other way: model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight."""
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name):
        return f"blk.{found[1]}.{_INVERSE[found[2]]}.{found[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_INVERSE[stem]}.{kind}"


def _half_split_rows(count: int, heads: int) -> np.ndarray:
    """Row order that turns (x0, y0, x1, y1, ...) within each head back into (x0, x1, ..., y0, y1, ...)."""
    return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
