"""After a long session: its first turn again, prompts that share nothing or one token, and histories edited on Qwen3's template."""
import pytest
from helpers import assert_identical, both_engines, ids_of, make_chat, make_engine, naive_prefix, same_turn, say, serve
from models import T_CONFIG

from refengine.chat import Chat
from refengine.model import load_model
from refengine.synth import write_checkpoint

TEXTS = ["What is the capital of France?", "And of Japan?", "Thank you", "Tell me a story."]


def session(engine, turns=4):
    """Ids of each turn's prompt; each is the one before, its answer and more. Nearly fills a cache of 128."""
    prompts = [ids_of(10, seed=1)]
    for turn in range(turns):
        served = serve(engine, prompts[-1], 8)
        assert served.reused == (len(prompts[-2]) + 7 if turn else 0)
        prompts.append([*prompts[-1], *served.ids, *ids_of(14, seed=turn + 2)])
    return prompts[:-1]


@both_engines
def test_the_first_turn_again_after_a_long_session(kind, t_model):
    """I2: it gave corrupted text, as a checkpoint from beyond the rewind point was taken."""
    engine = make_engine(kind, t_model)
    first, *_, last = session(engine)
    assert engine.processed_token_count > 80
    served = assert_identical(engine, first, 8)
    assert (served.reused, served.forwarded) == (len(first) - 1, 1)
    assert assert_identical(engine, last, 8).reused == naive_prefix(last, [*first, *served.ids[:-1]])


@both_engines
@pytest.mark.parametrize("common", [0, 1])
@pytest.mark.parametrize("long", [False, True])
def test_a_prompt_that_shares_nothing_or_one_token_with_a_long_session(kind, common, long, t_model):
    """I3: a boundary at position 0."""
    engine = make_engine(kind, t_model)
    first, *_, last = session(engine)
    other = [*first[:common], *((id + 1) % 64 for id in (last if long else first)[common:])]
    for _ in range(2):
        assert assert_identical(engine, other, 3).reused == common
        serve(engine, last, 3)
    assert assert_identical(engine, [*first[:common], (first[common] + 1) % 64], 3).reused == common


@both_engines
def test_the_first_message_again_after_a_long_chat(kind):
    on, off = make_chat(kind), make_chat(cache=False)
    for chat in (on, off):
        for text in TEXTS:
            say(chat, text)
        del chat.messages[1:]
        say(chat, TEXTS[0])
    same_turn(on, off)
    assert on.turns[-1].forwarded == 1 and on.turns[-1].ids == on.turns[0].ids


@pytest.fixture(scope="module")
def qwen3_sized(tmp_path_factory):
    """A small model with the ids of Qwen3's, padded as Qwen3's are."""
    folder = tmp_path_factory.mktemp("qwen3-sized")
    write_checkpoint(folder, {**T_CONFIG, "vocab_size": 151936, "tie_word_embeddings": True, "num_hidden_layers": 1}, seed=1)
    return load_model(folder)


def swapped(messages):
    messages[1]["role"], messages[2]["role"] = messages[2]["role"], messages[1]["role"]


@pytest.mark.real
@both_engines
@pytest.mark.parametrize("edit", [
    lambda messages: messages[1].update(content="And of Italy?"), lambda messages: messages.__delitem__(2), swapped,
    lambda messages: messages[0].update(content="Be long."), lambda messages: messages[2].update(content="<think>hm</think>x"),
    lambda messages: messages.insert(3, {"role": "tool", "content": "<tool_response>"})],
    ids=["edit message 1", "delete message 2", "swap roles", "edit the system prompt", "edit an answer", "insert a tool's result"])
def test_a_history_that_is_edited_is_rendered_whole_and_compared_by_ids_on_qwen3s_template(edit, kind, qwen3, qwen3_sized):
    """G14: message-level caches gave broken histories."""
    on, off = (Chat(make_engine(kind, qwen3_sized, capacity=512, page_size=16, chunk_size=32), qwen3, cache, system="Be brief.", max_tokens=5,
                    template_arguments={"enable_thinking": False}) for cache in (True, False))
    for chat in (on, off):
        for text in TEXTS[:2]:
            say(chat, text)
        edit(chat.messages)
    held = on.engine.tokens
    for chat in (on, off):
        say(chat, TEXTS[2])
    same_turn(on, off)
    prompt = on.prompt(on.messages[:-1])
    assert prompt.text == qwen3.render(on.messages[:-1], enable_thinking=False), "rendered whole"
    assert on.turns[-1].reused == naive_prefix(prompt.ids, held) < len(held) and on.turns[-1].prompt == len(prompt.ids)
