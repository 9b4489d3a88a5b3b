"""What the report needs of one ledger, small whatever the ledger's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexfloor.ledger.accounting import Summary, summarize
from flexfloor.ledger.events import read_ledger, refusing
from flexfloor.report.html_charts import MOST_BINS
from flexfloor.report.timeline import Timeline, group_workers, make_timeline
from flexfloor.report.timeline_memory import MemoryLine, make_memory_line

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Forecast:
    """Forecasts of lengths, made before responses began, beside what came of them.

    levels: float64 [l]; quantiles: float64 [n, l], tokens; tokens: int64 [n].
    """

    levels: np.ndarray
    quantiles: np.ndarray
    tokens: np.ndarray

    def at(self, level: float) -> np.ndarray:
        """The quantile nearest to `level`: float64 [n]."""
        return self.quantiles[:, int(np.argmin(abs(self.levels - level)))]


@dataclass(frozen=True)
class Run:
    """name: the policy's, or more where that does not tell rollouts apart. source: where the records come from.

    settings, started_at: of the start record. answered: the same number for the same requests. tokens: int64 [n], of
    each response that ended; cut: bool [n], by its limit.
    """

    name: str
    source: str
    summary: Summary
    settings: Mapping[str, Any]
    started_at: str
    answered: int
    line: Timeline
    memory: MemoryLine | None
    tokens: np.ndarray
    cut: np.ndarray
    forecast: Forecast | None

    @classmethod
    def of(cls, records: Sequence[Record], source: str) -> Run:
        """records: as `read_ledger` gives them."""
        summary = summarize(records)
        finished = [f for r in records if r["type"] == "chunk" for f in r["finished"]]
        line = make_timeline(records, summary.wall_s)
        memory = make_memory_line(records, line.end_s)
        return cls(
            name=summary.policy,
            source=source,
            summary=summary,
            settings=records[0]["settings"],
            started_at=records[0].get("started_at", ""),
            answered=hash(frozenset(f["request_id"] for f in finished)),
            line=line,
            memory=None if memory is None else memory.bins(line.bins(MOST_BINS)),
            tokens=np.array([f["response_tokens"] for f in finished], dtype=np.int64),
            cut=np.array([f["finish_reason"] == "length" for f in finished], dtype=np.bool_),
            forecast=_forecast(records, finished),
        )

    def rows(self, most: int) -> list[list[int]]:
        """Workers in rows of a chart."""
        detail = self.summary.workers_detail
        return group_workers([w.released_at_s for w in detail], [w.finished_at_s for w in detail], most)


def same_requests(runs: Sequence[Run]) -> bool:
    """Whether the rollouts were asked for the same responses, as far as their ledgers go."""
    asked = {(run.summary.requests, run.summary.prompt_tokens, run.summary.step) for run in runs}
    return len(asked) == 1 and len({run.answered for run in runs if run.summary.complete}) <= 1


def _forecast(records: Sequence[Record], finished: Sequence[Record]) -> Forecast | None:
    """None where the policy made none, or none of its requests has ended."""
    made = [r for r in records if r["type"] == "forecast"]
    quantiles = {
        name: column for r in made for name, column in zip(r["requests"], zip(*r["tokens"], strict=True), strict=True)
    }
    known = [f for f in finished if f["request_id"] in quantiles]
    if not known:
        return None
    return Forecast(
        np.array(made[0]["levels"], dtype=np.float64),
        np.array([quantiles[f["request_id"]] for f in known], dtype=np.float64),
        np.array([f["response_tokens"] for f in known], dtype=np.int64),
    )


def read_run(path: Path) -> Run:
    """Raises InputError for a file that is no ledger, or none of this version."""
    records = read_ledger(path)
    with refusing(path):
        return Run.of(records, str(path))


def name_runs(policies: Sequence[str], sources: Sequence[Path]) -> list[str]:
    """What the runs are called beside each other: their policies, with the file's name where these are the same."""
    names = []
    for policy, source in zip(policies, sources, strict=True):
        stem = source.absolute().parent.name if source.stem == "ledger" else source.stem
        names.append(policy if policies.count(policy) == 1 else f"{policy} ({stem})")
    # Two files of one name, in two folders.
    return [n if names.count(n) == 1 else f"{n} #{index + 1}" for index, n in enumerate(names)]
