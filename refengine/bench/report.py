"""A bench report in words: tables for the terminal, one for the README, a picture."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from refengine.bench.subject import OURS
from refengine.errors import RefengineError


def tables(report: dict[str, Any]) -> list[Table]:
    """All figures of a report."""
    found = [_turns(report)]
    if any(name not in OURS for name in report["subjects"]):
        found.append(_against(report))
    return [*found, _three(report), _chunks(report), _trims(report), _subjects(report)]


def ceilings(report: dict[str, Any]) -> str:
    """The machine, and what it can do."""
    top, machine = report["ceilings"], report["machine"]
    return (f"{machine['processor']}, {machine['cpus']} cores; {machine['blas']}, "
            f"core {machine.get('blas_core', 'unknown')}, {machine.get('blas_threads', '?')} threads; "
            f"NumPy {machine['numpy']}, Python {machine['python']}. "
            f"Ceilings: sgemm {top['sgemm']:.0f} and dgemm {top['dgemm']:.0f} GFLOP/s, reading {top['read']:.1f} GB/s. "
            f"{'One round' if report['rounds'] == 1 else 'Medians of ' + str(report['rounds']) + ' rounds'}")


def markdown(report: dict[str, Any]) -> str:
    """The README's table: a turn with and without the cache, and the machine under it."""
    lines = ["| prompt | reused | to run | engine | TTFT ON | OFF | OFF / ON | ms a token after |",
             "|--:|--:|--:|---|--:|--:|--:|--:|"]
    for row in report["turns"]:
        after = f"{row['decode'] * 1e3:.0f}" if "decode" in row else ""
        lines.append(f"| {row['prompt']:,} | {row['reused']:,} | {row['prompt'] - row['reused']} | {_name(row)} | "
                     f"{_seconds(row['on'])} | {_seconds(row['off'])}{_star(row)} | {row['ratio']:.1f}x | {after} |")
    versions = "; ".join(f"{name}: {about['version']}" for name, about in report["subjects"].items() if name not in OURS)
    return "\n".join([*lines, "", f"{ceilings(report)}.{' ' + versions + '.' if versions else ''}"
                      + (f" {_EXTRAPOLATED}" if any(_star(row) for row in report["turns"]) else "")]) + "\n"


_EXTRAPOLATED = "\\* One token a forward, extrapolated from a stretch around the middle of the prompt."


def _name(row: dict[str, Any]) -> str:
    return row["subject"] if row["engine"] is None else f"{row['subject']}, {row['engine']}"


def _star(row: dict[str, Any]) -> str:
    return "*" if row.get("measured", row["prompt"]) < row["prompt"] else ""


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def _table(title: str, words: int, columns: list[str], caption: str | None = None) -> Table:
    """The first ``words`` columns are text, the others figures."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right", no_wrap=True)
    return table


def _turns(report: dict[str, Any]) -> Table:
    starred = any(_star(row) for row in report["turns"])
    table = _table("time to the first token of a turn", 1, ["engine", "prompt", "reused", "to run", "ON", "OFF", "OFF/ON",
                   "prefill tok/s", "of its gemm", "decode", "of reading"], _EXTRAPOLATED.lstrip("\\") if starred else None)
    for row in report["turns"]:
        decode = [f"{row['decode'] * 1e3:.1f} ms", f"{row['decode_share']:.0%}"] if "decode" in row else ["", ""]
        table.add_row(_name(row), f"{row['prompt']:,}", f"{row['reused']:,}", str(row["prompt"] - row["reused"]),
                      _seconds(row["on"]), _seconds(row["off"]) + _star(row), f"{row['ratio']:.1f}x",
                      f"{row['prompt'] / row['off']:.1f}",
                      f"{row['prefill_share']:.0%}" if "prefill_share" in row else "", *decode)
    return table


def _against(report: dict[str, Any]) -> Table:
    """Our times as multiples of the others': below 1 is faster."""
    table = _table("ours as a multiple of others' times (below 1 is faster)", 2,
                   ["ours", "theirs", "prompt", "OFF", "ON", "decode"])
    for row in report["turns"]:
        for other in report["turns"]:
            if row["engine"] == "pipelined" and other["engine"] is None and other["prompt"] == row["prompt"]:
                table.add_row(row["subject"], other["subject"], f"{row['prompt']:,}",
                              *(f"{row[key] / other[key]:.2f}x" for key in ("off", "on", "decode")))
    return table


