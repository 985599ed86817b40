"""Your engine under the state machine: pytest --pyargs refengine.conformance --engine my.module:make_engine. Floor 7.

`make_engine()` returns a fresh engine of the protocol (subclass refengine.Engine). It is compared, bit for bit, with what
a fresh one of its own gives when it is fed everything at once. What fails is cut short and written as a trace.
"""
import importlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from refengine.conformance.campaign import shorten
from refengine.conformance.history import Player, engine_truth, save_trace
from refengine.conformance.machine import machine_for


def test_any_history_leaves_what_a_fresh_engine_gives(request):
    option = request.config.getoption
    if option("--engine") is None:
        pytest.fail("no engine to test: --engine my.module:make_engine")
    module, _, function = option("--engine").partition(":")
    make_engine = getattr(importlib.import_module(module), function)
    truth = engine_truth(make_engine)
    machine = machine_for(make_engine, truth, option("--vocab"), option("--longest"))
    try:
        run_state_machine_as_test(machine, settings=settings(
            max_examples=option("--histories"), stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.reuse, Phase.generate], report_multiple_bugs=False))  # `shorten` is quicker than Hypothesis here
    except Exception:
        if machine.failed:
            def fails(ops):
                try:
                    Player(make_engine(), truth).play(ops)
                except Exception:
                    return True
                return False

            short = shorten(machine.failed, fails) if fails(machine.failed) else machine.failed
            save_trace(Path(option("--save-trace")), short, model=option("--engine"))
            print(f"the history that fails: {option('--trace')}")
        raise
