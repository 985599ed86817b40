"""refengine generate. Floor 8."""
from __future__ import annotations

import argparse
import sys
import time

from refengine.cli import setup
from refengine.model import load_tokenizer


def run(arguments: argparse.Namespace) -> int:
    tokenizer = load_tokenizer(arguments.model)
    if arguments.chat:
        ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": arguments.prompt}]))
    else:
        ids = tokenizer.encode(arguments.prompt, add_special_tokens=True)
    engine = setup.engine(arguments, arguments.model)
    decoder, count, began, first = tokenizer.stream(), 0, time.perf_counter(), 0.0
    for token in engine.generate(ids, max_tokens=arguments.max_tokens, stop_ids=tokenizer.stop_ids,
                                 sampling=setup.sampling(arguments)):
        first = first or time.perf_counter() - began
        count += 1
        if token not in tokenizer.stop_ids:
            print(decoder.push(token), end="", flush=True)
    print(decoder.flush())
    print(f"{len(ids)} prompt tokens, first token {first:.3f} s, {count} tokens in {time.perf_counter() - began:.3f} s",
          file=sys.stderr)
    return 0
