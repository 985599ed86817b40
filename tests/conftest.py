"""Shared by all tests: Hypothesis profiles, and the tiny random models that the cases speak of. Floor 9."""
import os

import pytest
from hypothesis import HealthCheck, settings

from refengine.model import Model, load_model
from refengine.synth import write_checkpoint

_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("dev", max_examples=30, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("ci", max_examples=60, deadline=None, suppress_health_check=_QUIET, derandomize=True, print_blob=True)
settings.register_profile("deep", max_examples=5000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

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
