"""A recorded chat is played again as it was, and the page has what the engine has. Floor 9."""
import json
import re

import numpy as np
import pytest

from helpers import both_engines, same_bits
from refengine.cli import main
from refengine.errors import InspectError
from refengine.inspect import Recorder, Replay, Shown, page, read_record
from refengine.loading import load
from refengine.model import load_tokenizer
from refengine.chat import Chat

SAID = ("What is a cache?", "And a prefix?</script><b>&", "Say it again.")


def recorded(path, engine="pipelined", model="tiny", **settings):
    """A chat of three turns, an answer taken back, one sampled, one cancelled, and its record."""
    chat = Chat(load(model, engine=engine, capacity=512, page_size=16, **settings), load_tokenizer(model), system="Be brief.",
                max_tokens=6, stats_log=None)
    recorder = Recorder(chat, path)
    for text in SAID:
        list(chat.send(text))
        recorder.save()
    list(chat.regenerate())
    chat.undo()
    stream = chat.send("Something else, and longer.")
    next(stream)
    stream.close()
    recorder.save()
    return chat


@both_engines
@pytest.mark.parametrize("model", ["tiny", "tiny-hybrid"])
def test_a_replay_goes_through_the_states_that_the_chat_went_through(kind, model, tmp_path):
    chat = recorded(tmp_path / "c.json", kind, model)
    record = read_record(tmp_path / "c.json")
    again = Replay(record)
    assert again.differences == [] and len(again.data["turns"]) == len(chat.turns) == 5
    for shown, turn in zip(again.data["turns"], chat.turns):
        assert (shown["prompt"], shown["reused"], shown["forwarded"], shown["generated"], shown["fallback"]) == (
            turn.prompt, turn.reused, turn.forwarded, turn.generated, turn.fallback)
        assert shown["unequal_bytes"] == 0 and shown["largest"] == 0 and shown["logits_bytes"] == turn.generated * 512 * 4
        assert shown["cause"] == turn.explain().cause and len(shown["k"]) == len(shown["attention"]) == shown["end"]
    assert again.engine.tokens == chat.engine.tokens
    same_bits(again.engine.logits, chat.engine.logits)


def replayed(events, upto):
    """The ids below the offset after some events, by what the page does with them."""
    ids, offset = [], 0
    for event in events[:upto]:
        assert event["from"] == offset
        ids[event["from"]:event["from"] + len(event["ids"])] = event["ids"]
        offset = event["to"]
    return ids[:offset]


def test_the_events_are_the_operations_one_after_the_other(tmp_path):
    chat = recorded(tmp_path / "c.json", chunk_size=8)
    data = Replay(read_record(tmp_path / "c.json")).data
    assert replayed(data["events"], len(data["events"])) == chat.engine.tokens
    assert {event["op"] for event in data["events"]} == {"prefill", "decode", "trim"}
    assert all(len(event["ids"]) <= 8 for event in data["events"])
    trims = [event for event in data["events"] if event["op"] == "trim"]
    assert [(event["turn"], event["to"]) for event in trims] == [
        (number, turn.reused) for number, turn in enumerate(chat.turns) if turn.reused < len(turn.asked()[0])]
    for number, turn in enumerate(data["turns"]):
        at = max(i for i, event in enumerate(data["events"]) if event["turn"] == number)
        held = replayed(data["events"], at + 1)
        assert len(held) == turn["end"]
        assert [mark["role"] for mark in turn["messages"]][:2] == ["system", "user"] and turn["messages"][-1] == {
            "at": turn["prompt"], "role": "answer"}
        for mark in turn["messages"][:-1]:
            assert data["tokens"][held[mark["at"]]] == "<|im_start|>"


def test_a_position_shows_what_the_cache_and_the_forward_have(tmp_path):
    from refengine.inspect import activations, kv, logit_lens, trace

    recorded(tmp_path / "c.json")
    again = Replay(read_record(tmp_path / "c.json"))
    turn, engine = again.data["turns"][-1], again.engine
    values, end = kv(engine), engine.processed_token_count
    k = np.mean([np.sqrt((values[f"layers.{i}.k"].astype(float)**2).sum(axis=(1, 2))) for i in range(4)], axis=0)
    assert np.allclose(turn["k"], k, rtol=6e-3)
    weights = trace(engine, engine.tokens[-1:], "layers.*.weights", start=end - 1)
    attention = np.mean([x[:, 0].mean(axis=0) for x in weights.values()], axis=0)
    assert np.allclose(turn["attention"], attention, rtol=6e-3, atol=1e-9) and turn["top"][0] == int(attention.argmax())
    start = turn["lens_from"]
    residual = trace(engine, engine.tokens[start:], f"layers.{turn['lens_layers'][-1]}.residual", start=start)
    (x,) = residual.values()
    assert turn["lens"][-1] == logit_lens(engine.model, x).argmax(axis=-1).tolist() and turn["lens"][-1][-1] == int(engine.logits.argmax())
    assert len(activations(engine.model.config)) > 0 and set(sum(turn["lens"], [])) <= set(again.data["tokens"])


