"""THEOREM. Logits and K/V at a position are a function of the weights and the tokens up to it, of nothing else.

Statement: the logits of EVERY position and the K/V of every layer are the same bits for any composition of the tokens into
chunks; and they do not change when other tokens follow.

Argument: by induction over layers. The row of a position depends on its own input row, bit for bit
(prove_rows_are_independent), and through attention on the K/V of positions up to it, which do so by the same argument.

Not shown: more than 32 positions here. tests/test_goldens.py compares whole forwards of up to 1,500 with a plain float64
implementation, for how right they are rather than how alike.
"""
import numpy as np
from hypothesis import given, strategies as st

IDS = st.lists(st.integers(0, 63), min_size=1, max_size=32)


@given(ids=IDS, more=IDS, data=st.data())
def prove_chunks_and_what_follows_do_not_show(t_model, ids, more, data):
    whole, cache, rows = t_model.logits(ids), t_model.new_cache(64, 7), []
    while cache.offset < len(ids):
        chunk = np.array(ids[cache.offset:cache.offset + data.draw(st.integers(1, len(ids) - cache.offset))])
        rows.append(t_model.run(cache, chunk, every=True))
        cache.commit(chunk)
    assert np.concatenate(rows).tobytes() == whole.tobytes()
    assert t_model.logits(ids + more)[:len(ids)].tobytes() == whole.tobytes()


@given(ids=st.lists(st.integers(0, 63), min_size=2, max_size=12))
def prove_the_control_can_fail(t_model, ids):
    """Another token early on does show later: the comparison is not of constants."""
    other = [(ids[0] + 1) % 64, *ids[1:]]
    assert t_model.logits(other)[-1].tobytes() != t_model.logits(ids)[-1].tobytes()
