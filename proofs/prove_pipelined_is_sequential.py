"""THEOREM. The pipelined engine is the sequential one: between any two tokens they cannot be told apart.

Statement: for any prompt, chunk size, part of it cached before, and number of tokens asked for, both engines hand out the
same ids, and after each id hold the same `tokens`, the same offset, the same logits and the same K/V, bit for bit.

Argument: a step in flight writes above the offset only. It is committed by the caller's thread when its token is asked
for, which is when the sequential engine would run it; and a chunk's rows are the rows of single steps
(prove_rows_are_independent).

Not shown: real time. The step does overlap with what the caller does, but nothing here measures it.
"""
from hypothesis import given, strategies as st

from refengine.engine import SequentialEngine
from refengine.pipelined import PipelinedEngine

IDS = st.lists(st.integers(0, 63), min_size=1, max_size=20)


@given(cached=IDS, keep=st.integers(0, 20), prompt=IDS, chunk=st.integers(1, 25), count=st.integers(1, 6), cancel=st.integers(1, 6))
def prove_both_engines_are_alike_between_any_two_tokens(t_model, cached, keep, prompt, chunk, count, cancel):
    one = SequentialEngine(t_model, capacity=64, page_size=5)
    two = PipelinedEngine(t_model, capacity=64, page_size=3, chunk_size=chunk)
    for engine in (one, two):
        engine.prefill(cached)
        engine.trim_kv_cache(keep)
    streams = (one.generate(one.tokens + prompt, max_tokens=count), two.generate(prompt, max_tokens=count))
    for number, (a, b) in enumerate(zip(*streams)):
        assert a == b
        _alike(one, two)
        if number + 1 == cancel:
            break
    for stream in streams:
        stream.close()
    _alike(one, two)


def _alike(one: SequentialEngine, two: PipelinedEngine) -> None:
    assert one.tokens == two.tokens and one.processed_token_count == two.processed_token_count
    assert one.logits.tobytes() == two.logits.tobytes()
    for a, b in zip(one.kv(), two.kv()):
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)
