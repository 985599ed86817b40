"""refengine prove. Floor 8."""
from __future__ import annotations

import argparse
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from refengine.conformance import campaign, receipt
from refengine.conformance.history import save_trace
from refengine.conformance.prove import LADDER, Result, Row, pairs
from refengine.model import Model, load_model
from refengine.sources import BUILT_IN

_SHORT = {"sequential": "seq.", "pipelined": "pipe."}
_WHAT = {"text": "text", "ids": "token ids", "logits": "logits", "kv": "K/V"}


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    console.width = max(console.width, 104)  # the table's columns; a narrower terminal wraps, and nothing is cut
    if arguments.workers is None:
        arguments.workers = 1 if arguments.histories is None else 2
    if arguments.histories is not None:
        return _campaign(console, arguments)
    small = arguments.model in BUILT_IN
    planned = {"engine": arguments.engine, "chats": arguments.chats if arguments.chats is not None else 8 if small else 2,
               "turns": arguments.turns if arguments.turns is not None else 6 if small else 4,
               "max_tokens": arguments.max_tokens, "long_words": 60 if small else 24, "capacity": arguments.capacity,
               "page_size": arguments.page_size, "keep_ids": arguments.keep_ids, "reanchor": arguments.reanchor,
               "snapshot_every": arguments.snapshot_every, "snapshot_bytes": arguments.snapshot_bytes}
    if min(planned["chats"], planned["turns"], planned["max_tokens"], arguments.workers) < 1:
        raise ValueError("chats, turns, max-tokens and workers must be at least 1")
    console.print(f"loading {arguments.model}, {arguments.arithmetic} arithmetic", highlight=False)
    model = load_model(arguments.model, arguments.arithmetic)
    result = play(console, model, arguments.model, planned, arguments.seed, arguments.workers, arguments.minutes)
    sides = campaign.side_names(planned)
    console.print(_table(result.rows, sides))
    _verdict(console, arguments.seed, result, sides)
    # When time ran out, the receipt plans what was done, so that it can be repeated.
    planned |= {"chats": result.chats if not result.differences else planned["chats"]}
    receipt.write(Path(arguments.receipt), receipt.chats_receipt(model, arguments.seed, planned, sides, result))
    console.print(f"receipt: {arguments.receipt}", highlight=False)
    return 1 if result.differences else 0


def play(console: Console, model: Model, source: str, planned: dict, seed: int, workers: int,
         minutes: float | None = None) -> Result:
    """The chats of a plan, under a progress bar."""
    with _progress(console) as progress:
        task = progress.add_task("turns", total=planned["chats"] * planned["turns"])
        return campaign.run_chats(model, source, seed=seed, planned=planned, workers=workers, minutes=minutes,
                                  on_turn=lambda row: progress.advance(task))


def play_campaign(console: Console, source: str, arithmetic: str, seed: int, histories: int, workers: int,
                  minutes: float | None = None) -> campaign.Campaign:
    """The histories of a campaign, under a progress bar."""
    with _progress(console) as progress:
        task = progress.add_task("histories", total=histories)
        return campaign.run(source, arithmetic, seed=seed, histories=histories, workers=workers, minutes=minutes,
                            on_batch=lambda batch: progress.advance(task, batch.histories))


