"""Trains the built-in model `small` anew: python tests/make_small.py. Its result is committed. Needs torch and transformers
(`pip install 'refengine[train]'`) and half an hour of one core. make_small_card.py then writes its README.

Dialogues of refengine.recall, none of whose values is one that the measure holds out; a byte-level BPE trained on them; a
Qwen3 of a million parameters; loss on what the assistant says. The dialogues grow longer as the training goes on. The same
seed, torch and CPU give the same weights.
"""
from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from make_tiny import write_text_side
from tokenizers import Tokenizer

from refengine.recall.dialogues import Dialogue, dialogue
from refengine.recall.phrases import SMALL_TALK
from refengine.safetensors_file import write_safetensors

FOLDER = Path(__file__).parent.parent / "refengine" / "data" / "small"
VOCAB = 512
CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "attention_bias": False,
          "rms_norm_eps": 1e-6, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512, "vocab_size": VOCAB,
          "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": None,
          "eos_token_id": VOCAB - 1, "torch_dtype": "bfloat16"}
THINKING_OFF = "<think>\n\n</think>\n\n"      # what the template writes for enable_thinking=False

Sample = tuple[list[int], list[bool]]         # the ids of a conversation, and which of them are learned


class Recipe(NamedTuple):
    """How it is trained. ``tokens`` of a batch, with what pads it; rates at their peak: of the embedding and the norms
    (Adam), and of the matrices (Muon)."""

    seed: int = 7
    steps: int = 3500
    tokens: int = 2048
    rate: float = 3e-3
    matrix_rate: float = 0.02
    warm_up: int = 100


def segments(said: Dialogue, rng: random.Random) -> list[tuple[str, bool]]:
    """The text of a conversation as the template renders it, in pieces: (text, whether the model learns to write it).

    An answer with thoughts can only be the last: the template strips them from all before it. So where the system prompt
    asks for thoughts, an earlier answer to a question is read and not learned.
    """
    turns = said.turns
    questions = [i for i, turn in enumerate(turns) if turn.thought]
    off = rng.random() < 0.08
    if said.thinks and not off:
        turns = turns[:rng.choice(questions) + 1]
    pieces = [(f"<|im_start|>system\n{said.system}<|im_end|>\n", False)] if said.system else []
    for i, turn in enumerate(turns):
        last = i == len(turns) - 1
        opened = THINKING_OFF if last and off else ""
        pieces.append((f"<|im_start|>user\n{turn.user}<|im_end|>\n<|im_start|>assistant\n{opened}", False))
        thought = f"<think>\n{turn.thought}\n</think>\n\n" if said.thinks and turn.thought and last and not off else ""
        pieces += [(f"{thought}{turn.answer}<|im_end|>", last or not (said.thinks and turn.thought)), ("\n", False)]
    return pieces[:-1]


def plain_text(rng: random.Random) -> list[tuple[str, bool]]:
    """A text outside a conversation, for those who only want to have one continued."""
    return [(f"{rng.choice(SMALL_TALK)[1]}<|im_end|>", True)]


def encoded(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> Sample:
    """The pieces meet at control tokens, so they can be encoded alone."""
    ids, learned = [], []
    encodings = tokenizer.encode_batch_fast([text for text, _ in pieces], add_special_tokens=False)
    for (_, learn), encoding in zip(pieces, encodings):
        ids += encoding.ids
        learned += [learn] * len(encoding.ids)
    return ids, learned


def batches(tokenizer: Tokenizer, rng: random.Random, tokens: int, progress: Callable[[], float]) -> Iterator[list[Sample]]:
    """Batches of conversations of nearly one length. progress: 0 to 1."""
    while True:
        most = 2 + round(6 * min(1.0, progress() / 0.6))        # turns: 2 at first, 8 from here on
        pool = [encoded(tokenizer, segments(dialogue(rng, rng.randint(2, most)), rng)) for _ in range(1000)]
        pool += [encoded(tokenizer, plain_text(rng)) for _ in range(24)]
        pool.sort(key=lambda sample: len(sample[0]))
        ready, batch = [], []
        for sample in pool:
            if batch and (len(batch) + 1) * len(sample[0]) > tokens:
                ready.append(batch)
                batch = []
            batch.append(sample)
        rng.shuffle(ready)
        yield from ready[:max(1, len(ready) * 9 // 10)]         # the next pool may be of longer ones already


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) in float32: a step along the momentum of each matrix, made nearly orthogonal by five
    Newton-Schulz iterations. torch's own computes those in bfloat16, which most CPUs do slowly. A group is of one shape."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            gradients = torch.stack([p.grad for p in group["params"]])                            # (matrices, rows, columns)
            average = self.state[group["params"][0]].setdefault("average", torch.zeros_like(gradients))
            average.lerp_(gradients, 1 - 0.95)
            x = gradients.lerp(average, 0.95)
            wide = x.shape[-1] >= x.shape[-2]
            x = x if wide else x.mT
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                square = x @ x.mT
                x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
            x = x if wide else x.mT
            scale = max(1.0, x.shape[-2] / x.shape[-1]) ** 0.5
            for p, update in zip(group["params"], x):
                p.mul_(1 - group["lr"] * 0.01).add_(update, alpha=-group["lr"] * scale)


def untrained(seed: int) -> transformers.Qwen3ForCausalLM:
    """The model before its first step."""
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG, attn_implementation="sdpa")).float()
    for name, p in model.named_parameters():
        if p.ndim == 2:
            into_residual = "o_proj" in name or "down" in name
            torch.nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5 * (0.3 if into_residual else 1))
    return model


