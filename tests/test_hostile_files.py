"""Files that are broken or hostile, fuzzed: whatever the bytes are, a load succeeds or is one typed error, and takes little.

The loads are done in a process that may have little more memory than it has after a healthy one, and little time for each.
"""
import os
import shutil
import struct
import subprocess
import sys
import threading
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


MORE = 1 << 30    # bytes of address space beyond those of a process that has loaded a healthy model: threads reserve some
SECONDS = 30      # of a load that takes milliseconds, on a machine that may be busy


def outcome(path, loads=(load_model, load_tokenizer)):
    """"ok" if each load succeeds or raises a typed error that says what was wrong; else what it did."""
    for load in loads:
        try:
            load(path)
        except RefengineError as error:
            if not str(error):
                return f"{load.__name__}: {type(error).__name__} without a word"
            behind = error
            while behind := behind.__context__:
                if isinstance(behind, MemoryError):
                    return f"{load.__name__}: {behind!r} behind {error!r:.200}"
        except BaseException as error:  # MemoryError too
            return f"{load.__name__}: {error!r:.300}"
    return "ok"


class Loader:
    """The process, started again when it died."""

    def __init__(self, healthy):
        self.healthy, self.child = healthy, None

    def attempt(self, path, kind="load"):
        """Load both; AssertionError unless that is ok within the limits."""
        if self.child is None:
            self.child = subprocess.Popen([sys.executable, __file__, str(self.healthy)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
            assert self.child.stdout.readline() == "ready\n"
        late = threading.Event()
        timer = threading.Timer(SECONDS, lambda: (late.set(), self.child.kill()))
        timer.start()
        try:
            self.child.stdin.write(f"{kind} {path}\n")
            self.child.stdin.flush()
            found = self.child.stdout.readline()
        finally:
            timer.cancel()
        if not found:
            self.stop()
        assert found == "ok\n", f"it took longer than {SECONDS} s" if late.is_set() else found or "the process died"

    def stop(self):
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child.stdin.close(), self.child.stdout.close()
            self.child = None


@pytest.fixture(scope="module")
def loader(healthy):
    loader = Loader(healthy)
    yield loader
    loader.stop()


def serve(healthy):
    """Of the process: a line "load PATH" is answered by its outcome."""
    assert outcome(healthy) == "ok"
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE,) * 2)
    own = {"fill": lambda path: bytearray(2 * MORE), "hang": lambda path: threading.Event().wait(), "raise": lambda path: 1 / 0}
    print("ready", flush=True)
    for line in sys.stdin:
        kind, _, path = line.rstrip("\n").partition(" ")
        print(outcome(path, (own[kind],)) if kind in own else outcome(path), flush=True)


@pytest.mark.parametrize(("kind", "why"), [("fill", "MemoryError"), ("hang", "it took longer than 1 s"), ("raise", "ZeroDivisionError")])
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_a_load_that_fills_memory_or_hangs_would_be_found(kind, why, loader, healthy, monkeypatch):
    """The control of those below."""
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 1 if kind == "hang" else SECONDS)
    with pytest.raises(AssertionError, match=why):
        loader.attempt(healthy, kind)
    monkeypatch.undo()
    loader.attempt(healthy)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
@settings(max_examples=max(20, settings.default.max_examples), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(edits=EDITS)
def test_any_bytes_are_loaded_or_refused_by_a_typed_error(name, edits, healthy, loader, tmp_path):
    broken = tmp_path / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(healthy, broken)
    (broken / name).write_bytes(mutated((healthy / name).read_bytes(), edits, 3000))
    loader.attempt(broken)


@pytest.fixture(scope="module")
def healthy_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, CONFIGS["qwen3"])
    load_model(path)
    return path.read_bytes()


@settings(max_examples=max(20, settings.default.max_examples), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(edits=EDITS)
def test_any_bytes_of_a_gguf_file_are_loaded_or_refused_by_a_typed_error(edits, healthy_gguf, loader, tmp_path):
    (tmp_path / "model.gguf").write_bytes(mutated(healthy_gguf, edits, 4000))
    loader.attempt(tmp_path / "model.gguf")


@pytest.mark.parametrize("at", [8, 16], ids=["tensors", "metadata"])
@pytest.mark.parametrize("count", [10**9, 2**40, 2**63, 2**64 - 1])
def test_an_absurd_count_in_a_gguf_header_is_refused_at_once(at, count, healthy_gguf, loader, tmp_path):
    (tmp_path / "model.gguf").write_bytes(healthy_gguf[:at] + struct.pack("<Q", count) + healthy_gguf[at + 8:])
    loader.attempt(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="model.gguf: not a readable GGUF file"):
        load_model(tmp_path / "model.gguf")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
