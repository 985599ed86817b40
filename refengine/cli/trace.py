"""refengine trace: activations of a prompt, by name. Floor 8."""
from __future__ import annotations

import argparse
from pathlib import Path

from refengine.cli import setup
from refengine.inspect import activations, trace, write_trace
from refengine.model import load_tokenizer
from refengine.sources import open_checkpoint


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        for name, about in activations(open_checkpoint(arguments.model).config).items():
            print(f"{name:24} {'(' + ', '.join(about.shape) + ')':12} {about.module}, {about.point}")
        return 0
    if arguments.prompt is None or arguments.out is None:
        raise ValueError("a PROMPT and -o FILE are needed, or --list")
    tokenizer = load_tokenizer(arguments.model)
    if arguments.chat:
        ids = tokenizer.encode_chat([{"role": "user", "content": arguments.prompt}]).ids
    else:
        ids = tokenizer.encode(arguments.prompt, add_special_tokens=True)
    if not 0 <= arguments.start < len(ids):
        raise ValueError(f"--from {arguments.start}: the prompt has positions 0..{len(ids) - 1}")
    engine = setup.engine(arguments, arguments.model)
    held, tokens = ids[:arguments.start], ids[arguments.start:]
    if held:
        engine.prefill(held)
    arrays = trace(engine, tokens, arguments.names)
    header = write_trace(Path(arguments.out), arrays, engine, tokens)
    print(f"{arguments.out}: {len(arrays)} activations, {sum(x.nbytes for x in arrays.values()):,} bytes, of {len(tokens)} tokens "
          f"at offset {header['offset']}, {header['arithmetic']} arithmetic")
    return 0
