"""What runs come to: ratios to the baselines, medians and minima over the seeds, and the file that keeps it all."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flexfloor.simulate.runs import BEST_FIXED, Experiment, Run

BASELINES = ("static-spread", "static-grouped", "planned", BEST_FIXED)
DEFINITIONS = {
    "simulated": "times come from the cost model of the device profile, in virtual time; nothing was measured",
    "tokens_per_occupied_s": "response tokens / (Σ over workers of occupied seconds + workers · regrow seconds)",
    "throughput": "response tokens / seconds from the first request handed over to the last response complete",
    "ratios": "value of the policy / value of the baseline on the same workload; above 1 is better",
    "planned": "the baseline with the same knowledge of lengths; max_slowdown is the throughput given up against it",
    "fixed:best": (
        "fixed:N with the most tokens per occupied second among N = W (planned), ¾ W, ½ W, ⅜ W, … that keep "
        "1 − max_slowdown of the throughput of planned, chosen for each seed in hindsight, with the same knowledge"
    ),
    "fixed:N": "the policy: W − N workers leave before the first token, and are occupied until their experts moved",
    "post_finish_share": "share of occupied time after a worker's last live request ended or left",
    "stall_share": "seconds of resizes / seconds of the rollout",
    "of_reference": (
        "worker-seconds of the clairvoyant reference / those of the run; the reference knows all lengths, moves "
        "requests for free, is balanced and takes the best group size each step within the time of the run, or that "
        "which max_slowdown allows if that is more. Not a bound"
    ),
    "of_bound": "the same with the lower bound of the linear program, which no policy beats",
    "pareto": "no other row of the same workers, load and knowledge (or without any) has more of both medians",
    "history": (
        "of drawn lengths: the same prompts in two earlier epochs, drawn afresh; of a trace: the siblings of each "
        "request, its own response left out, in place of earlier epochs, which traces do not have"
    ),
    "shuffled": "a history in which every prompt has the lengths of another one",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Over the seeds."""

    median: float
    least: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        kept = list(values)
        return cls(statistics.median(kept), min(kept))


@dataclass(frozen=True, slots=True)
class Row:
    """A policy over the seeds of one (workers, load, knowledge, max_slowdown). Definitions: DEFINITIONS.

    ratios: baseline → (of tokens per occupied second, of throughput); a baseline that did not run is missing.
    ran: what ran under the name, for each seed.
    """

    workers: int
    load: int
    policy: str
    knowledge: str | None
    max_slowdown: float | None
    seeds: int
    ran: tuple[str, ...]
    tokens_per_occupied_s: Spread
    throughput_tok_s: Spread
    ratios: dict[str, tuple[Spread, Spread]]
    post_finish_share: Spread
    stall_share: Spread
    preemptions: float
    resizes: float
    of_reference: Spread | None
    of_bound: Spread
    pareto: bool = False


def make_rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each policy with its knowledge and max_slowdown, in the order of the runs."""
    found: dict[tuple, list[Run]] = defaultdict(list)
    for run in runs:
        found[_place(run)].append(run)
    known = {(run.cell, run.policy, run.knowledge, run.max_slowdown): run for run in runs}
    rows = [_row(own, known) for own in found.values()]
    return [_marked(row, rows) for row in rows]


def _place(run: Run) -> tuple:
    return run.cell.workers, run.cell.load, run.policy, run.knowledge, run.max_slowdown


def _row(runs: Sequence[Run], known: dict[tuple, Run]) -> Row:
    first = runs[0]
    references = [run.reference_s / run.occupied_s for run in runs if run.reference_s is not None]
    return Row(
        workers=first.cell.workers,
        load=first.cell.load,
        policy=first.policy,
        knowledge=first.knowledge,
        max_slowdown=first.max_slowdown,
        seeds=len(runs),
        ran=tuple(run.ran for run in runs),
        tokens_per_occupied_s=Spread.of(run.summary.occupied_rate for run in runs),
        throughput_tok_s=Spread.of(run.summary.throughput_tok_s for run in runs),
        ratios={name: ratios for name in BASELINES if (ratios := _ratios(runs, name, known)) is not None},
        post_finish_share=Spread.of(run.summary.post_finish_share for run in runs),
        stall_share=Spread.of(run.summary.stall_s / run.summary.wall_s for run in runs),
        preemptions=statistics.median(run.summary.preemptions for run in runs),
        resizes=statistics.median(changes_of(run) for run in runs),
        of_reference=Spread.of(references) if len(references) == len(runs) else None,
        of_bound=Spread.of(run.bound_s / run.occupied_s for run in runs),
    )


def changes_of(run: Run) -> int:
    """Changes of the active set that were carried out."""
    return sum(1 for r in run.summary.resizes if r["failed"] is None and (r["leaving"] or r["joining"]))


def _ratios(runs: Sequence[Run], name: str, known: dict[tuple, Run]) -> tuple[Spread, Spread] | None:
    knowledge = runs[0].knowledge if name in ("planned", BEST_FIXED) else None
    slowdown = runs[0].max_slowdown if name == BEST_FIXED else None
    pairs = [(run, known.get((run.cell, name, knowledge, slowdown))) for run in runs]
    whole = [(run, base) for run, base in pairs if base is not None]
    if len(whole) < len(runs):
        return None
    return (
        Spread.of(run.summary.occupied_rate / base.summary.occupied_rate for run, base in whole),
        Spread.of(run.summary.throughput_tok_s / base.summary.throughput_tok_s for run, base in whole),
    )


def _marked(row: Row, rows: Sequence[Row]) -> Row:
    """The row, with `pareto` as it is among those it may be compared with."""

    def better(other: Row) -> bool:
        pairs = (
            (other.tokens_per_occupied_s.median, row.tokens_per_occupied_s.median),
            (other.throughput_tok_s.median, row.throughput_tok_s.median),
        )
        return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)

    peers = [r for r in rows if (r.workers, r.load) == (row.workers, row.load)]
    if row.knowledge is not None:
        peers = [r for r in peers if r.knowledge in (row.knowledge, None)]
    return replace(row, pareto=not any(better(other) for other in peers))


def to_json(
    experiment: Experiment, runs: Sequence[Run], rows: Sequence[Row], versions: dict[str, str], settings: dict[str, Any]
) -> dict[str, Any]:
    """The object of `result.json`."""
    return {
        "simulated": True,
        "schema": 1,
        "versions": versions,
        "settings": settings,
        "scenario": experiment.scenario.to_json(),
        "model": asdict(experiment.shape),
        "device": {k: v if v != float("inf") else None for k, v in asdict(experiment.device).items()},
        "definitions": DEFINITIONS,
        "rows": [asdict(row) for row in rows],
        "runs": [run.to_json() for run in runs],
    }
