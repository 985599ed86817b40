"""The trainer of `small`: python -m pytest -m peers. Floor 9.

Needs torch and transformers; where they are missing, these tests fail.
"""
import random
import re

import pytest

from refengine.model import load_model, load_tokenizer
from refengine.recall.dialogues import dialogue

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def maker():
    import make_small

    return make_small


def test_the_text_that_is_learned_from_is_what_the_template_renders(maker):
    tokenizer, kinds = load_tokenizer("small"), set()
    for seed in range(200):
        said = dialogue(random.Random(seed), 5)
        pieces = maker.segments(said, random.Random(seed))
        text, thinks = "".join(text for text, _ in pieces), "\n</think>" in pieces[-1][0]
        off = maker.THINKING_OFF in text
        kinds.add((thinks, off))
        messages = [{"role": "system", "content": said.system}] * bool(said.system)
        for turn in said.turns[:text.count("<|im_start|>user")]:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]
        prompt = tokenizer.encode_chat(messages[:-1], **({"enable_thinking": False} if off else {})).text
        assert text.startswith(prompt) and text.endswith(f"{messages[-1]['content']}<|im_end|>")
        assert [i for i, (_, learned) in enumerate(pieces) if learned][-1] == len(pieces) - 1
        assert all(not learned or piece.endswith("<|im_end|>") for piece, learned in pieces)
    assert kinds == {(False, False), (True, False), (False, True)}


def test_pieces_encoded_alone_are_the_whole_text_encoded(maker):
    tokenizer = load_tokenizer("small")
    for seed in range(50):
        pieces = maker.segments(dialogue(random.Random(seed), 4), random.Random(seed))
        ids, learned = maker.encoded(tokenizer.backend, pieces)
        assert ids == tokenizer.backend.encode("".join(text for text, _ in pieces), add_special_tokens=False).ids
        assert len(ids) == len(learned) and any(learned) and not all(learned)
    assert all(maker.encoded(tokenizer.backend, maker.plain_text(random.Random(0)))[1])


def test_batches_hold_so_many_tokens_and_grow_longer(maker):
    tokenizer, turns = load_tokenizer("small").backend, []
    for progress in (0.0, 0.6):
        some = maker.batches(tokenizer, random.Random(1), 2048, lambda: progress)
        samples = []
        for _ in range(20):
            batch = next(some)
            assert len(batch) * max(len(ids) for ids, _ in batch) <= 2048
            samples += batch
        turns.append(sum(len(ids) for ids, _ in samples) / len(samples))
    assert turns[1] > 1.5 * turns[0]


def test_training_writes_a_model_that_is_better_than_none(maker, tmp_path):
    lines: list[str] = []
    recipe = maker.Recipe(steps=100, tokens=512, warm_up=5)
    tokenizer = maker.trained_tokenizer(tmp_path, recipe.seed, 300)
    maker.write(maker.train(tokenizer, recipe, 1, lines.append), tmp_path)
    first = load_model(tmp_path).logits([1, 2, 3])
    maker.write(maker.train(tokenizer, recipe, 20, lines.append), tmp_path)
    assert load_model(tmp_path).config.vocab == maker.VOCAB and (load_model(tmp_path).logits([1, 2, 3]) != first).any()
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in lines if "loss" in line]
    assert losses[0] > 5.8 and losses[1] < losses[0] - 1


def test_the_same_seed_trains_the_same_weights(maker, tmp_path):
    tokenizer, recipe = load_tokenizer("small").backend, maker.Recipe(steps=3, tokens=256)
    one, other = (maker.train(tokenizer, recipe, log=lambda line: None).state_dict() for _ in range(2))
    assert all((one[name] == other[name]).all() for name in one)
