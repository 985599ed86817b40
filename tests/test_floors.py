"""Kernels compute, the engine remembers, chat talks, conformance judges: each module imports only lower floors. Floor 9.

The floor is what the module's docstring says ("Floor 3."); a module of a package may leave that to the package's. Modules of
one floor may import each other where that makes no circle. Imports inside functions count too, except for circles.
What is imported by a name in a string, as refengine/__init__.py does, is not seen.
"""
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import refengine
import refkernels

FLOOR = re.compile(r"\bFloor (\d)\.")
PACKAGES = {"refkernels": 1, "refengine.inspect": 7, "refengine.conformance": 7, "refengine.bench": 7, "refengine.recall": 7,
            "refengine.vectors": 7, "refengine.backends": 7, "refengine.cli": 8}
PUBLIC = 7  # from here on, `import refengine` is allowed: all that it offers lies below


def read_sources() -> dict[str, str]:
    """Module name -> source, of both packages. refengine itself is left out: it imports nothing before it is asked."""
    sources = {}
    for package in (refengine, refkernels):
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*.py")):
            parts = [package.__name__, *path.relative_to(root).with_suffix("").parts]
            sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    del sources["refengine"]
    return sources


def floor_of(module: str, sources: dict[str, str]) -> int | None:
    """The floor that a module, or the package it is in, states; None when it states none."""
    while module in sources:
        stated = FLOOR.findall(ast.get_docstring(ast.parse(sources[module])) or "")
        if stated:
            return int(stated[-1])
        module = module.rpartition(".")[0]
    return None


