"""The prover itself: it finds nothing in a right engine, and names what a broken one does wrong."""
import json

import numpy as np
import pytest

from refengine.cli import main
from refengine.conformance.compare import first_kv_difference
from refengine.conformance.prove import Side, prove
from refengine.engine import SequentialEngine
from refengine.model import load_tokenizer, tiny
from refengine.pipelined import PipelinedEngine


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


def play(model, tokenizer, suspect, **settings):
    """The pipelined engine with the cache off as the truth, and a suspect with it on."""
    sides = [Side("truth OFF", PipelinedEngine(model), tokenizer, False), Side("suspect ON", suspect, tokenizer, True)]
    return prove(sides, **{"seed": 3, "chats": 4, "turns": 5, "max_tokens": 8, **settings})


class LyingTrim(PipelinedEngine):
    """Says that it has rewound, and has not."""

    def trim_kv_cache(self, length):
        self._begin()
        return min(length, self.cache.offset)


class ShortTrim(PipelinedEngine):
    """Keeps one position more than it says."""

    def trim_kv_cache(self, length):
        kept = super().trim_kv_cache(min(self.cache.offset, length + 1))
        return max(0, kept - 1)


class StaleLayer(PipelinedEngine):
    """After a rewind, layer 2 has one wrong value below the offset."""

    def trim_kv_cache(self, length):
        kept = super().trim_kv_cache(length)
        if kept > 3:
            self.cache.pool.fields[1][2, 1, 3, 5] += 1  # v of kv head 1, position 3, dimension 5; page 0 is first
        return kept


class OneUlpOff(PipelinedEngine):
    """Right ids, and logits that differ in one last bit."""

    @property
    def logits(self):
        logits = super().logits.copy()
        logits[7] = np.nextafter(logits[7], np.float32(np.inf))
        return logits


class DropsLast(PipelinedEngine):
    """Loses the last prompt token when it is fed a suffix of more than one."""

    def _new(self, tokens):
        return super()._new(tokens[:-1] if len(tokens) > 1 else tokens)


class Crashes(PipelinedEngine):
    """Fails at a rewind to the middle."""

    def trim_kv_cache(self, length):
        if 0 < length < self.cache.offset:
            raise RuntimeError("SIGTRAP in GrowingLogitsBuffer")
        return super().trim_kv_cache(length)


@pytest.mark.parametrize("engine", (SequentialEngine, PipelinedEngine))
def test_a_right_engine_is_found_lossless(model, tokenizer, engine):
    result = play(model, tokenizer, engine(model, page_size=5), chats=3)
    assert result.differences == []
    assert result.chats == 3 and len(result.rows) == 15 and result.kv_bytes > 1_000_000
    reused = [row.turns["suspect ON"].reused for row in result.rows if row.turns["suspect ON"]]
    assert sum(reused) > 0, "nothing was reused, so nothing was shown"


@pytest.mark.parametrize(("engine", "kinds"), (
    (LyingTrim, {"state"}), (ShortTrim, {"state"}), (StaleLayer, {"kv"}), (OneUlpOff, {"logits"}),
    (DropsLast, {"state", "logits"}), (Crashes, {"error"})))
def test_a_broken_engine_is_found_out(model, tokenizer, engine, kinds):
    result = play(model, tokenizer, engine(model))
    assert kinds <= {difference.kind for difference in result.differences}, result.differences


def test_a_wrong_value_is_named_with_layer_position_and_head(model, tokenizer):
    result = play(model, tokenizer, StaleLayer(model))
    kv = next(str(d) for d in result.differences if d.kind == "kv")
    assert "layer 2, position 3, v, head 1, dimension 5" in kv and "but should be" in kv


def test_logits_that_differ_in_one_bit_are_named(model, tokenizer):
    result = play(model, tokenizer, OneUlpOff(model))
    assert "token 0, id 7" in str(next(d for d in result.differences if d.kind == "logits"))


def test_a_negative_zero_is_not_a_zero():
    zero = [{"k": np.zeros((1, 2, 3))}]
    other = [{"k": np.zeros((1, 2, 3))}]
    other[0]["k"][0, 1, 2] = -0.0
    assert first_kv_difference(zero, zero, 2) is None
    assert first_kv_difference(zero, other, 2)[0] == "layer 0, position 1, k, head 0, dimension 2"
    assert first_kv_difference(zero, other, 1) is None, "position 1 is beyond what both hold"


def test_the_command_writes_a_receipt_and_exits_0(tmp_path, capsys):
    receipt = tmp_path / "receipt.json"
    assert main(["prove", "--chats", "1", "--turns", "3", "--receipt", str(receipt)]) == 0
    out, saved = capsys.readouterr().out, json.loads(receipt.read_text())
    assert "LOSSLESS" in out and "NOT" not in out
    assert saved["lossless"] is True and saved["compared"]["turns"] == 3 and len(saved["digest"]) == 64
    assert all(row["sides"].keys() == set(saved["sides"]) for row in saved["rows"])


