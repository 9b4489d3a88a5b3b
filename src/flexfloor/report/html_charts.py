"""Charts of what workers did over time: Gantt chart, active set, requests, throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from flexfloor.report.html_figure import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    PALETTE,
    RED,
    VIOLET,
    make_figure,
    shorten,
    steps,
    whole_ticks,
)
from flexfloor.report.html_words import tell_resize
from flexfloor.report.timeline import STATES, Timeline, main_states
from flexfloor.report.words import shorten_name

MOST_ROWS, MOST_BINS = 64, 1000
_LINE_BINS = 400  # of line charts, which are narrower
_ROW_PX, _LEAST_PX, _MOST_PX = 26, 90, 420  # heights of a row of the Gantt chart, and of all rows
_MARKS_PX = 26  # above the rows
_MOST_RULES = 60  # resizes that get a line through all rows

STATE_COLOURS = {
    "prefill": VIOLET,
    "decode": BLUE,
    "idle": AMBER,
    "stall": RED,
    "planning": GREY,
    "released": "rgba(46, 160, 103, 0.18)",
}

Resizes = Sequence[Mapping[str, Any]]


def gantt(line: Timeline, groups: Sequence[Sequence[int]], resizes: Resizes, end_s: float) -> go.Figure:
    """A row for each group of workers, coloured by the main state of each bin.

    groups: of `group_workers`. resizes: records, marked above the rows. end_s: where the axis ends, the same for
    charts below each other.
    The page makes what a pointer on a bin shows from `meta`, the names of states and rows.
    """
    single = len(groups) == line.workers
    edges = line.bins(MOST_BINS)
    state, live = main_states(line, groups, edges)
    colours = [colour for colour in STATE_COLOURS.values() for _ in range(2)]
    stops = [(index + side) / len(STATES) for index in range(len(STATES)) for side in (0, 1)]
    heat = go.Heatmap(
        x=np.round(edges, 6),
        y=np.arange(len(groups)),
        z=state,
        customdata=np.round(live).astype(np.int32),
        meta={"states": STATES, "rows": [_name_row(group) for group in groups]},
        colorscale=[list(pair) for pair in zip(stops, colours, strict=True)],
        zmin=-0.5,
        zmax=len(STATES) - 0.5,
        showscale=False,
        ygap=3 if len(groups) <= 16 else 0,
        hovertemplate="%{text}<extra></extra>",
    )
    ticks = range(0, len(groups), -(-len(groups) // 16)) if single else ()
    height = int(np.clip(_ROW_PX * len(groups), _LEAST_PX, _MOST_PX))
    above = _MARKS_PX / height * len(groups)  # in rows
    return make_figure(
        [heat, *_marks(resizes, len(groups), -0.5 - above / 2)],
        height + _MARKS_PX + 44,
        "seconds",
        "worker" if single else f"{line.workers} workers, {len(groups[0])} a row",
        xaxis={"range": [0, end_s], "zeroline": False},
        yaxis={
            "range": [len(groups) - 0.5, -0.5 - above],
            "tickvals": list(ticks),
            "ticktext": [str(groups[i][0]) for i in ticks],
            "showgrid": False,
            "zeroline": False,
        },
        showlegend=False,
    )


def states_over_time(line: Timeline, end_s: float) -> go.Figure:
    """How many workers are in which state, where the Gantt chart has no row for each. end_s: as of `gantt`."""
    edges = line.bins(_LINE_BINS)
    traces = []
    for index, name in enumerate(STATES[:-1]):
        count = line.mean((line.state == index).sum(axis=0).astype(float), edges)
        traces.append(
            steps(edges, count, name, STATE_COLOURS[name], stackgroup="all", hovertemplate="%{y:.4~g}",
                  line={"width": 0}, fillcolor=STATE_COLOURS[name])
        )  # fmt: skip
    return make_figure(
        traces,
        260,
        "seconds",
        "workers",
        xaxis={"range": [0, end_s]},
        yaxis={"rangemode": "tozero"} | whole_ticks(line.workers),
        hovermode="x unified",
        showlegend=False,
    )


def _name_row(group: Sequence[int]) -> str:
    if len(group) == 1:
        return f"worker {group[0]}"
    return f"workers {', '.join(map(str, sorted(group)[:6]))}{', …' if len(group) > 6 else ''}"


def _marks(resizes: Resizes, rows: int, top: float) -> list[Any]:
    """A mark for every resize or move, with what moved; a line through the rows where the group changed."""
    done = [r for r in resizes if r["failed"] is None]
    if not done:
        return []
    changes = [bool(r["leaving"] or r["joining"]) for r in done]
    marks = go.Scatter(
        x=[r["t1"] for r in done],
        y=[top] * len(done),
        mode="markers",
        cliponaxis=False,
        marker={
            "symbol": ["triangle-down" if change else "circle-open" for change in changes],
            "size": [11 if change else 7 for change in changes],
            "color": RED,
            "opacity": 1,
        },
        text=[_wrap(f"{tell_resize(r)}. {r['reason'].capitalize()}.") for r in done],
        hovertemplate="%{text}<extra></extra>",
    )
    at = [r["t1"] for r, change in zip(done, changes, strict=True) if change]
    if len(at) > _MOST_RULES:
        return [marks]
    rules = go.Scatter(
        x=[x for t in at for x in (t, t, None)],
        y=[y for _ in at for y in (top, rows - 0.5, None)],
        mode="lines",
        line={"color": RED, "width": 1},
        hoverinfo="skip",
    )
    return [rules, marks]


def _wrap(text: str, width: int = 48) -> str:
    """With breaks, so that it fits beside a pointer on a narrow page."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "<br>".join(lines)


