"""Pictures: a turn's time against its prompt, what was reused, where heads look, and the bits that a float engine loses.

Each returns a matplotlib Figure (`pip install 'refengine[plot]'`). Of a bench: `refengine bench --plot`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refengine.errors import InspectError

_REUSED, _FRESH = "#4a7fb5", "#e0872f"


def plot_reuse(turns: Sequence[Any]):
    """A bar for each turn: prompt tokens reused, and forwarded. turns: of a `Chat`, or of `Replay.data`."""
    reused, forwarded = ([_of(turn, name) for turn in turns] for name in ("reused", "forwarded"))
    figure, axes = _axes(max(4.0, 0.5 * len(turns) + 2), 2.8)
    numbers = np.arange(len(turns))
    axes.bar(numbers, reused, color=_REUSED, label="reused")
    axes.bar(numbers, forwarded, bottom=reused, color=_FRESH, label="forwarded")
    axes.set(xlabel="turn", ylabel="prompt tokens")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    return figure


def plot_ttft(turns: Sequence[Mapping[str, Any]]):
    """Seconds of the prefill with the cache and without, against the length of the prompt. turns: of `Replay.data`."""
    figure, axes = _axes(5, 3)
    order = np.argsort([turn["prompt"] for turn in turns], kind="stable")
    prompts = [turns[i]["prompt"] for i in order]
    for name, colour in (("off", _FRESH), ("on", _REUSED)):
        axes.plot(prompts, [turns[i][name] for i in order], "o-", color=colour, label=f"cache {name.upper()}")
    axes.set(xlabel="prompt, tokens", ylabel="seconds to the first token", ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def plot_attention(weights: np.ndarray, tokens: Sequence[str] = ()):
    """Where each head of a layer looks. weights: (H, T, S) of a trace; tokens: the texts of the S positions."""
    if weights.ndim != 3:
        raise InspectError(f"weights are (H, T, S), these have shape {weights.shape}")
    heads, _, keys = weights.shape
    columns = min(4, heads)
    figure, _ = _axes(2.6 * columns, 2.6 * -(-heads // columns), axes=False)
    for head in range(heads):
        axes = figure.add_subplot(-(-heads // columns), columns, head + 1)
        axes.imshow(weights[head], cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_title(f"head {head}", fontsize="small")
        if len(tokens) == keys <= 24:
            axes.set_xticks(range(keys), [repr(text)[1:-1] for text in tokens], rotation=90, fontsize="x-small")
        else:
            axes.set_xticks([])
        axes.set_yticks([])
    return figure


def plot_bits(pairs: Mapping[str, tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]]):
    """The share of numbers whose bits differ between two traces of the same tokens, along the forward pass.

    pairs: name of a line -> two traces, as of an engine with other chunks. Of `exact` it is the zero line.
    """
    figure, axes = _axes(7, 3)
    for label, (one, other) in pairs.items():
        if list(one) != list(other) or any(one[name].shape != other[name].shape for name in one):
            raise InspectError(f"the traces of {label} are not of the same activations")
        share = [np.mean(one[name].view(np.uint32) != other[name].view(np.uint32)) for name in one]
        axes.plot(range(len(share)), [100 * value for value in share], "o-", markersize=3, label=label)
    names = list(next(iter(pairs.values()))[0])
    axes.set(xlabel="activations, in the order of the forward pass", ylabel="% of numbers that differ", ylim=(-3, 103))
    if len(names) <= 40:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize="x-small")
    axes.legend(frameon=False)
    return figure


def _of(turn: Any, name: str) -> int:
    return turn[name] if isinstance(turn, Mapping) else getattr(turn, name)


def _axes(width: float, height: float, *, axes: bool = True):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InspectError("drawing needs matplotlib: pip install 'refengine[plot]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots() if axes else None
