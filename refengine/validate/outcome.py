"""What a check came to. Six outcomes, kept apart: a check that could not be made is never one that passed."""
from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

OUTCOMES = ("pass", "fail", "expected fail", "unexpected pass", "skip", "error")


@dataclass(frozen=True)
class Check:
    """One question to a backend. words: the answer in a sentence or two; figures: the numbers behind it, JSON."""

    name: str
    outcome: str
    words: str
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r} is not one of {', '.join(OUTCOMES)}")


@dataclass
class Report:
    """All checks of a backend. ``expected``: names of checks that are known to fail."""

    about: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    expected: frozenset[str] = frozenset()

    def add(self, check: Check) -> Check:
        """Keep a check; of one that is expected to fail, say whether it did."""
        if check.name in self.expected and check.outcome in ("pass", "fail"):
            outcome = "expected fail" if check.outcome == "fail" else "unexpected pass"
            check = Check(check.name, outcome, check.words, check.figures)
        self.checks.append(check)
        return check

    @property
    def outcome(self) -> str:
        """The worst: an error, then a failure, an unexpected pass; "skip" when nothing was checked; else "pass"."""
        found = [check.outcome for check in self.checks]
        for outcome in ("error", "fail", "unexpected pass"):
            if outcome in found:
                return outcome
        return "pass" if "pass" in found or "expected fail" in found else "skip"

    def json(self) -> dict[str, Any]:
        return {"schema": "refengine-validation/1", "about": self.about, "outcome": self.outcome,
                "checks": [asdict(check) for check in self.checks]}
