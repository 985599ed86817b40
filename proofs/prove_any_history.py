"""THEOREM. Whatever is done to an engine, and in whatever order, it holds what one forward from nothing would give.

Statement: after any sequence of prefill, generate, cancel, chat turn, rewind, reset and raised error, on the sequential
and the pipelined engine, with any page size, any page order and any chunk size: `tokens`, `processed_token_count`, the
logits of the last position and the K/V of every position in every layer equal, bit for bit, those of one forward over
`tokens` in a fresh cache.

Argument: row p of every kernel's result depends on row p of its input and, in attention, on the stored K/V of positions
0..p only, bit for bit (prove_rows_are_independent). By induction over layers, K/V and logits at p are a function of the
weights and tokens[0..p]. The cache reads only below the offset plus what is being written (NaN lies everywhere above,
here), and the offset moves only when a forward is complete.

Shown by: the state machine of refengine.conformance, beside a twin that is nothing but the list of ids.
Not shown: more than 64 positions a history and models beyond T (2 layers, GQA); `refengine prove` does longer ones.
"""
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
import pytest

from refengine.conformance.campaign import LONGEST, make_engine
from refengine.conformance.history import model_truth
from refengine.conformance.machine import machine_for

ENGINES = {
    "sequential, pages of 1": {"engine": "sequential", "page_size": 1},
    "sequential, pages of 5, shuffled": {"engine": "sequential", "page_size": 5},
    "pipelined, chunks of 1": {"engine": "pipelined", "page_size": 3, "chunk_size": 1},
    "pipelined, chunks of 5, pages of 4, shuffled": {"engine": "pipelined", "page_size": 4, "chunk_size": 5},
    "pipelined, one chunk, one page": {"engine": "pipelined", "page_size": 64, "chunk_size": 64},
}


@pytest.mark.parametrize("name", ENGINES)
def prove_any_history_leaves_what_one_forward_gives(name, t_model):
    chosen = {"chunk_size": 1, **ENGINES[name]}
    pages = list(range(-(-LONGEST // chosen["page_size"])))
    chosen["page_order"] = pages[1::2] + pages[::2] if "shuffled" in name else pages
    machine = machine_for(lambda: make_engine(t_model, chosen), model_truth(t_model), t_model.config.vocab, LONGEST)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=12))
    assert machine.histories >= 10


def prove_ties_are_no_exception(t_ties):
    """Every greedy choice a tie between two ids: still one answer, the lower id."""
    chosen = {"engine": "pipelined", "page_size": 4, "page_order": None, "chunk_size": 5}
    machine = machine_for(lambda: make_engine(t_ties, chosen), model_truth(t_ties), t_ties.config.vocab, LONGEST)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=8))
    assert machine.histories >= 10