def _progress(console: Console) -> Progress:
    return Progress(TextColumn("proving"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
                    TimeElapsedColumn(), console=console)


def _campaign(console: Console, arguments: argparse.Namespace) -> int:
    if arguments.keep_ids or arguments.reanchor:
        raise ValueError("--keep-ids and --reanchor are for chats; --histories has no text")
    if arguments.snapshot_every is not None:
        raise ValueError("--snapshot-every is for chats; --histories draws its snapshots, as it does pages and chunks")
    if arguments.histories < 1 or arguments.workers < 1:
        raise ValueError("histories and workers must be at least 1")
    model = load_model(arguments.model, arguments.arithmetic)
    done = play_campaign(console, arguments.model, arguments.arithmetic, arguments.seed, arguments.histories, arguments.workers,
                         arguments.minutes)
    console.print(f"{done.histories:,} histories, {done.operations:,} operations, {done.bytes:,} bytes of logits and K/V compared "
                  f"after each of them; seed {arguments.seed}, {arguments.workers} workers, {done.seconds:.1f} s, "
                  f"{done.histories / done.seconds * 60:,.0f} histories a minute", highlight=False)
    # When time ran out, the receipt plans what was done, so that it can be repeated.
    planned = {"histories": arguments.histories if done.failure else done.histories}
    receipt.write(Path(arguments.receipt),
                  receipt.histories_receipt(model, arguments.seed, planned, arguments.workers, done))
    console.print(f"receipt: {arguments.receipt}", highlight=False)
    if done.failure is None:
        console.print("[bold green]LOSSLESS[/]: every byte is equal", highlight=False)
        return 0
    number, settings, history, message = done.failure
    short = campaign.shorten(history, lambda ops: campaign.failure_of(model, settings, ops) is not None)
    path = Path(arguments.receipt).with_suffix(".trace.json")
    save_trace(path, short, model=model.checkpoint.source, engine=settings, note=message)
    console.print(f"[bold red]NOT LOSSLESS[/]: history {number}", highlight=False)
    console.print(campaign.failure_of(model, settings, short) or message, style="red", highlight=False, markup=False)
    console.print(f"trace: {path}", highlight=False)
    return 1


def _table(rows: list[Row], sides: list[str]) -> Table:
    """Prompt, reused and forwarded of the ON sides, and the times to the first token."""
    table = Table(title="tokens, and ms to the first token", caption="~ sampled  ! cancelled", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0))
    table.add_column("turn", no_wrap=True)
    table.add_column("what", no_wrap=True)
    for column in ("prompt", "reused", "forwarded"):
        table.add_column(column, justify="right", no_wrap=True)
    for engine, _, _ in pairs(sides):
        for column in (f"{_SHORT[engine]} ON", "OFF", "ratio"):
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        what = row.step.kind + "~" * bool(row.step.sampling.temperature) + "!" * (row.step.cancel is not None)
        timed = [(row.turns[on], row.turns[off]) for _, on, off in pairs(sides)]
        cells = ["-"] * (3 + 3 * len(timed))
        if all(on and off for on, off in timed):
            first = timed[0][0]
            cells = [str(first.prompt), str(first.reused), str(first.forwarded)]
            for on, off in timed:
                cells += [f"{on.ttft * 1e3:.1f}", f"{off.ttft * 1e3:.1f}", f"{off.ttft / on.ttft:.1f}x"]
        table.add_row(f"{row.chat}.{row.turn}", what, *cells)
    return table


def _verdict(console: Console, seed: int, result: Result, sides: list[str]) -> None:
    for kind in LADDER:
        mark = "[green]equal[/]" if result.equal(kind) else "[red]NOT EQUAL[/]"
        console.print(f"{_WHAT[kind]:10} {mark}", highlight=False)
    for difference in result.differences:
        console.print(str(difference), style="red", highlight=False, markup=False)
    on = [row.turns[side] for row in result.rows for side in sides if side.endswith(" ON") and row.turns[side]]
    prompt, reused = sum(turn.prompt for turn in on), sum(turn.reused for turn in on)
    console.print(f"{result.chats} chats, {len(result.rows)} turns, {result.tokens} generated tokens; "
                  f"{', '.join(sides)}: {result.logits_bytes + result.kv_bytes:,} bytes compared "
                  f"(logits {result.logits_bytes:,}, K/V {result.kv_bytes:,}); with the cache ON "
                  f"{reused:,} of {prompt:,} prompt tokens reused; seed {seed}, {result.seconds:.1f} s", highlight=False)
    verdict = "[bold green]LOSSLESS[/]: every byte is equal" if not result.differences else "[bold red]NOT LOSSLESS[/]"
    console.print(verdict, highlight=False)
