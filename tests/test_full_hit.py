"""A prompt that is cached whole, tails, page boundaries (groups B and C of the cases): one token is always run."""
import pytest
from helpers import (assert_holds, assert_identical, both_engines, cold, feed_of, ids_of, make_engine, same_bits, same_kv,
                     serve, spied)

from refengine.chat import Chat
from refengine.model import load_model, load_tokenizer


@both_engines
@pytest.mark.parametrize("n", [1, 2, 4, 5, 8, 12])
@pytest.mark.parametrize("answer", [0, 1, 4])
def test_the_same_prompt_again_runs_its_last_token(kind, n, answer, t_model):
    """C1, C4: a prompt that was an exact multiple of the block and cached whole gave 0 query rows."""
    model, forwards = spied(t_model)
    engine, prompt = make_engine(kind, model), ids_of(n)
    first = serve(engine, prompt, answer)
    assert (first.reused, first.forwarded) == (0, n)
    for _ in range(2):
        forwards.clear()
        served = assert_identical(engine, prompt, 3, f"serve {n} again")
        assert (served.reused, served.forwarded) == (n - 1, 1)
        assert forwards[0] == (n - 1, prompt[-1:])


@both_engines
@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
def test_a_full_hit_in_a_full_cache(kind, n, t_model):
    """C3: the same with n == capacity: the slot of the last token is used again, and no other is needed."""
    engine, prompt = make_engine(kind, t_model, capacity=n), ids_of(n)
    for turn in range(3):
        served = serve(engine, prompt, 1)
        assert served == ((n - 1) * (turn > 0), n if turn == 0 else 1, cold(t_model, prompt, 1).ids)
        assert_holds(engine, prompt, f"serve {n} for the {turn + 1}. time")
        assert engine.logits is not None


@both_engines
def test_a_full_hit_never_answers_from_the_logits_of_another_position(kind, t_model):
    """C1: after a longer sequence the live logits are of its end. A prefix of it must run its own last token."""
    engine, history = make_engine(kind, t_model), ids_of(12)
    engine.prefill(history)
    last = engine.logits.copy()
    for n in (11, 8, 4, 1):
        assert assert_identical(engine, history[:n], 1, f"feed 12, serve its first {n}").reused == n - 1
        assert (engine.logits != last).any()


@both_engines
def test_many_forwards_of_which_none_is_empty(kind, t_model):
    """C2, C3: an exact hit returned an empty remainder. Over all lengths and repeats, no forward has 0 tokens."""
    model, forwards = spied(t_model)
    engine, history = make_engine(kind, model, chunk_size=4), ids_of(9)
    for n in (4, 4, 8, 8, 9, 8, 1, 1):
        engine.trim_kv_cache(min(n - 1, engine.processed_token_count))
        engine.prefill(feed_of(engine, history[:n]))
    assert min(len(ids) for _, ids in forwards) >= 1
    assert_holds(engine, history[:1])


@both_engines
@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
def test_on_a_full_hit_all_counts_come_from_one_number(kind, n, t_model):
    """B6: one side subtracted 1, the other did not. Reused, offset before the forward and its position are n - 1."""
    model, forwards = spied(t_model)
    engine, prompt = make_engine(kind, model), ids_of(n)
    serve(engine, prompt, 3)
    forwards.clear()
    served = serve(engine, prompt)
    assert served[:2] == (n - 1, 1) and forwards == [(n - 1, prompt[-1:])]


@both_engines
def test_every_token_of_the_tail_is_embedded_once(kind, t_model):
    """B7: a tail that did not fill a block was skipped. Prompt lengths 4k + r, the common prefix anywhere."""
    model, forwards = spied(t_model)
    engine, history = make_engine(kind, model, chunk_size=4), ids_of(11, seed=2)
    for n in (8, 9, 10, 11, 12):
        for lcp in range(0, n, 3):
            serve(engine, history)
            prompt = [*history[:lcp], *((history[lcp:] + [5])[i] ^ 1 for i in range(n - lcp))]
            forwards.clear()
            served = assert_identical(engine, prompt, 1, f"LCP {lcp} of {n}")
            assert served.forwarded == n - served.reused == n - lcp
            assert [(start + i, id) for start, ids in forwards for i, id in enumerate(ids)] == \
                list(enumerate(prompt))[lcp:]


