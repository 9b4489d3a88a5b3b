"""What the ledger and the live view cost a rollout of the tiny model: with and without, taking turns on one fleet.

    python benchmarks/bench_overhead.py                 # about four minutes on two cores
    python benchmarks/bench_overhead.py --rounds 3 --chunk 4

without: no record is made, nothing is written or shown. ledger: records made and written to a file. live view: these,
and the view on a pseudo-terminal, whose other end a process reads. lines: these, and progress lines into a file.

Two figures for each, as shares of the time of a rollout without: the extra time, and the extra processor time of the
driver, for which all workers wait. The second one is right on a busy machine too; the first one wants an idle one.
Responses have lengths with a heavy tail, so that most iterations are short and have few requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from workload import bench_model, token_prompts

import flexfloor
from flexfloor.cli.display import ProgressLines
from flexfloor.ledger.events import LedgerWriter
from flexfloor.report.live import LiveDisplay

ROLLOUT: Any = sys.modules["flexfloor.rollout"]  # the package has a function of that name
RECORDS = [name for name in vars(ROLLOUT) if name.endswith("_record")]
REQUESTS, SHORTEST, LONGEST, SHAPE = 64, 24, 640, 1.1
WANTED = 0.02


class NoLedger(LedgerWriter):
    def write(self, record: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Cost:
    """Of one rollout: seconds, and processor seconds of this process."""

    wall_s: float
    driver_s: float


@contextlib.contextmanager
def without(folder: Path) -> Iterator[LedgerWriter]:
    made = {name: getattr(ROLLOUT, name) for name in RECORDS}
    for name in made:
        setattr(ROLLOUT, name, lambda *_, **__: {})
    try:
        yield NoLedger()
    finally:
        for name, function in made.items():
            setattr(ROLLOUT, name, function)


@contextlib.contextmanager
def ledger(folder: Path) -> Iterator[LedgerWriter]:
    yield LedgerWriter(folder / "ledger.jsonl")


@contextlib.contextmanager
def live_view(folder: Path) -> Iterator[LedgerWriter]:
    ours, theirs = pty.openpty()
    with subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reader:
        os.close(ours)
        with os.fdopen(theirs, "w", encoding="utf-8") as terminal, LiveDisplay(terminal) as show:
            yield LedgerWriter(folder / "ledger.jsonl", on_record=show.record)
        reader.wait(timeout=10)  # its reads fail once nobody has the terminal open


@contextlib.contextmanager
def lines(folder: Path) -> Iterator[LedgerWriter]:
    with open(folder / "log", "w", encoding="utf-8") as file, ProgressLines(stream=file) as show:
        yield LedgerWriter(folder / "ledger.jsonl", on_record=show.record)


VARIANTS: dict[str, Callable[[Path], contextlib.AbstractContextManager[LedgerWriter]]] = {
    "without": without,
    "ledger": ledger,
    "ledger and live view": live_view,
    "ledger and lines": lines,
}


def make_requests(vocab: int) -> list[flexfloor.Request]:
    """Lengths at even quantiles of a Pareto distribution, cut at LONGEST."""
    requests = []
    for index, prompt in enumerate(token_prompts(REQUESTS, 32, vocab)):
        length = min(LONGEST, int(SHORTEST * (1 - (index + 0.5) / REQUESTS) ** (-1 / SHAPE)))
        sampling = flexfloor.SamplingParams(max_tokens=length, ignore_eos=True)
        requests += flexfloor.make_requests([prompt], sampling=sampling)
    return requests


def run(fleet: flexfloor.Fleet, requests: list[flexfloor.Request], writer: LedgerWriter, chunk: int) -> Cost:
    rollout = flexfloor.Rollout(fleet, policy="release", ledger=writer, chunk=chunk)
    rollout.submit(requests)
    rollout.seal()
    begin, begun = time.perf_counter(), time.process_time()
    for _ in rollout:
        pass
    return Cost(time.perf_counter() - begin, time.process_time() - begun)


def measure(rounds: int, workers: int, chunk: int) -> dict[str, list[Cost]]:
    found: dict[str, list[Cost]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    with (
        tempfile.TemporaryDirectory() as folder,
        flexfloor.Fleet.launch(bench_model("tiny"), workers=workers, worker_memory="512MiB") as fleet,
    ):
        requests = make_requests(fleet.info.shape.vocab_size)
        for turn in range(-1, rounds):
            for name in names:
                with VARIANTS[name](Path(folder)) as writer:
                    cost = run(fleet, requests, writer, chunk)
                if turn >= 0:  # the first turn warms up
                    found[name].append(cost)
                print(f"round {turn + 1}: {name} {cost.wall_s:.2f} s, driver {cost.driver_s:.3f} s", file=sys.stderr)
            names.append(names.pop(0))  # another one is first
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=16, help="iterations between two looks of the driver")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    found = measure(args.rounds, args.workers, args.chunk)
    middle = {
        name: Cost(statistics.median(c.wall_s for c in costs), statistics.median(c.driver_s for c in costs))
        for name, costs in found.items()
    }
    base = middle["without"]
    figures = {
        name: {
            "wall_s": cost.wall_s,
            "driver_s": cost.driver_s,
            "wall_share": cost.wall_s / base.wall_s - 1,
            "driver_share": (cost.driver_s - base.driver_s) / base.wall_s,
        }
        for name, cost in middle.items()
    }
    table = Table("", "rollout", "driver", "extra time", "extra driver", title=f"medians of {args.rounds} rounds")
    for name, own in figures.items():
        shares = (f"{own[what]:+.2%}" for what in ("wall_share", "driver_share"))
        table.add_row(name, f"{own['wall_s']:.2f} s", f"{own['driver_s']:.3f} s", *shares)
    Console().print(table)
    dearest = max(own["driver_share"] for own in figures.values())
    print(f"the driver's extra processor time is at most {dearest:.2%} of a rollout (wanted: below {WANTED:.0%})")
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1))
    return 0 if dearest < WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
