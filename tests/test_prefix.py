"""How much of a prompt is reused: the longest common prefix of ids, token by token, and always one token left to run.
And what may be fed after that: the feed contracts, and what is refused."""
import numpy as np
import pytest
from helpers import assert_identical, both_engines, cold, feed_of, ids_of, make_engine, naive_prefix, serve, state
from hypothesis import example, given, strategies as st

from refengine.errors import FeedError
from refengine.model import load_tokenizer
from refengine.prefix import common_prefix, reusable

PROMPT = ids_of(5)
IDS = st.lists(st.integers(0, 2), max_size=12)  # few ids, so that long common prefixes are common


@given(IDS, IDS)
@example([], [])
@example([1, 2], [1, 2])
@example([1, 2, 1], [1, 2, 2])
def test_common_prefix_is_the_one_found_by_comparing_id_by_id(a, b):
    assert common_prefix(a, b) == common_prefix(b, a) == naive_prefix(a, b)
    assert common_prefix(tuple(a), np.array(b, np.int64)) == naive_prefix(a, b)


@given(IDS.filter(bool), IDS)
def test_reusable_leaves_one_token_to_run(prompt, cached):
    assert reusable(prompt, cached) == min(naive_prefix(prompt, cached), len(prompt) - 1)


def test_equal_text_from_other_ids_is_no_common_prefix():
    """E2: a hit was trusted without comparing tokens. Two spellings of one text share only what their ids share."""
    tokenizer = load_tokenizer("tiny")
    whole = tokenizer.encode("the cache")
    letters = [i for character in "the cache" for i in tokenizer.encode(character)]
    assert whole != letters and tokenizer.decode(whole) == tokenizer.decode(letters)
    assert reusable(letters, whole) == naive_prefix(letters, whole) < min(len(whole), len(letters))


@both_engines
@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
def test_every_common_prefix_is_reused_to_the_token(kind, page_size, t_model):
    """E10: reuse was rounded down to blocks. reused == min(LCP, n - 1) for every LCP, whatever the page size."""
    engine = make_engine(kind, t_model, capacity=64, page_size=page_size)
    a = [7 * i % 64 for i in range(13)]
    for n in (9, 13, 16):
        for lcp in range(min(n, 13) + 1):
            serve(engine, a)
            b = [*a[:lcp], *((id + 1) % 64 for id in a[lcp:n]), *range(40, 40 + n - max(lcp, 13))]
            assert len(b) == n and naive_prefix(a, b) == lcp
            served = assert_identical(engine, b, 1, f"pages of {page_size}, LCP {lcp} of {n}")
            assert (served.reused, served.forwarded) == (min(lcp, n - 1), n - min(lcp, n - 1))


@both_engines
def test_reuse_after_an_answer_includes_all_of_it_but_its_last_id(kind, t_model):
    """The last generated id has no K/V yet: a prompt that goes on from the whole answer reuses one token less than that."""
    engine = make_engine(kind, t_model)
    prompt = [3, 1, 4, 1, 5]
    answer = serve(engine, prompt, 6).ids
    assert answer == cold(t_model, prompt, 6).ids
    assert assert_identical(engine, [*prompt, *answer, 9], 2).reused == len(prompt) + 5


# Feeds that do not fit the contract

@both_engines
@pytest.mark.parametrize(("bad", "message"), [
    ([], "no new token to run"), ([1, 64], "is 64, outside the vocabulary of 64"), ([-1], "is -1, outside"),
    ([2**31], "is 2147483648, outside")], ids=["none", "too large", "negative", "huge"])
def test_a_feed_without_a_new_token_or_with_an_unknown_id_changes_nothing(kind, bad, message, t_model):
    engine = make_engine(kind, t_model)
    engine.prefill(PROMPT)
    before = state(engine)
    for call in (engine.prefill, engine.generate):
        with pytest.raises(FeedError, match=message):
            call(feed_of(engine, PROMPT) + bad)
        assert state(engine) == before


@both_engines
@pytest.mark.parametrize("bad", [np.array([PROMPT, PROMPT]), np.zeros((0, 3), int), np.array(PROMPT) * 1.0, [True, False],
                                 ["a"], [2**64], "abc"],
                         ids=["2-D", "2-D and empty", "floats", "booleans", "texts", "huge", "a text"])
def test_what_is_no_sequence_of_ids_is_refused_and_changes_nothing(kind, bad, t_model):
    engine = make_engine(kind, t_model)
    engine.prefill(PROMPT)
    before = state(engine)
    for call in (engine.prefill, engine.generate):
        with pytest.raises(FeedError):
            call(bad)
        assert state(engine) == before


@pytest.mark.parametrize(("tokens", "at"), [([0, *PROMPT[1:], 7], 0), ([*PROMPT[:3], 0, PROMPT[4], 7], 3),
                                            (PROMPT[:4], 4), ([*PROMPT[:2], 0], 2)])
def test_a_full_sequence_that_does_not_begin_with_the_cache_is_refused_where_it_differs(tokens, at, t_model):
    engine = make_engine("sequential", t_model)
    engine.prefill(PROMPT)
    before = state(engine)
    assert PROMPT[0] and PROMPT[2] and PROMPT[3]
    for call in (engine.prefill, engine.generate):
        with pytest.raises(FeedError, match=rf"differs from the 5 cached tokens at {at}: trim_kv_cache\({at}\) first"):
            call(tokens)
    assert state(engine) == before
