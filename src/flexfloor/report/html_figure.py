"""What the report's charts have in common. Colours of text, grid and background come from the page's theme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

BLUE, AMBER, GREEN, VIOLET, GREY, RED = "#3b82c4", "#f0a030", "#2ea067", "#8e6bd8", "#8a94a3", "#d1495b"
PALETTE = (GREY, AMBER, BLUE, GREEN, VIOLET, RED, "#b07a3e", "#4fb3bf")
"""Of rollouts that are compared."""


def make_figure(traces: Sequence[Any], height: int, x: str, y: str, **layout: Any) -> go.Figure:
    """height: pixels; x, y: titles of the axes. layout: plotly's; what it says of an axis is added to that."""
    axes = {"xaxis": {"title": {"text": x, "standoff": 4}}, "yaxis": {"title": {"text": y}}}
    for name in axes:
        axes[name] |= layout.pop(name, {})
    usual: dict[str, Any] = {
        "template": None,
        "height": height,
        "margin": {"l": 52, "r": 12, "t": 8, "b": 36},
        "showlegend": len(traces) > 1,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    }
    return go.Figure(list(traces), layout=usual | axes | layout)


def steps(edges: np.ndarray, values: np.ndarray, name: str, colour: str, **more: Any) -> go.Scatter:
    """A line that holds each value over its bin. edges: [n + 1]; values: [n]."""
    line = {"shape": "hv", "color": colour, "width": 1.8} | more.pop("line", {})
    held = np.append(values, values[-1])
    return go.Scatter(x=shorten(edges), y=shorten(held), name=name, mode="lines", line=line, **more)


def whole_ticks(most: float) -> dict[str, Any]:
    """Of an axis that counts up to `most`: no ticks between whole numbers."""
    return {"dtick": 1} if most <= 6 else {}


def shorten(values: np.ndarray) -> np.ndarray:
    """Half the bytes in the file; seven digits are more than a chart shows."""
    return np.asarray(values, dtype=np.float32)


def rule(x: Sequence[float], y: Sequence[float], name: str, colour: str, dash: str = "dot", **more: Any) -> go.Scatter:
    """A thin straight line."""
    line = {"color": colour, "dash": dash, "width": 1.5}
    return go.Scatter(x=list(x), y=list(y), mode="lines", name=name, line=line, **({"hoverinfo": "skip"} | more))
