"""THEOREM. The proofs can fail: every fault of a catalogue of real ones (mutants.py) is found by them.

Statement: each mutant, an engine or a chat turn with one mistake that an engine of somebody's had, is told from a right
one by the same state machine, or the same chats, that find nothing wrong with ours.

Argument: none; this is an experiment. A proof by testing is worth as much as what it would have caught.

`python proofs/make_readme.py` writes the table of proofs/README.md: which claim each mutant breaks, by what and after how
many histories (or turns) it was found, and the shortest history to which the failure could be cut.
"""
import statistics

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from mutants import CAPACITY, MUTANTS, ChatMutant, Mutant
import pytest

from refengine.conformance.campaign import shorten
from refengine.conformance.history import Player, model_truth
from refengine.conformance.machine import machine_for
from refengine.conformance.prove import Side, prove
from refengine.model import Model, load_tokenizer
from refengine.pipelined import PipelinedEngine

SEARCH = settings(max_examples=300, stateful_step_count=10, deadline=None, derandomize=True, database=None,
                  report_multiple_bugs=False, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def find(mutant: Mutant, models: dict[str, Model]) -> tuple[int, list | None, str]:
    """(histories or turns until found, the history that failed, what was seen). Raises when nothing is found."""
    model = models[mutant.over]
    if isinstance(mutant.make(model), ChatMutant):
        talks, tokenizer = models["hybrid" if mutant.over == "hybrid" else "tiny"], load_tokenizer("tiny")
        made = mutant.make(talks)
        sides = [Side("truth OFF", PipelinedEngine(talks, capacity=1024), tokenizer, False),
                 Side("mutant ON", made.engine(talks), tokenizer, True, made.chat)]
        result = prove(sides, seed=1, chats=20, turns=6, long_words=8, max_tokens=8)
        assert result.differences, f"{mutant.name} survives {len(result.rows)} turns"
        return len(result.rows), None, str(result.differences[0])
    machine = machine_for(lambda: mutant.make(model), model_truth(model), model.config.vocab, CAPACITY - 32)
    try:
        run_state_machine_as_test(machine, settings=SEARCH)
    except Exception as error:
        return machine.histories, machine.failed, str(error)
    raise AssertionError(f"{mutant.name} survives {machine.histories} histories")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # stale slots hold NaN, and mutants read them
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def prove_a_planted_fault_is_found(mutant, t_model, t_ties, hybrid, built_in):
    find(mutant, {"T": t_model, "ties": t_ties, "hybrid": hybrid, "tiny": built_in[0]})


def prove_the_catalogue_is_long_and_every_fault_has_its_story():
    assert len(MUTANTS) >= 25 and all(mutant.story and mutant.claim in CLAIMS for mutant in MUTANTS)


CLAIMS = {"rows": "rows are independent", "function": "K/V and logits are a function of the tokens", "trim": "a rewind is forgetting",
          "pages": "pages are invisible", "pipelined": "pipelined is sequential", "atomic": "a step is whole or not at all",
          "snapshots": "a snapshot is a full recompute", "reuse": "prefix reuse is invisible", "sampling": "sampled text is the same"}


def table(models: dict[str, Model]) -> str:
    """The mutants as a Markdown table, each found and cut short."""
    lines, lengths = ["| planted fault | what people saw | claim it breaks | found by | after | cut to |", "|---|---|---|---|---|---|"], []
    for mutant in MUTANTS:
        chosen = models[mutant.over]
        count, history, _ = find(mutant, models)
        cut, unit, proof = "", "turns", "prove_prefix_reuse_is_invisible"
        if history is not None:
            truth = model_truth(chosen)

            def fails(ops):
                try:
                    Player(mutant.make(chosen), truth).play(ops)
                except Exception:
                    return True
                return False

            unit, proof, short = "histories", "prove_any_history", shorten(history, fails)
            lengths.append(len(short))
            cut = f"{len(short)} operation{'s' * (len(short) > 1)}"
        lines.append(f"| {mutant.name} | {' '.join(mutant.story.split())} | {CLAIMS[mutant.claim]} | `{proof}` | {count} {unit} | "
                     f"{cut} |")
    return "\n".join([*lines, "", f"{len(MUTANTS)} planted, {len(MUTANTS)} found; the histories were cut to a median of "
                      f"{statistics.median(lengths):.0f} operations."])
