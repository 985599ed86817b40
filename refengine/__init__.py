"""refengine: a reference inference engine for Qwen3-type transformers that proves its own prefix cache lossless.

    engine = refengine.load("tiny", engine="pipelined")
    chat = refengine.Chat(engine, refengine.load_tokenizer("tiny"))
    for text in chat.send("Hello"):
        print(text, end="")
    print(chat.turns[-1])
"""
from importlib import import_module

__version__ = "0.1.0"

_HOMES = {"load": "loading", "Engine": "engine", "SequentialEngine": "engine", "PipelinedEngine": "pipelined",
          "load_model": "model", "Model": "model", "tiny": "model", "load_tokenizer": "model", "Chat": "chat",
          "Turn": "chat", "Sampling": "sampling", "RefengineError": "errors"}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    """Public names are imported when they are first used, so that `import refengine` is quick."""
    if name in _HOMES:
        return getattr(import_module(f"refengine.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'refengine' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
