"""The tools for other people's engines: the pytest suite, traces and their replay, receipts and their repetition."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refengine.cli import main
from refengine.conformance import campaign, receipt
from refengine.conformance.history import TraceError, load_trace, model_truth, save_trace
from refengine.model import tiny
from refengine.sources import open_checkpoint

HERE = Path(__file__).parent


def suite(tmp_path, engine):
    """The conformance suite over an engine of engines_of_others.py, in a process of its own."""
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "refengine.conformance",
                           "--engine", f"engines_of_others:{engine}", "--histories", "40"],
                          cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(HERE)}, capture_output=True, text=True, timeout=200)


def test_the_suite_passes_a_right_engine(tmp_path):
    done = suite(tmp_path, "make_right")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_the_suite_fails_a_broken_engine_and_writes_the_shortest_history(tmp_path):
    done = suite(tmp_path, "make_broken")
    assert done.returncode == 1, done.stdout
    _, history = load_trace(tmp_path / "refengine-trace.json", 64)
    assert len(history) == 2 and history[1]["op"] in ("trim", "turn")
    assert "the retained prefix" in done.stdout


def test_a_history_depends_on_its_number_only(t_model):
    whole = campaign.play_histories(t_model, 3, range(6))
    again = campaign.play_histories(t_model, 3, range(6))
    assert whole.digest == again.digest and whole.failure is None and whole.histories == 6 and whole.operations >= 30
    assert campaign.play_histories(t_model, 4, range(6)).digest != whole.digest


def test_native_arithmetic_fails_its_campaign_and_the_failure_replays(t_native, tmp_path):
    """The control, and the way from a failure to a file that shows it."""
    batch = campaign.play_histories(t_native, 0, range(50))
    if batch.failure is None:
        pytest.skip("this BLAS computes these shapes alike whatever the chunk")
    number, settings, history, message = batch.failure
    short = campaign.shorten(history, lambda ops: campaign.failure_of(t_native, settings, ops) is not None)
    assert 1 <= len(short) <= 2
    save_trace(tmp_path / "trace.json", short, model="T", engine=settings, note=message)
    again, ops = load_trace(tmp_path / "trace.json", 64)
    assert again == settings and ops == short
    assert "but should be" in campaign.failure_of(t_native, again, ops)


@pytest.mark.parametrize(("change", "says"), (
    ({"schema": "refengine-trace/9"}, "schema is 'refengine-trace/9'"),
    ({"ops": None}, "ops is not a list"),
    ({"ops": [{"op": "fly"}]}, "ops[0].op is 'fly'"),
    ({"ops": [{"op": "trim"}]}, "ops[0] has the fields"),
    ({"ops": [{"op": "trim", "length": -1}]}, "ops[0].length is -1"),
    ({"ops": [{"op": "prefill", "tokens": [1, 64]}]}, "ops[0].tokens is not a list of ids in 0..63"),
    ({"ops": [{"op": "prefill", "tokens": []}]}, "ops[0].tokens"),
    ({"ops": [{"op": "fault", "after": 1, "during": {"op": "prefill", "tokens": ["a"]}}]}, "ops[0].during.tokens"),
    ({"engine": {"engine": "pipelined"}}, "engine does not have the fields"),
    ({"engine": {"engine": "x", "page_size": 1, "chunk_size": 1, "page_order": None}}, "engine.engine is 'x'"),
    ({"engine": {"engine": "pipelined", "page_size": 0, "chunk_size": 1, "page_order": None}}, "engine.page_size is 0"),
))
def test_a_wrong_trace_is_refused_and_the_field_named(change, says, tmp_path):
    path = tmp_path / "trace.json"
    save_trace(path, [{"op": "reset"}], model="T")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TraceError) as error:
        load_trace(path, 64)
    assert says in str(error.value)


def test_replay_plays_a_trace(tmp_path, capsys):
    path = tmp_path / "trace.json"
    turn = {"op": "turn", "prompt": [1, 2, 3, 4], "max_tokens": 3, "cancel": 1}
    save_trace(path, [turn, {"op": "trim", "length": 2}, {"op": "fault", "after": 5, "during": {"op": "prefill", "tokens": [7]}}],
               model="tiny")
    assert main(["replay", str(path)]) == 0
    assert "3 operations, every byte is equal" in capsys.readouterr().out


def test_a_receipt_is_repeated_and_compared(tmp_path, capsys):
    path = tmp_path / "receipt.json"
    assert main(["prove", "--chats", "1", "--turns", "2", "--engine", "pipelined", "--receipt", str(path)]) == 0
    assert main(["verify", str(path)]) == 0
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"digest": "0" * 64}))
    assert main(["verify", str(path)]) == 1
    assert "but the receipt says 000" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((Path(__file__).parent.parent / "proofs" / "receipts").glob("*.json")), ids=lambda p: p.stem)
def test_a_receipt_of_the_repository_is_of_the_models_as_they_are(path):
    """Else `refengine verify` refuses it: other weights, or a fingerprint that is made in another way."""
    model = receipt.read(path)["model"]
    assert open_checkpoint(model["source"]).fingerprint() == model["fingerprint"]


@pytest.mark.parametrize(("change", "says"), (
    ({"schema": "refengine-receipt/0"}, "schema is"), ({"refengine": "0.0.1"}, "refengine is '0.0.1'"), ({"kind": "x"}, "kind is"),
    ({"planned": {}}, "planned does not have"), ({"seed": "1"}, "seed is '1'"), ({"model": {}}, "model does not have"),
    ({"model": {"source": "tiny", "fingerprint": "0"}}, "model.fingerprint")))
def test_a_wrong_receipt_is_refused_and_the_field_named(change, says, tmp_path, capsys):
    path = tmp_path / "receipt.json"
    main(["prove", "--chats", "1", "--turns", "1", "--engine", "pipelined", "--receipt", str(path)])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert main(["verify", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_a_campaign_over_processes_gives_the_digest_of_one(tmp_path):
    digests = []
    for workers in ("1", "2"):
        path = tmp_path / f"{workers}.json"
        assert main(["prove", "--histories", "4", "--workers", workers, "--receipt", str(path)]) == 0
        digests.append(json.loads(path.read_text())["digest"])
    assert digests[0] == digests[1]


def test_a_campaign_that_ran_out_of_time_leaves_a_receipt_of_what_it_did(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "BATCH", 2)
    path = tmp_path / "receipt.json"
    assert main(["prove", "--histories", "40", "--workers", "1", "--minutes", "0.0001", "--receipt", str(path)]) == 0
    receipt = json.loads(path.read_text())
    assert receipt["planned"]["histories"] == receipt["compared"]["histories"] == 2
    assert main(["verify", str(path), "--workers", "1"]) == 0


def test_the_truth_is_remembered_and_right(t_model):
    truth = model_truth(t_model)
    assert truth((1, 2, 3)) is truth((1, 2, 3))
    assert truth((1, 2, 3)).logits.tobytes() == t_model.logits([1, 2, 3])[-1].tobytes()
    assert truth(()).logits is None and tiny().config.layers == len(tiny().new_cache(1, 1).pool.fields[0])
