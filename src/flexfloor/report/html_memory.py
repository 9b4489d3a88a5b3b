"""Charts of what lies in the memory of workers, against what there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from flexfloor.report.html_figure import BLUE, GREY, RED, VIOLET, make_figure, rule, shorten, steps
from flexfloor.report.timeline import fullest_of
from flexfloor.report.timeline_memory import MemoryLine

MEMORY_COLOURS = {"dense weights and reserve": GREY, "experts": VIOLET, "KV pages in use": BLUE}
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SCALE = [[0, "rgba(59, 130, 196, 0.12)"], [0.6, BLUE], [0.9, VIOLET], [1, RED]]


def _unit(most: float) -> tuple[float, str]:
    return next(((size, name) for size, name in _UNITS if most >= size), (1, "bytes"))


def worker_memory(memory: MemoryLine, worker: int, end_s: float) -> go.Figure:
    """What one worker holds over time, against its budget."""
    arena = float(memory.arena[worker].max())
    budget = float(memory.budget or arena)
    scale, unit = _unit(budget)
    hover = "%{y:.4~g} " + unit
    dense = np.where(memory.arena[worker] > 0, budget - arena, 0.0)
    parts = dict(zip(MEMORY_COLOURS, (dense, memory.experts[worker], memory.kv[worker]), strict=True))
    edges = np.append(memory.t, end_s)
    traces: list[Any] = [
        steps(edges, values / scale, name, MEMORY_COLOURS[name], stackgroup="all", hovertemplate=hover)
        for name, values in parts.items()
    ]
    limit = rule([0, end_s], [budget / scale] * 2, "budget", RED, "dash", hoverinfo=None, hovertemplate=hover)
    return make_figure(
        [*traces, limit],
        180,
        "seconds",
        unit,
        xaxis={"range": [0, end_s]},
        yaxis={"rangemode": "tozero"},
        hovermode="x unified",
        showlegend=False,
    )


def fleet_memory(memory: MemoryLine, end_s: float) -> go.Figure:
    """What all active workers hold together, against the room that they have for it."""
    experts, kv, arena = (values.sum(axis=0) for values in (memory.experts, memory.kv, memory.arena))
    scale, unit = _unit(float(arena.max()))
    edges = np.append(memory.t, end_s)
    hover = "%{y:.4~g} " + unit
    traces = [
        steps(edges, experts / scale, "experts", VIOLET, stackgroup="all", hovertemplate=hover),
        steps(edges, kv / scale, "KV pages in use", BLUE, stackgroup="all", hovertemplate=hover),
        steps(edges, arena / scale, "room for both", RED, line={"dash": "dash"}, hovertemplate=hover),
    ]
    return make_figure(
        traces,
        310,
        "seconds",
        unit,
        xaxis={"range": [0, end_s]},
        yaxis={"rangemode": "tozero"},
        hovermode="x unified",
    )


def memory_share(memory: MemoryLine, groups: Sequence[Sequence[int]], end_s: float) -> go.Figure:
    """The share of a worker's room that experts and KV take; of workers that share a row, the fullest's.

    groups: of `group_workers`.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (memory.experts + memory.kv) / memory.arena  # NaN once it is released
    single = len(groups) == len(memory.kv)
    heat = go.Heatmap(
        x=shorten(np.append(memory.t, end_s)),
        y=np.arange(len(groups)),
        z=shorten(np.round(fullest_of(share, groups), 3)),
        colorscale=_SCALE,
        zmin=0,
        zmax=1,
        colorbar={"tickformat": ".0%", "thickness": 10, "outlinewidth": 0, "len": 1},
        hovertemplate="%{x:.4~g} s: %{z:.1%} of the room in use<extra></extra>",
    )
    return make_figure(
        [heat],
        310,
        "seconds",
        "worker" if single else f"workers, {len(groups[0])} a row",
        xaxis={"range": [0, end_s], "showgrid": False},
        yaxis={"autorange": "reversed", "showgrid": False, "zeroline": False, "showticklabels": single},
    )
