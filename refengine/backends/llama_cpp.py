"""llama.cpp through llama-cpp-python: a .gguf file as it is, or one written from the checkpoint; its usual float16 K/V."""
from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

import numpy as np

from refengine.backends import Backend, BackendError, Precision
from refengine.checkpoint import Checkpoint
from refengine.errors import CheckpointError
from refengine.gguf_checkpoint import GGUFCheckpoint, gguf_name


class LlamaCppBackend(Backend):
    """One context of llama.cpp on all cores, 512 tokens a batch (its default).

    weights: what a checkpoint that is no .gguf is written as; q4_k is llama.cpp's own mixture Q4_K_M, made by it. kv: what it
    keeps K/V in.
    """

    OPTIONS = {"weights": ("f32", "f16", "bf16", "q8_0", "q4_k"), "kv": ("f16", "f32")}

    def __init__(self, checkpoint: Checkpoint, capacity: int, *, weights: str = "f32", kv: str = "f16"):
        try:
            import gguf  # noqa: F401, needed for writing
            import llama_cpp
        except ImportError as error:
            raise BackendError(f"backend llama.cpp needs {error.name}: "
                               "pip install llama-cpp-python 'refengine[gguf]'") from None
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        threads = os.cpu_count()
        self._folder = tempfile.TemporaryDirectory(prefix="refengine-gguf-")  # lives as long as this, for who reads the same file
        path = Path(self._folder.name) / "model.gguf"
        if isinstance(checkpoint, GGUFCheckpoint):
            path = checkpoint.path
        elif weights == "q4_k":
            write_gguf(checkpoint, path)
            path = _quantized(llama_cpp, path)
        else:
            write_gguf(checkpoint, path, weights)
        if weights != "f32":
            self.source = path
        self.precision = Precision("f32", _inputs(path if weights != "f32" else checkpoint), kv, "stored")
        try:
            kept = {"f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16}[kv]
            self._llama = llama_cpp.Llama(str(path), n_ctx=capacity, n_threads=threads, n_threads_batch=threads, type_k=kept,
                                          type_v=kept, verbose=False, use_mmap=False)
        except ValueError as error:
            raise BackendError(f"llama.cpp cannot open {checkpoint.source}: {error}") from error
        self._get_logits, self._handle = llama_cpp.llama_get_logits_ith, self._llama.ctx
        super().__init__(self._llama.n_vocab(), capacity)

    def _forward(self, ids: list[int]) -> np.ndarray:
        self._llama.n_tokens = len(self._ids)  # eval drops what lies beyond from its cache
        self._llama.eval(ids)
        return np.ctypeslib.as_array(self._get_logits(self._handle, -1), shape=(self.vocab,)).copy()

    def _rewind(self, length: int) -> None:
        self._llama.n_tokens = length


def _inputs(source: Path | Checkpoint) -> str:
    """What ggml rounds the inputs of its products to: that depends on what it multiplies them with. The coarsest of a mixture."""
    checkpoint = GGUFCheckpoint(source) if isinstance(source, Path) else source
    if not isinstance(checkpoint, GGUFCheckpoint):
        return "f32"
    kinds = {kind.name for kind in checkpoint.types()} - {"F32"}
    if kinds & {"F16", "BF16"} == kinds:
        return min((kind.lower() for kind in kinds), default="f32")  # "bf16" before "f16"
    return "q8_k" if any(kind.endswith("_K") for kind in kinds) else "q8_0"


def _quantized(llama_cpp, path: Path) -> Path:
    """The file once more, quantised by llama.cpp itself. Raises BackendError."""
    made, parameters = path.with_name("q4_k.gguf"), llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    if llama_cpp.llama_model_quantize(str(path).encode(), str(made).encode(), ctypes.byref(parameters)) != 0:
        raise BackendError("llama.cpp cannot quantise this model to q4_k")
    return made


def write_gguf(checkpoint: Checkpoint, path: Path, weights: str = "f32") -> None:
    """Weights and configuration as a GGUF, without a tokenizer: it is fed with ids. weights: what matrices are stored as;
    vectors are float32.

    Raises BackendError for a family or rope type that is not written here.
    """
    import gguf

    c = checkpoint.config
    if c.family not in ("qwen3", "qwen2") or c.rope.type != "default" or c.rope.divisors:
        raise BackendError(f"{checkpoint.source}: a GGUF is written of qwen3 and qwen2 models with plain rope, "
                           f"not of {c.family} with rope {c.rope.type}")
    writer = gguf.GGUFWriter(path, c.family)
    writer.add_context_length(c.max_positions or 2**20)
    writer.add_embedding_length(c.hidden)
    writer.add_block_count(c.layers)
    writer.add_feed_forward_length(c.mlp)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope.theta)
    writer.add_vocab_size(c.vocab)
    writer.add_tokenizer_model("none")
    kind = gguf.GGMLQuantizationType[weights.upper()]
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if weights == "f32" else gguf.LlamaFileType[f"MOSTLY_{weights.upper()}"])
    names = [name for name in checkpoint.shapes() if not (c.tied and name == "lm_head.weight")]
    for name in names:
        shape = checkpoint.shapes()[name]
        _add_info(writer, gguf_name(name), shape, kind if len(shape) == 2 else gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in names:  # one at a time: two copies of all weights never exist
        tensor = checkpoint.tensor(name)
        if not np.isfinite(tensor).all():
            raise CheckpointError(f"{checkpoint.source}: {name} holds an infinity or a NaN")
        tensor = np.ascontiguousarray(tensor, np.float32)
        writer.write_tensor_data(gguf.quants.quantize(tensor, kind) if tensor.ndim == 2 and weights != "f32" else tensor)
    writer.close()


def _add_info(writer, name: str, shape: tuple[int, ...], kind) -> None:
    import gguf

    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        return
    try:
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
    except ValueError as error:
        raise BackendError(f"{name} cannot be stored as {kind.name.lower()}: {error}") from None
    writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind)


open_backend = LlamaCppBackend
