"""Looking inside: every activation by name, patches, the logit lens, K/V as numbers. Floor 7.

    names = refengine.inspect.activations(engine.model.config)       # name -> shape, and where transformers has it
    seen = refengine.inspect.trace(engine, tokens, "layers.*.residual")
    refengine.inspect.logit_lens(engine.model, seen["layers.3.residual"])       # (T, V)

An engine is left just as it was: a trace runs its tokens aside. A chat that a `Recorder` wrote down is played again by
`Replay`, and `page` shows what its cache held, in time.
"""
from refengine.inspect.names import Activation, activations
from refengine.inspect.page import Shown, page
from refengine.inspect.record import Recorder, read_record
from refengine.inspect.replay import Replay
from refengine.inspect.trace import kv, logit_lens, trace
from refengine.inspect.trace_file import read_trace, write_trace

__all__ = ["Activation", "Recorder", "Replay", "Shown", "activations", "kv", "logit_lens", "page", "read_record", "read_trace",
           "trace", "write_trace"]
