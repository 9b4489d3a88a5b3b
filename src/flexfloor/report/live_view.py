"""A rollout as lines of a terminal: what `LiveState` knows, drawn for a given width and height.

flexfloor  static  4 workers of runs/models/tiny                     ← what runs
responses ━━━━━━━━━━━━━───────  61 of 96  live 33  9 600 tok/s  ~5 s left
active 2 of 4 workers: 0, 1  iteration 1 240  12 s
worker  KV pages                    in use  live  experts  state     ← bars: KV pages in use
     0  ━━━━━━━━━━━━━━────────   45% of 72    33       64  decode
worker 1 left: ran dry; 16 experts moved, 6.0 MiB in 0.034 s         ← newest resize
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

from flexfloor.report.live_state import LiveState, WorkerState
from flexfloor.report.words import describe_resize, format_count, format_rate, format_seconds

Line = list[tuple[str, str]]
"""Pieces of a line: text, and its style in rich's words."""

_STYLES = {
    "begins": "dim", "prefill": "cyan", "decode": "green", "idle": "yellow", "stall": "magenta", "released": "dim",
}  # fmt: skip
_GAP = "  "
_WIDEST_BAR, _SHORTEST_BAR = 48, 6
_HEAD = ("worker", "KV pages", "in use", "live", "experts", "state   ")
_FEWEST_ROWS = 3
_ASCII = str.maketrans({"×": "x", "–": "-", "…": "~", "→": ">"})
_LINES_OF_RESIZE = 3


def draw(state: LiveState, width: int, height: int, *, above: Sequence[str] = (), plain: bool = False) -> list[Line]:
    """At most `height` lines of at most `width` columns. above: what to begin with. plain: ASCII only."""
    bar = _Bar("#", "-") if plain else _Bar("━", "─")
    lines: list[Line] = [[(text, "bold")] for told in above for text in textwrap.wrap(told, width)]
    lines += _wrap(_what_runs(state), width)
    lines += _wrap(_responses(state, bar), width)
    lines += _wrap(_group(state), width)
    last: list[Line] = []
    if state.last_resize is not None:
        told = textwrap.wrap(describe_resize(state.last_resize), width, max_lines=_LINES_OF_RESIZE, placeholder=" …")
        last = [[(text, "")] for text in told]
    room = height - len(lines) - len(last)
    if room > _FEWEST_ROWS:
        lines += _worker_lines(state, room, width, bar)
    lines += last
    return [_crop(line, width, plain) for line in lines[:height]]


def describe_progress(state: LiveState) -> str:
    """Where a rollout is: 'iteration 1 240  finished 61/96  live 33'."""
    finished = f"finished {format_count(state.finished)}/{format_count(state.requests)}"
    waiting = f"  waiting {format_count(state.waiting)}" if state.waiting else ""
    return f"iteration {format_count(state.iteration)}  {finished}  live {format_count(state.live)}{waiting}"


class _Bar:
    def __init__(self, full: str, empty: str) -> None:
        self._full, self._empty = full, empty

    def pieces(self, share: float, width: int, style: str) -> Line:
        """share: 0 … 1; a share above 0 shows."""
        full = max(round(share * width), 1 if share > 0 else 0)
        return [(self._full * full, style), (self._empty * (width - full), "dim")]


def _what_runs(state: LiveState) -> list[Line]:
    start = state.start
    parts: list[Line] = [[("flexfloor", "bold")], [(start["policy"], "bold")]]
    if state.made_by:
        parts.append([(state.made_by, "yellow")])
    return [*parts, [(start["fleet"]["model"], "")]]


def _responses(state: LiveState, bar: _Bar) -> list[Line]:
    done = state.finished / max(state.requests, 1)
    parts: list[Line] = [
        [("responses ", ""), *bar.pieces(done, 20, "bold green")],
        [(f"{format_count(state.finished)} of {format_count(state.requests)}", "bold")],
        [(f"live {format_count(state.live)}", "")],
    ]
    if state.waiting:
        parts.append([(f"waiting {format_count(state.waiting)}", "")])
    parts.append([(f"{format_rate(state.tokens_per_s())} tok/s", "bold")])
    if (left := _left(state)) and not state.simulated:
        parts.append([(left, "")])
    return parts


def _left(state: LiveState) -> str:
    left = state.remaining_s()
    return "" if left is None or state.ended else f"~{format_seconds(left)} left"


