"""What releasing workers must be worth, by simulation: wanted and reached, on fresh draws, row by row.

    make bench-gates                                  # TRACE=FILE.csv adds the rows of the dapo trace
    python benchmarks/gates.py --only A,B --seeds 4
    python benchmarks/gates.py --only F --grid-seeds 1 --jobs 2

A row is reached when the median over the seeds reaches what is wanted, and the minimum 0.95 of it. Rows F, G and H hold
for every case; F also for the grid (lognormal, dapo, deepcoder-like × 8/16/32 workers × load 32/128/512 × h200/h800),
G and H there with --everywhere. Nothing here is measured: times come from the cost model of the device profiles. "of
the clairvoyant reference" is told beside the rows it belongs to, and decides nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flexfloor.errors import FlexFloorError
from flexfloor.outputs import write_json
from flexfloor.simulate.results import Row, Spread, make_rows
from flexfloor.simulate.runs import BEST_FIXED, Cell, Experiment, Run, run_all
from flexfloor.simulate.scenarios import load_scenario
from flexfloor.world.costs import load_profile
from flexfloor.world.model_config import shape_from_config

MODEL = "qwen3-30b-a3b"
USUAL = 0.02  # the default of max_slowdown
LEAST = 0.95  # of what is wanted, on every seed


@dataclass(frozen=True)
class Case:
    """A scenario on a fleet. slowdowns: values of max_slowdown."""

    scenario: str
    workers: int
    load: int
    profile: str
    slowdowns: tuple[float, ...] = (USUAL,)
    grid: bool = False

    @property
    def name(self) -> str:
        return f"{self.scenario} {self.workers} × {self.load} {self.profile}"


R1 = Case("R1", 8, 128, "h800", (0.1, USUAL))
R2 = Case("R2", 16, 128, "h800", (0.1, USUAL))
LOGNORMAL = Case("lognormal", 16, 32, "h200")
DAPO = Case("dapo", 16, 512, "h800")
DEEPCODER = Case("deepcoder-like", 32, 128, "h800")
ONE_NODE = Case("lognormal", 8, 32, "h200")
CASES = (R1, R2, LOGNORMAL, DAPO, DEEPCODER, ONE_NODE)
GRID = tuple(
    Case(scenario, workers, load, profile, grid=True)
    for scenario, workers, load, profile in product(
        ("lognormal", "dapo", "deepcoder-like"), (8, 16, 32), (32, 128, 512), ("h200", "h800")
    )
)


@dataclass(frozen=True)
class Gate:
    """flexfloor with history against a baseline: ratios of tokens per occupied second and of throughput; None: any."""

    row: str
    case: Case
    slowdown: float
    baseline: str
    occupied: float | None
    throughput: float | None


GATES = (
    Gate("A", R1, 0.1, "static-grouped", 1.70, 1.53),
    Gate("A2", R2, 0.1, "static-grouped", 1.95, 1.55),
    Gate("A3", R1, USUAL, "static-spread", 1.10, 0.98),
    Gate("B", LOGNORMAL, USUAL, "static-spread", 2.6, 0.98),
    Gate("B", LOGNORMAL, USUAL, BEST_FIXED, 1.4, None),
    Gate("C", DAPO, USUAL, "static-spread", 2.0, 0.98),
    Gate("D", DEEPCODER, USUAL, "static-grouped", 1.25, 1.25),
    Gate("D", DEEPCODER, USUAL, "static-spread", 1.10, 1.10),
    Gate("E", ONE_NODE, USUAL, "static-grouped", 1.15, 1.0),
)
HONOURED, NO_SLOWER = 1 - USUAL - 0.01, 0.98  # F: throughput against planned and against static-spread
NO_HARM, WORTH_IT, WRONG_IS_HARMLESS = 0.98, 1.05, 0.97  # G: history, history in D, shuffled, against none
FIXED = 1.0  # H
AMBITION = 0.90  # of the clairvoyant reference in A, B and C; told, not demanded
ROWS = ("A", "A2", "A3", "B", "C", "D", "E", "F", "G", "H")


@dataclass(frozen=True)
class Verdict:
    """wanted and reached of one ratio. demanded: it decides the exit code."""

    row: str
    case: str
    what: str
    wanted: float
    reached: Spread
    demanded: bool = True

    @property
    def passed(self) -> bool:
        return self.reached.median >= self.wanted and self.reached.least >= LEAST * self.wanted


def needed(case: Case, rows: Sequence[str], everywhere: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(policies, knowledge) that the rows ask of a case; none where they ask nothing."""
    own = [gate for gate in GATES if gate.case == case and gate.row in rows]
    policies = dict.fromkeys(gate.baseline for gate in own)
    wide = everywhere or not case.grid
    if "F" in rows:
        policies |= dict.fromkeys(["planned", "static-spread"])
    if "G" in rows and wide:
        policies |= {"planned": None}
    if "H" in rows and wide:
        policies |= {BEST_FIXED: None}
    if not policies:
        return (), ()
    knowledge = ("history", "none", "shuffled") if "G" in rows and wide else ("history",)
    return (*policies, "flexfloor"), knowledge


