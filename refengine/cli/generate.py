"""refengine generate. Floor 8."""
from __future__ import annotations

import argparse
import sys
import time

from refengine.cli import setup
from refengine.model import load_tokenizer
from refengine.text_stream import StopText


def run(arguments: argparse.Namespace) -> int:
    tokenizer = load_tokenizer(arguments.model)
    if arguments.chat:
        ids = tokenizer.encode_chat([{"role": "user", "content": arguments.prompt}]).ids
    else:
        ids = tokenizer.encode(arguments.prompt, add_special_tokens=True)
    engine = setup.engine(arguments, arguments.model)
    decoder, stops, count, began, first = tokenizer.stream(), StopText(arguments.stop), 0, time.perf_counter(), 0.0
    for token in engine.generate(ids, max_tokens=arguments.max_tokens, stop_ids=tokenizer.stop_ids,
                                 sampling=setup.sampling(arguments)):
        first = first or time.perf_counter() - began
        count += 1
        if token not in tokenizer.stop_ids:
            print(stops.push(decoder.push(token)), end="", flush=True)
        if stops.found:
            break
    print("" if stops.found else stops.push(decoder.flush()) + stops.flush())
    print(f"{len(ids)} prompt tokens, first token {first:.3f} s, {count} tokens in {time.perf_counter() - began:.3f} s",
          file=sys.stderr)
    return 0
