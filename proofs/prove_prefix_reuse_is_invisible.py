"""THEOREM. Whole chats are the same with the prefix cache ON and OFF, and ON reuses all that it may.

Statement: for any conversation (messages sent, edited, deleted, regenerated, system prompt changed, answers cancelled,
greedy or sampled), text, ids, logits and K/V are equal bit for bit with reuse and with a reset before each turn; and
`reused == min(longest common prefix, len(prompt) - 1)`, token by token, for every length of common prefix.

Argument: reuse is a rewind to the common prefix and a feed of the rest, so it is a history in the sense of
prove_any_history, ending in the same tokens as the history without reuse.

Not shown: templates and tokenizers other than the built-in ones (`refengine prove --model` does yours).
"""
from hypothesis import given, settings, strategies as st
import pytest

from refengine.conformance.prove import Side, prove
from refengine.engine import SequentialEngine
from refengine.pipelined import PipelinedEngine
from refengine.prefix import common_prefix, reusable


@settings(max_examples=max(1, settings.default.max_examples // 6))  # a chat is four turns on two engines
@given(seed=st.integers(0, 2**32), kind=st.sampled_from((SequentialEngine, PipelinedEngine)), page_size=st.integers(1, 70))
def prove_chats_on_equal_chats_off(seed, kind, page_size, built_in):
    model, tokenizer = built_in
    sides = [Side("pipelined OFF", PipelinedEngine(model, capacity=1024), tokenizer, False),
             Side("suspect ON", kind(model, capacity=1024, page_size=page_size), tokenizer, True)]
    result = prove(sides, seed=seed, chats=1, turns=4, long_words=8, max_tokens=6)
    assert not result.differences, result.differences[0]


@pytest.mark.parametrize("kind", (SequentialEngine, PipelinedEngine))
def prove_every_common_prefix_is_reused_to_the_token(kind, t_model):
    engine, cached = kind(t_model, capacity=64, page_size=4), list(range(2, 30))
    for common in range(len(cached) + 1):
        for prompt in (cached[:common], cached[:common] + [0], cached[:common] + [0, 1, 0, 1]):
            if not prompt:
                continue
            engine.reset()
            engine.prefill(cached)
            want = min(common, len(prompt) - 1)
            assert engine.trim_kv_cache(reusable(prompt, engine.tokens)) == want == engine.processed_token_count
            engine.prefill(prompt if engine.prefix_reuse_feeds_full_sequence else prompt[want:])
            assert engine.tokens == prompt


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def prove_the_common_prefix_is_the_longest_one(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])
