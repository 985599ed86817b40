"""refengine bench on the tiny model: what is timed is what is said, and the report has it all. No time is judged. Floor 9."""
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import refengine.cli.bench
from refengine.bench.ceilings import decode_bytes, linear_weights, prefill_flops
from refengine.bench.measure import Plan, bench
from refengine.bench.report import ceilings, markdown, plot, tables
from refengine.bench.subject import Remote, Subject
from refengine.cli import main
from refengine.errors import RefengineError
from refengine.sources import open_checkpoint

SMALL = Plan(turns=((40, 30), (100, 80)), three=(20, 26, 32), chunks=(8, 32), chunk_length=48, trims=(1, 300), decode=3,
             stretch=6, rounds=2, ceiling_megabytes=8)


@pytest.fixture(scope="module")
def measured():
    """(report, the order in which engines were asked)."""
    asked = []
    return bench("tiny", ["exact", "native"], SMALL, on_step=lambda name, what: asked.append((name, what))), asked


@pytest.fixture(scope="module")
def exact():
    return Subject("exact", "tiny", SMALL.capacity, seed=0)


@pytest.fixture
def forwarded(exact, monkeypatch):
    """How many tokens each forward ran."""
    counts, run = [], type(exact.engine.model).run

    def counted(self, cache, tokens, **options):
        counts.append(len(tokens))
        return run(self, cache, tokens, **options)

    monkeypatch.setattr(type(exact.engine.model), "run", counted)
    return counts


