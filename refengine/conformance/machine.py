"""The state machine: Hypothesis invents histories, drives an engine with them, and shrinks what fails. Floor 7.

Needs `hypothesis`. Any engine of the protocol can sit under it, ours or yours:

    pytest --pyargs refengine.conformance --engine my.module:make_engine
"""
from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from refengine.conformance.caller import Caller
from refengine.conformance.history import Op, Player, Truth
from refengine.engine import Engine


class _Drawn:
    """Choices of Hypothesis, which knows how to make them smaller."""

    def __init__(self, data):
        self.data = data

    def integer(self, low, high):
        return self.data.draw(st.integers(low, high))

    def pick(self, options):
        return self.data.draw(st.sampled_from(options))

    def ids(self, low, high, most):
        return self.data.draw(st.lists(st.integers(low, high), min_size=1, max_size=most))


class EngineMachine(RuleBasedStateMachine):
    """Rules are what a caller may do; every rule ends in the player's checks. Subclass with `machine_for`."""

    make_engine: Callable[[], Engine]
    truth: Callable[[tuple[int, ...]], Truth]
    vocab: int
    longest: int
    histories = 0                    # of the class: how many were begun
    failed: list[Op] | None = None   # of the class: the history that failed last, which is the shrunk one in the end

    @initialize()
    def begin(self):
        type(self).histories += 1
        self.player = Player(type(self).make_engine(), type(self).truth)
        self.caller = Caller(self.vocab, self.longest)

    def _do(self, rule: str, data) -> None:
        op = self.caller.operation(rule, _Drawn(data), self.player.held)
        try:
            self.player.do(op)
        except Exception:
            type(self).failed = list(self.player.played)
            raise
        self.caller.answered(op, self.player.held)

    @rule(data=st.data())
    def prefill(self, data):
        self._do("prefill", data)

    @rule(data=st.data())
    def generate(self, data):
        self._do("generate", data)

    @rule(data=st.data())
    def trim(self, data):
        self._do("trim", data)

    @rule(data=st.data())
    def reset(self, data):
        self._do("reset", data)

    @rule(data=st.data())
    def fault(self, data):
        self._do("fault", data)

    @rule(data=st.data())
    def turn(self, data):
        self._do("turn", data)

    @rule(data=st.data())
    def another_turn(self, data):
        self._do("turn", data)


def machine_for(make_engine: Callable[[], Engine], truth: Callable[[tuple[int, ...]], Truth], vocab: int,
                longest: int = 96) -> type[EngineMachine]:
    """The state machine over engines that ``make_engine`` makes (fresh ones, which can hold ``longest`` tokens)."""
    return type("EngineMachineFor", (EngineMachine,), {
        "make_engine": staticmethod(make_engine), "truth": staticmethod(truth), "vocab": vocab, "longest": longest})
