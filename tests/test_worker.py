"""Foreign programs and files as backends: the protocol, and all that may go wrong with them. Floor 9."""
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import make_engine
from refengine.backends import BackendError
from refengine.backends.worker import WorkerBackend, WorkerError
from refengine.cli import main
from refengine.errors import InspectError
from refengine.inspect import trace, write_trace
from refengine.model import load_model
from refengine.safetensors_file import write_safetensors
from refengine.validate import open_subject, validate

EXAMPLE = f"{sys.executable} {Path(__file__).parent / 'worker_example.py'}"
HELLO = "print('{\"name\": \"x\", \"vocab\": 3, \"capacity\": 9}', flush=True); "


def script(code, timeout=20.0):
    """A worker that reads its first request and then does this."""
    return WorkerBackend(shlex.join([sys.executable, "-c", f"import sys, time\nask = sys.stdin.readline\nask()\n{code}\n"]), timeout)


def test_the_example_worker_is_judged_as_its_engine_is():
    report = validate(open_subject(f"worker:{EXAMPLE} tiny", "tiny"), longest=20, histories=4)
    outcomes = {check.name: check.outcome for check in report.checks}
    assert outcomes == {"preflight": "pass", "forward": "pass", "location": "skip", "cache": "fail"}
    assert "within its rounding" in report.checks[-1].words and report.about["backend"] == "worker example"


def test_a_worker_does_what_its_engine_does():
    backend, engine = WorkerBackend(f"{EXAMPLE} tiny"), make_engine("pipelined", load_model("tiny", "native"), capacity=512)
    for tokens, length in (([1, 2, 3], 2), ([9, 8], 9), ([7], 0), ([5, 5], 1)):
        backend.prefill(tokens)
        engine.prefill(tokens)
        assert backend.logits.shape == engine.logits.shape and np.abs(backend.logits - engine.logits).max() < 1e-5
        assert backend.trim_kv_cache(length) == engine.trim_kv_cache(length) and backend.tokens == engine.tokens
    with pytest.raises(BackendError, match="worker: trim: ValueError"):
        backend._ask({"op": "trim", "length": -1}, retained=int)
    backend.prefill([1])
    assert backend.tokens == engine.tokens + [1], "an error that it said itself does not end it"


@pytest.mark.parametrize(("code", "says"), [
    ("raise SystemExit(3)", "it ended at 'hello' with exit code 3"),
    ("sys.stderr.write('no device'); raise SystemExit(1)", "it said: no device"),
    ("time.sleep(60)", "no answer to 'hello' in 1 s"),
    ("print('hello', flush=True)", "is not JSON: 'hello"),
    ("print('[1]', flush=True)", "not an object"),
    ("print('{\"name\": \"x\", \"vocab\": \"3\"}', flush=True)", "vocab in the answer to 'hello' is '3', not a int"),
    ("print('{\"name\": \"x\", \"vocab\": 0, \"capacity\": 9}', flush=True)", "must be at least 1"),
    ("print('{\"name\": \"x\", \"vocab\": 3, \"capacity\": 9, \"precision\": {\"kv\": \"int2\"}}', flush=True)", "precision is"),
    (HELLO + "ask(); print('{\"logits\": \"AAAA\"}', flush=True)", "logits are not base64 of float32"),
    (HELLO + "ask(); print('{\"logits\": \"AAAAAA==\"}', flush=True)", "1 logits, but it said that it knows 3 ids"),
    (HELLO + "ask(); print('{}', flush=True)", "logits in the answer to 'prefill' is None"),
    (HELLO + "ask(); time.sleep(60)", "no answer to 'prefill' in 1 s"),
])
def test_a_worker_that_breaks_the_protocol_is_an_error_and_is_ended(code, says):
    with pytest.raises(WorkerError, match=says.replace("[", r"\[")) as first:
        backend = script(code, 1.0 if "60" in code else 20.0)
        backend.prefill([1])
    if "prefill" in says:
        with pytest.raises(WorkerError) as again:
            backend.prefill([1])
        assert str(again.value) == str(first.value) and backend._process.poll() is not None


def test_a_command_that_is_none():
    for command, says in (("", "no command"), ("/nowhere/engine", "cannot be started")):
        with pytest.raises(BackendError, match=says):
            WorkerBackend(command)


def test_a_hanging_worker_is_an_error_never_a_pass(monkeypatch):
    monkeypatch.setattr("refengine.validate.subject.WorkerBackend", lambda command: script(
        "print('{\"name\": \"x\", \"vocab\": 512, \"capacity\": 99}', flush=True)\nask()\ntime.sleep(60)", 1.0))
    report = validate(open_subject("worker:x", "tiny"), longest=8, histories=2)
    assert report.outcome == "error" and [check.outcome for check in report.checks] == ["pass", "error", "skip", "skip"]


# Files

@pytest.fixture
def traced(tmp_path):
    """A trace of our native engine, as a foreign one would write it."""
    model = load_model("tiny", "native")
    engine, ids = make_engine("sequential", model), [5, 6, 7, 8]
    return tmp_path / "t.safetensors", trace(engine, ids), engine, ids


def test_a_file_is_judged_and_its_first_wrong_activation_named(traced, capsys, tmp_path):
    path, arrays, engine, ids = traced
    write_trace(path, arrays, engine, ids)
    report = validate(open_subject(f"files:{path}", "tiny"))
    assert [check.outcome for check in report.checks] == ["pass", "pass", "pass", "skip"]
    wrong = {name: x * np.float32(1.001) if name == "layers.2.mlp_norm" else x for name, x in arrays.items()}
    write_trace(path, wrong | {"logits": arrays["logits"] * np.float32(1.01)}, engine, ids)
    report = validate(open_subject(f"files:{path}", "tiny"))
    assert report.checks[1].outcome == "fail" and report.checks[2].figures["name"] == "layers.2.mlp_norm"
    assert main(["validate", "--backend", f"files:{path}", "--model", "tiny", "--report", str(tmp_path / "r.json")]) == 1
    assert "first wrong: layers.2.mlp_norm (layer 2" in capsys.readouterr().out


def test_a_file_that_is_not_of_this_model_is_an_error(traced):
    path, arrays, engine, ids = traced
    write_trace(path, {**arrays, "logits": arrays["logits"][:, :9]}, engine, ids)
    assert "logits have shape (4, 9)" in validate(open_subject(f"files:{path}", "tiny")).checks[1].words
    write_trace(path, {name: x for name, x in arrays.items() if name != "logits"}, engine, ids)
    assert validate(open_subject(f"files:{path}", "tiny")).checks[1].outcome == "error"
    header = '{"schema": "refengine-trace/1", "tokens": [1], "activations": {"layers.9.q": {}}}'
    write_safetensors(path, {"layers.9.q": ("F32", np.zeros((1, 6, 16), np.float32))}, metadata={"refengine": header})
    with pytest.raises(InspectError, match="layers.9.q: no activations of this model"):
        open_subject(f"files:{path}", "tiny")
    write_safetensors(path, {"embed": ("F32", np.zeros((1, 64), np.float32))}, metadata={
        "refengine": '{"schema": "refengine-trace/1", "tokens": "x", "activations": {"embed": {}}}'})
    with pytest.raises(InspectError, match="tokens is 'x'"):
        open_subject(f"files:{path}", "tiny")
    path.write_bytes(b"")
    with pytest.raises(InspectError):
        open_subject(f"files:{path}", "tiny")