def test_the_same_seed_gives_the_same_digest_and_another_seed_another(tmp_path):
    digests = []
    for seed, page in ((5, 64), (5, 3), (6, 64)):
        receipt = tmp_path / f"{seed}-{page}.json"
        main(["prove", "--chats", "1", "--turns", "2", "--engine", "pipelined", "--seed", str(seed), "--page-size", str(page),
              "--receipt", str(receipt)])
        digests.append(json.loads(receipt.read_text())["digest"])
    assert digests[0] == digests[1] != digests[2]


def test_the_environments_switch_does_not_turn_the_on_side_off(tmp_path, monkeypatch):
    monkeypatch.setenv("REFENGINE_NO_PREFIX_CACHE", "1")
    receipt = tmp_path / "receipt.json"
    main(["prove", "--chats", "1", "--turns", "3", "--engine", "pipelined", "--receipt", str(receipt)])
    rows = json.loads(receipt.read_text())["rows"]
    assert any(row["sides"]["pipelined ON"]["reused"] for row in rows if row["sides"]["pipelined ON"])


def test_any_number_of_workers_gives_one_receipt_and_a_run_out_of_time_one_that_can_be_verified(tmp_path, monkeypatch, capsys):
    """A receipt of chats that were stopped by --minutes could not be repeated: it planned more than was done."""
    monkeypatch.chdir(tmp_path)
    chats = ["prove", "--chats", "5", "--turns", "2", "--max-tokens", "3", "--engine", "pipelined"]
    for workers in ("1", "2"):
        assert main([*chats, "--workers", workers, "--receipt", f"{workers}.json"]) == 0
    one, two = (json.loads((tmp_path / f"{workers}.json").read_text()) for workers in ("1", "2"))
    assert [one[key] == two[key] for key in ("digest", "compared", "planned")] == [True] * 3
    assert one["planned"]["chats"] == 5 and one["compared"]["turns"] == 10
    assert main([*chats, "--minutes", "1e-6", "--receipt", "short.json"]) == 0
    assert json.loads((tmp_path / "short.json").read_text())["planned"]["chats"] == 1
    assert main(["verify", "short.json", "--workers", "2"]) == 0
    assert capsys.readouterr().out.count("the same") == 3


class BadAnchor(PipelinedEngine):
    """Prefills on its own, as re-anchoring does, with one wrong value."""

    def prefill(self, tokens):
        super().prefill(tokens)
        self.cache.pool.fields[1][2, 1, 3, 5] += 1


@pytest.mark.parametrize("options", [{"keep_ids": True}, {"reanchor": True}, {"keep_ids": True, "reanchor": True}])
def test_kept_ids_and_re_anchoring_are_proved_too(model, tokenizer, options):
    def result(engine, **options):
        sides = [Side("truth OFF", PipelinedEngine(model), tokenizer, False, **options),
                 Side("suspect ON", engine, tokenizer, True, **options)]
        return prove(sides, seed=3, chats=2, turns=5, max_tokens=8)

    plain, with_them = result(PipelinedEngine(model)), result(PipelinedEngine(model), **options)
    assert plain.differences == with_them.differences == []
    assert (plain.digest == with_them.digest) == ("keep_ids" not in options), "kept ids are other prompts, anchors change nothing"
    on = [[row.turns["suspect ON"] for row in one.rows if row.turns["suspect ON"]] for one in (plain, with_them)]
    assert sum(turn.forwarded for turn in on[1]) < sum(turn.forwarded for turn in on[0]), "and it shows in what runs before the first id"
    assert (sum(turn.anchored for turn in on[1]) > 0) == ("reanchor" in options)
    assert ("kv" in {d.kind for d in result(BadAnchor(model), **options).differences}) == ("reanchor" in options)


def test_a_receipt_says_whether_ids_were_kept_and_anchors_prefilled_and_verify_does_so_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chats, planned = ["prove", "--chats", "1", "--turns", "5", "--seed", "3", "--engine", "pipelined"], {}
    for name, flags in (("plain", []), ("both", ["--keep-ids", "--reanchor"])):
        assert main([*chats, *flags, "--receipt", f"{name}.json"]) == 0
        planned[name] = json.loads((tmp_path / f"{name}.json").read_text())
        assert main(["verify", f"{name}.json"]) == 0
    assert capsys.readouterr().out.count("the same") == 6
    assert [[one["planned"][key] for key in ("keep_ids", "reanchor")] for one in planned.values()] == [[False] * 2, [True] * 2]
    assert planned["plain"]["digest"] != planned["both"]["digest"]
    reused = [sum(row["sides"]["pipelined ON"]["reused"] for row in one["rows"] if row["sides"]["pipelined ON"]) for one in planned.values()]
    assert reused[0] < reused[1]
    del planned["plain"]["planned"]["keep_ids"], planned["plain"]["planned"]["reanchor"]        # as receipts were before
    (tmp_path / "old.json").write_text(json.dumps(planned["plain"]))
    assert main(["verify", "old.json"]) == 0
    planned["both"]["planned"]["keep_ids"] = False
    (tmp_path / "other.json").write_text(json.dumps(planned["both"]))
    assert main(["verify", "other.json"]) == 1
    assert main([*chats, "--histories", "3", "--keep-ids"]) == 2 and "are for chats" in capsys.readouterr().err
