"""The process that renders chat templates: Jinja in a sandbox, one JSON request a line. Floor 1.

Run as a file by refengine.template, never imported. A template is somebody's program: the sandbox keeps it from Python,
and a process can be given little memory and be killed, in the middle of an expression if need be.
"""
import datetime
import functools
import json
import signal
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

MEMORY = 1 << 30     # bytes of address space
LONGEST = 32 << 20   # characters of a rendering


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, with which templates mark what the model said. Its body, in a scope."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class Namespace(jinja2.utils.Namespace):
    """namespace(), but no attribute may begin with an underscore."""

    def __init__(*args, **kwargs):
        self, *args = args
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name):
    if str(name).startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace may not hold {name!r}")


class Dict:
    """dict, for templates: what it makes, without what it is."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args):
        return dict.fromkeys(*args)


def raise_exception(message):
    raise jinja2.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                           extensions=[jinja2.ext.loopcontrols, Generation])
environment.filters["tojson"] = tojson
environment.globals |= {"raise_exception": raise_exception, "namespace": Namespace, "dict": Dict()}


@functools.lru_cache(8)
def compiled(source):
    return environment.from_string(source)


def answer(request):
    """{"text"} of a request, or {"error"}."""
    now = datetime.datetime.fromisoformat(request["now"])
    try:
        template = compiled(request["source"])
        pieces, length = [], 0
        for piece in template.generate({"strftime_now": now.strftime, **request["variables"]}):
            pieces.append(piece)
            length += len(piece)
            if length > LONGEST:
                return {"error": f"it rendered more than {LONGEST} characters"}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MiB of memory"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error}"}
    except Exception as error:  # the template's own, or of Python under it
        return {"error": str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"}


def main():
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # no such limit here: the time limit remains
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asked; that one stops this process if need be
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            request = json.loads(line)
            _last_at_most(request["seconds"])
            reply = json.dumps(answer(request))
        except (MemoryError, RecursionError) as error:
            reply = json.dumps({"error": type(error).__name__})
        _last_at_most(0)
        print(reply, flush=True)


def _last_at_most(seconds):
    """Die then (0: not any more), if nobody is left who would stop a rendering without end."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
