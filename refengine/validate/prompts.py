"""What is asked of a backend: ids, since text is never compared as text. Made of the model's own vocabulary."""
from __future__ import annotations

import random
from collections.abc import Sequence

from refengine.checkpoint import Checkpoint
from refengine.errors import TokenizerError

TEXTS = {"English": "The cache remembers what was said, and forgets what was taken back.",
         "code": "def trim(self, length):\n    self.offset = min(length, self.offset)\n    return self.offset\n",
         "Chinese, Japanese, Korean": "缓存记住了所说的话。キャッシュは覚えている。캐시는 기억한다.",
         "emoji and accents": "naïve café 👩‍🚀 déjà vu — ½ ∑ ≠"}
BORDERS = (63, 64, 65, 130)  # around a page of 64


def prompts(checkpoint: Checkpoint, most: int, own: Sequence[Sequence[int]] = ()) -> dict[str, list[int]]:
    """Name -> ids of a model: one token, texts of several scripts, a chat with its control tokens, lengths around a page
    border. Those longer than ``most`` are left out. own: a user's, instead."""
    if own:
        return {f"prompt {i}": list(ids) for i, ids in enumerate(own)}
    rng, vocab = random.Random(0), checkpoint.config.vocab
    found = {"one token": [rng.randrange(vocab)]}
    try:
        tokenizer = checkpoint.tokenizer()
        found |= {name: tokenizer.encode(text) for name, text in TEXTS.items()}
        found["a chat"] = tokenizer.encode_chat([{"role": "user", "content": "What is a prefix?"},
                                                 {"role": "assistant", "content": "What two prompts begin with."},
                                                 {"role": "user", "content": "And then?"}]).ids
    except TokenizerError:  # a checkpoint without a tokenizer, or without a template
        pass
    found |= {f"{count} random tokens": [rng.randrange(vocab) for _ in range(count)] for count in BORDERS}
    return {name: ids for name, ids in found.items() if 0 < len(ids) <= most}
