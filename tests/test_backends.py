"""transformers and llama.cpp behind our protocol: python -m pytest -m peers. What needs neither runs always. Floor 9."""
import importlib.util
import sys

import numpy as np
import pytest

from refengine.backends import NAMES, Backend, BackendError, open_backend
from refengine.chat import Chat
from refengine.errors import CapacityError, FeedError
from refengine.gguf_checkpoint import GGUFCheckpoint, gguf_name
from refengine.model import load_model, load_tokenizer
from refengine.sources import open_checkpoint

INSTALLED = [pytest.param("transformers", marks=pytest.mark.peers),
             pytest.param("llama.cpp", marks=[pytest.mark.peers, pytest.mark.skipif(
                 importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed: it is built from source")])]


class Fake(Backend):
    """A backend whose logits are the sum of its ids, one-hot. It can be told to fail."""

    fail = False

    def _forward(self, ids):
        if self.fail:
            raise RuntimeError("broken")
        return np.eye(self.vocab, dtype=np.float32)[(sum(self._ids) + sum(ids)) % self.vocab]

    def _rewind(self, length):
        assert 0 <= length < len(self._ids)


def test_the_protocol_around_a_forward():
    engine = Fake(10, 8)
    assert list(engine.generate([1, 2], max_tokens=3)) == [3, 6, 2]
    assert engine.tokens == [1, 2, 3, 6] and engine.processed_token_count == 4, "the last has no K/V yet"
    assert engine.trim_kv_cache(9) == 4 and engine.logits is not None
    assert engine.trim_kv_cache(1) == 1 and engine.logits is None and engine.tokens == [1]
    assert list(engine.generate([4], max_tokens=5, stop_ids=[0])) == [5, 0]
    assert list(engine.generate([4], max_tokens=0)) == []
    engine.reset()
    assert engine.tokens == []


@pytest.mark.parametrize("wrong, error", [([], FeedError), ([10], FeedError), ([-1], FeedError), ([1] * 9, CapacityError)])
def test_what_does_not_fit_is_refused_and_changes_nothing(wrong, error):
    engine = Fake(10, 8)
    engine.prefill([1])
    with pytest.raises(error):
        engine.prefill(wrong)
    assert engine.tokens == [1] and engine.logits is not None
    with pytest.raises(ValueError):
        engine.trim_kv_cache(-1)


def test_a_forward_that_fails_leaves_the_ids_as_they_were():
    engine = Fake(10, 8)
    engine.prefill([1])
    engine.fail = True
    with pytest.raises(RuntimeError):
        engine.prefill([2])
    assert engine.tokens == [1]


@pytest.mark.parametrize("name, module, remedy", [("transformers", "torch", r"refengine\[peers\]"),
                                                  ("llama.cpp", "llama_cpp", "llama-cpp-python")])
def test_a_backend_that_is_not_installed_says_how_to_install_it(monkeypatch, name, module, remedy):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendError, match=rf"needs {module}.*pip install .*{remedy}"):
        open_backend(name, "tiny")


def test_an_unknown_backend_is_named():
    with pytest.raises(BackendError, match="'vllm' is not one of transformers, llama.cpp"):
        open_backend("vllm", "tiny")


def test_the_gguf_that_is_written_is_the_checkpoint(tmp_path):
    """Read back by our own reader: the same configuration and the same weights."""
    from refengine.backends.llama_cpp import write_gguf

    original = open_checkpoint("tiny")
    write_gguf(original, tmp_path / "tiny.gguf")
    copy = GGUFCheckpoint(tmp_path / "tiny.gguf")
    assert copy.shapes() == original.shapes()
    for name in original.shapes():
        assert copy.tensor(name).tobytes() == original.tensor(name).tobytes(), name
    mine, theirs = vars(original.config), vars(copy.config)
    assert {key for key in mine if mine[key] != theirs[key]} <= {"stop_ids"}, "a GGUF without a tokenizer has none"


def test_a_gguf_of_another_family_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    from dataclasses import replace

    from refengine.backends.llama_cpp import write_gguf

    checkpoint = open_checkpoint("tiny")
    checkpoint.config = replace(checkpoint.config, family="llama")
    with pytest.raises(BackendError, match="not of llama"):
        write_gguf(checkpoint, tmp_path / "no.gguf")
    assert not list(tmp_path.iterdir())


def test_gguf_names():
    assert gguf_name("model.layers.12.self_attn.k_norm.weight") == "blk.12.attn_k_norm.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"


@pytest.fixture(scope="module")
def truth():
    """Logits of the exact set at all positions of 60 ids."""
    ids = np.random.default_rng(3).integers(0, 512, 60).tolist()
    return ids, load_model("tiny").logits(ids)


@pytest.mark.parametrize("name", INSTALLED)
def test_a_backend_computes_the_same_model_and_rewinds(truth, name):
    """Within float32 for transformers; llama.cpp keeps K and V in float16."""
    ids, want = truth
    most = {"transformers": 1e-5, "llama.cpp": 5e-3}[name]
    engine = open_backend(name, "tiny", capacity=128)
    for kept, stop in ((0, 60), (59, 60), (17, 40), (40, 41), (1, 60), (0, 3)):
        assert engine.trim_kv_cache(kept) == kept
        engine.prefill(ids[kept:stop])
        assert engine.tokens == ids[:stop]
        assert np.abs(engine.logits - want[stop - 1]).max() < most, (kept, stop)


@pytest.mark.parametrize("name", INSTALLED)
def test_a_chat_runs_on_a_backend(name):
    chat = Chat(open_backend(name, "tiny", capacity=512), load_tokenizer("tiny"), max_tokens=6)
    for message in ("One", "Two"):
        "".join(chat.send(message))
    assert chat.turns[1].reused > chat.turns[0].prompt // 2 and not chat.turns[1].fallback


@pytest.mark.parametrize("name", INSTALLED)
def test_a_bench_with_a_peer(name):
    from refengine.bench.measure import bench
    from test_bench import SMALL

    report = bench("tiny", ["exact", name], SMALL)
    assert {row["subject"] for row in report["turns"]} == {"exact", name} == set(report["subjects"])


def test_all_names_have_a_module():
    assert NAMES == ("transformers", "llama.cpp", "mlx")
    assert all(importlib.util.find_spec(f"refengine.backends.{module}") for module in ("transformers", "llama_cpp", "mlx"))
