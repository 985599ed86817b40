"""The exact kernels are read as source. Outside reduce.py nothing may reduce, and nowhere may libm be called: exp, sin and
pow differ from machine to machine, and a float sum depends on its order. Also: the kernel sets have the same functions, and
refkernels imports NumPy and a few harmless modules. Floor 9.
"""
import ast
import inspect
from pathlib import Path

import pytest

import refkernels

ROOT = Path(refkernels.__file__).parent
EXACT = sorted(path.name for path in (ROOT / "exact").glob("*.py"))

# Of NumPy, only what is listed: types, array building, and operations that IEEE 754 rounds correctly or that do not round.
# argmax picks an index and computes nothing; NumPy documents that ties go to the lowest.
NUMPY = set("""
    float32 float64 int8 int32 int64 uint64 ndarray inf
    array empty empty_like zeros arange tri concatenate repeat copyto where errstate
    abs maximum minimum add subtract multiply divide sqrt rint ceil ldexp frexp isfinite flatnonzero argmax
""".split())
REDUCE_ONLY = {"matmul", "logical_and", "logical_or"}      # more NumPy for reduce.py
REDUCTIONS = {"reduce", "accumulate"}                      # more methods for reduce.py
# Not any() and all(): of truth values, they have no rounding and no order.
METHODS = set("""
    sum mean max min prod dot std var trace ptp argmax argmin cumsum cumprod sort argsort partition round clip conj
    reduce accumulate reduceat at power exp log nansum average norm einsum tensordot matmul inner vdot linalg fft
""".split())
BUILTINS = {"sum", "pow", "getattr", "setattr", "vars", "globals", "locals", "eval", "exec", "compile", "__import__"}
CALLS = set("""
    exp log log2 log10 sin cos tan tanh power mean dot einsum tensordot prod cumsum inner vdot average std var norm trace
    nansum reduce accumulate
""".split())
STANDARD = {"typing", "collections.abc"}


def complaints(source: str, reductions: bool = False) -> list[str]:
    """What the exact set may not contain, as "line N: ...". ``reductions``: the rules of reduce.py."""
    numpy = NUMPY | REDUCE_ONLY if reductions else NUMPY
    methods = METHODS - REDUCTIONS if reductions else METHODS
    tree = ast.parse(source)
    followed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [(node, f"import {a.name}") for a in names if (a.name, a.asname) != ("numpy", "np")]
            case ast.ImportFrom(module=module, level=level, names=names):
                ours = level == 0 and (module == "refkernels.errors" or module.startswith("refkernels.exact."))
                if not (ours or module in STANDARD) or names[0].name == "*":
                    found.append((node, f"import from {module}"))
            case ast.Attribute(value=ast.Name(id="np"), attr=attr):
                if attr not in numpy:
                    found.append((node, f"np.{attr}"))
            case ast.Attribute(attr=attr) if attr in methods:
                found.append((node, f".{attr}"))
            case ast.Name(id="np") if id(node) not in followed:
                found.append((node, "np handed on"))
            case ast.Name(id=name) if name in BUILTINS:
                found.append((node, name))
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.append((node, f"{name}()"))
            case ast.Call(func=ast.Name(id="max" | "min" as name), args=args):
                if len(args) < 2 or any(isinstance(arg, ast.Starred) for arg in args):
                    found.append((node, f"{name} of an array"))   # of several Python numbers it is allowed
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult()):
                found.append((node, "@"))
            case ast.BinOp(op=ast.Pow(), left=left, right=right) if not (_constant(left) and _constant(right)):
                found.append((node, "** of a variable"))
            case ast.AugAssign(op=ast.Pow()):
                found.append((node, "**="))
    return [f"line {node.lineno}: {what}" for node, what in sorted(found, key=lambda pair: pair[0].lineno)]


def _constant(node: ast.expr) -> bool:
    """A number, a NAME of a constant, or + - of such."""
    match node:
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return name.isupper()
        case ast.UnaryOp(operand=operand):
            return _constant(operand)
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
            return _constant(left) and _constant(right)
    return False


@pytest.mark.parametrize("name", EXACT)
def test_the_exact_set_has_no_reduction_outside_reduce_and_no_libm(name):
    assert complaints((ROOT / "exact" / name).read_text(encoding="utf-8"), reductions=name == "reduce.py") == []


