"""Writes proofs/README.md from the proofs' own docstrings and a run over the planted faults: python proofs/make_readme.py."""
import ast
import re
import sys
import tempfile
import warnings
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """# proofs

What refengine claims, one statement a file. The docstring is the theorem, the argument and its limits; below it are
Hypothesis properties that try to refute it. `make test` runs them derandomised; `make prove-deep EXAMPLES=100000` as long
as you like. This page is written by `python proofs/make_readme.py`.

| claim | file | shown by | not shown |
|---|---|---|---|
"""
MIDDLE = """
Histories from a seed, over processes, with a receipt: `refengine prove --histories 100000 --workers 2`. Receipts of long
runs are in [receipts/](receipts/); `refengine verify RECEIPT` repeats one and compares. A history that fails is cut short
and saved as a trace; `refengine replay TRACE.json` plays it again. The trace is plain JSON, documented in
[history.py](../refengine/conformance/history.py), and means the same to any engine.

An engine of your own:

```
pytest --pyargs refengine.conformance --engine my.module:make_engine
```

where `make_engine()` returns a fresh subclass of `refengine.Engine`. It is compared, bit for bit, with what a fresh one of
its own gives. [tests/engines_of_others.py](../tests/engines_of_others.py) has a right one, and one whose rewind to zero
keeps everything: the suite fails it and writes the two operations that show it.

## One hash

SHA-256 of the logits and K/V of the built-in model, chunks of 1, 7 and 256, in a process for each line. `exact` has one;
`native`, plain float32, is what it would be otherwise.

{platforms}
## What snapshots save

Prompt tokens that a chat over recurrent layers reuses, and the states that it keeps for it. These are counts, the same on
every machine.

{snapshots}
## The proofs can fail

Each of these faults, which engines of others had, is planted in turn and found.

"""


def theorems() -> str:
    """A table row for each prove_*.py."""
    rows = []
    for path in sorted(HERE.glob("prove_*.py")):
        doc = " ".join(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).split())
        claim = re.search(r"THEOREM\. (.+?)(?= Statement:)", doc)[1]
        part = {name: (found[1] if (found := re.search(rf"{name}: (.+?)(?= (?:Shown by|Not shown|Argument|The control|The native set)[:, ]|$)", doc))
                       else "") for name in ("Shown by", "Not shown")}
        rows.append(f"| {claim} | [{path.name}]({path.name}) | {part['Shown by'] or 'Hypothesis properties.'} | {part['Not shown']} |")
    return "\n".join(rows) + "\n"


def platforms() -> str:
    """A table row for each OpenBLAS core and number of threads that this machine has, and for NumPy without SIMD."""
    from digest import CORES, missing, simd
    from prove_the_same_bits_everywhere import CHUNKS, OTHERS, run, without_simd

    runs = {f"OpenBLAS {core}, {threads} thread{'s' * (threads > 1)}": {name: run(name, core, threads)[1] for name in ("exact", "native")}
            for core in CORES if not missing(core) for threads in (1, 2)}
    if simd():
        runs["NumPy without SIMD"] = {name: without_simd(name)[1] for name in ("exact", "native")}
    lines = [f"| | {' | '.join(f'{name}, {chunk}' for name in ('exact', 'native') for chunk in CHUNKS)} |", "|---" * (1 + 2 * len(CHUNKS)) + "|"]
    for what, hashes in runs.items():
        lines.append(f"| {what} | {' | '.join(f'`{digest[:8]}`' for name in ('exact', 'native') for digest in hashes[name].values())} |")
    many = {name: len({digest for hashes in runs.values() for digest in hashes[name].values()}) for name in ("exact", "native")}
    count = len(runs) * len(CHUNKS)
    lines.append(f"\n{count} runs each: {many['exact']} hash of `exact`, {many['native']} of `native`. Marked `platforms`, and not in "
                 f"this table: {', '.join(OTHERS)} (the newest), aarch64.\n")
    return "\n".join(lines)


def main() -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]
    from models import T_CONFIG, write_ties
    from prove_a_snapshot_is_a_full_recompute import figures
    from prove_the_proofs_can_fail import table

    from refengine.model import load_model
    from refengine.synth import write_checkpoint

    warnings.simplefilter("ignore", RuntimeWarning)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "T", T_CONFIG, seed=1)
        write_ties(Path(folder) / "ties")
        mutants = table({"T": load_model(Path(folder) / "T"), "ties": load_model(Path(folder) / "ties"),
                         "hybrid": load_model("tiny-hybrid"), "tiny": load_model("tiny")})
    middle = MIDDLE.replace("{platforms}", platforms()).replace("{snapshots}", figures())
    (HERE / "README.md").write_text(HEAD + theorems() + middle + mutants + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
