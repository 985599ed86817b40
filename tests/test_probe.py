"""The probe finds what would break exact arithmetic: a BLAS that rounds, another rounding mode, flushed subnormals, a wrong
sqrt. Each is planted here, the process-wide ones in a process of their own, and each error says what to do. Floor 9.
"""
import platform
import sys

import numpy as np
import pytest

from digest import python
from refengine.model import load_model
from refkernels import ProbeError, probe

ROUNDING, SUBNORMALS = "float64 rounds to nearest, ties to even", "subnormals are kept"
ELEMENTWISE, BLAS = "elementwise operations are IEEE", "BLAS multiplies worst-case integers exactly"


class Planted:
    """NumPy with some functions replaced."""

    def __init__(self, **replaced):
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(np, name)


@pytest.fixture
def plant(monkeypatch):
    """Replace functions of NumPy as the probe sees it. What require() remembers is forgotten before and after."""
    probe.require.cache_clear()
    yield lambda **replaced: monkeypatch.setattr(probe, "np", Planted(**replaced))
    probe.require.cache_clear()


def failed() -> set[str]:
    """The checks that fail, of the BLAS check only the common part of the name."""
    return {BLAS if name.startswith(BLAS) else name for name, text in probe.checks().items() if text}


def test_this_process_passes_every_check():
    checks = probe.checks()
    assert set(checks.values()) == {""}
    assert {ROUNDING, SUBNORMALS, ELEMENTWISE} < set(checks) and sum(name.startswith(BLAS) for name in checks) >= 5
    probe.require()


def in_float32(a, b):
    return np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(np.float64)


def to_float32(a, b):
    return np.matmul(a, b).astype(np.float32).astype(np.float64)


def one_sum_off_by_one(a, b):
    y = np.matmul(a, b)
    y[-1, -1] += 1
    return y


def transposed_only(a, b):
    return np.matmul(a, b) if b.flags.c_contiguous else in_float32(a, b)


def many_rows_only(a, b):
    return np.matmul(a, b) if len(a) == 1 else in_float32(a, b)


def one_row_only(a, b):
    return in_float32(a, b) if len(a) == 1 else np.matmul(a, b)


@pytest.mark.parametrize("matmul", [in_float32, to_float32, one_sum_off_by_one, transposed_only, many_rows_only,
                                    one_row_only])
def test_a_blas_that_rounds_is_reported(plant, matmul):
    plant(matmul=matmul)
    assert failed() == {BLAS}
    with pytest.raises(ProbeError, match="another BLAS"):
        probe.require()


def test_a_wrong_sqrt_is_reported(plant):
    plant(sqrt=lambda x: np.nextafter(np.sqrt(x), 0))
    assert failed() == {ELEMENTWISE}


def test_a_wrong_rint_is_reported(plant):
    plant(rint=lambda x: np.floor(x + 0.5))  # ties upward
    assert failed() == {ROUNDING}


def test_an_exact_model_is_not_loaded_where_the_probe_fails(plant):
    plant(matmul=to_float32)
    with pytest.raises(ProbeError, match="exact arithmetic is not possible"):
        load_model("tiny")
    assert load_model("tiny", "native").op.NAME == "native"


# State of a whole process is switched in a process of its own, through <fenv.h> of the C library. {switch} changes it.
CODE = """
import ctypes, json, struct
from refkernels import ProbeError, probe

def result():
    wrong = [name for name, text in probe.checks().items() if text]
    try:
        return wrong, str(probe.require() or "")
    except ProbeError as error:
        return wrong, str(error)

assert not any(probe.checks().values())              # also: NumPy works out its finfo while all is well
c, default = ctypes.CDLL(None), ctypes.create_string_buffer(64)
c.fegetenv(default)
{switch}
switched = result()
c.fesetenv(default)
print(json.dumps((switched, result())))
"""
MXCSR = """
env = ctypes.create_string_buffer(default.raw)      # fenv_t of x86-64 ends with the MXCSR register, at byte 28
struct.pack_into("<I", env, 28, struct.unpack_from("<I", env, 28)[0] | {bits})
c.fesetenv(env)
"""
X86 = platform.machine().lower() in ("x86_64", "amd64")
needs_fenv = pytest.mark.skipif(not sys.platform.startswith("linux") or not (X86 or platform.machine() == "aarch64"),
                                reason="the constants of <fenv.h> are known here for Linux on x86-64 and aarch64")
needs_mxcsr = pytest.mark.skipif(not sys.platform.startswith("linux") or not X86,
                                 reason="flushing is switched through MXCSR, a register of x86-64; fenv_t as Linux has it")


@needs_fenv
@pytest.mark.parametrize("mode", [1, 2, 3], ids=["up or down", "down or up", "to zero"])  # in the order of the constants
def test_another_rounding_mode_is_reported_and_may_be_put_right(mode):
    (wrong, error), afterwards = python(CODE.format(switch=f"assert c.fesetround({mode} << {10 if X86 else 22}) == 0"))
    assert ROUNDING in wrong and SUBNORMALS not in wrong
    assert ROUNDING in error and "fesetround" in error
    assert afterwards == [[], ""]


@needs_mxcsr
@pytest.mark.parametrize("bits", [0x8000, 0x0040, 0x8040], ids=["FTZ", "DAZ", "both"])
def test_flushed_subnormals_are_reported_and_may_be_put_right(bits):
    (wrong, error), afterwards = python(CODE.format(switch=MXCSR.format(bits=bits)))
    assert wrong == [SUBNORMALS]
    assert "FTZ/DAZ" in error and "another process" in error
    assert afterwards == [[], ""]
