"""A report as one HTML file that needs nothing else."""
from __future__ import annotations

import html
import json
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ink: #22252a; --soft: #6c7178; --line: #dedfda; --ground: #fbfbf9; --pass: #2f7d4f; --fail: #c2294e }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e5e2; --soft: #979ca3; --line: #33373c; --ground: #16181b; --pass: #6cc391; --fail: #ff6b8b } }
body { margin: 0 auto; max-width: 1000px; padding: 28px 20px; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 22px; margin: 0 } h2 { font-size: 16px; margin: 28px 0 8px } .soft { color: var(--soft) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums } th { color: var(--soft); font-weight: 500; font-size: 13px; text-align: right }
td { border-top: 1px solid var(--line); padding: 5px 12px 5px 0; text-align: right; vertical-align: top } th { padding-right: 12px }
td:first-child, th:first-child, td.words { text-align: left } .pass { color: var(--pass) } .fail, .error { color: var(--fail) } .skip { color: var(--soft) }
pre { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; border-top: 1px solid var(--line); padding-top: 8px }
"""


def page(report: dict[str, Any]) -> str:
    """HTML of `Report.json`."""
    about, e = report["about"], html.escape
    checks = {check["name"]: check for check in report["checks"]}
    precision = ", ".join(f"{name} {kind}" for name, kind in about["precision"].items())
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{e(about['backend'])}: {e(report['outcome'])}</title><style>{_STYLE}</style>",
             f"<h1>{e(about['backend'])} on {e(about['model'])}: <span class='{_kind(report['outcome'])}'>{e(report['outcome'])}</span></h1>",
             f"<p class=soft>{e(about['version'])}; {e(precision)}. Reference: {e(about['reference'])}.</p>",
             "<table><tr><th>check</th><th>outcome</th><th style='text-align:left'>what was found</th></tr>"]
    parts += [f"<tr><td>{e(check['name'])}</td><td class='{_kind(check['outcome'])}'>{e(check['outcome'])}</td>"
              f"<td class=words>{e(check['words'])}</td></tr>" for check in report["checks"]]
    parts.append("</table>")
    if found := checks.get("forward", {}).get("figures", {}).get("prompts"):
        parts += ["<h2>Prompts, in multiples of the noise floor</h2><table><tr><th>prompt</th><th>verdict</th><th>distance</th><th>KL</th>"
                  "<th>worst position</th><th>within up to</th><th>largest difference</th><th>top-1</th><th>top-5</th><th>first beyond</th></tr>"]
        for name, figures in found.items():
            ratios = [f"{figures['ratios'][key]:.2g}" for key in ("nmse", "kl_forward", "worst")]
            cells = [name, figures["verdict"], *ratios, f"{figures['slack']:.2g}", f"{figures['largest']:.2g}", f"{figures['top_1']:.1%}",
                     f"{figures['top_5']:.1%}", "" if figures["first_position_beyond"] is None else str(figures["first_position_beyond"])]
            parts.append("<tr>" + "".join(f"<td>{e(str(cell))}</td>" for cell in cells) + "</tr>")
        parts.append("</table>")
    for name, title in (("violating", "The history that shows it"), ("first", "The first history whose logits differ in bits")):
        if history := checks.get("cache", {}).get("figures", {}).get(name):
            parts.append(f"<h2>{title}</h2><pre>" + e("\n".join(json.dumps(op) for op in history)) + "</pre>")
    return "\n".join(parts) + "\n"


def _kind(outcome: str) -> str:
    return {"pass": "pass", "expected fail": "pass", "skip": "skip"}.get(outcome, "fail")