def _three(report: dict[str, Any]) -> Table:
    table = _table("three turns", 1, ["engine", "prompt", "reused", "to run", "ON", "OFF", "OFF/ON"])
    for row in report["three_turns"]:
        table.add_row(row["subject"], f"{row['prompt']:,}", f"{row['reused']:,}", str(row["prompt"] - row["reused"]),
                      _seconds(row["on"]), _seconds(row["off"]), f"{row['off'] / row['on']:.1f}x")
    return table


def _chunks(report: dict[str, Any]) -> Table:
    sizes = sorted({row["size"] for row in report["chunks"]})
    table = _table("prefill, tokens a second, by chunk size", 1, ["engine", *map(str, sizes)])
    rates = {(row["subject"], row["size"]): row["tokens_per_s"] for row in report["chunks"]}
    for name in dict.fromkeys(row["subject"] for row in report["chunks"]):
        table.add_row(name, *(f"{rates[name, size]:.1f}" for size in sizes))
    return table


def _trims(report: dict[str, Any]) -> Table:
    lengths = sorted({row["length"] for row in report["trims"]})
    table = _table("rewind, microseconds, by tokens given up", 1, ["engine", *(f"{length:,}" for length in lengths)])
    times = {(row["subject"], row["length"]): row["s"] for row in report["trims"]}
    for name in dict.fromkeys(row["subject"] for row in report["trims"]):
        table.add_row(name, *(f"{times[name, length] * 1e6:.2f}" for length in lengths))
    return table


def _subjects(report: dict[str, Any]) -> Table:
    table = _table("loading and memory", 1, ["engine", "load", "MB after load", "peak MB"])
    for name, about in report["subjects"].items():
        table.add_row(f"{name} ({about['version']})", f"{about['load_s']:.1f} s", f"{about['load_mb']:,.0f}",
                      f"{about['peak_mb']:,.0f}")
    return table


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw a report as a PNG: TTFT against the prompt, decode against context, chunk sizes, rewind. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RefengineError("drawing needs matplotlib: pip install 'refengine[plot]'") from None
    figure = Figure(figsize=(12, 8), layout="constrained")
    ttft, decode, chunks, trims = figure.subplots(2, 2).ravel()
    for color, (name, rows) in enumerate(_grouped(report["turns"], _name).items()):
        prompts = [row["prompt"] for row in rows]
        ttft.plot(prompts, [row["on"] for row in rows], f"C{color}o-", label=f"{name}, ON")
        ttft.plot(prompts, [row["off"] for row in rows], f"C{color}s--", label=f"{name}, OFF")
        if "decode" in rows[0]:
            decode.plot(prompts, [row["decode"] * 1e3 for row in rows], f"C{color}o-", label=name)
    for name, rows in _grouped(report["chunks"], lambda row: row["subject"]).items():
        chunks.plot([row["size"] for row in rows], [row["tokens_per_s"] for row in rows], "o-", label=name)
    for name, rows in _grouped(report["trims"], lambda row: row["subject"]).items():
        trims.plot([row["length"] for row in rows], [row["s"] * 1e6 for row in rows], "o-", label=name)
    for axes, title, x, y in ((ttft, "time to the first token", "prompt, tokens", "seconds"),
                              (decode, "each token after", "context, tokens", "ms"),
                              (chunks, "prefill", "chunk size, tokens", "tokens a second"),
                              (trims, "rewind", "tokens given up", "microseconds")):
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    ttft.set(xscale="log", yscale="log")
    trims.set(xscale="log", ylim=(0, None))
    chunks.set(xscale="log")
    figure.suptitle(f"{Path(report['model']['source']).name}, {report['machine']['processor']}", fontsize="medium")
    figure.savefig(path, dpi=110)


def _grouped(rows: list[dict[str, Any]], key) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