@pytest.mark.parametrize("suffix", range(1, 18))
def test_a_chunked_tail_has_no_empty_chunk(suffix, t_model):
    """B8: chunked by the whole length instead of the suffix; the last chunk was empty. 30 cached, chunks of 8."""
    model, forwards = spied(t_model)
    engine, prompt = make_engine("pipelined", model), ids_of(30 + suffix)
    engine.prefill(prompt[:30])
    forwards.clear()
    assert assert_identical(engine, prompt, 1).reused == 30
    assert [len(ids) for _, ids in forwards] == [8] * (suffix // 8) + [suffix % 8] * (suffix % 8 > 0)
    assert [start for start, _ in forwards] == list(range(30, 30 + suffix, 8))


@both_engines
@pytest.mark.parametrize("lcp", [3, 4, 5, 8])
@pytest.mark.parametrize("cancel", [False, True])
def test_common_prefixes_at_page_boundaries_with_and_without_a_cancel(kind, lcp, cancel, t_model):
    """B10: divergence where the prefix ended with a block, and more often after cancellations."""
    engine, history = make_engine(kind, t_model), ids_of(10)
    ids = engine.generate(history, max_tokens=6)
    for _ in range(2 if cancel else 6):
        next(ids)
    if cancel:
        ids.close()
    assert assert_identical(engine, [*history[:lcp], history[lcp] ^ 1, 2], 4, f"LCP {lcp}, cancel {cancel}").reused == lcp


@both_engines
@pytest.mark.parametrize("again", ["regenerate", "another chat", "undo and send", "the list put back"])
def test_an_identical_message_list_through_the_chat_layer(kind, again):
    """C2: the same message list twice raised in the chat layer. n - 1 reused, 1 forwarded, the same answer."""
    engine, tokenizer = make_engine(kind, load_model("tiny"), capacity=256), load_tokenizer("tiny")
    chat = Chat(engine, tokenizer, system="Be brief.", max_tokens=6)
    answer = "".join(chat.send("Hello"))
    logits, kv = engine.logits.copy(), engine.kv()
    if again == "regenerate":
        repeat = chat.regenerate()
    elif again == "another chat":
        chat = Chat(engine, tokenizer, system="Be brief.", max_tokens=6)
        repeat = chat.send("Hello")
    elif again == "undo and send":
        chat.undo()
        repeat = chat.send("Hello")
    else:
        chat.messages = [{"role": "system", "content": "Be brief."}]
        repeat = chat.send("Hello")
    assert "".join(repeat) == answer
    turn = chat.turns[-1]
    assert (turn.reused, turn.forwarded) == (turn.prompt - 1, 1) and turn.prompt > 8
    same_bits(engine.logits, logits, again)
    same_kv(engine.kv(), kv, again)


@both_engines
def test_a_chat_prompt_as_long_as_the_capacity_can_be_sent_twice(kind):
    """C3, through the chat layer: the first id is handed out, for the second there is no room."""
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    n = len(Chat(make_engine(kind, model), tokenizer).prompt([{"role": "user", "content": "Hello"}]).ids)
    chat = Chat(make_engine(kind, model, capacity=n), tokenizer)
    list(chat.send("Hello"))
    list(chat.regenerate())
    assert [(turn.prompt, turn.reused, turn.generated, turn.finish_reason) for turn in chat.turns] == \
        [(n, 0, 1, "capacity"), (n, n - 1, 1, "capacity")]
    assert chat.turns[0].ids == chat.turns[1].ids
