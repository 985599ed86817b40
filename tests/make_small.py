"""Trains the built-in model `small` anew: python tests/make_small.py. Its result is committed. Needs torch and transformers
(`pip install 'refengine[train]'`) and less than an hour on two cores.

Dialogues of refengine.recall, none of whose values is one that the measure holds out; a byte-level BPE trained on them; a
Qwen3 of a million parameters; loss on what the assistant says. The dialogues grow longer as the training goes on.
"""
from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

from make_tiny import write_text_side
from tokenizers import Tokenizer

from refengine.recall.dialogues import Dialogue, dialogue
from refengine.safetensors_file import write_safetensors

FOLDER = Path(__file__).parent.parent / "refengine" / "data" / "small"
SEED = 7
VOCAB = 1024
CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "attention_bias": False,
          "rms_norm_eps": 1e-6, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 32, "intermediate_size": 512, "vocab_size": VOCAB, "max_position_embeddings": 4096, "rope_theta": 10000.0,
          "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": VOCAB - 1, "torch_dtype": "bfloat16"}
THINKING_OFF = "<think>\n\n</think>\n\n"      # what the template writes for enable_thinking=False


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
        pieces.append((f"<|im_start|>user\n{turn.user}<|im_end|>\n<|im_start|>assistant\n" + THINKING_OFF * (last and off), False))
        thought = f"<think>\n{turn.thought}\n</think>\n\n" if said.thinks and turn.thought and last and not off else ""
        pieces += [(f"{thought}{turn.answer}<|im_end|>", last or not (said.thinks and turn.thought)), ("\n", False)]
    return pieces[:-1]


def encoded(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
    """Ids of the whole text, and which of them are learned. The pieces meet at control tokens, so they can be encoded alone."""
    ids, learned = [], []
    for (_, learn), encoding in zip(pieces, tokenizer.encode_batch_fast([text for text, _ in pieces], add_special_tokens=False)):
        ids += encoding.ids
        learned += [learn] * len(encoding.ids)
    return ids, learned


def batches(tokenizer: Tokenizer, rng: random.Random, tokens: int, progress) -> Iterator[list[tuple[list[int], list[bool]]]]:
    """Batches of conversations of nearly one length, ``tokens`` a batch with what pads them. progress: 0 to 1."""
    while True:
        most = 2 + round(6 * min(1.0, progress() / 0.6))        # turns: 2 at first, 8 from here on
        pool = []
        for _ in range(1024):
            pool.append(encoded(tokenizer, segments(dialogue(rng, rng.randint(2, most)), rng)))
        pool.sort(key=lambda sample: len(sample[0]))
        ready, batch = [], []
        for sample in pool:
            if batch and (len(batch) + 1) * len(sample[0]) > tokens:
                ready.append(batch)
                batch = []
            batch.append(sample)
        rng.shuffle(ready)
        yield from ready[:max(1, len(ready) * 9 // 10)]


def orthogonal_steps(matrices, rate: float, momentum: float = 0.95):
    """Muon (Jordan et al. 2024) in float32: the momentum of each matrix, made orthogonal by five Newton-Schulz steps. torch's
    own computes them in bfloat16, which most CPUs do slowly."""
    import torch

    class Muon(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                stack = torch.stack([p.grad for p in group["params"]])
                average = self.state[group["params"][0]].setdefault("average", torch.zeros_like(stack))
                average.lerp_(stack, 1 - momentum)
                x = stack.lerp(average, momentum)
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

    shapes = sorted({p.shape for p in matrices})
    return Muon([{"params": [p for p in matrices if p.shape == shape]} for shape in shapes], {"lr": rate})


def train(tokenizer: Tokenizer, seed: int, steps: int, tokens: int, rate: float, muon: float, threads: int, save=None):
    """A trained model of transformers."""
    import torch
    import transformers

    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG, attn_implementation="sdpa")).float()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, torch {torch.__version__}, transformers {transformers.__version__}")
    for name, p in model.named_parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5 * (0.3 if "o_proj" in name or "down" in name else 1))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [torch.optim.AdamW(others if muon else others + matrices, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)]
    if muon:
        optimizers.append(orthogonal_steps(matrices, muon))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    step, began, seen, total, count, right, ends = 0, time.perf_counter(), 0, 0.0, 0, 0, 0
    pad = CONFIG["eos_token_id"]
    for batch in batches(tokenizer, random.Random(seed), tokens, lambda: step / steps):
        factor = min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        length = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in batch])
        learned = torch.tensor([learn + [False] * (length - len(learn)) for _, learn in batch])[:, 1:]
        x = model.model(ids[:, :-1]).last_hidden_state[learned]
        logits, want = model.lm_head(x), ids[:, 1:][learned]
        loss = torch.nn.functional.cross_entropy(logits, want)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step, seen, total, count = step + 1, seen + ids.numel(), total + loss.item(), count + 1
        right += (logits.argmax(-1) == want).sum().item()
        ends += len(want)
        if step % 100 == 0 or step == steps:
            print(f"step {step:5} loss {total / count:.4f} right {right / ends:.4f} length {length} tokens {seen:,} {time.perf_counter() - began:.0f} s", flush=True)
            total, count, right, ends = 0.0, 0, 0, 0
        if step % 1000 == 0 and save:
            save(model)
        if step == steps:
            return model


def write(model, folder: Path) -> None:
    """config.json, and the weights as BF16."""
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    tensors = {name: ("BF16", tensor.detach().numpy()) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    write_safetensors(folder / "model.safetensors", tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--muon", type=float, default=0.0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    texts = ["".join(text for text, _ in segments(dialogue(rng, 6), rng)) for _ in range(20000)]
    tokenizer = write_text_side(arguments.out, texts, VOCAB)
    model = train(tokenizer, arguments.seed, arguments.steps, arguments.tokens, arguments.rate, arguments.muon, arguments.threads, lambda model: write(model, arguments.out))
    write(model, arguments.out)


if __name__ == "__main__":
    main()