def _two_panels(
    upper: Sequence[Any], lower: Sequence[Any], units: tuple[str, str], counts: tuple[float, float] = (np.inf, np.inf)
) -> go.Figure:
    """Two charts above each other on one axis of time; traces of the lower one are on `y2`. counts: up to which the
    axes count, where they count something."""
    return make_figure(
        [*upper, *lower],
        330,
        "seconds",
        units[0],
        xaxis={"anchor": "y2"},
        yaxis={"domain": [0.56, 1], "rangemode": "tozero"} | whole_ticks(counts[0]),
        yaxis2={"domain": [0, 0.44], "rangemode": "tozero", "title": {"text": units[1]}} | whole_ticks(counts[1]),
        hovermode="x unified",
    )


def activity(line: Timeline) -> go.Figure:
    """Active workers, and requests below."""
    edges = line.bins(_LINE_BINS)
    below = {"yaxis": "y2", "stackgroup": "all", "hovertemplate": "%{y:.0f}"}
    running = line.live.sum(axis=0)
    return _two_panels(
        [steps(*line.active_set(), "active workers", BLUE, hovertemplate="%{y}")],
        [
            steps(edges, line.mean(running, edges), "running requests", GREEN, **below),
            steps(edges, line.mean(line.waiting, edges), "waiting requests", GREY, **below),
        ],
        ("workers", "requests"),
        (line.workers, float((running + line.waiting).max())),
    )


def throughput(line: Timeline) -> go.Figure:
    """Tokens per second in all, and for each occupied worker below."""
    edges = line.bins(_LINE_BINS)
    rate = line.mean(line.tokens_per_s, edges)
    each = rate / np.maximum(line.mean(line.active().astype(float), edges), 1e-9)
    return _two_panels(
        [steps(edges, rate, "all workers", BLUE, hovertemplate="%{y:.4~s} tokens/s")],
        [steps(edges, each, "per occupied worker", AMBER, yaxis="y2", hovertemplate="%{y:.4~s} tokens/s")],
        ("tokens/s", "tokens/s"),
    )


def active_sets(lines: Mapping[str, Timeline]) -> go.Figure:
    """Active workers over time of several rollouts: a line for each, or a row where there are more than colours."""
    if len(lines) > len(PALETTE):
        return _active_rows(lines)
    traces = []
    for index, (name, line) in enumerate(lines.items()):
        edges, active = line.active_set()
        # Down to 0 at the end, so that it is seen who was through when.
        held, ends = np.append(active, 0), np.append(edges, edges[-1])
        traces.append(steps(ends, held, shorten_name(name, 24), PALETTE[index], hovertemplate="%{y} workers"))
    return make_figure(
        traces,
        240,
        "seconds",
        "active workers",
        yaxis={"rangemode": "tozero"} | whole_ticks(max(line.workers for line in lines.values())),
        hovermode="x unified",
        showlegend=True,
    )


def _active_rows(lines: Mapping[str, Timeline]) -> go.Figure:
    edges = np.linspace(0.0, max(line.end_s for line in lines.values()), _LINE_BINS + 1)
    most = max(line.workers for line in lines.values())
    rows = np.full((len(lines), _LINE_BINS), np.nan)  # nothing is drawn behind the end
    for row, line in zip(rows, lines.values(), strict=True):
        last = int(np.searchsorted(edges, line.end_s, side="left"))
        own = np.minimum(edges[: last + 1], line.end_s)
        row[:last] = line.mean(line.active().astype(float), own)
    heat = go.Heatmap(
        x=shorten(edges),
        y=np.arange(1, len(lines) + 1),
        z=shorten(rows),
        text=[[shorten_name(name)] * _LINE_BINS for name in lines],
        colorscale=[[0, "rgba(59, 130, 196, 0.12)"], [1, BLUE]],
        zmin=0,
        zmax=most,
        ygap=1,
        colorbar={"thickness": 10, "outlinewidth": 0, "len": 1, "title": {"text": "active<br>workers"}}
        | whole_ticks(most),
        hovertemplate="%{text}<br>%{x:.4~g} s: %{z:.4~g} active workers<extra></extra>",
    )
    return make_figure(
        [heat],
        int(np.clip(16 * len(lines), 160, 640)) + 50,
        "seconds",
        "rollout, in the order given",
        yaxis={"autorange": "reversed", "showgrid": False, "zeroline": False} | whole_ticks(len(lines)),
    )


def by_rollout(names: Sequence[str], values: Sequence[float | None], axis: str) -> go.Figure:
    """One number of several rollouts, in the order given. axis: what it is, with its unit."""
    points = go.Scatter(
        x=list(range(1, len(names) + 1)),
        y=list(values),
        text=[shorten_name(name) for name in names],
        mode="lines+markers",
        line={"color": BLUE, "width": 1.5},
        hovertemplate="%{text}: %{y:,.4~g}<extra></extra>",
    )
    return make_figure(
        [points],
        200,
        "rollout, in the order given",
        axis,
        xaxis=whole_ticks(len(names)) | {"range": [0.5, len(names) + 0.5]},
        yaxis={"rangemode": "tozero", "tickformat": ".0%" if axis.startswith("share") else ""},
        hovermode="closest",
    )