def optimizers(model: transformers.Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, Adam for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [{"params": [p for p in matrices if p.shape == shape]} for shape in sorted({p.shape for p in matrices})]
    both = [torch.optim.AdamW(others, lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0),
            Muon(groups, {"lr": recipe.matrix_rate})]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return both


def train(tokenizer: Tokenizer, recipe: Recipe, steps: int | None = None, log: Callable[[str], object] = print,
          save: Callable[[transformers.Qwen3ForCausalLM], object] = lambda model: None) -> transformers.Qwen3ForCausalLM:
    """A trained model. steps: stop after so many of the recipe's. save: called now and then, to look at it early."""
    torch.set_num_threads(1)
    model = untrained(recipe.seed)
    both = optimizers(model, recipe)
    log(f"{sum(p.numel() for p in model.parameters()):,} parameters, torch {torch.__version__}, "
        f"transformers {transformers.__version__}")
    step, began, seen, total, count, right, asked = 0, time.perf_counter(), 0, 0.0, 0, 0, 0
    pad = CONFIG["eos_token_id"]
    for batch in batches(tokenizer, random.Random(recipe.seed), recipe.tokens, lambda: step / recipe.steps):
        length = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in batch])                            # (B, T)
        learned = torch.tensor([learn + [False] * (length - len(learn)) for _, learn in batch])[:, 1:]         # (B, T - 1)
        logits = model.lm_head(model.model(ids[:, :-1]).last_hidden_state[learned])                            # (learned, V)
        want = ids[:, 1:][learned]                                                                             # (learned,)
        loss = torch.nn.functional.cross_entropy(logits, want)
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for optimizer in both:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * min(1.0, (step + 1) / recipe.warm_up) * cosine
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both:
            optimizer.step()
        step, seen, total, count = step + 1, seen + ids.numel(), total + loss.item(), count + 1
        right, asked = right + (logits.argmax(-1) == want).sum().item(), asked + len(want)
        done = step == (steps or recipe.steps)
        if step % 100 == 0 or done:
            log(f"step {step:5} loss {total / count:.4f} right {right / asked:.4f} length {length} tokens {seen:,} "
                f"{time.perf_counter() - began:.0f} s")
            total, count, right, asked = 0.0, 0, 0, 0
        if step % 1000 == 0:
            save(model)
        if done:
            return model


def trained_tokenizer(folder: Path, seed: int, dialogues: int = 20000) -> Tokenizer:
    """A byte-level BPE trained on dialogues; with the template and the stop ids it is written to the folder."""
    rng = random.Random(seed)
    texts = ["".join(text for text, _ in segments(dialogue(rng, 6), rng)) for _ in range(dialogues)]
    return write_text_side(folder, texts, VOCAB)


def write(model: transformers.Qwen3ForCausalLM, folder: Path) -> None:
    """config.json, and the weights as BF16."""
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    tensors = {name: ("BF16", p.detach().numpy()) for name, p in model.state_dict().items() if name != "lm_head.weight"}
    write_safetensors(folder / "model.safetensors", tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="for a look at the first steps")
    for name, default in Recipe._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    arguments = parser.parse_args()
    recipe = Recipe(**{name: getattr(arguments, name) for name in Recipe._fields})
    tokenizer = trained_tokenizer(arguments.out, recipe.seed)
    with (arguments.out / "training.log").open("w", encoding="utf-8") as file:
        def log(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        log(json.dumps(recipe._asdict()))
        model = train(tokenizer, recipe, arguments.stop_after, log, lambda model: write(model, arguments.out))
    write(model, arguments.out)


if __name__ == "__main__":
    main()
