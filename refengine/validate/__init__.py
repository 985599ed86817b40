"""Another backend against the reference: is its forward pass right, is its prefix cache lossless, where does it first go wrong.
Floor 7.

A `Subject` is what is judged; `validate` returns a `Report` of checks, each with one of six outcomes.
"""
from refengine.validate.outcome import Check, Report
from refengine.validate.run import validate
from refengine.validate.subject import Subject, open_subject

__all__ = ["Check", "Report", "Subject", "open_subject", "validate"]
