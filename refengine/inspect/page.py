"""The page that shows a KV cache in time: one HTML file that needs nothing else."""
from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any


def page(data: dict[str, Any]) -> str:
    """HTML of `Replay.data`. What people and models wrote is in it as data only, and cannot end the script that holds it."""
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return (files("refengine.inspect") / "page.html").read_text(encoding="utf-8").replace("@DATA@", text)


class Shown:
    """A page inside a notebook: the last expression of a cell."""

    def __init__(self, data: dict[str, Any], height: int = 900):
        self.data, self.height = data, height

    def _repr_html_(self) -> str:
        return (f'<iframe srcdoc="{html.escape(page(self.data), quote=True)}" style="width:100%;height:{self.height}px;border:0">'
                "</iframe>")
