"""THEOREM. Pages are invisible: any page size and any arrangement of pages give the same bits.

Statement: for any page size from 1 up, any order in which the pool hands out pages, and any feeds and rewinds, logits and
K/V equal those of a cache of one page.

Argument: a run of neighbouring pages is read as one stretch; scores of several stretches go into one row, and the value
products of stretches are exact sums, so that adding them up in pieces is adding them up at once.

Not shown: two sequences that share a page (the pool counts holders, but nothing forks yet).
"""
import numpy as np
from hypothesis import given, strategies as st


@given(ids=st.lists(st.integers(0, 63), min_size=1, max_size=40), page_size=st.integers(1, 41), data=st.data())
def prove_any_page_table_holds_the_same(t_model, ids, page_size, data):
    pages = -(-40 // page_size)
    order = data.draw(st.permutations(range(pages)))
    paged, plain = t_model.new_cache(40, page_size, order), t_model.new_cache(40, 40)
    at = 0
    while at < len(ids):
        count = data.draw(st.integers(1, len(ids) - at))
        chunk = np.array(ids[at:at + count])
        a, b = (t_model.run(cache, chunk) for cache in (paged, plain))
        assert a.tobytes() == b.tobytes()
        for cache in (paged, plain):
            cache.commit(chunk)
        at += count
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, at))
            for cache in (paged, plain):
                cache.trim_to(at)
            paged.poison()
    for layer in range(t_model.config.layers):
        for name, field in paged.snapshot(layer).items():
            assert field.tobytes() == plain.snapshot(layer)[name].tobytes()
