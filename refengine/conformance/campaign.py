"""A campaign: histories of the state machine, or chats, from a seed, over processes, for as many as one likes. Floor 7.

A history or chat depends on the seed and its number only, and they are played in batches of a fixed size, each on engines of
its own: so any number of workers gives the same digest, and a campaign that ran out of time is one with fewer of them.
"""
from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from refengine.conformance.caller import RULES, Caller, SeededChoices
from refengine.conformance.history import SNAPSHOTS, Op, Player, model_truth
from refengine.conformance.prove import Result, Row, Side, prove
from refengine.engine import SequentialEngine
from refengine.loading import load
from refengine.model import Model, load_model, load_tokenizer
from refengine.pipelined import PipelinedEngine

LONGEST = 48   # positions of a history
BATCH = 100    # histories in a batch
CHATS = 4      # chats in a batch


@dataclass
class Batch:
    """What some consecutive histories came to. ``failure``: (number, engine settings, operations, message) of the first."""

    histories: int = 0
    operations: int = 0
    bytes: int = 0
    digest: str = ""
    failure: tuple[int, dict[str, Any], list[Op], str] | None = None


@dataclass
class Campaign:
    """The sum of all batches, in order."""

    histories: int = 0
    operations: int = 0
    bytes: int = 0
    digest: str = ""
    seconds: float = 0.0
    failure: tuple[int, dict[str, Any], list[Op], str] | None = None
    batches: list[str] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        self.histories += batch.histories
        self.operations += batch.operations
        self.bytes += batch.bytes
        self.batches.append(batch.digest)
        self.failure = self.failure or batch.failure


