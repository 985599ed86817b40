"""The command line: parsing and printing only. Floor 8."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import refengine


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 done (and equal), 1 unequal or unfit, 2 a mistake in what was asked."""
    arguments = _parser().parse_args(argv)
    from refengine.errors import RefengineError
    from refkernels import KernelError

    try:
        return arguments.run(arguments)
    except (RefengineError, KernelError, ValueError, OSError) as error:
        print(f"refengine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="refengine", description="A reference inference engine that proves its own prefix cache lossless.")
    parser.add_argument("--version", action="version", version=f"refengine {refengine.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    prove = commands.add_parser("prove", help="play random chats with the prefix cache on and off, compare every byte")
    _model(prove, default="tiny")
    prove.add_argument("--engine", choices=("both", "sequential", "pipelined"), default="both")
    prove.add_argument("--chats", type=int, help="how many chats (8 for a built-in model, 2 for others)")
    prove.add_argument("--turns", type=int, help="turns a chat (6 for a built-in model, 4 for others)")
    prove.add_argument("--max-tokens", type=int, default=24, help="longest answer (default %(default)s)")
    prove.add_argument("--keep-ids", action="store_true", help="in the chats, answers keep the ids they were generated with")
    prove.add_argument("--reanchor", action="store_true", help="in the chats, with the cache on, prefill between turns what the next "
                       "prompt will begin with")
    _snapshots(prove)
    prove.add_argument("--histories", type=int, metavar="N", help="a campaign instead of chats: N random histories of "
                       "prefill, generate, turn, rewind, cancel and raised errors, both engines, any page and chunk size")
    prove.add_argument("--workers", type=int, help="processes (default 1, for --histories 2); each loads the model")
    prove.add_argument("--minutes", type=float, help="stop when this has passed, after the chat at hand")
    prove.add_argument("--seed", type=int, default=0)
    prove.add_argument("--receipt", default="refengine-receipt.json", metavar="FILE", help="where to write the JSON receipt "
                       "(default %(default)s)")
    prove.set_defaults(run=_command("prove"))

    verify = commands.add_parser("verify", help="repeat the run of a receipt and compare")
    verify.add_argument("receipt", metavar="RECEIPT")
    verify.add_argument("--workers", type=int, default=1, help="processes (default 1); any number gives the same")
    verify.set_defaults(run=_command("verify"))

    replay = commands.add_parser("replay", help="play one history from a trace file, checking every byte")
    replay.add_argument("trace", metavar="TRACE.json")
    replay.add_argument("--model", default="tiny", metavar="PATH")
    replay.add_argument("--arithmetic", choices=("exact", "native", "native64"), default="exact")
    replay.set_defaults(run=_command("replay"))

    chat = commands.add_parser("chat", help="talk to a model; the status line says what was reused")
    _model(chat, default="small")
    _engine(chat)
    _sampling(chat)
    chat.add_argument("--system", help="the system prompt")
    chat.add_argument("--no-prefix-cache", action="store_true", help="reset and prefill everything each turn")
    chat.add_argument("--greedy", action="store_true", help="the same as --temperature 0")
    chat.add_argument("--no-thinking", action="store_true", help="enable_thinking=False for the chat template")
    chat.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text (repeatable)")
    chat.add_argument("--parser", choices=("plain", "qwen3", "harmony"), help="how to read answers (default: as the template asks)")
    chat.add_argument("--keep-ids", action="store_true", help="answers keep the ids they were generated with")
    chat.add_argument("--reanchor", action="store_true", help="while you type, prefill what the next prompt will begin with")
    chat.add_argument("--stats-log", metavar="FILE", help="append a PFXCACHE line a turn, and PFXANSWER when greedy")
    chat.add_argument("--record", metavar="CHAT.json", help="write down what each turn was, for `refengine inspect`")
    chat.set_defaults(run=_command("chat"))

    generate = commands.add_parser("generate", help="continue a text")
    _model(generate, default="small")
    _engine(generate)
    _sampling(generate)
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    generate.add_argument("--chat", action="store_true", help="the text is a user's message, not a beginning")
    generate.add_argument("prompt", metavar="PROMPT")
    generate.set_defaults(run=_command("generate"))

    explain = commands.add_parser("explain", help="what each turn of a conversation reuses, and why not more")
    explain.add_argument("--model", default="small", metavar="PATH",
                         help="a model, or a folder with a tokenizer (default %(default)s)")
    explain.add_argument("--parser", choices=("plain", "qwen3", "harmony"), help="default: as the template asks")
    explain.add_argument("transcript", metavar="TRANSCRIPT.json", help="a list of messages, or an object with messages, tools, "
                         "documents, template_arguments")
    explain.set_defaults(run=_command("explain"))

    lint = commands.add_parser("lint-template", help="on which conversations is a chat template append-only?")
    lint.add_argument("model", metavar="MODEL", help="a model, or a folder with a tokenizer")
    lint.add_argument("--parser", choices=("plain", "qwen3", "harmony"), help="default: as the template asks")
    lint.add_argument("--conversations", type=int, default=20, help="of each kind (default %(default)s)")
    lint.add_argument("--seed", type=int, default=0)
    lint.set_defaults(run=_command("lint_template"))

    bench = commands.add_parser("bench", help="time to the first token with the cache and without, and the machine's ceilings")
    bench.add_argument("--model", metavar="PATH", help="default: random weights of --shape; speed does not depend on the values")
    bench.add_argument("--shape", default="qwen3-0.6b", help="tiny or qwen3-0.6b (default %(default)s)")
    bench.add_argument("--arithmetic", action="append", choices=("exact", "native"), help="default: both")
    bench.add_argument("--peer", action="append", default=[], choices=("transformers", "llama.cpp"),
                       help="measure it in the same run (repeatable)")
    bench.add_argument("--turn", action="append", default=[], metavar="PROMPT:REUSED",
                       help="repeatable (default 357:336, 1024:996, 4103:4075)")
    bench.add_argument("--rounds", type=int, default=3, help="medians are of so many (default %(default)s)")
    bench.add_argument("--no-sequential", action="store_true", help="leave out the engine of one token a forward")
    bench.add_argument("--json", metavar="FILE")
    bench.add_argument("--markdown", metavar="FILE", help="the README's table")
    bench.add_argument("--plot", metavar="FILE.png")
    bench.set_defaults(run=_command("bench"))

    trace = commands.add_parser("trace", help="activations of a prompt, by name, as a safetensors file")
    trace.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a .gguf file, a hub id, or tiny")
    trace.add_argument("prompt", metavar="PROMPT", nargs="?")
    trace.add_argument("-o", "--out", metavar="FILE.safetensors")
    trace.add_argument("--names", action="append", metavar="PATTERN", help='which ones, as "layers.*.residual" (repeatable; default: '
                       'all)')
    trace.add_argument("--list", action="store_true", help="print the names, their shapes, and where transformers has them")
    trace.add_argument("--chat", action="store_true", help="the prompt is a user's message, not a beginning")
    trace.add_argument("--from", type=int, default=0, dest="start", metavar="N", help="trace from position N on; what is before "
                       "is prefilled")
    _sizes(trace)
    _engine(trace)
    trace.set_defaults(run=_command("trace"))

    inspect = commands.add_parser("inspect", help="the KV cache of a recorded chat in time, as one HTML file")
    inspect.add_argument("record", metavar="CHAT.json", help="what `refengine chat --record` wrote")
    inspect.add_argument("-o", "--out", default="kv.html", metavar="FILE.html", help="default %(default)s")
    inspect.set_defaults(run=_command("inspect"))

    check = commands.add_parser("validate", help="judge another backend: its forward pass, and its prefix cache")
    check.add_argument("--backend", required=True, metavar="NAME[:option=value,...]", help="refengine, transformers (dtype=, attention=), "
                       "llama.cpp (weights=, kv=), mlx (dtype=, cache=), openai:URL (a server), worker:COMMAND, files:TRACE.safetensors")
    check.add_argument("--model", required=True, metavar="PATH")
    check.add_argument("--capacity", type=int, default=1024, help="its context (default %(default)s)")
    check.add_argument("--prompts", metavar="FILE.json", help="lists of token ids, instead of the built-in prompts")
    check.add_argument("--longest", type=int, default=256, help="of the prompts that are used (default %(default)s)")
    check.add_argument("--histories", type=int, default=30, help="of its cache (default %(default)s; 0: leave that out)")
    check.add_argument("--seed", type=int, default=0)
    check.add_argument("--expect", action="append", default=[], choices=("forward", "location", "cache"),
                       help="known to fail: then that it does is no failure (repeatable)")
    check.add_argument("--report", default="report.json", metavar="FILE.json", help="default %(default)s")
    check.add_argument("--html", metavar="FILE.html", help="the report as a page")
    check.set_defaults(run=_command("validate"))

    vectors = commands.add_parser("vectors", help="golden vectors: make a set of a plan, check one, or play one on a backend")
    vectors.add_argument("action", choices=("make", "lint", "run"))
    vectors.add_argument("folder", metavar="FOLDER", help="as tests/vectors/v1")
    vectors.add_argument("--backend", default="refengine", metavar="NAME[:option=value,...]", help="as of validate (default %(default)s)")
    vectors.add_argument("--plan", metavar="PLAN.json", help="of make: models and scripts (tests/vectors/README.md)")
    vectors.set_defaults(run=_command("vectors"))

    recall = commands.add_parser("recall", help="does a model answer from its conversation? Dialogues with held-out facts")
    _model(recall, default="small")
    _engine(recall)
    recall.add_argument("--dialogues", type=int, default=200, help="default %(default)s")
    recall.add_argument("--turns", type=int, default=4, help="of each (default %(default)s)")
    recall.add_argument("--seed", type=int, default=0)
    recall.add_argument("--max-tokens", type=int, default=128, help="longest answer (default %(default)s)")
    recall.add_argument("--no-prefix-cache", action="store_true", help="reset and prefill everything each turn")
    recall.add_argument("--wrong", action="store_true", help="print the answers that are wrong, beside the right ones")
    recall.set_defaults(run=_command("recall"))

    doctor = commands.add_parser("doctor", help="can this process compute exactly?")
    doctor.set_defaults(run=_command("doctor"))

    synth = commands.add_parser("synth", help="write a checkpoint of a real shape with random weights")
    synth.add_argument("--shape", required=True, help="tiny or qwen3-0.6b")
    synth.add_argument("--seed", type=int, default=0)
    synth.add_argument("out", metavar="OUT", help="the folder to write")
    synth.set_defaults(run=_command("synth"))
    return parser


def _command(name: str):
    """A command's function, imported when it runs."""
    def run(arguments: argparse.Namespace) -> int:
        from importlib import import_module

        return import_module(f"refengine.cli.{name}").run(arguments)
    return run


def _model(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--model", default=default, metavar="PATH",
                        help="a Hugging Face folder, a .gguf file, a hub id, tiny, tiny-hybrid or small (default %(default)s)")
    _sizes(parser)


def _sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arithmetic", choices=("exact", "native", "native64"), default="exact",
                        help="exact: lossless by proof (default); native: plain float32")
    parser.add_argument("--capacity", type=int, default=4096, help="most tokens in the cache (default %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="positions a page (default %(default)s)")


def _engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("sequential", "pipelined"), default="pipelined")
    _snapshots(parser)


def _snapshots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--snapshot-every", type=_every, metavar="N|turn", help="of a model with recurrent layers: keep its state "
                        "after every N tokens, or where the parts of a turn begin, to rewind to")
    parser.add_argument("--snapshot-bytes", type=int, default=2**28, metavar="N", help="most memory for them; the oldest go first "
                        "(default %(default)s)")


def _every(text: str) -> int | str:
    return text if text == "turn" else int(text)


def _sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