def _group(state: LiveState) -> list[Line]:
    active, number = state.active, len(state.workers)
    named = f": {', '.join(_ranges(active))}" if len(active) < number else ""
    if len(named) > 40:
        named = ""
    parts = [f"active {len(active)} of {number} workers{named}", f"iteration {format_count(state.iteration)}"]
    if state.preemptions:
        parts.append(f"preemptions {format_count(state.preemptions)}")
    if state.simulated:  # nobody waits that long
        parts.append(", ".join(filter(None, (f"{format_seconds(state.t)} of simulated time", _left(state)))))
    else:
        parts.append(format_seconds(state.t))
    return [[(part, "")] for part in (*parts, *(["rollout done"] if state.ended else []))]


def _ranges(numbers: Iterable[int]) -> list[str]:
    """0, 1, 2, 5 → ['0–2', '5']."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ["–".join(map(str, ends)) for ends in found]


def _worker_lines(state: LiveState, room: int, width: int, bar: _Bar) -> list[Line]:
    """One line a worker; where these are too many, one for each range of consecutive workers."""
    each = -(-len(state.workers) // (room - 1))
    groups = [state.workers[i : i + each] for i in range(0, len(state.workers), each)]
    rows = [_row(group) for group in groups]
    columns = [max(len(head), *(len(row[i]) for row in rows)) for i, head in enumerate(_HEAD)]
    free = width - sum(columns) + columns[1] - len(_GAP) * (len(_HEAD) - 1)
    columns[1] = min(_WIDEST_BAR, free) if free >= _SHORTEST_BAR else 0
    lines = [_cells([(head, "dim") for head in _HEAD], columns, [(_HEAD[1].ljust(columns[1]), "dim")])]
    for group, row in zip(groups, rows, strict=True):
        style = _STYLES[Counter(w.state for w in group).most_common(1)[0][0]]
        used, pages = _sum(w.kv_pages_used for w in group), _sum(w.kv_pages for w in group)
        known = used is not None and pages is not None
        filled = bar.pieces((used or 0) / (pages or 1), columns[1], style) if known else [(" " * columns[1], "")]
        lines.append(_cells([(cell, "") for cell in row[:-1]] + [(row[-1], style)], columns, filled))
    return lines


def _cells(cells: Line, columns: Sequence[int], bar: Line) -> Line:
    """Right-justified, but for the bar and the state."""
    line: Line = []
    for index, ((text, style), size) in enumerate(zip(cells, columns, strict=True)):
        if index == 1:
            line += [*bar, (_GAP, "")] if size else []
        else:
            line += [(text if index == len(columns) - 1 else text.rjust(size), style), (_GAP, "")]
    return line[:-1]


def _row(group: Sequence[WorkerState]) -> tuple[str, ...]:
    """The cells under _HEAD; the bar's is empty."""
    numbers = [w.worker for w in group]
    used, pages = _sum(w.kv_pages_used for w in group), _sum(w.kv_pages for w in group)
    states = Counter(w.state for w in group)
    told = ", ".join(state if len(group) == 1 else f"{count} {state}" for state, count in states.most_common(2))
    if len(states) > 2:
        told += ", …"
    return (
        _ranges(numbers)[0],
        "",
        "" if not pages or used is None else f"{used / pages:.0%} of {format_count(pages)}",
        format_count(sum(w.live for w in group)),
        "" if (experts := _sum(w.experts for w in group)) is None else format_count(experts),
        told,
    )


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _wrap(parts: Sequence[Line], width: int) -> list[Line]:
    """The parts with gaps between them, on as many lines as it takes."""
    lines: list[Line] = []
    for part in parts:
        if lines and _size(lines[-1]) + len(_GAP) + _size(part) <= width:
            lines[-1] += [(_GAP, ""), *part]
        else:
            lines.append(list(part))
    return lines


def _size(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def _crop(line: Line, width: int, plain: bool) -> Line:
    """At most `width` columns, and nothing that moves the cursor."""
    kept: Line = []
    for text, style in line:
        if plain:
            text = text.translate(_ASCII).encode("ascii", "replace").decode()
        text = "".join(c if c.isprintable() else "?" for c in text)
        if (size := cell_len(text)) > width:
            text = set_cell_size(text, width)
        width -= min(size, width)
        kept.append((text, style))
    return kept
