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


# Stand-ins: characters in the values that stand for others (the first ones of control tokens), so that it shows afterwards
# what came from where. A template that looks into a text must see what they stand for, or it would render something else.

stand_ins = {}  # of the request at hand: stand-in -> character


def seen(value):
    """A value as it is without stand-ins."""
    if isinstance(value, str):
        return value.translate(stand_ins)
    if isinstance(value, (list, tuple)):
        return type(value)(map(seen, value))
    if isinstance(value, dict):
        return {seen(key): seen(item) for key, item in value.items()}
    return value


def seeing(name, text, args, kwargs):
    """A method of a text, found out on what is seen; the text that it returns still has its stand-ins."""
    shown, found = seen(text), None
    separator = args[0] if args else kwargs.get("sep")
    if name == "replace" and separator:
        return args[1].join(_cut(text, shown.split(seen(separator), *args[2:]), len(separator)))
    if name in ("split", "rsplit", "partition", "rpartition") and separator is not None:
        found = getattr(shown, name)(*seen(args), **seen(kwargs))
        return type(found)(_cut(text, found, 0 if name.endswith("partition") else len(separator)))
    if name in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"):
        found = getattr(shown, name)(*seen(args))
        start = len(shown) - len(shown.lstrip(*seen(args))) if name == "strip" else \
            0 if name in ("rstrip", "removesuffix") else len(shown) - len(found)
        return text[start:start + len(found)]
    if name in ("startswith", "endswith", "find", "rfind", "index", "rindex", "count"):
        return getattr(shown, name)(*seen(args))
    return getattr(text, name)(*args, **kwargs)


def _cut(text, pieces, gap):
    at = 0
    for piece in pieces:
        yield text[at:at + len(piece)]
        at += len(piece) + gap


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """As transformers sets it."""

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation])
        self.filters["tojson"] = tojson
        self.globals |= {"raise_exception": raise_exception, "namespace": Namespace, "dict": Dict()}


class SeeingSandbox(Sandbox):
    """One in which comparisons, tests, filters and methods of texts see what stand-ins stand for."""

    SEEN = "seen "  # no filter that a template could name

    def __init__(self):
        super().__init__()
        self.filters[self.SEEN] = seen
        self.filters["trim"] = lambda text, chars=None: seeing("strip", str(text), (chars,), {})
        self.filters["replace"] = lambda text, old, new, count=None: seeing(
            "replace", str(text), (str(old), str(new), -1 if count is None else count), {})
        for name in ("e", "escape", "forceescape", "urlencode"):                 # what they write is no token any more
            self.filters[name] = lambda value, plain=self.filters[name]: plain(seen(value))
        for name in ("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge", "in"):
            self.tests[name] = lambda a, b, test=self.tests[name]: test(seen(a), seen(b))

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        for compare in list(tree.find_all(jinja2.nodes.Compare)):
            for part in (compare, *compare.ops):
                part.expr = jinja2.nodes.Filter(part.expr, self.SEEN, [], [], None, None, lineno=compare.lineno, environment=self)
        return tree

    def call(self, context, function, /, *args, **kwargs):
        text = getattr(function, "__self__", None)
        if isinstance(text, str) and not function.__name__.startswith("format"):
            own = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            return seeing(function.__name__, text, args, own)
        return super().call(context, function, *args, **kwargs)


sandboxes = {False: Sandbox(), True: SeeingSandbox()}


@functools.lru_cache(8)
def compiled(source, sees):
    return sandboxes[sees].from_string(source)


def render(source, variables, sees=False):
    pieces, length = [], 0
    for piece in compiled(source, sees).generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > LONGEST:
            raise jinja2.TemplateError(f"it rendered more than {LONGEST} characters")
    return "".join(pieces)


def answer(request):
    """{"text", "marked"} of a request, or {"error"}. marked: the text with the stand-ins that came from the variables."""
    clock = {"strftime_now": datetime.datetime.fromisoformat(request["now"]).strftime}
    stand_ins.clear()
    stand_ins.update((ord(other), first) for other, first in request["stand_ins"].items())
    try:
        text = marked = render(request["source"], clock | seen(request["variables"]))
        if stand_ins:
            try:
                marked = render(request["source"], clock | request["variables"], True)
            except MemoryError:
                raise
            except Exception:  # without the stand-ins there was none
                marked = ""
            for other, first in request["stand_ins"].items():                    # JSON in ASCII, or a Python literal, has escapes
                plain = json.dumps(first)[1:-1]
                marked = marked.replace(json.dumps(other)[1:-1], other if plain == first else plain)
            if seen(marked) != text:
                return {"error": "it treats a control token in a message in a way that hides who wrote it; "
                                 "control_in_text=True lets messages have control tokens"}
        return {"text": text, "marked": marked}
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
