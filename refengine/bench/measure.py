"""The plan of a bench: who is measured on what, in which order, and the medians that come out.

Machines drift, so every round asks each engine in turn (A B A B), and what is compared was measured in the same run.
"""
from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from refengine.bench.ceilings import decode_bytes, measure_ceilings, prefill_flops
from refengine.bench.subject import OURS, Remote
from refengine.config import ModelConfig
from refengine.machine import describe
from refengine.sources import open_checkpoint

SCHEMA = "refengine-bench/1"


@dataclass(frozen=True)
class Plan:
    """What to measure. ``turns``: (prompt, how many of it are reused). ``three``: prompts that each reuse the one before."""

    turns: tuple[tuple[int, int], ...] = ((357, 336), (1024, 996), (4103, 4075))
    three: tuple[int, ...] = (826, 849, 872)
    chunks: tuple[int, ...] = (32, 64, 128, 256, 512)
    chunk_length: int = 1024
    trims: tuple[int, ...] = (1, 4096, 32768)
    decode: int = 16          # tokens after each prompt
    stretch: int = 24         # tokens of a sequential OFF turn that are measured; the rest is extrapolated
    rounds: int = 3
    sequential: bool = True
    ceiling_megabytes: int = 512

    def __post_init__(self):
        for prompt, reused in self.turns:
            if not 0 <= reused < prompt:
                raise ValueError(f"a prompt of {prompt} tokens cannot reuse {reused}; at least one must run")
        if min(self.decode, self.stretch, self.rounds, self.chunk_length, *self.chunks, *self.trims) < 1:
            raise ValueError("decode, stretch, rounds, chunk sizes and trim lengths must be at least 1")

    @property
    def capacity(self) -> int:
        return max(self.chunk_length, *self.three, *(prompt + self.decode for prompt, _ in self.turns))

    @property
    def steps(self) -> int:
        """How often `on_step` is called for each subject."""
        return self.rounds * (len(self.turns) + 2)


def bench(model: str, subjects: Sequence[str], plan: Plan = Plan(), *, seed: int = 0,
          on_step: Callable[[str, str], None] = lambda subject, what: None) -> dict[str, Any]:
    """Measure subjects ("exact", "native", names of backends) on a model. Returns the report, JSON-able, times in seconds.

    Raises RefengineError: BackendError where one is not installed, CheckpointError.
    """
    config = open_checkpoint(model).config
    with ExitStack() as stack:
        remotes = []
        for name in subjects:
            on_step(name, "load")
            remote = Remote(name, model, plan.capacity, seed)
            stack.callback(remote.close)
            remotes.append(remote)
        ours = [remote for remote in remotes if remote.name in OURS]
        ceilings, turns, three, chunks = [], {}, {}, {}
        for _ in range(plan.rounds):
            ceilings.append(measure_ceilings(megabytes=plan.ceiling_megabytes))
            for prompt, reused in plan.turns:
                for remote in remotes:
                    on_step(remote.name, f"prompt of {prompt:,}")
                    _add(turns, (remote.name, "pipelined", prompt, reused), remote.turn(prompt, reused, plan.decode))
                    if remote in ours and plan.sequential:
                        _add(turns, (remote.name, "sequential", prompt, reused),
                             remote.sequential_turn(prompt, reused, plan.stretch))
            for remote in remotes:
                on_step(remote.name, "three turns")
                for at, times in enumerate(remote.turns(plan.three)):
                    _add(three, (remote.name, at), times)
            for remote in ours:
                on_step(remote.name, "chunk sizes")
                for size in plan.chunks:
                    _add(chunks, (remote.name, size), {"tokens_per_s": remote.chunk(size, plan.chunk_length)})
        trims = [{"subject": remote.name, "length": length, "s": remote.trim(length)}
                 for remote in ours for length in plan.trims]
        about = {remote.name: remote.about() for remote in remotes}
    top = {key: statistics.median(c[key] for c in ceilings) for key in ("sgemm", "dgemm", "read")}
    return {"schema": SCHEMA, "machine": describe(), "model": {"source": model, "weights": _weights(config)},
            "rounds": plan.rounds, "ceilings": top, "subjects": about,
            "turns": [_turn(config, top, *key, times) for key, times in turns.items()],
            "three_turns": [{"subject": name, "prompt": plan.three[at], "reused": plan.three[at - 1] if at else 0,
                             **_medians(times)} for (name, at), times in three.items()],
            "chunks": [{"subject": name, "size": size, **_medians(times)} for (name, size), times in chunks.items()],
            "trims": trims}


def _turn(config: ModelConfig, top: dict, name: str, engine: str, prompt: int, reused: int, times: dict) -> dict[str, Any]:
    """One line of the turns, with each figure's share of its ceiling."""
    row = {"subject": name, "engine": engine if name in OURS else None, "prompt": prompt, "reused": reused,
           **_medians(times)}
    row["ratio"] = row["off"] / row["on"]
    if engine == "pipelined":
        peak = top["dgemm" if name == "exact" else "sgemm"]
        row["prefill_share"] = prefill_flops(config, 0, prompt) / row["off"] / (peak * 1e9)
        row["decode_share"] = decode_bytes(config, prompt, 8 if name == "exact" else 4) / row["decode"] / (top["read"] * 1e9)
    return row


def _add(table: dict, key: tuple, times: dict[str, float]) -> None:
    for name, value in times.items():
        table.setdefault(key, {}).setdefault(name, []).append(value)


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def _weights(config: ModelConfig) -> int:
    total = 0
    for shape in config.tensors().values():
        size = 1
        for n in shape:
            size *= n
        total += size
    return total
