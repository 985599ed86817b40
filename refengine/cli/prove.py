"""refengine prove. Floor 8."""
from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import refengine
from refengine.cli import setup
from refengine.conformance.prove import LADDER, Result, Row, Side, pairs, prove
from refengine.machine import describe
from refengine.model import load_model, load_tokenizer

_WHAT = {"text": "text", "ids": "token ids", "logits": "logits", "kv": "K/V"}


def run(arguments: argparse.Namespace) -> int:
    small = arguments.model == "tiny"
    chats = arguments.chats if arguments.chats is not None else 8 if small else 2
    turns = arguments.turns if arguments.turns is not None else 6 if small else 4
    if chats < 1 or turns < 1:
        raise ValueError(f"{chats} chats of {turns} turns; both must be at least 1")
    console = Console()
    console.width = max(console.width, 100)  # the table's columns; a narrower terminal wraps, and nothing is cut
    console.print(f"loading {arguments.model}, {arguments.arithmetic} arithmetic", highlight=False)
    model, tokenizer = load_model(arguments.model, arguments.arithmetic), load_tokenizer(arguments.model)
    engines = ("sequential", "pipelined") if arguments.engine == "both" else (arguments.engine,)
    sides = [Side(f"{name} {'ON' if on else 'OFF'}", setup.engine(arguments, model, name), tokenizer, on)
             for name in engines for on in (False, True)]
    with Progress(TextColumn("proving"), BarColumn(), MofNCompleteColumn(), TextColumn("turns"), TimeElapsedColumn(),
                  console=console) as progress:
        task = progress.add_task("", total=chats * turns)
        result = prove(sides, seed=arguments.seed, chats=chats, turns=turns, max_tokens=arguments.max_tokens,
                       long_words=60 if small else 24, on_turn=lambda row: progress.advance(task),
                       until=time.perf_counter() + 60 * arguments.minutes if arguments.minutes else float("inf"))
    console.print(_table(result.rows, sides))
    _verdict(console, arguments, result, sides)
    receipt = _receipt(arguments, chats, turns, model, result, sides)
    Path(arguments.receipt).write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
    console.print(f"receipt: {arguments.receipt}", highlight=False)
    return 1 if result.differences else 0


def _table(rows: list[Row], sides: list[Side]) -> Table:
    """Prompt, reused and forwarded of the ON sides, and the times to the first token."""
    table = Table(title="tokens, and ms to the first token", caption="~ sampled  ! cancelled", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0))
    table.add_column("turn", no_wrap=True)
    table.add_column("what", no_wrap=True)
    for column in ("prompt", "reused", "forwarded"):
        table.add_column(column, justify="right", no_wrap=True)
    for engine, _, _ in pairs(sides):
        for column in (f"{engine} ON", "OFF", "ratio"):
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        what = row.step.kind + "~" * bool(row.step.sampling.temperature) + "!" * (row.step.cancel is not None)
        timed = [(row.turns[on.name], row.turns[off.name]) for _, on, off in pairs(sides)]
        cells = ["-"] * (3 + 3 * len(timed))
        if all(on and off for on, off in timed):
            first = timed[0][0]
            cells = [str(first.prompt), str(first.reused), str(first.forwarded)]
            for on, off in timed:
                cells += [f"{on.ttft * 1e3:.1f}", f"{off.ttft * 1e3:.1f}", f"{off.ttft / on.ttft:.1f}x"]
        table.add_row(f"{row.chat}.{row.turn}", what, *cells)
    return table


def _verdict(console: Console, arguments: argparse.Namespace, result: Result, sides: list[Side]) -> None:
    for kind in LADDER:
        mark = "[green]equal[/]" if result.equal(kind) else "[red]NOT EQUAL[/]"
        console.print(f"{_WHAT[kind]:10} {mark}", highlight=False)
    for difference in result.differences:
        console.print(str(difference), style="red", highlight=False, markup=False)
    on = [row.turns[side.name] for row in result.rows for side in sides if side.prefix_cache if row.turns[side.name]]
    prompt, reused = sum(turn.prompt for turn in on), sum(turn.reused for turn in on)
    console.print(f"{result.chats} chats, {len(result.rows)} turns, {result.tokens} generated tokens; "
                  f"{', '.join(side.name for side in sides)}: {result.logits_bytes + result.kv_bytes:,} bytes compared "
                  f"(logits {result.logits_bytes:,}, K/V {result.kv_bytes:,}); with the cache ON "
                  f"{reused:,} of {prompt:,} prompt tokens reused; seed {arguments.seed}, {result.seconds:.1f} s",
                  highlight=False)
    verdict = "[bold green]LOSSLESS[/]: every byte is equal" if not result.differences else "[bold red]NOT LOSSLESS[/]"
    console.print(verdict, highlight=False)


def _receipt(arguments: argparse.Namespace, chats: int, turns: int, model, result: Result, sides: list[Side]) -> dict:
    """All that another person needs to repeat the run and to compare."""
    return {
        "schema": "refengine-receipt/1", "refengine": refengine.__version__, "machine": describe(),
        "model": {"source": model.checkpoint.source, "fingerprint": model.checkpoint.fingerprint()},
        "arithmetic": model.op.NAME, "capacity": arguments.capacity, "page_size": arguments.page_size,
        "seed": arguments.seed, "planned": {"chats": chats, "turns": turns, "max_tokens": arguments.max_tokens},
        "sides": [side.name for side in sides],
        "compared": {"chats": result.chats, "turns": len(result.rows), "tokens": result.tokens,
                     "logits_bytes": result.logits_bytes, "kv_bytes": result.kv_bytes},
        "equal": {kind: result.equal(kind) for kind in LADDER}, "lossless": not result.differences,
        "differences": [vars(difference) for difference in result.differences],
        "digest": result.digest, "seconds": round(result.seconds, 3),
        "rows": [{"chat": row.chat, "turn": row.turn, "kind": row.step.kind,
                  "sides": {name: turn and {"prompt": turn.prompt, "reused": turn.reused, "forwarded": turn.forwarded,
                                            "generated": turn.generated, "ttft": round(turn.ttft, 6), "finish": turn.finish}
                            for name, turn in row.turns.items()}} for row in result.rows],
    }
