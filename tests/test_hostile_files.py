"""Files that are broken or hostile, fuzzed: whatever the bytes are, a load succeeds or is one typed error, and takes little."""
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from models import T_CONFIG
from test_gguf import CONFIGS, write

import refengine
from refengine.errors import CheckpointError, RefengineError
from refengine.model import load_model, load_tokenizer
from refengine.synth import write_checkpoint

NUMBERS = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
TOKENS = [b"{", b"}", b"[" * 3000, b'"', b":", b"-1", b"0", b"1e999", b"NaN", b"null", b"9" * 5000, b"\x00", b"\xff", b"../", b"bf16",
          b'"BF16"', b'"data_offsets":[0,4]', b'"shape":[99999999,99999999]', b'"num_hidden_layers":1000000000', b'"vocab_size":-1']
EDITS = st.lists(st.tuples(st.sampled_from(["flip", "cut", "insert", "number", "repeat", "replace"]), st.floats(0, 1), st.integers(0, 255),
                           st.sampled_from(TOKENS), st.sampled_from(NUMBERS)), min_size=1, max_size=3)


def mutated(data: bytes, edits, reach: int) -> bytes:
    """The edits, most of them in the first ``reach`` bytes, where headers are."""
    for verb, where, byte, token, number in edits:
        at = int(where * min(len(data), reach))
        if verb == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (byte or 1)]) + data[at + 1:]
        elif verb == "cut":
            data = data[:at] if byte % 2 else data[at:]
        elif verb == "insert":
            data = data[:at] + token + data[at:]
        elif verb == "replace":
            data = data[:at] + token + data[at + len(token):]
        elif verb == "number":
            at = 0 if byte < 128 else at
            data = data[:at] + struct.pack("<Q", number) + data[at + 8:]
        elif verb == "repeat":
            data = data[:at] + data[at // 2:]
    return data


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    write_checkpoint(folder, {**T_CONFIG, "vocab_size": 512}, seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(refengine.__file__).parent / "data" / "tiny" / name, folder / name)
    load_model(folder), load_tokenizer(folder).render([{"role": "user", "content": "x"}])
    return folder


def attempt(folder):
    for load in (load_model, load_tokenizer):
        try:
            load(folder)
        except RefengineError as error:
            assert str(error), "an error says what was wrong"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
@settings(max_examples=max(20, settings.default.max_examples), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(edits=EDITS)
def test_any_bytes_are_loaded_or_refused_by_a_typed_error(name, edits, healthy, tmp_path):
    broken = tmp_path / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(healthy, broken)
    (broken / name).write_bytes(mutated((healthy / name).read_bytes(), edits, 3000))
    attempt(broken)


@pytest.fixture(scope="module")
def healthy_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, CONFIGS["qwen3"])
    load_model(path)
    return path.read_bytes()


@settings(max_examples=max(20, settings.default.max_examples), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(edits=EDITS)
def test_any_bytes_of_a_gguf_file_are_loaded_or_refused_by_a_typed_error(edits, healthy_gguf, tmp_path):
    (tmp_path / "model.gguf").write_bytes(mutated(healthy_gguf, edits, 4000))
    attempt(tmp_path / "model.gguf")


@pytest.mark.parametrize("at", [8, 16], ids=["tensors", "metadata"])
@pytest.mark.parametrize("count", [10**9, 2**40, 2**63, 2**64 - 1])
def test_an_absurd_count_in_a_gguf_header_is_refused_at_once(at, count, healthy_gguf, tmp_path):
    (tmp_path / "model.gguf").write_bytes(healthy_gguf[:at] + struct.pack("<Q", count) + healthy_gguf[at + 8:])
    with pytest.raises(CheckpointError, match="model.gguf: not a readable GGUF file"):
        load_model(tmp_path / "model.gguf")
