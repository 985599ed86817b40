"""THEOREM. One hash for every machine: the exact set gives the same bits wherever IEEE 754 holds.

Statement: the logits and the K/V of the built-in model for a fixed prompt have ONE pinned SHA-256, whatever the OpenBLAS
core, the number of BLAS threads, NumPy's SIMD extensions and version, the chunk size, the processor's architecture, and
whatever another thread computes meanwhile.

Argument: sums have no rounding (prove_reductions_are_exact); everything else is one of + - * / sqrt, rint, comparisons,
casts and exponent bits, each of which IEEE 754 defines to the bit; there is no libm in the set (tests/test_kernel_lint.py),
and frequencies come from the decimal module, whose ln and exp are correctly rounded.

Shown by: processes told to use each core; other NumPys in environments of their own; aarch64 under emulation (the last two
are marked `platforms`, for they download). Not shown: real ARM hardware, other BLAS libraries, big-endian machines.
The native set, run the same way, gives many hashes: that is the control.
"""
import os
import shutil
import subprocess
import venv
from pathlib import Path
import sys
import threading

import pytest

from digest import CORES, PROMPT, digest, digests, elsewhere, missing, simd
from refengine.model import tiny

# It hunts any change of any bit, on any machine. Made on x86-64 (AVX-512) by digest.digests("exact", 256); whether the
# numbers are right is for other tests. It changes with the built-in model's weights or with the arithmetic, on purpose only.
PINNED = "07682cf5a907dd921d2c8ebd800bcb50c434a49bce8afe9b987b270bcd4d48a8"
CHUNKS = (1, 7, 256)
SAME = {str(chunk): PINNED for chunk in CHUNKS}


def run(set_name: str, core: str, threads: int):
    """(core in use, digests by chunk size) of a process that is told to use a core and a number of threads."""
    return elsewhere(f"describe()['blas_core'], digests({set_name!r}, *{CHUNKS})",
                     OPENBLAS_CORETYPE=core, OPENBLAS_NUM_THREADS=str(threads))


def without_simd(set_name: str):
    """(SIMD extensions in use, digests by chunk size) of a process whose NumPy may use none."""
    return elsewhere(f"simd(), digests({set_name!r}, *{CHUNKS})", NPY_DISABLE_CPU_FEATURES=" ".join(simd()))


def prove_every_chunk_size_gives_the_pinned_bits_on_this_machine():
    assert digests("exact", *CHUNKS) == {chunk: PINNED for chunk in CHUNKS}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("core", CORES)
def prove_every_blas_core_and_thread_count_gives_the_pinned_bits(core, threads):
    if reason := missing(core):
        pytest.skip(reason)
    used, exact = run("exact", core, threads)
    assert exact == SAME
    if used not in CORES[core][1]:
        pytest.skip(f"the pinned bits, but OpenBLAS uses {used} when told {core}")


def prove_numpy_without_simd_gives_the_pinned_bits():
    if not simd():
        pytest.skip("NumPy uses no SIMD beyond its baseline here")
    left, exact = without_simd("exact")
    assert left == []
    assert exact == SAME


def prove_engines_in_two_threads_do_not_disturb_each_other():
    # Case D9. One model, two prompts of one length, so that both threads compute with the same shapes at the same time; a
    # short switch interval makes them take turns often.
    model, other = tiny(), PROMPT[::-1]
    want = {"first": PINNED, "second": digest(model, 256, other)}
    start, found = threading.Barrier(2, timeout=60), {"first": [], "second": []}

    def work(name, prompt):
        for chunk_size in (1, 7, 256, 1):
            start.wait()
            found[name].append(digest(model, chunk_size, prompt))

    workers = [threading.Thread(target=work, args=pair) for pair in (("first", PROMPT), ("second", other))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == {name: [hashed] * 4 for name, hashed in want.items()}


OTHERS = ("numpy==1.26.4", "numpy")  # the oldest that we support, and the newest there is


@pytest.mark.platforms
@pytest.mark.parametrize("numpy", OTHERS)
def prove_another_numpy_gives_the_pinned_bits(numpy, tmp_path):
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", numpy, "safetensors", "tokenizers"], check=True)
    assert outside([python], {}) == [PINNED] * len(CHUNKS)


@pytest.mark.platforms
def prove_aarch64_gives_the_pinned_bits(tmp_path):
    """An arm64 CPython and NumPy under user-mode emulation. Needs Debian's packages and root, as in CI."""
    subprocess.run(["bash", ROOT / "proofs" / "aarch64.sh", tmp_path], check=True)
    qemu = [shutil.which("qemu-aarch64-static"), "-L", tmp_path / "root", tmp_path / "root/usr/bin/python3.11"]
    assert outside(qemu, {"PYTHONHOME": str(tmp_path / "root/usr")}, tmp_path / "site") == [PINNED] * len(CHUNKS)


ROOT = Path(__file__).parent.parent


def outside(python: list, environment: dict[str, str], *path: Path) -> list[str]:
    """The digests that another Python computes from this checkout."""
    code = f"import numpy, platform; from digest import digests; print(numpy.__version__, platform.machine(), *digests('exact', *{CHUNKS}).values())"
    path = os.pathsep.join(map(str, (*path, ROOT, ROOT / "kernels", ROOT / "tests")))
    done = subprocess.run([*python, "-c", code], env={**os.environ, **environment, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, machine, *found = done.stdout.split()
    print(f"NumPy {version} on {machine}: {found}")
    return found


def prove_the_native_set_gives_other_bits_on_another_core_and_in_other_chunks():
    runs = {core: run("native", core, 1)[1] for core in CORES if not missing(core)}      # core -> chunk size -> hash
    if len(runs) < 2:
        pytest.skip("the control needs two OpenBLAS cores to choose from")
    print(f"native: {len({digest for hashes in runs.values() for digest in hashes.values()})} hashes in {len(runs) * len(CHUNKS)} runs")
    assert any(len(set(hashes.values())) > 1 for hashes in runs.values()), "the chunk size never showed"
    assert any(len({hashes[chunk] for hashes in runs.values()}) > 1 for chunk in SAME), "the core never showed"