def printed(*tables):
    console = Console(width=140, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def test_every_figure_is_there_and_shares_belong_to_their_ceilings(measured):
    report, _ = measured
    json.dumps(report)
    rows = {(row["subject"], row["engine"], row["prompt"]): row for row in report["turns"]}
    assert list(rows) == [(name, engine, prompt) for prompt in (40, 100) for name in ("exact", "native")
                          for engine in ("pipelined", "sequential")]
    config, top = open_checkpoint("tiny").config, report["ceilings"]
    for (name, engine, prompt), row in rows.items():
        assert row["on"] > 0 and row["ratio"] == row["off"] / row["on"]
        if engine == "pipelined":
            gemm, item = (top["dgemm"], 8) if name == "exact" else (top["sgemm"], 4)
            assert row["prefill_share"] * row["off"] * gemm * 1e9 == pytest.approx(prefill_flops(config, 0, prompt))
            assert row["decode_share"] * row["decode"] * top["read"] * 1e9 == pytest.approx(decode_bytes(config, prompt, item))
        else:
            assert row["measured"] == SMALL.stretch
    assert [(row["subject"], row["prompt"], row["reused"]) for row in report["three_turns"]] == [
        (name, prompt, reused) for name in ("exact", "native") for prompt, reused in ((20, 0), (26, 20), (32, 26))]
    ours = ("exact", "native")
    assert {(row["subject"], row["size"]) for row in report["chunks"]} == {(n, size) for n in ours for size in (8, 32)}
    assert {(row["subject"], row["length"]) for row in report["trims"]} == {(n, size) for n in ours for size in (1, 300)}
    assert all(about["load_s"] > 0 and about["peak_mb"] > 10 for about in report["subjects"].values())


def test_the_ceilings_of_a_hybrid_count_its_layers_for_what_they_are():
    """One of four attends: K/V grow in it alone. The others do three products with their memory for each token."""
    config = open_checkpoint("tiny-hybrid").config
    assert decode_bytes(config, 101, 4) - decode_bytes(config, 100, 4) == 4 * 2 * config.kv_heads * config.head_dim
    later = prefill_flops(config, 8, 1) - prefill_flops(config, 7, 1)
    assert later == 4 * config.heads * config.head_dim
    d = config.delta
    rest = prefill_flops(config, 0, 1) - 2 * linear_weights(config) - 2 * config.vocab * config.hidden - later
    assert rest == 3 * 6 * d.value_heads * d.value_dim * d.key_dim


def test_the_readme_has_the_table_of_the_run_that_lies_beside_the_tests():
    here = Path(__file__).parent
    report = json.loads((here / "bench-qwen3-0.6b.json").read_text(encoding="utf-8"))
    assert markdown(report) in (here.parent / "README.md").read_text(encoding="utf-8")


def test_engines_take_turns_in_every_round(measured):
    names = [name for name, what in measured[1] if what == "prompt of 40"]
    assert names == ["exact", "native"] * SMALL.rounds


def test_the_report_in_words(measured):
    report, _ = measured
    text = printed(*tables(report))
    assert all(word in text for word in ("exact, pipelined", "native, sequential", "extrapolated", "rewind", "chunk size"))
    lines = markdown(report).splitlines()
    assert len([line for line in lines if line.startswith("| 100 | 80 | 20 |")]) == 4
    assert ceilings(report) in lines[-1] and report["machine"]["numpy"] in lines[-1]


def test_others_are_compared_with_ours(measured):
    report, _ = measured
    row = next(row for row in report["turns"] if row["engine"] == "pipelined")
    other = {**row, "subject": "other", "engine": None, "off": row["off"] / 2, "on": row["on"] * 4, "decode": row["decode"]}
    report = {**report, "turns": [row, other], "subjects": {**report["subjects"], "other": report["subjects"]["exact"]}}
    assert "2.00x  0.25x   1.00x" in printed(tables(report)[1])


def test_the_picture(measured, tmp_path):
    plot(measured[0], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_says_how_to_install_it(measured, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RefengineError, match=r"pip install 'refengine\[plot\]'"):
        plot(measured[0], tmp_path / "bench.png")


def test_what_is_timed_is_the_turn(exact, forwarded):
    """OFF runs all of the prompt and ON what is not reused, on both engines; afterwards they hold just the prompt."""
    exact.turn(100, 80, decode=3)
    assert forwarded == [100, 1, 1, 1, 20]
    assert exact.engine.tokens == exact.ids[:100] and exact.engine.processed_token_count == 100
    expected = exact.engine.logits.tobytes()
    forwarded.clear()
    times = exact.sequential_turn(100, 80, stretch=6)
    assert forwarded == [1] * 20 + [1] * 6
    assert times["off"] > 0 and times["measured"] == 6
    assert exact.sequential.tokens == exact.ids[:53], "the stretch lies around the middle"
    exact.sequential.prefill(exact.ids[:100])
    assert exact.sequential.logits.tobytes() == expected, "over the K/V that the other engine left"
    forwarded.clear()
    exact.turns((20, 26, 32))
    assert forwarded == [20, 6, 6] + [20, 26, 32]


def test_a_sequential_turn_that_is_short_is_measured_whole(exact):
    exact.turn(5, 3, decode=1)
    assert exact.sequential_turn(5, 3, stretch=6)["measured"] == 5


def test_chunk_sizes_are_used_and_put_back(exact, forwarded):
    assert exact.chunk(7, 20) > 0
    assert forwarded == [7, 7, 6] and exact.engine.chunk_size == 256


def test_a_rewind_that_keeps_less_is_an_error(exact, monkeypatch):
    monkeypatch.setattr(type(exact.engine), "trim_kv_cache", lambda self, length: 0)
    with pytest.raises(RefengineError, match="rewind to 10 retained 0"):
        exact._on(exact.engine, 20, 10)


@pytest.mark.parametrize("wrong", [{"turns": ((10, 10),)}, {"turns": ((10, -1),)}, {"rounds": 0}, {"decode": 0},
                                   {"trims": (0,)}])
def test_a_plan_that_cannot_be_measured_is_refused(wrong):
    with pytest.raises(ValueError):
        replace(SMALL, **wrong)


def test_errors_of_another_process_are_told_with_its_name():
    with pytest.raises(RefengineError, match="nonsense: BackendError: backend 'nonsense' is not one of transformers, llama.cpp"):
        Remote("nonsense", "tiny", 64, 0)
    remote = Remote("exact", "tiny", 64, 0)
    try:
        with pytest.raises(RefengineError, match="exact: CapacityError: 1 more tokens do not fit: 64 of 64"):
            remote.turn(64, 60, 1)
        assert remote.turn(20, 10, 1)["on"] > 0, "and it goes on"
        remote._process.kill()
        with pytest.raises(RefengineError, match="exact: its process ended"):
            remote.turn(20, 10, 1)
    finally:
        remote.close()


def test_flops_and_bytes_of_a_shape_that_was_counted_by_hand():
    config = open_checkpoint("tiny").config   # E 64, L 4, H 6, N 2, D 16, F 160, V 512
    layer = 64 * (6 + 2 + 2) * 16 + 6 * 16 * 64 + 3 * 64 * 160
    assert linear_weights(config) == 4 * layer
    assert prefill_flops(config, 0, 2) == 2 * 4 * layer * 2 + 4 * 4 * 6 * 16 * 3 + 2 * 512 * 64
    assert decode_bytes(config, 10, 8) == 8 * (4 * layer + 512 * 64 + 2 * 4 * 2 * 16 * 10)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(refengine.cli.bench, "PLAN", SMALL)
    files = {kind: tmp_path / f"bench.{kind}" for kind in ("json", "markdown", "png")}
    assert main(["bench", "--model", "tiny", "--arithmetic", "exact", "--turn", "40:30", "--rounds", "1", "--no-sequential",
                 "--json", str(files["json"]), "--markdown", str(files["markdown"]), "--plot", str(files["png"])]) == 0
    out = capsys.readouterr().out
    assert "exact, pipelined" in out and "sequential" not in out and "GFLOP/s" in out
    report = json.loads(files["json"].read_text())
    assert report["schema"] == "refengine-bench/1" and report["model"]["source"] == "tiny"
    assert files["markdown"].read_text() == markdown(report) and files["png"].stat().st_size > 10_000


def test_mistakes_of_the_command_are_told(capsys):
    assert main(["bench", "--model", "tiny", "--turn", "40"]) == 2
    assert "should be PROMPT:REUSED" in capsys.readouterr().err
    assert main(["bench", "--shape", "no-such-shape"]) == 2
    assert "no-such-shape" in capsys.readouterr().err


@pytest.mark.parametrize("engine_name", ["llama.cpp", "native, sequential"])
def test_no_figure_of_the_terminals_tables_is_cut_off(measured, engine_name, capsys):
    """Long names and large figures: the widest table fits the width that the command takes."""
    report, _ = measured
    row = {**report["turns"][0], "subject": engine_name, "engine": None, "prompt": 131072, "reused": 131000, "off": 99999.0,
           "measured": 3, "ratio": 999.9, "decode": 99.9}
    text = printed(*tables({**report, "turns": [row]}))
    assert "…" not in text and "99999.00 s*" in text