def test_native_arithmetic_shows_the_bytes_that_differ(tmp_path):
    chat = Chat(load("tiny", engine="pipelined", arithmetic="native", capacity=512), load_tokenizer("tiny"), max_tokens=6)
    recorder = Recorder(chat, tmp_path / "c.json")
    for text in SAID:
        list(chat.send(text))
    recorder.save()
    turns = Replay(read_record(tmp_path / "c.json")).data["turns"]
    assert any(turn["unequal_bytes"] > 0 and 0 < turn["largest"] < 1e-3 for turn in turns[1:])


def test_a_replay_says_what_is_not_as_it_was(tmp_path):
    recorded(tmp_path / "c.json")
    record = read_record(tmp_path / "c.json")
    record["model"]["fingerprint"] = "0" * 64
    record["turns"][0]["ids"][2] ^= 1
    record["turns"][1]["reused"] -= 1
    record["turns"][2]["reused"] = len(record["turns"][2]["prompt"]) - 1
    record["turns"][2]["held"] = [1, 2, 3]
    again = Replay(record)
    told = again.differences
    assert f"turn 2: 0 tokens are reused now, {len(record['turns'][2]['prompt']) - 1} were" in told
    assert all(turn["unequal_bytes"] == 0 for turn in again.data["turns"])
    assert told[0].startswith("the weights of tiny") and "turn 0: token 2 would be another one now" in told


def test_what_idle_time_left_in_the_cache_is_brought_there(tmp_path):
    chat = Chat(load("tiny", engine="pipelined", capacity=512), load_tokenizer("tiny"), max_tokens=6)
    recorder = Recorder(chat, tmp_path / "c.json")
    list(chat.send(SAID[0]))
    chat.anchor()
    list(chat.send(SAID[1]))
    recorder.save()
    data = Replay(read_record(tmp_path / "c.json")).data
    assert data["differences"] == [] and [event for event in data["events"] if event["note"] == "between turns"]


# The page

def test_the_page_holds_the_data_and_nothing_from_outside(tmp_path):
    recorded(tmp_path / "c.json")
    data = Replay(read_record(tmp_path / "c.json")).data
    text = page(data)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    assert json.loads(found) == json.loads(json.dumps(data)) and "</script><b>" not in found
    assert not re.search(r"https?:|src=|@import|url\(", text.replace(found, "")) and "innerHTML" not in text
    assert Shown(data)._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')


def test_the_commands_record_and_show(tmp_path, capsys, monkeypatch):
    import io

    record, out = tmp_path / "chat.json", tmp_path / "kv.html"
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd you?\n/regen\n"))
    assert main(["chat", "--model", "tiny", "--max-tokens", "4", "--record", str(record)]) == 0
    assert main(["inspect", str(record), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "playing 3 turns on tiny" in said and re.search(r"0 of 24,576 bytes of logits differ", said)
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["inspect", str(record), "-o", str(tmp_path / "none" / "kv.html")]) == 2


@pytest.mark.parametrize(("change", "says"), [
    ({"schema": "x"}, "schema is 'x'"), ({"turns": []}, "it has no turn"), ({"turns": [1]}, "turns[0] is not an object"),
    ({"engine": {"engine": "pipelined"}}, "engine.capacity is None"), ({"model": 3}, "model is 3, not a dict"),
])
def test_a_record_that_is_none_is_refused_by_its_field(change, says, tmp_path):
    recorded(tmp_path / "c.json")
    record = read_record(tmp_path / "c.json")
    (tmp_path / "d.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(InspectError, match=re.escape(says)):
        read_record(tmp_path / "d.json")
    turn = {**record["turns"][0], "prompt": [1, -1]}
    (tmp_path / "d.json").write_text(json.dumps({**record, "turns": [turn]}))
    with pytest.raises(InspectError, match=re.escape("turns[0].prompt is not a list of token ids")):
        read_record(tmp_path / "d.json")
    (tmp_path / "d.json").write_text(json.dumps({**record, "turns": [{**record["turns"][0], "reused": 10**6}]}))
    with pytest.raises(InspectError, match=re.escape("turns[0].reused is 1000000, of a prompt of")):
        read_record(tmp_path / "d.json")
    for broken in ("", "[", "[1]"):
        (tmp_path / "d.json").write_text(broken)
        with pytest.raises(InspectError):
            read_record(tmp_path / "d.json")


def test_a_record_with_settings_that_no_engine_has_is_refused(tmp_path):
    recorded(tmp_path / "c.json")
    record = read_record(tmp_path / "c.json")
    record["engine"]["warp"] = 9
    with pytest.raises(InspectError, match="warp"):
        Replay(record)


def test_a_chat_over_an_engine_that_shows_nothing_is_refused(tmp_path):
    class Other:
        pass

    with pytest.raises(InspectError, match="Other cannot be recorded"):
        chat = Chat(load("tiny"), load_tokenizer("tiny"))
        chat.engine = Other()
        Recorder(chat, tmp_path / "c.json")
