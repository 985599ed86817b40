"""Text that arrives token by token: whole characters only, and joined it is the text of all ids (H7 of the cases)."""
import pytest
import tokenizers
from hypothesis import example, given, strategies as st
from tokenizers import AddedToken, decoders, models

from refengine.model import load_tokenizer
from refengine.tokenizer import Tokenizer

TINY = load_tokenizer("tiny")


def byte_ids():
    """The id of each single byte in the tiny tokenizer: byte-level BPE writes bytes that do not print as other letters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in letters)}
    return [TINY.backend.token_to_id(letters[byte]) for byte in range(256)]


BYTES = byte_ids()
SPECIAL = [TINY.backend.token_to_id(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>")]
TEXT = st.text(st.sampled_from("aä ď€漢字🙂\n\u200d\ufe0f\ufffd"), max_size=40)
PIECE = st.integers(0, 511) | st.sampled_from(BYTES[128:]) | st.sampled_from(SPECIAL) | st.sampled_from(BYTES[0xF0:0xF5])


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [stream.push(id) for id in ids], stream.flush()


def test_all_bytes_have_a_token_of_their_own():
    assert None not in BYTES and len(set(BYTES)) == 256
    assert TINY.decode([BYTES[byte] for byte in "ď 🙂".encode()]) == "ď 🙂"


@given(st.lists(PIECE, max_size=90))
# Special tokens inside a character, which show as nothing; and the same where the stream forgets its first ids.
@example([BYTES[0xF0], BYTES[0x9F], SPECIAL[0], BYTES[0x98], BYTES[0x80]])
@example([BYTES[0x61]] * 23 + [BYTES[0xE6], SPECIAL[0], BYTES[0xBC], SPECIAL[0], BYTES[0xA2], BYTES[0x62]])
def test_joined_pushes_and_the_flush_are_the_text_of_all_ids(ids):
    """Random ids are mostly no UTF-8. What was handed out is never taken back: it is a prefix at each step."""
    pushes, rest = streamed(TINY, ids)
    whole = TINY.decode(ids)
    assert "".join(pushes) + rest == whole
    shown = ""
    for push in pushes:
        shown += push
        assert whole.startswith(shown)


@given(TEXT)
@example("ď 🙂🙂 漢字")
@example("x" * 30 + "漢字" * 20)
def test_a_character_comes_when_its_last_byte_does(text):
    """H7: emoji and CJK that are split over tokens became U+FFFD, each token decoded alone.

    A U+FFFD that is really in the text comes with the next character: until then it could be an unfinished one.
    """
    pushes, rest = streamed(TINY, [BYTES[byte] for byte in text.encode()])
    want = [piece for character in text for piece in [""] * (len(character.encode()) - 1) + [character]]
    assert "".join(pushes) + rest == text
    if "\ufffd" not in text:
        assert (pushes, rest) == (want, "")


@given(TEXT)
def test_text_in_the_tokenizers_own_tokens_comes_whole(text):
    ids = TINY.encode(text)
    pushes, rest = streamed(TINY, ids)
    assert "".join(pushes) + rest == TINY.decode(ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pushes) + rest


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_is_cut_off_is_flushed_once(cut):
    """H7: a truncated end gives one U+FFFD at the end, and not again at a second flush."""
    stream = TINY.stream()
    pushes = [stream.push(BYTES[byte]) for byte in "a🙂".encode()[:1 + cut]]
    assert pushes == ["a"] + [""] * cut
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens_are_not_shown_and_plain_added_tokens_are():
    assert streamed(TINY, [SPECIAL[1], *TINY.encode("the"), SPECIAL[2], SPECIAL[3]]) == \
        (["", *[TINY.decode([id]) for id in TINY.encode("the")], "", "<think>"], "")


def test_nothing_pushed_is_nothing_flushed():
    assert streamed(TINY, []) == ([], "")


# Other decoders

WORDS = ["▁a", "▁b", "c", "▁"]


def other_tokenizer(decoder):
    """A vocabulary in SentencePiece's manner: 256 byte tokens, and words with their space before them."""
    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    backend.decoder = decoder
    return Tokenizer(backend, None, [2])


@given(st.lists(st.integers(259, 262), max_size=60))
def test_a_decoder_that_drops_the_first_space_of_a_text(ids):
    """A stream decodes only its last few ids, and none of the spaces inside the text may be taken for the first one."""
    tokenizer = other_tokenizer(decoders.Metaspace())
    pushes, rest = streamed(tokenizer, ids)
    assert "".join(pushes) + rest == tokenizer.decode(ids)


def test_a_decoder_that_drops_the_first_space_after_special_tokens():
    tokenizer, ids = other_tokenizer(decoders.Metaspace()), [259] * 21 + [1] * 4 + [260]
    pushes, rest = streamed(tokenizer, ids)
    assert "".join(pushes) + rest == tokenizer.decode(ids)


BYTE_FALLBACK = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(content=" ", left=1, right=0)])  # Llama 2 and its kin


@pytest.mark.parametrize("text", ["漢字", "a🙂", "é漢 c", "🙂" * 12])
def test_a_decoder_with_byte_fallback(text):
    """A character outside the vocabulary comes as single bytes, and an unfinished one decodes to a U+FFFD for each byte."""
    tokenizer, ids = other_tokenizer(BYTE_FALLBACK), [3 + byte for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    pushes, rest = streamed(tokenizer, ids)
    assert "".join(pushes) + rest == text


@pytest.mark.parametrize("text", ["漢" * 12, "漢字🙂é" * 4, "c" + "字" * 30 + "c"])
def test_a_long_run_of_single_bytes_with_byte_fallback(text):
    tokenizer, ids = other_tokenizer(BYTE_FALLBACK), [3 + byte for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    pushes, rest = streamed(tokenizer, ids)
    assert "".join(pushes) + rest == text