def judge(case: Case, runs: Sequence[Run], rows: Sequence[str], everywhere: bool) -> Iterator[Verdict]:
    """The verdicts on a case, for the rows asked for."""
    found = {(r.policy, r.knowledge, r.max_slowdown): r for r in make_rows(runs)}
    for gate in GATES:
        if gate.case != case or gate.row not in rows:
            continue
        row = found["flexfloor", "history", gate.slowdown]
        for index, wanted in enumerate((gate.occupied, gate.throughput)):
            if wanted is not None:
                yield Verdict(
                    gate.row, case.name, _what(index, gate.baseline), wanted, row.ratios[gate.baseline][index]
                )
        if gate.row in ("A", "B", "C") and row.of_reference is not None and gate.baseline != BEST_FIXED:
            yield Verdict(gate.row, case.name, "of the clairvoyant reference", AMBITION, row.of_reference, False)
    if "F" in rows:
        usual = found["flexfloor", "history", USUAL]
        for baseline, wanted in {"planned": HONOURED, "static-spread": NO_SLOWER}.items():
            yield Verdict("F", case.name, _what(1, baseline), wanted, usual.ratios[baseline][1])
    if case.grid and not everywhere:
        return
    for slowdown in case.slowdowns:
        if "G" in rows:
            yield from _harm(case, runs, slowdown)
        if "H" in rows:
            row = found["flexfloor", "history", slowdown]
            yield Verdict("H", case.name, f"{_what(0, BEST_FIXED)}, {slowdown:.0%}", FIXED, row.ratios[BEST_FIXED][0])


def _harm(case: Case, runs: Sequence[Run], slowdown: float) -> Iterator[Verdict]:
    value = {
        (run.knowledge, run.cell): run.summary.occupied_rate
        for run in runs
        if (run.policy, run.max_slowdown) == ("flexfloor", slowdown)
    }
    cells = [cell for knowledge, cell in value if knowledge == "none"]
    for knowledge, wanted in {
        "history": WORTH_IT if case == DEEPCODER else NO_HARM,
        "shuffled": WRONG_IS_HARMLESS,
    }.items():
        reached = Spread.of(value[knowledge, cell] / value["none", cell] for cell in cells)
        yield Verdict("G", case.name, f"tokens / occ. s of {knowledge} to none, {slowdown:.0%}", wanted, reached)


def _what(index: int, baseline: str) -> str:
    return f"{('tokens / occ. s', 'throughput')[index]} to {baseline}"


def simulate(case: Case, args: argparse.Namespace, seeds: int) -> tuple[list[Run], list[Row]]:
    """The runs that the rows ask for; empty where they ask nothing of the case."""
    policies, knowledge = needed(case, args.rows, args.everywhere)
    if not policies:
        return [], []
    scenario = load_scenario(case.scenario, trace=args.trace if case.scenario == "dapo" else None)
    experiment = Experiment(
        scenario=scenario,
        shape=shape_from_config(MODEL),
        device=scenario.device(load_profile(case.profile)),
        policies=policies,
        knowledge=knowledge,
        max_slowdown=case.slowdowns,
    )
    begun = time.monotonic()
    cells = [Cell(case.workers, case.load, args.first_seed + seed) for seed in range(seeds)]
    runs = run_all(experiment, cells, jobs=args.jobs)
    print(f"{case.name}: {len(runs)} results, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return runs, make_rows(runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS), help=f"rows, with commas (default: {','.join(ROWS)})")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--grid-seeds", type=int, default=2, help="of the cells of the grid; 0 leaves it out")
    parser.add_argument("--first-seed", type=int, default=1000, help="tuning has used those below")
    parser.add_argument("--trace", type=Path, help="CSV file with the dapo workload; without it its rows are left out")
    parser.add_argument("--everywhere", action="store_true", help="G and H in the grid too: hours")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="JSON file of verdicts and rows")
    args = parser.parse_args()
    args.rows = args.only.split(",")
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"--only: no row {', '.join(sorted(unknown))}; there is {', '.join(ROWS)}")
    verdicts: list[Verdict] = []
    told: dict[str, list[dict]] = {}
    left_out = []
    for case in (*CASES, *(GRID if args.grid_seeds else ())):
        if case.scenario == "dapo" and args.trace is None:
            left_out += [case.name] if needed(case, args.rows, args.everywhere)[0] else []
            continue
        runs, rows = simulate(case, args, args.grid_seeds if case.grid else args.seeds)
        if runs:
            verdicts += judge(case, runs, args.rows, args.everywhere)
            told[case.name + (" (grid)" if case.grid else "")] = [asdict(row) for row in rows]
    Console(width=None if sys.stdout.isatty() else 130).print(tabulate(verdicts))
    if left_out:
        print(f"left out without --trace: {len(left_out)} cases of dapo")
    missed = [v for v in verdicts if v.demanded and not v.passed]
    print(f"{len(missed)} of {sum(v.demanded for v in verdicts)} missed")
    if args.out:
        results = [asdict(v) | {"passed": v.passed} for v in verdicts]
        write_json(args.out, {"simulated": True, "model": MODEL, "verdicts": results, "rows": told})
    return 1 if missed else 0


def tabulate(verdicts: Sequence[Verdict]) -> Table:
    """In the order of the rows."""
    table = Table(title="Simulated: wanted and reached")
    for head in ("row", "case", "what"):
        table.add_column(head)
    for head in ("wanted", "median", "least", ""):
        table.add_column(head, justify="right")
    for verdict in sorted(verdicts, key=lambda v: ROWS.index(v.row)):
        mark = "" if not verdict.demanded else "reached" if verdict.passed else "MISSED"
        figures = (verdict.wanted, verdict.reached.median, verdict.reached.least)
        table.add_row(verdict.row, verdict.case, verdict.what, *(f"{x:.3f}" for x in figures), mark)
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlexFloorError as error:
        sys.exit(f"gates: {error}")