@pytest.mark.parametrize("source", [
    "y = np.exp(x)", "y = np.exp2(x)", "y = np.log(x)", "y = np.sin(x)", "y = np.cos(x)", "y = np.tan(x)", "y = np.tanh(x)",
    "y = np.power(x, 2)", "y = np.cbrt(x)", "y = np.mean(x)", "y = np.sum(x)", "y = np.dot(a, b)", "y = np.prod(x)",
    "y = np.einsum('ij,kj', a, b)", "y = np.tensordot(a, b)", "y = np.matmul(a, b)", "y = np.cumsum(x)", "y = np.var(x)",
    "y = np.inner(a, b)", "y = np.vdot(a, b)", "y = np.linalg.norm(x)", "y = np.average(x)", "y = np.std(x)",
    "y = np.max(x)", "y = np.trace(x)", "y = np.nansum(x)", "y = np.add.reduce(x)", "y = np.add.accumulate(x)",
    "f = np.add.reduceat", "y = np.maximum.reduce(x)", "y = a @ b", "a @= b", "y = x.sum()", "y = (x * x).mean(axis=-1)",
    "y = x.max()",
    "y = x.min(axis=0)", "y = x.dot(w)", "y = x.prod()", "y = x.cumsum()", "y = x.std()", "f = x.sum", "y = sum(x)",
    "y = max(x)", "y = min(*x)", "y = pow(x, 0.5)", "y = d**0.5", "y = 2.0**n", "y = X**2 ** n", "x **= 2", "y = exp(x)",
    "import math", "import numpy", "import numpy.linalg", "import numpy as np, scipy", "from numpy import add",
    "from numpy.linalg import norm", "from math import exp", "from . import reduce", "from .reduce import row_sum",
    "from refkernels.exact.reduce import *", "from refkernels.native import rms_norm", "from refkernels import native",
    "import ctypes", "from functools import reduce", "f = getattr(np, 'ex' + 'p')", "library = np", "y = __import__('math')",
    "def f(x):\n    if x:\n        return [np.exp(y) for y in x]",
])
def test_the_lint_sees(source):
    assert complaints(source)


@pytest.mark.parametrize("source", [
    "import numpy as np", "from refkernels.errors import BoundError", "from refkernels.exact.reduce import matmul, row_sum",
    "from typing import NamedTuple", "y = matmul(a, b); z = row_sum(y)", "y = exp2(t)", "c, s = cos_sin_turns(turns)",
    "y = np.rint(np.ldexp(x, -e))", "y = 2.0**-64 + 2.0**P_BITS", "y = 2.0 ** (BITS - X_BITS)", "n = max(1, min(a, b))",
    "y = np.sqrt(x) / np.abs(x)", "y = np.maximum(a, b)", "y = x.astype(np.float32).swapaxes(0, 1).view(np.int32)",
])
def test_the_lint_lets_pass(source):
    assert complaints(source) == []


def test_reduce_may_reduce_but_may_not_call_libm():
    assert complaints("y = np.add.reduce(x)\nz = np.matmul(a, b)", reductions=True) == []
    assert complaints("y = np.exp(x)\nz = x.mean()\nw = a @ b\nimport math", reductions=True) == [
        "line 1: np.exp", "line 2: .mean", "line 3: @", "line 4: import math"]


@pytest.mark.parametrize("name", refkernels.SETS)
def test_every_set_has_the_public_names_of_the_exact_set(name):
    exact, other = refkernels.arithmetic("exact"), refkernels.arithmetic(name)
    assert other.__all__ == exact.__all__
    assert [public for public in other.__all__ if not hasattr(other, public)] == []
    assert other.NAME == name


@pytest.mark.parametrize("name", ["native", "native64"])
def test_functions_of_one_name_have_the_same_parameters(name):
    exact, other = refkernels.arithmetic("exact"), refkernels.arithmetic(name)
    for function in exact.__all__:
        if callable(getattr(exact, function)) and function not in ("DTYPE", "KV"):  # what KV holds is the set's own matter
            ours, theirs = (inspect.signature(getattr(op, function)).parameters for op in (exact, other))
            bound = {p for p in theirs if p == "dtype" and theirs[p].default is not inspect.Parameter.empty}
            assert [p for p in theirs if p not in bound] == list(ours), function
            assert [theirs[p].default for p in ours] == [ours[p].default for p in ours], function


def _imports(path: Path) -> set[str]:
    """Names of the modules a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def test_refkernels_imports_nothing_but_numpy_and_harmless_standard_modules():
    standard = {"collections.abc", "functools", "importlib", "platform", "types", "typing"}
    for path in ROOT.rglob("*.py"):
        foreign = {name for name in _imports(path) if name != "refkernels" and not name.startswith("refkernels.")}
        assert foreign <= standard | {"numpy"}, path.name


def test_kernels_is_a_folder_and_not_a_package():
    # A package named `kernels` would shadow the one of that name on PyPI, which transformers imports.
    assert ROOT.parent.name != "kernels" or not (ROOT.parent / "__init__.py").exists()
