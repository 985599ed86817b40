"""Makes the built-in models' folders anew: python tests/make_tiny.py. Its result is committed; the pinned hashes go with it.

A byte-level BPE of 512 entries, trained on the text below, ChatML specials, a chat template in Qwen3's manner (thinking
is stripped from earlier answers), random weights from a seed.
"""
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from refengine.synth import synthesize

FOLDER = Path(__file__).parent.parent / "refengine" / "data" / "tiny"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<think>", "</think>"]
TEXT = """
A cache remembers what the model has just seen. The next turn begins with the same words, so the work was done before.
Read the prompt, keep the common prefix, set the offset, feed the rest: that is one turn of a conversation.
What is the capital of France? The capital of France is Paris. And of Japan? Tokyo. Thank you, that was very helpful!
The user asks a question, the assistant thinks about it and gives an answer; then the user changes an earlier question.
Please write a short story about a sailor, a storm and a lighthouse. Once upon a time there was a sailor who lived alone.
Attention looks at every earlier position; the position of a token never changes, so its key and value never change either.
How many tokens were reused, and how many had to be forwarded? The system prompt is always the same, the date is not.
You are a helpful assistant. Explain the difference between a page and a position. Where does the first difference begin?
Here is a list: one, two, three, four, five, six, seven, eight, nine, ten. Now say it backwards, please.
If nothing is cleared and nothing is copied, then a rewind costs nothing; everything above the offset is written again
before it is read. Numbers are exact when every sum is a sum of integers, and then the order of the sum does not matter.
"""
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' and '</think>' in message.content and not loop.last %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- else %}
{%- set content = message.content %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def write_text_side(folder: Path, texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train a tokenizer of so many ids on the texts and write what a model's folder has beside the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"'\p{L}+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab - len(SPECIAL) - len(PLAIN), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    assert tokenizer.get_vocab_size() == vocab and tokenizer.token_to_id("<|im_end|>") == vocab - 1
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [vocab - 1, vocab - 3]}) + "\n", encoding="utf-8")
    return tokenizer


def main() -> None:
    write_text_side(FOLDER, TEXT.splitlines(), 512)
    synthesize("tiny", FOLDER)
    hybrid = FOLDER.parent / "tiny-hybrid"
    synthesize("tiny-hybrid", hybrid)
    shutil.copyfile(FOLDER / "generation_config.json", hybrid / "generation_config.json")


if __name__ == "__main__":
    main()
