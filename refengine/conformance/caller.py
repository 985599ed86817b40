"""What a caller may do next to an engine, as choices: made by Hypothesis (machine.py) or by a seed (campaign.py). Floor 7."""
from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

from refengine.conformance.history import Op

ROLE, END = 0, 1  # ids that the toy chat template below uses as markers
RULES = ("prefill", "generate", "trim", "reset", "fault", "turn", "turn", "turn")


class Choices(Protocol):
    """Where choices come from."""

    def integer(self, low: int, high: int) -> int: ...
    def pick(self, options: Sequence[Any]) -> Any: ...
    def ids(self, low: int, high: int, most: int) -> list[int]: ...


class SeededChoices:
    """Choices of a random generator."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def pick(self, options: Sequence[Any]) -> Any:
        return self.rng.choice(options)

    def ids(self, low: int, high: int, most: int) -> list[int]:
        return [self.rng.randint(low, high) for _ in range(self.rng.randint(1, most))]


class Caller:
    """Makes operations that fit an engine which may hold ``longest`` tokens, and keeps a conversation of its own."""

    def __init__(self, vocab: int, longest: int):
        self.vocab, self.longest = vocab, longest
        self.messages: list[list[int]] = []

    def operation(self, rule: str, choose: Choices, held: Sequence[int]) -> Op:
        """The next operation of a kind. ``held``: the ids that the engine holds now."""
        if rule in ("prefill", "generate", "fault") and self._room(held) < 1:
            rule = "reset"
        return getattr(self, f"_{rule}")(choose, held)

    def answered(self, op: Op, held: Sequence[int]) -> None:
        """After a chat turn: what was generated is the answer in the conversation."""
        if op["op"] == "turn" and (answer := list(held[len(op["prompt"]):])):
            self.messages.append(answer)

    def _room(self, held: Sequence[int]) -> int:
        return self.longest - len(held) - 8

    def _prefill(self, choose: Choices, held: Sequence[int]) -> Op:
        return {"op": "prefill", "tokens": choose.ids(0, self.vocab - 1, min(17, self._room(held)))}

    def _generate(self, choose: Choices, held: Sequence[int]) -> Op:
        return {"op": "generate", "tokens": choose.ids(0, self.vocab - 1, min(9, self._room(held))), **self._ending(choose)}

    def _ending(self, choose: Choices) -> Op:
        cancel = choose.integer(-3, 4)
        return {"max_tokens": choose.integer(1, 5), "cancel": cancel if cancel >= 0 else None}

    def _trim(self, choose: Choices, held: Sequence[int]) -> Op:
        return {"op": "trim", "length": choose.integer(0, len(held) + 2)}

    def _reset(self, choose: Choices, held: Sequence[int]) -> Op:
        return {"op": "reset"}

    def _fault(self, choose: Choices, held: Sequence[int]) -> Op:
        inner = self._generate(choose, held) if choose.integer(0, 1) else self._prefill(choose, held)
        return {"op": "fault", "after": choose.integer(0, 60), "during": inner}

    def _turn(self, choose: Choices, held: Sequence[int]) -> Op:
        """Change the conversation as people do, and ask for an answer. Message i is ROLE, its ids, END."""
        change, text = choose.pick(("send", "send", "send", "edit", "delete", "regenerate", "system")), None
        messages = self.messages
        if change in ("edit", "delete") and messages:
            at = choose.integer(0, len(messages) - 1)
            messages[at:at + 1] = [choose.ids(2, self.vocab - 1, 6)] if change == "edit" else []
        elif change == "system":
            messages[:1] = [choose.ids(2, self.vocab - 1, 6)]
        elif change == "regenerate" and len(messages) > 1:
            text = messages[-2]
            del messages[-2:]
        messages.append(text or choose.ids(2, self.vocab - 1, 6))
        if len(prompt := self._prompt()) + 8 > self.longest:
            self.messages = messages[-1:]
            prompt = self._prompt()
        return {"op": "turn", "prompt": prompt, **self._ending(choose)}

    def _prompt(self) -> list[int]:
        return [i for message in self.messages for i in (ROLE, *message, END)] + [ROLE]
