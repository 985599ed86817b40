"""The page of the proofs says what the proofs say."""
import sys
from pathlib import Path

PROOFS = Path(__file__).parent.parent / "proofs"


def test_every_theorem_is_in_the_table_word_for_word(monkeypatch):
    monkeypatch.syspath_prepend(str(PROOFS))
    from make_readme import theorems

    assert theorems() in (PROOFS / "README.md").read_text(encoding="utf-8"), "run python proofs/make_readme.py"
    sys.modules.pop("make_readme")


def test_the_table_of_snapshots_is_what_they_save(monkeypatch):
    monkeypatch.syspath_prepend(str(PROOFS))
    from prove_a_snapshot_is_a_full_recompute import figures

    assert figures() in (PROOFS / "README.md").read_text(encoding="utf-8"), "run python proofs/make_readme.py"


def test_every_planted_fault_is_in_the_table(monkeypatch):
    monkeypatch.syspath_prepend(str(PROOFS))
    from mutants import MUTANTS

    page = (PROOFS / "README.md").read_text(encoding="utf-8")
    assert all(f"| {mutant.name} |" in page for mutant in MUTANTS)
    assert f"{len(MUTANTS)} planted, {len(MUTANTS)} found" in page
