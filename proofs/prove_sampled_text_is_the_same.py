"""THEOREM. Sampled text is the same too: a draw depends on the seed, the position and the logits, on nothing else.

Statement: for any temperature, top-k, top-p, min-p and repetition penalty (over the full history), the ids that follow a
prompt are the same on both engines, with any chunk size, with any part of the prompt reused, and however often the
generation is interrupted and taken up again.

Argument: the logits at a position are a function of the tokens up to it (prove_any_history). From there on there are only
integers, and the random number of a position is a block of a counter-based generator keyed by the seed, its counter the
position. Nothing counts steps.
"""
from hypothesis import given, strategies as st

from refengine.engine import SequentialEngine
from refengine.pipelined import PipelinedEngine
from refengine.sampling import Sampling

SAMPLINGS = st.builds(Sampling, temperature=st.sampled_from((0.3, 1.0, 2.0)), top_k=st.sampled_from((0, 3, 20)),
                      top_p=st.sampled_from((1.0, 0.8)), min_p=st.sampled_from((0.0, 0.1)),
                      repetition_penalty=st.sampled_from((1.0, 1.3)), seed=st.integers(0, 2**64 - 1))
IDS = st.lists(st.integers(0, 63), min_size=1, max_size=12)


@given(prompt=IDS, before=IDS, sampling=SAMPLINGS, chunk=st.integers(1, 9), stops=st.lists(st.integers(1, 3), max_size=3))
def prove_a_sampled_answer_is_a_function_of_prompt_and_seed(t_model, prompt, before, sampling, chunk, stops):
    fresh = SequentialEngine(t_model, capacity=64)
    want = list(fresh.generate(prompt, max_tokens=8, sampling=sampling))
    engine = PipelinedEngine(t_model, capacity=64, page_size=3, chunk_size=chunk)
    engine.prefill(before)                                    # another history, some of which may be reused
    got: list[int] = []
    for count in [*stops, 8]:                                 # interrupted, and taken up again
        running = prompt + got
        kept = engine.trim_kv_cache(_common(running, engine.tokens))
        got += list(engine.generate(running[kept:], max_tokens=min(count, 8 - len(got)), sampling=sampling))
    assert got == want


def _common(running: list[int], held: list[int]) -> int:
    n = 0
    while n < min(len(running) - 1, len(held)) and running[n] == held[n]:
        n += 1
    return n


@given(prompt=IDS, seed=st.integers(0, 2**32))
def prove_another_seed_or_position_draws_anew(t_model, prompt, seed):
    """The control: over 24 draws at a high temperature, a generator that ignored its key would repeat itself."""
    def draws(sampling, extra):
        engine = PipelinedEngine(t_model, capacity=64)
        return list(engine.generate(prompt + extra, max_tokens=24, sampling=sampling))

    hot = Sampling(temperature=50.0, seed=seed)
    assert draws(hot, []) != draws(Sampling(temperature=50.0, seed=seed + 1), [])
    assert draws(hot, []) != draws(hot, [1])
