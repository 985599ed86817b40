"""A tokenizer of another model is refused when it is loaded, where that is certain, and not at the first feed."""
import json
import shutil

import pytest
from helpers import make_chat
from models import T_CONFIG

import refengine
from refengine.chat import Chat
from refengine.engine import SequentialEngine
from refengine.errors import TokenizerError
from refengine.model import load_model, load_tokenizer
from refengine.synth import write_checkpoint
from refengine.tokenizer import Tokenizer, load_folder_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A model of some vocabulary, with the built-in tokenizer of 512 ids, of which 511 ends an answer."""
    def make(vocab, eos=None, **settings):
        write_checkpoint(tmp_path, {**T_CONFIG, "vocab_size": vocab, "eos_token_id": eos}, seed=1)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(f"{refengine.__path__[0]}/data/tiny/{name}", tmp_path / name)
        if settings:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tmp_path

    return make


@pytest.mark.parametrize("vocab", [512, 513, 600])
def test_a_padded_vocabulary_is_larger_than_its_tokenizer(vocab, folder):
    """Qwen3 has 151,936 ids, and its tokenizer 151,669."""
    assert load_tokenizer(folder(vocab, 511)).stop_ids == (511,)


@pytest.mark.parametrize("vocab", [64, 511])
def test_ids_outside_the_vocabulary_are_refused_at_load_with_both_files_and_numbers(vocab, folder):
    """They were a FeedError at the first feed, when the cache had been rewound."""
    path = folder(vocab)
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(path)
    assert str(refused.value).startswith(f"{path / 'tokenizer.json'} can give id 511, but the model of {path} has a vocabulary of {vocab}: ")
    load_model(path)  # which is whole


def test_what_a_tokenizer_puts_around_a_text_counts_too(folder):
    path = folder(512)
    raw = json.loads((path / "tokenizer.json").read_text())
    raw["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                             "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                             "special_tokens": {"B": {"id": "B", "ids": [900], "tokens": ["B"]}}}
    (path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(TokenizerError, match="can give id 900"):
        load_tokenizer(path)


@pytest.mark.parametrize(("vocab", "eos", "why"), [
    (512, 512, "ends an answer with id 512, but the model of .* has a vocabulary of 512"),
    (600, [511, 550], r"ends an answer with id 550, but .*tokenizer.json has no such id \(its last is 511\)")])
def test_an_answer_ends_with_an_id_that_both_have(vocab, eos, why, folder):
    """A smaller tokenizer, of another family."""
    with pytest.raises(TokenizerError, match=why):
        load_tokenizer(folder(vocab, eos))


def test_two_files_that_name_one_id_differently_are_refused(folder):
    def added(**tokens):
        return {"added_tokens_decoder": {id: {"content": text} for id, text in tokens.items()}}

    load_folder_tokenizer(folder(512, **added(**{"511": "<|im_end|>", "700": "<pad>", "x": "y"})), ())
    for broken in ({"added_tokens_decoder": [3]}, {"added_tokens_decoder": {"511": 3, "9" * 5000: {"content": "x"}}}):
        load_folder_tokenizer(folder(512, **broken), ())
    with pytest.raises(TokenizerError, match=r"tokenizer.json has '<\|im_end\|>' as id 511, and .*tokenizer_config.json has '</s>'"):
        load_folder_tokenizer(folder(512, **added(**{"511": "</s>"})), ())


def test_a_chat_refuses_an_engine_of_another_model_and_takes_one_that_does_not_say(folder):
    path = folder(64)
    engine = SequentialEngine(load_model(path))
    tokenizer = load_tokenizer("tiny")
    with pytest.raises(TokenizerError, match="tokenizer.json can give id 511, but the engine's model has a vocabulary of 64"):
        Chat(engine, tokenizer)
    engine.vocab = None
    assert Chat(engine, tokenizer).turns == [] == make_chat().turns


@pytest.mark.real
def test_qwen3s_tokenizer_fits_its_model_and_not_one_of_its_own_size_less_one(qwen3):
    qwen3.check_fits(151936, "Qwen3")
    qwen3.check_fits(151669, "Qwen3")
    with pytest.raises(TokenizerError, match="can give id 151668, but Qwen3 has a vocabulary of 151668"):
        qwen3.check_fits(151668, "Qwen3")


def test_a_tokenizer_of_nothing_fits_anything():
    import tokenizers

    Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), None, ()).check_fits(1, "a model")
