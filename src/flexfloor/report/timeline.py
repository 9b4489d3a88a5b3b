"""What every worker did when: the records of a ledger as arrays over time, and these over bins of time.

Between two records the driver plans; an iteration is one state of a worker. Where a simulated fleet's entry stands for
several iterations, it is prefill if any prompt token was computed in them, and idle if no request was live. While
nothing is computed, the requests of the next iteration are live, and the next advance's tokens are spread over the
planning before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexfloor.ledger.accounting import iteration_ends

Record = Mapping[str, Any]

STATES = ("prefill", "decode", "idle", "stall", "planning", "released")
"""Of a worker. prefill: computes prompt tokens, of whichever of its requests; decode: no prompt token, but a live
request; idle: none, but occupied; stall: waits for a resize or a move; planning: waits for the driver between two
advances."""
PREFILL, DECODE, IDLE, STALL, PLANNING, RELEASED = range(len(STATES))


@dataclass(frozen=True)
class Timeline:
    """Intervals without a gap from 0 to the end of the rollout.

    edges: float64 [n + 1], seconds. state: int8 [workers, n], index into STATES. live: float32 [workers, n], requests
    that took part. tokens_per_s: float64 [n], response tokens of the advance over its seconds. waiting: float64 [n],
    requests that are neither running nor ended.
    """

    edges: np.ndarray
    state: np.ndarray
    live: np.ndarray
    tokens_per_s: np.ndarray
    waiting: np.ndarray

    @property
    def workers(self) -> int:
        return len(self.state)

    @property
    def end_s(self) -> float:
        return float(self.edges[-1])

    def seconds_by_state(self) -> dict[str, float]:
        """Worker-seconds of each state; all but `released` are occupied."""
        seconds = np.diff(self.edges)
        return {name: float(((self.state == index) @ seconds).sum()) for index, name in enumerate(STATES)}

    def active(self) -> np.ndarray:
        """Workers in the group or on their way out of it: int64 [n]."""
        return (self.state != RELEASED).sum(axis=0)

    def active_set(self) -> tuple[np.ndarray, np.ndarray]:
        """Its size between two changes: (edges float64 [m + 1], workers int64 [m])."""
        active = self.active()
        firsts = np.flatnonzero(np.diff(active, prepend=-1))
        return np.append(self.edges[firsts], self.end_s), active[firsts]

    def integrate(self, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """∫ values dt over each bin. values: [..., n]; edges: float64 [bins + 1], inside 0 … end_s."""
        done = np.concatenate(
            [np.zeros((*values.shape[:-1], 1)), np.cumsum(values * np.diff(self.edges), axis=-1, dtype=np.float64)],
            axis=-1,
        )
        at = np.clip(np.searchsorted(self.edges, edges, side="right") - 1, 0, len(self.edges) - 2)
        return np.diff(done[..., at] + values[..., at] * (edges - self.edges[at]), axis=-1)

    def mean(self, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """The mean over each bin."""
        return self.integrate(values, edges) / np.maximum(np.diff(edges), 1e-12)

    def bins(self, count: int) -> np.ndarray:
        """Edges of `count` bins of equal length: float64 [count + 1]."""
        return np.linspace(0.0, self.end_s, count + 1)


def group_workers(released_at: Sequence[float | None], finished_at: Sequence[float], most: int) -> list[list[int]]:
    """Workers in rows of a chart, in at most `most` rows: one in each while there are so few; else as many in each, who
    left at about the same time, those that stayed longest first; of those that stayed to the end, or left together,
    those first whose work ended last, so that idle workers share rows.

    released_at: seconds, None for a worker that stayed; finished_at: seconds, end of its work."""
    workers = len(released_at)
    if workers <= most:
        return [[w] for w in range(workers)]
    left = [np.inf if at is None else at for at in released_at]
    order = sorted(range(workers), key=lambda w: (-left[w], -finished_at[w], w))
    size = -(-workers // most)
    return [order[first : first + size] for first in range(0, workers, size)]


def sum_groups(values: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """[workers, …] → [groups, …]."""
    order, firsts = _flatten(groups)
    return np.add.reduceat(values[order], firsts, axis=0)


def fullest_of(values: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """The largest value of each group: [workers, …] → [groups, …]; NaN where all of them are."""
    order, firsts = _flatten(groups)
    return np.fmax.reduceat(values[order], firsts, axis=0)


def _flatten(groups: Sequence[Sequence[int]]) -> tuple[list[int], np.ndarray]:
    """All workers, and where each group begins among them."""
    return [w for group in groups for w in group], np.cumsum([0, *(len(group) for group in groups[:-1])])


def main_states(line: Timeline, groups: Sequence[Sequence[int]], edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each group and bin the state that took the most worker-seconds, int8, and the live requests, float64."""
    most = np.full((len(groups), len(edges) - 1), -1.0)
    state = np.zeros(most.shape, dtype=np.int8)
    for index in range(len(STATES)):
        seconds = sum_groups(line.integrate((line.state == index).astype(np.float32), edges), groups)
        state[seconds > most] = index
        most = np.maximum(most, seconds)
    return state, sum_groups(line.mean(line.live, edges), groups)