def make_engine(model: Model, settings: dict[str, Any], capacity: int = LONGEST) -> SequentialEngine:
    """An engine from what a trace says: engine, page_size, page_order (of so many pages; more follow), chunk_size."""
    order, pages = settings["page_order"], -(-capacity // settings["page_size"])
    if order is not None:
        settings = {**settings, "page_order": [*order, *sorted(set(range(pages)) - set(order))]}
    rest = {"capacity": capacity, **{name: settings[name] for name in ("page_size", "page_order", *SNAPSHOTS) if name in settings}}
    if settings["engine"] == "pipelined":
        return PipelinedEngine(model, chunk_size=settings["chunk_size"], **rest)
    return SequentialEngine(model, **rest)


def random_settings(rng: random.Random, model: Model) -> dict[str, Any]:
    """Either engine, any page size and order, any chunk size; with recurrent layers, any snapshots, few or many, or none."""
    page_size = rng.choice((1, 2, 3, 4, 7, 16, 64))
    order = list(range(-(-LONGEST // page_size)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    chosen = {"engine": rng.choice(("sequential", "pipelined", "pipelined", "pipelined")), "page_size": page_size,
              "page_order": order, "chunk_size": rng.choice((1, 3, 5, 8, 16, 64))}
    if model.config.delta:
        size = model.new_cache(1, 1).state_bytes
        chosen |= {"snapshot_every": rng.choice((None, "turn", 1, 4, 7)), "snapshot_bytes": size * rng.choice((1, 2, 1000))}
    return chosen


def play_histories(model: Model, seed: int, numbers: Sequence[int]) -> Batch:
    """Play the histories of these numbers; stop at the first that fails."""
    batch, digest, truth = Batch(), hashlib.sha256(), model_truth(model)
    for number in numbers:
        rng = random.Random(f"refengine history {seed} {number}")
        settings = random_settings(rng, model)
        player, caller, choose = Player(make_engine(model, settings), truth), Caller(model.config.vocab, LONGEST), SeededChoices(rng)
        try:
            for _ in range(rng.randint(5, 8)):
                op = caller.operation(rng.choice(RULES), choose, player.held)
                player.do(op)
                caller.answered(op, player.held)
        except Exception as error:  # any kind is a finding
            batch.failure = number, settings, player.played, f"{type(error).__name__}: {error}"
            break
        batch.histories += 1
        batch.operations += len(player.played)
        batch.bytes += player.bytes
        digest.update(player.digest())
    batch.digest = digest.hexdigest()
    return batch


def side_names(planned: dict[str, Any]) -> list[str]:
    """Each engine of a plan with the cache off and on, "sequential OFF" and so on; the first is the truth."""
    engines = ("sequential", "pipelined") if planned["engine"] == "both" else (planned["engine"],)
    return [f"{engine} {cache}" for engine in engines for cache in ("OFF", "ON")]


def sides_of(model: Model, planned: dict[str, Any]) -> list[Side]:
    """The sides of a plan, on new engines."""
    tokenizer, sides = load_tokenizer(model), []
    for name in side_names(planned):
        kind, cache = name.split()
        engine = load(model, engine=kind, capacity=planned["capacity"], page_size=planned["page_size"],
                      **{name: planned.get(name, default) for name, default in SNAPSHOTS.items()})
        sides.append(Side(name, engine, tokenizer, cache == "ON", keep_ids=planned.get("keep_ids", False),
                          reanchor=planned.get("reanchor", False)))
    return sides


def play_chats(model: Model, seed: int, planned: dict[str, Any], first: int, count: int, until: float,
               on_turn: Callable[[Row], None] = lambda row: None) -> Result:
    """A batch of the chats of a plan, on new engines."""
    result = prove(sides_of(model, planned), seed=seed, first=first, chats=count, turns=planned["turns"],
                   max_tokens=planned["max_tokens"], long_words=planned["long_words"], until=until, on_turn=on_turn)
    for row in result.rows:  # of thousands of turns, only what they cost is kept
        row.turns = {name: turn and replace(turn, _explain=None, _asked=None) for name, turn in row.turns.items()}
    return result


_model: Model | None = None  # of a worker


def _start(source: str, arithmetic: str) -> None:
    global _model
    _model = load_model(source, arithmetic)


def _in_worker(play: Callable[..., Any], *arguments: Any) -> Any:
    return play(_model, *arguments)


def _over_workers(source: str, arithmetic: str, workers: int, play: Callable[..., Any], tasks: Sequence[tuple]) -> Iterator[Any]:
    """play(model, *task) of each task, in order, from worker processes of one BLAS thread each."""
    threads = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read by the workers when they start
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (source, arithmetic)) as pool:
            pending = [pool.submit(_in_worker, play, *task) for task in tasks]
            try:
                for future in pending:
                    yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        if threads is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = threads


def run(source: str, arithmetic: str, *, seed: int, histories: int, workers: int, on_batch: Callable[[Batch], None],
        minutes: float | None = None) -> Campaign:
    """Play histories 0..histories-1 in worker processes. Stops at a failure, or when time is up."""
    began, campaign = time.perf_counter(), Campaign()
    tasks = [(seed, range(first, min(first + BATCH, histories))) for first in range(0, histories, BATCH)]
    batches = _over_workers(source, arithmetic, workers, play_histories, tasks)
    for batch in batches:
        campaign.add(batch)
        on_batch(batch)
        if batch.failure or (minutes and time.perf_counter() - began > 60 * minutes):
            break
    batches.close()
    campaign.digest = hashlib.sha256("".join(campaign.batches).encode()).hexdigest()
    campaign.seconds = time.perf_counter() - began
    return campaign


def run_chats(model: Model, source: str, *, seed: int, planned: dict[str, Any], workers: int, on_turn: Callable[[Row], None],
              minutes: float | None = None) -> Result:
    """Play the chats of a plan, in this process or over several. Stops at a difference, or after a chat when time is up."""
    began, until = time.perf_counter(), time.time() + 60 * minutes if minutes else float("inf")
    tasks = [(seed, planned, first, min(CHATS, planned["chats"] - first), until) for first in range(0, planned["chats"], CHATS)]
    if workers == 1:
        results = (play_chats(model, *task, on_turn) for task in tasks)
    else:
        results = _over_workers(source, model.op.NAME, workers, play_chats, tasks)
    whole, digests = Result(), []
    for task, part in zip(tasks, results):
        whole.rows += part.rows
        whole.differences += part.differences
        for count in ("chats", "tokens", "logits_bytes", "kv_bytes"):
            setattr(whole, count, getattr(whole, count) + getattr(part, count))
        digests.append(part.digest)
        if workers > 1:
            for row in part.rows:
                on_turn(row)
        if part.differences or part.chats < task[3] or time.time() > until:
            break
    results.close()
    whole.digest, whole.seconds = hashlib.sha256("".join(digests).encode()).hexdigest(), time.perf_counter() - began
    return whole


def failure_of(model: Model, settings: dict[str, Any], history: Sequence[Op]) -> str | None:
    """What goes wrong when one history is played, or None. The cache is as large as the history can need."""
    inner = [op.get("during", op) for op in history]
    most = LONGEST + sum(len(op.get("tokens", ())) + len(op.get("prompt", ())) + op.get("max_tokens", 0) for op in inner)
    try:
        Player(make_engine(model, settings, most), model_truth(model)).play(history)
    except Exception as error:  # any kind is a finding
        return f"{type(error).__name__}: {error}"
    return None


def shorten(history: Sequence[Op], fails: Callable[[Sequence[Op]], bool]) -> list[Op]:
    """A shorter history that still fails: operations are dropped, then ids, as long as it does."""
    history = list(history)
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(history))):
            if fails(shorter := history[:i] + history[i + 1:]):
                history, changed = shorter, True
        for i, op in enumerate(history):
            for name in ("tokens", "prompt"):
                while len(op.get(name, ())) > 1:
                    smaller = {**op, name: op[name][:len(op[name]) // 2]}
                    if not fails(shorter := history[:i] + [smaller] + history[i + 1:]):
                        break
                    history, op, changed = shorter, smaller, True
    return history
