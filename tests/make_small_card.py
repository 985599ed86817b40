"""Writes refengine/data/small/README.md: how the model was trained, by its log, and its recall, measured. Floor 9.

    python tests/make_small_card.py
"""
import contextlib
import io
import json
import re
from math import prod
from pathlib import Path

import refengine
from refengine.cli import main
from refengine.machine import describe
from refengine.model import load_model

FOLDER = Path(refengine.__file__).parent / "data" / "small"
COMMAND = "recall --dialogues 100"
OTHER_COMMANDS = ("recall --dialogues 1000 --seed 1 --arithmetic native", "recall --dialogues 100 --turns 8")

CARD = """\
# small

A Qwen3 of {parameters:,} parameters: {config[num_hidden_layers]} layers, hidden size {config[hidden_size]}, \
{config[num_attention_heads]} query heads and {config[num_key_value_heads]} K/V heads of {config[head_dim]},
{config[vocab_size]} ids; {size:.1f} MB in BF16. It answers from its conversation and knows nothing else: names, numbers, times,
places and lists that it was told, as they were last corrected. So a chat over a wrongly reused cache says something wrong
that everybody can see.

## Data

Dialogues that [refengine.recall](../../recall/dialogues.py) writes from a seed: facts, corrections ("No, it is ..."), lists
and what is added to them, questions about what was said and what was not, small talk, a system prompt in some, and in some
thoughts before the answer (after the system prompt "Think before you answer."). All text is made by that generator; none
is from elsewhere. Values are mostly made-up words, pieces of words put together, and numbers, so that an answer must be
copied and cannot be known. A fifth of all values, chosen by their CRC-32, is never in a training dialogue: the measure
uses only those.

## Training

`python tests/make_small.py`, with the extra `train`: {versions}; one thread of {processor}.
Seed {seed}, {steps:,} steps of {tokens:,} tokens, {minutes:.0f} minutes on a machine that had other work.
[training.log](training.log):

| step | loss | tokens right | tokens seen |
|---:|---:|---:|---:|
{rows}

## Recall

Of the questions about what was said, how many are answered with all values that were said last, in order, and none that was
corrected since. The values are held out; the history is of the model's own answers. Exact arithmetic gives these figures
everywhere.

{recall}

## Limits

It was trained on dialogues of two to eight turns, in a few hundred forms of sentences, in English. In longer ones, and
with other words, it errs more. It knows nothing about the world, and is no example of what a model of this architecture
can do.
"""


def run(command: str) -> str:
    """What a command prints, without spaces at the ends of lines."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if main(command.split()):
            raise SystemExit(f"{command} failed")
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines()).strip()


def block(command: str) -> str:
    return f"```\n$ refengine {command}\n{run(command)}\n```"


def card() -> str:
    log = (FOLDER / "training.log").read_text(encoding="utf-8").splitlines()
    recipe = json.loads(log[0])
    form = re.compile(r"step +(\d+) loss ([\d.]+) right ([\d.]+) length \d+ tokens ([\d,]+) (\d+) s")
    steps = [form.fullmatch(line) for line in log[2:]]
    rows = (f"| {m[1]} | {m[2]} | {float(m[3]):.1%} | {m[4]} |" for m in steps if int(m[1]) % 500 == 0)
    return CARD.format(**recipe, versions=log[1].partition(" parameters, ")[2], minutes=int(steps[-1][5]) / 60, rows="\n".join(rows),
                       parameters=sum(prod(shape) for shape in load_model("small").config.tensors().values()),
                       config=json.loads((FOLDER / "config.json").read_text(encoding="utf-8")),
                       size=(FOLDER / "model.safetensors").stat().st_size / 1e6, processor=describe()["processor"],
                       recall="\n\n".join(map(block, (COMMAND, *OTHER_COMMANDS))))


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(card(), encoding="utf-8")
