"""Charts of response lengths, and of how good the forecasts of them were."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from flexfloor.report.html_figure import AMBER, BLUE, GREY, RED, make_figure, rule, shorten
from flexfloor.report.words import format_count

_HEIGHT = 310
_MOST_BARS, _MOST_POINTS = 40, 1500


def lengths(tokens: np.ndarray, cut: np.ndarray) -> go.Figure:
    """Responses by length. tokens: int64 [n]; cut: bool [n], ended at their limit."""
    top = float(tokens.max())
    bins = np.linspace(0, top * (1 + 1e-9), min(_MOST_BARS, max(8, int(np.sqrt(len(tokens))))) + 1)
    traces = [
        go.Bar(
            x=(bins[:-1] + bins[1:]) / 2,
            y=np.histogram(tokens[chosen], bins)[0],
            width=np.diff(bins) * 0.94,
            name=name,
            marker={"color": colour},
            hovertemplate="%{y} responses of about %{x:.0f} tokens<extra></extra>",
        )
        for name, chosen, colour in (("ended by themselves", ~cut, BLUE), ("ended at their limit", cut, AMBER))
        if chosen.any()
    ]
    shapes, notes = [], []
    # Below each other, because the median and the 90% may be close.
    for index, (level, name) in enumerate(((0.5, "median"), (0.9, "90%"))):
        at = float(np.quantile(tokens, level))
        line = {"dash": "dot", "width": 1.5, "color": RED}
        shapes.append({"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line})
        side = {"xanchor": "left", "xshift": 3} if at < 0.7 * top else {"xanchor": "right", "xshift": -3}
        text = f"{name} {format_count(at)}"
        notes.append({"x": at, "y": 1 - 0.1 * index, "yref": "paper", "text": text, "showarrow": False, **side})
    return make_figure(
        traces,
        _HEIGHT,
        "response, tokens",
        "responses",
        barmode="stack",
        shapes=shapes,
        annotations=notes,
        showlegend=True,
    )


def calibration(levels: np.ndarray, below: np.ndarray) -> go.Figure:
    """Share of responses that came out no longer than each quantile of their forecast said, float64 [levels]."""
    traces = [
        rule([0, 1], [0, 1], "ideal", GREY),
        go.Scatter(
            x=levels,
            y=below,
            mode="lines+markers",
            name="forecasts",
            marker={"color": BLUE},
            line={"color": BLUE},
            hovertemplate="forecast: %{x:.0%} are no longer<br>came out: %{y:.1%}<extra></extra>",
        ),
    ]
    share = {"range": [0, 1], "tickformat": ".0%"}
    return make_figure(
        traces, _HEIGHT, "responses no longer, by forecast", "came out no longer", xaxis=share, yaxis=share
    )


def forecasts(median: np.ndarray, low: np.ndarray, high: np.ndarray, actual: np.ndarray) -> go.Figure:
    """Actual over forecast median, with the central 80% of the forecast; of many responses every so many. All [n]."""
    chosen = slice(None, None, max(1, -(-len(actual) // _MOST_POINTS)))
    median, low, high, actual = (shorten(a[chosen]) for a in (median, low, high, actual))
    top = float(max(median.max(), actual.max())) * 1.05
    inside = (actual >= low) & (actual <= high)
    traces: list[Any] = [rule([0, top], [0, top], "ideal", GREY)]
    for name, those, colour in (("in the central 80%", inside, BLUE), ("outside", ~inside, RED)):
        traces.append(
            go.Scatter(
                x=median[those],
                y=actual[those],
                mode="markers",
                name=name,
                marker={"size": 5, "opacity": 0.6, "color": colour},
                customdata=np.stack([low[those], high[those]], axis=1),
                hovertemplate="forecast %{x:.0f} (%{customdata[0]:.0f}–%{customdata[1]:.0f}), "
                "came out %{y:.0f} tokens<extra></extra>",
            )
        )
    whole = {"range": [0, top]}
    return make_figure(
        traces, _HEIGHT, "forecast median, tokens", "response, tokens", xaxis=whole, yaxis=whole, hovermode="closest"
    )
