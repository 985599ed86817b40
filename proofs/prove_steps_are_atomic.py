"""THEOREM. A step happens whole or not at all.

Statement: on both engines, an error raised inside ANY kernel call of a prefill or of a generation, and a cancel after ANY
number of tokens, leave `tokens`, the offset, the logits and all K/V as after some whole number of steps; and the next
call gives what a fresh engine gives.

Argument: a forward writes above the offset only, and the offset moves in one assignment after its last layer. A step in
flight is committed by the thread that asks for its token, or never.

Shown by: every kernel call of T in turn (exhaustive), every cancel point; and at random in prove_any_history.
"""
import pytest

from refengine.conformance.campaign import make_engine
from refengine.conformance.history import Player, model_truth

ENGINES = ({"engine": "sequential", "page_size": 4, "page_order": None, "chunk_size": 1},
           {"engine": "pipelined", "page_size": 4, "page_order": None, "chunk_size": 3})
PREFILL = {"op": "prefill", "tokens": [5, 9, 2, 33, 7]}
GENERATE = {"op": "generate", "tokens": [11, 12], "max_tokens": 3, "cancel": None}


@pytest.mark.parametrize("settings", ENGINES, ids=lambda settings: settings["engine"])
@pytest.mark.parametrize("during", (PREFILL, GENERATE), ids=lambda op: op["op"])
def prove_an_error_in_any_kernel_call_changes_nothing_by_halves(settings, during, t_model):
    truth = model_truth(t_model)
    for call in range(400):
        player = Player(make_engine(t_model, settings), truth)
        player.play([PREFILL, {"op": "fault", "after": call, "during": during}])
        whole = len(player.held) == 5 + len(during["tokens"]) + during.get("max_tokens", 1) - 1
        player.play([{"op": "turn", "prompt": [5, 9, 2, 1], "max_tokens": 2, "cancel": None}, GENERATE])
        if whole:  # the fault lay behind the last call, so nothing was raised
            break
    assert 26 <= call < 399, "two layers have more kernel calls than that, and fewer than this"


@pytest.mark.parametrize("settings", ENGINES, ids=lambda settings: settings["engine"])
@pytest.mark.parametrize("count", range(6))
def prove_a_cancel_after_any_number_of_tokens_leaves_what_was_run(settings, count, t_model):
    player = Player(make_engine(t_model, settings), model_truth(t_model))
    player.play([{"op": "generate", "tokens": [3, 1, 4, 1, 5], "max_tokens": 5, "cancel": count},
                 {"op": "turn", "prompt": [3, 1, 4, 1, 5, 9, 2], "max_tokens": 4, "cancel": None}])
