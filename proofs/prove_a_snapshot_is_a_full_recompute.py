"""THEOREM. A recurrent state that was kept is as good as one computed again: a rewind to it loses nothing.

Statement: a model with recurrent layers keeps copies of their states, every so many tokens or where the parts of a turn
begin, and drops the oldest. After any sequence of prefill, generate, cancel, chat turn, rewind, reset and raised error,
whatever is kept: a rewind retains a prefix not longer than was asked for, and `tokens`, the logits, the K/V of every
position and the state of every recurrent layer equal, bit for bit, those of one forward over `tokens` in a fresh cache.

Argument: a state is a function of the tokens before its offset (the recurrence advances token by token, in one order, each
sum exact). It is put in force together with the offset, never changed afterwards, and dropped when a rewind goes below it;
so what is kept under a length is the state of the tokens held up to there, and prove_any_history says the rest.

Shown by: the state machine of refengine.conformance on a hybrid and on a model with recurrent layers only.
Not shown: that what is kept is the most useful; the table of this page says what it saves.
"""
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
import pytest

from refengine.chat import Chat
from refengine.conformance.campaign import LONGEST, make_engine
from refengine.conformance.history import SNAPSHOTS, model_truth
from refengine.conformance.machine import machine_for
from refengine.model import Model, load_model, load_tokenizer
from refengine.pipelined import PipelinedEngine

KEPT = {"none": {}, "every token": {"snapshot_every": 1}, "every 4, at most 2": {"snapshot_every": 4, "most": 2},
        "every 7, at most 1": {"snapshot_every": 7, "most": 1}, "at turns": {"snapshot_every": "turn"},
        "at turns, at most 2": {"snapshot_every": "turn", "most": 2}}
SEQUENTIAL = ("none", "every 4, at most 2", "at turns")  # the others are pipelined


def settings_of(model: Model, kept: dict) -> dict:
    """The settings of engines with so many snapshots at most."""
    size = model.new_cache(1, 1).state_bytes
    return SNAPSHOTS | {"snapshot_every": kept.get("snapshot_every")} | (
        {"snapshot_bytes": kept["most"] * size} if "most" in kept else {})


@pytest.mark.parametrize("kind", ("hybrid", "recurrent"))
@pytest.mark.parametrize("name", KEPT)
def prove_any_history_over_recurrent_layers_leaves_what_one_forward_gives(name, kind, request):
    model = request.getfixturevalue(kind)
    chosen = {"engine": "sequential" if name in SEQUENTIAL else "pipelined", "page_size": 3, "page_order": None, "chunk_size": 5, **settings_of(model, KEPT[name])}
    machine = machine_for(lambda: make_engine(model, chosen), model_truth(model), model.config.vocab, LONGEST)
    examples = max(1, settings.default.max_examples // 3)  # as many for all twelve as for four of prove_any_history
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=8, max_examples=examples))
    assert machine.histories >= 5


WAYS = ({}, {"snapshot_every": 64}, {"snapshot_every": 16}, {"snapshot_every": 16, "most": 8}, {"snapshot_every": "turn"},
        {"snapshot_every": "turn", "most": 8})
SAID = ("What is the capital of France?", "And of Japan?", "Say that again, please.", "Thank you. What else is there?")


def figures(model_name: str = "tiny-hybrid") -> str:
    """What snapshots save and cost: prompt tokens reused in a chat of 3 and of 20 turns, as a Markdown table."""
    model, tokenizer = load_model(model_name), load_tokenizer(model_name)
    size = model.new_cache(1, 1).state_bytes
    lines = [f"| snapshots of `{model_name}`, {size:,} bytes each | 3 turns: reused | kept | 20 turns: reused | kept |", "|---" * 5 + "|"]
    for way in WAYS:
        engine = PipelinedEngine(model, capacity=2048, **settings_of(model, way))
        chat, cells = Chat(engine, tokenizer, max_tokens=12, stats_log=None), []
        for turn in range(20):
            for _ in chat.send(SAID[turn % len(SAID)]):
                pass
            if turn in (2, 19):
                reused, prompt = (sum(getattr(turn, name) for turn in chat.turns) for name in ("reused", "prompt"))
                cells += [f"{reused:,} of {prompt:,}", f"{len(engine.snapshots)}, {engine.snapshot_bytes / 1e3:,.0f} kB"]
        every = way.get("snapshot_every")
        name = "none" if every is None else "where the parts of a turn begin" if every == "turn" else f"every {every} tokens"
        name += f", at most {way['most']}" if "most" in way else ""
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
