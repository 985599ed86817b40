"""refengine inspect: the KV cache of a recorded chat in time, as one HTML file. Floor 8."""
from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from refengine.inspect import Replay, page, read_record


def run(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    record = read_record(Path(arguments.record))
    out = Path(arguments.out)
    if not out.parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.parent}")
    console.print(f"playing {len(record['turns'])} turns on {record['model']['source']}, with the cache and without", soft_wrap=True,
                  markup=False)
    data = Replay(record).data
    out.write_text(page(data), encoding="utf-8")
    for difference in data["differences"]:
        console.print(f"not as it was recorded: {difference}", style="red", soft_wrap=True, markup=False)
    unequal = sum(turn["unequal_bytes"] for turn in data["turns"])
    console.print(f"{out}: {out.stat().st_size:,} bytes, {len(data['events'])} operations; {unequal:,} of "
                  f"{sum(turn['logits_bytes'] for turn in data['turns']):,} bytes of logits differ between ON and OFF", soft_wrap=True,
                  markup=False)
    return 0