def imports(module: str, source: str, sources: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """(module of ours that is imported, inside a function or not)."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if _is_package(module, sources) else module.split(".")[:-1]
                base = ".".join([*package[:len(package) - node.level + 1], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            target = _home(name, sources)
            if target:
                yield target, id(node) in inside


def _is_package(module: str, sources: dict[str, str]) -> bool:
    return any(other.startswith(f"{module}.") for other in sources)


def _home(name: str, sources: dict[str, str]) -> str | None:
    """The module of ours that an imported name comes from, if any."""
    top, _, rest = name.partition(".")
    if top == "refengine" and rest in refengine._HOMES and name not in sources:
        return f"refengine.{refengine._HOMES[rest]}"
    if name == "refengine":
        return name
    while name and name not in sources:
        name = name.rpartition(".")[0]
    return name or None


def complaints(sources: dict[str, str]) -> list[str]:
    """What breaks the rule, in words."""
    floors = {module: floor_of(module, sources) for module in sources}
    found = [f"{_file(module, sources)} states no floor" for module, floor in floors.items() if floor is None]
    found += [f"{package} is on floor {PACKAGES[package]}, but says {floors[package]}"
              for package in PACKAGES if floors.get(package) not in (None, PACKAGES[package])]
    same: dict[str, set[str]] = {module: set() for module in sources}      # imports on one floor, outside functions
    for module, source in sources.items():
        for target, late in imports(module, source, sources):
            here, there = floors[module], PUBLIC - 1 if target == "refengine" else floors[target]
            if here is None or there is None or target == module:
                continue
            if target == "refengine" and here < PUBLIC:
                found.append(f"{_file(module, sources)} (floor {here}) imports refengine, that is, all below {PUBLIC}")
            elif there > here:
                found.append(f"{_file(module, sources)} (floor {here}) imports {_short(target)} (floor {there})")
            elif there == here and not late:
                same[module].add(target)
    return found + [f"{' imports '.join(map(_short, circle))}: a circle on floor {floors[circle[0]]}"
                    for circle in _circles(same)]


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Each circle found by walking depth first, as [a, b, ..., a]."""
    circles, done = [], set()

    def walk(module, path):
        if module in path:
            circles.append([*path[path.index(module):], module])
        elif module not in done:
            for target in sorted(graph[module]):
                walk(target, [*path, module])
            done.add(module)

    for module in graph:
        walk(module, [])
    return circles


def _short(module: str) -> str:
    return module.removeprefix("refengine.")


def _file(module: str, sources: dict[str, str]) -> str:
    return _short(module).replace(".", "/") + ("/__init__.py" if _is_package(module, sources) else ".py")


def test_every_module_states_its_floor_and_imports_only_lower_ones():
    assert complaints(read_sources()) == []


def test_the_second_computation_shares_nothing_with_the_first():
    sources = read_sources()
    assert list(imports("refengine.vectors.oracle", sources["refengine.vectors.oracle"], sources)) == []


def test_the_whole_of_both_packages_is_read():
    sources = read_sources()
    assert {"refengine.model", "refengine.cli", "refkernels", "refkernels.exact.reduce"} <= set(sources)
    edges = {(module, target) for module, source in sources.items() for target, _ in imports(module, source, sources)}
    assert {("refengine.model", "refengine.cache"), ("refengine.model", "refkernels.probe"),
            ("refengine.tokenizer", "refengine.config_reader"), ("refkernels.native64", "refkernels.native")} <= edges


PLANTED = {"refengine.errors": '"""Errors. Floor 1."""', "refengine.cache": '"""The cache. Floor 3."""',
           "refengine.engine": '"""The engine.\n\nFloor 5.\n"""', "refengine.weights": '"""Weights. Floor 3."""',
           "refengine.cli": '"""Parsing. Floor 8."""', "refengine.cli.chat": '"""No floor of its own."""',
           "refkernels": '"""Arithmetic. Floor 1."""', "refkernels.exact": '"""Sums."""',
           "refkernels.probe": '"""The probe."""'}


@pytest.mark.parametrize("module, line, complaint", [
    ("refengine.cache", "from refengine.engine import Engine", "cache.py (floor 3) imports engine (floor 5)"),
    ("refengine.cache", "import refengine.engine", "cache.py (floor 3) imports engine (floor 5)"),
    ("refengine.cache", "from refengine import engine", "cache.py (floor 3) imports engine (floor 5)"),
    ("refengine.cache", "from refengine import Engine", "cache.py (floor 3) imports engine (floor 5)"),
    ("refengine.cache", "from . import engine", "cache.py (floor 3) imports engine (floor 5)"),
    ("refengine.cache", "from .engine import Engine", "cache.py (floor 3) imports engine (floor 5)"),
    ("refengine.cache", "def f():\n    from refengine.engine import load", "cache.py (floor 3) imports engine (floor 5)"),
    ("refengine.cache", "if True:\n    import refengine.engine as e", "cache.py (floor 3) imports engine (floor 5)"),
    ("refengine.cache", "import refengine", "cache.py (floor 3) imports refengine, that is, all below 7"),
    ("refengine.errors", "from refengine.cli.chat import run", "errors.py (floor 1) imports cli.chat (floor 8)"),
    ("refkernels.exact", "from refengine.cache import Cache", "refkernels/exact.py (floor 1) imports cache (floor 3)"),
    ("refengine.cli.chat", "from . import chat; from ..engine import load; import refengine", ""),
    ("refengine.cache", "from refengine.weights import Layer", ""),
    ("refengine.cache", "import refkernels.exact; from refkernels import probe; import numpy.linalg", ""),
])
def test_an_upward_import_is_named(module, line, complaint):
    sources = PLANTED | {module: f"{PLANTED[module]}\n{line}"}
    assert complaints(sources) == ([complaint] if complaint else [])


def test_a_circle_on_one_floor_is_named():
    sources = PLANTED | {"refengine.cache": '"""Floor 3."""\nfrom refengine.weights import Layer'}
    late = sources | {"refengine.weights": '"""Floor 3."""\ndef f():\n    from refengine.cache import Cache'}
    assert complaints(late) == []
    sources |= {"refengine.weights": '"""Floor 3."""\nfrom refengine.cache import Cache'}
    assert complaints(sources) == ["cache imports weights imports cache: a circle on floor 3"]


def test_a_module_without_a_floor_and_a_package_on_another_floor_are_named():
    assert complaints(PLANTED | {"refengine.new": "import os"}) == ["new.py states no floor"]
    assert complaints(PLANTED | {"refengine.cli": '"""Parsing. Floor 6."""'}) == ["refengine.cli is on floor 8, but says 6"]
