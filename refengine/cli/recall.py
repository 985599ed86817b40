"""refengine recall: does a model answer from its conversation? Floor 8."""
from __future__ import annotations

import argparse

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from refengine.chat import Chat
from refengine.cli import setup
from refengine.model import load_tokenizer
from refengine.recall.measure import KINDS, Recall, measure


def run(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    tokenizer, engine = load_tokenizer(arguments.model), setup.engine(arguments, arguments.model)

    def new_chat(system: str) -> Chat:
        return Chat(engine, tokenizer, not arguments.no_prefix_cache, system=system or None, max_tokens=arguments.max_tokens)

    columns = TextColumn("asking"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("dialogues", total=arguments.dialogues)
        recall = measure(new_chat, dialogues=arguments.dialogues, turns=arguments.turns, seed=arguments.seed,
                         on_dialogue=lambda: progress.advance(task))
    console.print(_table(recall))
    for answer in recall.answers if arguments.wrong else ():
        if not answer.right:
            console.print(f"dialogue {answer.dialogue}: {answer.turn.user!r} is {answer.turn.answer!r}, not {answer.text!r}",
                          markup=False, soft_wrap=True)
    right = sum(answer.right for answer in recall.answers)
    console.print(f"{escape(arguments.model)}, {arguments.arithmetic} arithmetic: {right} of {len(recall.answers)} right, "
                  f"[bold]{recall.accuracy:.1%}[/], in {arguments.dialogues} dialogues of {arguments.turns} turns, "
                  f"seed {arguments.seed}", soft_wrap=True)
    return 0


def _table(recall: Recall) -> Table:
    """Right of asked: a row for each kind, a column for each number of turns between."""
    counts = recall.counts()
    distances = sorted({distance for _, distance in counts})
    table = Table(box=box.SIMPLE_HEAD, title="right of asked, by turns since it was said", title_justify="left")
    table.add_column("", no_wrap=True)
    for distance in distances:
        table.add_column(str(distance), justify="right", no_wrap=True)
    for kind in KINDS:
        cells = [counts.get((kind, distance)) for distance in distances]
        table.add_row(kind, *("{}/{}".format(*cell) if cell else "-" for cell in cells))
    return table