def make_timeline(records: Sequence[Record], end_s: float) -> Timeline:
    """records: as `read_ledger` gives them; end_s: of the rollout, the summary's `wall_s`; what is later is cut off."""
    workers = records[0]["fleet"]["workers"]
    blocks = list(_blocks(records, workers, end_s))
    if not blocks or end_s <= 0:
        nothing = np.zeros(1)
        return Timeline(np.array([0.0, max(end_s, 1e-9)]), np.full((workers, 1), PLANNING, np.int8),
                        np.zeros((workers, 1), np.float32), nothing, nothing)  # fmt: skip
    edges = np.concatenate([[0.0], *(b.ends for b in blocks)])
    kept = int(np.searchsorted(edges[:-1], end_s))
    edges = np.minimum(edges[: kept + 1], end_s)
    state, live, rate = (
        np.concatenate([getattr(b, name) for b in blocks], axis=-1)[..., :kept] for name in ("state", "live", "rate")
    )
    _carry_back(live)
    waiting = np.maximum(_open_requests(records, edges) - live.sum(axis=0), 0.0)
    there = np.diff(edges) > 0  # an interval without length is none
    edges = np.concatenate([edges[:1], edges[1:][there]])
    return Timeline(edges, state[:, there], live[:, there], rate[there], waiting[there])


@dataclass(frozen=True)
class _Block:
    """Some intervals that follow each other, as in `Timeline`; ends: float64 [n], seconds. live: NaN while nothing is
    computed."""

    ends: np.ndarray
    state: np.ndarray
    live: np.ndarray
    rate: np.ndarray


def _blocks(records: Sequence[Record], workers: int, end_s: float) -> Iterator[_Block]:
    done = 0.0
    active = np.ones(workers, dtype=np.bool_)

    def waits(state: int, until: float, rate: float = 0.0) -> _Block:
        column = np.where(active, state, RELEASED).astype(np.int8)[:, None]
        return _Block(np.array([until]), column, np.full((workers, 1), np.nan, np.float32), np.array([rate]))

    for record in records:
        if record["type"] not in ("chunk", "resize") or record["t1"] <= record["t0"]:
            continue
        rate = record.get("tokens", 0) / (record["t1"] - done)
        if record["t0"] > done:
            yield waits(PLANNING, record["t0"], rate)
        done = record["t1"]
        if record["type"] == "chunk":
            yield _chunk_block(record, workers, rate)
            continue
        yield waits(STALL, done)
        if record["failed"] is None:
            active[list(record["leaving"])] = False
            active[list(record["joining"])] = True
    if end_s > done:  # the driver planned on when the run was cut off
        yield waits(PLANNING, end_s)


def _carry_back(live: np.ndarray) -> None:
    """Fill the columns that are NaN with the next one that is not; with 0 after the last."""
    count = live.shape[1]
    known = np.where(np.isnan(live[0]), count, np.arange(count))
    following = np.minimum.accumulate(known[::-1])[::-1]
    fill = np.flatnonzero(known == count)
    live[:, fill] = np.where(following[fill] < count, live[:, np.minimum(following[fill], count - 1)], 0.0)


def _chunk_block(chunk: Record, workers: int, rate: float) -> _Block:
    ends = np.array(iteration_ends(chunk))
    if (spans := chunk.get("spans")) is not None:
        ends = ends[np.cumsum(spans) - 1]
    entries = chunk["workers"]
    members = [entry["worker"] for entry in entries]
    batch = np.array([entry["batch"] for entry in entries], dtype=np.float32)
    prefill = np.array([entry["prefill_tokens"] for entry in entries], dtype=np.float32)
    state = np.full((workers, len(ends)), RELEASED, dtype=np.int8)
    state[members] = np.where(prefill > 0, PREFILL, np.where(batch > 0, DECODE, IDLE))
    live = np.zeros((workers, len(ends)), dtype=np.float32)
    live[members] = batch
    return _Block(ends, state, live, np.full(len(ends), rate))


def _open_requests(records: Sequence[Record], edges: np.ndarray) -> np.ndarray:
    """Requests that are known and have not ended, at the beginning of each interval: float64 [n]."""
    changes: list[tuple[float, int]] = []
    for record in records:
        if record["type"] == "submit":
            changes.append((record["t"], record["requests"]))
        elif record["type"] == "chunk" and record["finished"]:
            ends = iteration_ends(record)
            changes += [(ends[f["iteration"] - record["first_iteration"]], -1) for f in record["finished"]]
    if not changes:
        return np.zeros(len(edges) - 1)
    times, counts = (np.array(column, dtype=np.float64) for column in zip(*sorted(changes), strict=True))
    known = np.concatenate([[0.0], np.cumsum(counts)])
    return known[np.searchsorted(times, edges[:-1], side="right")]
