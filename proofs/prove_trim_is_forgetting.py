"""THEOREM. A rewind is forgetting: feed, trim, feed equals feeding what remains.

Statement: after any feeds and `trim_kv_cache(length)`, with NaN in every slot at or above the offset, feeding more gives
the logits and K/V of a fresh engine that was fed tokens[:length] and the rest, bit for bit. Trimming twice is trimming
once, to the smaller length; trimming to where one is changes nothing.

Argument: attention reads positions below the offset and those being written; a position is written before it is read. So
what lies above is never read, and its content, NaN here, cannot show.

Not shown: engines that keep what they rewind elsewhere than in this cache.
"""
import pytest
from hypothesis import example, given, strategies as st

from refengine.conformance.history import Player, model_truth
from refengine.engine import SequentialEngine
from refengine.pipelined import PipelinedEngine

IDS = st.lists(st.integers(0, 63), min_size=1, max_size=20)


@given(first=IDS, length=st.integers(0, 22), rest=IDS, kind=st.sampled_from((SequentialEngine, PipelinedEngine)),
       page_size=st.integers(1, 9))
@example(first=[1, 2, 3], length=0, rest=[1], kind=PipelinedEngine, page_size=4)  # a peer's crop(0) kept everything
def prove_feed_trim_feed_equals_feeding_what_remains(t_model, first, length, rest, kind, page_size):
    player = Player(kind(t_model, capacity=64, page_size=page_size), model_truth(t_model), poison=True)
    player.play([{"op": "prefill", "tokens": first}, {"op": "trim", "length": length}, {"op": "prefill", "tokens": rest}])
    assert player.held == first[:length] + rest


@given(first=IDS, a=st.integers(0, 22), b=st.integers(0, 22))
def prove_trimming_twice_is_trimming_to_the_smaller(t_model, first, a, b):
    player = Player(PipelinedEngine(t_model, capacity=64, page_size=4), model_truth(t_model))
    player.play([{"op": "prefill", "tokens": first}, {"op": "trim", "length": a}, {"op": "trim", "length": b}])
    assert player.held == first[:min(a, b)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def prove_a_stale_slot_would_show(t_model):
    """The control: poison BELOW the offset is met at once, so the NaN above it would be, were it read."""
    engine = PipelinedEngine(t_model, capacity=64, page_size=4)
    engine.prefill([5, 6, 7, 8, 9])
    engine.cache.offset = 3
    engine.cache.poison()
    engine.cache.offset = 5
    try:
        engine.prefill([1])
    except ArithmeticError:
        return
    raise AssertionError("NaN in the keys of a held position went unnoticed")
