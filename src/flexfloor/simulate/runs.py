"""Runs of policies on the workloads of a scenario, in virtual time."""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flexfloor.errors import FlexFloorError, InputError
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import Summary
from flexfloor.ledger.events import LedgerWriter
from flexfloor.progress import ModelShape
from flexfloor.requests import Request
from flexfloor.rollout import rollout
from flexfloor.settings import MOST_WORKERS
from flexfloor.simulate.scenarios import Scenario
from flexfloor.world.bounds import Work, kv_capacity, least_occupied_s
from flexfloor.world.costs import DeviceProfile, IterationCost
from flexfloor.world.lengths.knowledge import make_lengths
from flexfloor.world.lookahead import LookAhead, clairvoyant
from flexfloor.world.memory import format_bytes

BEST_FIXED = "fixed:best"
WITHOUT_KNOWLEDGE = ("static-spread", "static-grouped")
_TELL_S = 1.0  # between two looks at the processes
_FIXED_SHARES = (0.75, 0.5)  # of the fleet, and of its half, quarter, …
_HOPELESS = 0.9  # of the throughput limit: where fewer workers come below it twice, still fewer are not tried


@dataclass(frozen=True)
class Experiment:
    """What is simulated. device: with the scenario's memory. chunk: iterations between two looks of the driver.

    ledgers: folder for the ledger of every run, see `ledger_name`.
    """

    scenario: Scenario
    shape: ModelShape
    device: DeviceProfile
    policies: tuple[str, ...]
    knowledge: tuple[str, ...] = ("history",)
    max_slowdown: tuple[float, ...] = (0.02,)
    chunk: int = 16
    max_batch: int = 256
    prefill_tokens: int = 8192
    page_tokens: int = 16
    ledgers: Path | None = None

    def check_memory(self, workers: int) -> None:
        """Raises InputError where not every request fits beside the experts, naming how many workers it takes."""
        longest = self.scenario.longest + self.page_tokens
        counts = np.arange(1, MOST_WORKERS + 1)
        enough = counts[kv_capacity(self.cost, counts) / counts >= longest]
        if len(enough) and workers >= enough[0]:
            return
        remedy = f"give at least {enough[0]}" if len(enough) else "no number of them does; name another device or model"
        raise InputError(
            f"--workers {workers}: {format_bytes(self.device.memory_bytes)} a worker ({self.device.name}) do not hold "
            f"the weights and the KV of a request of {longest} tokens; {remedy}"
        )

    @property
    def cost(self) -> IterationCost:
        return IterationCost(self.device, self.shape)

    def capacity(self, workers: int) -> float:
        """KV tokens that each of so many workers holds."""
        return float(kv_capacity(self.cost, np.array(workers))) / workers


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload: requests = workers · load."""

    workers: int
    load: int
    seed: int

    def __str__(self) -> str:
        return f"{self.workers} workers, load {self.load}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one workload.

    policy: as it was asked for; ran: what ran under that name, `fixed:N` for `fixed:best`. knowledge, max_slowdown:
    None where the policy does not depend on it. bound_s, reference_s: worker-seconds, those of the linear program and
    of the clairvoyant reference, given the time that this run took, or that its max_slowdown allows if that is more.
    """

    cell: Cell
    policy: str
    ran: str
    knowledge: str | None
    max_slowdown: float | None
    summary: Summary
    bound_s: float
    reference_s: float | None

    @property
    def occupied_s(self) -> float:
        """Worker-seconds, with those that bringing workers back takes."""
        return self.summary.occupied_worker_s + self.summary.workers * (self.summary.regrow_s or 0.0)

    def to_json(self) -> dict[str, Any]:
        cell = {"workers": self.cell.workers, "load": self.cell.load, "seed": self.cell.seed}
        own = {name: getattr(self, name) for name in ("policy", "ran", "knowledge", "max_slowdown")}
        return (
            cell | own | {"bound_s": self.bound_s, "reference_s": self.reference_s, "summary": self.summary.to_json()}
        )


def count_runs(experiment: Experiment) -> int:
    """How many a cell has at least; the workers that `fixed:best` tries count as one."""
    return sum(1 for _ in _asked(experiment))


def _asked(experiment: Experiment) -> Iterator[tuple[str, str | None, float | None]]:
    """(policy, knowledge, max_slowdown) of each run; `planned` is always there, because slowdown is measured by it."""
    names = dict.fromkeys(("planned", *experiment.policies))
    for policy in names:
        for knowledge in experiment.knowledge if policy not in WITHOUT_KNOWLEDGE else (None,):
            for slowdown in experiment.max_slowdown if policy in ("flexfloor", BEST_FIXED) else (None,):
                yield policy, knowledge, slowdown


def run_cell(
    experiment: Experiment,
    cell: Cell,
    on_begin: Callable[[str], None] = lambda what: None,
    on_record: Callable[[Mapping[str, Any]], None] | None = None,
) -> Iterator[Run]:
    """All policies on one workload. on_begin: told what begins; on_record: every record of the ledgers.

    Raises FlexFloorError naming the run.
    """
    return _CellRunner(experiment, cell, on_begin, on_record).runs()


@dataclass
class _CellRunner:
    experiment: Experiment
    cell: Cell
    on_begin: Callable[[str], None]
    on_record: Callable[[Mapping[str, Any]], None] | None
    _done: dict[tuple[str, str | None, float | None], Summary] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.on_begin(f"{self.cell}, requests")
        self.workload = self.experiment.scenario.draw(self.cell.workers * self.cell.load, self.cell.seed)
        self.requests = {known: self.workload.requests(known=known) for known in self._known()}
        work = self.workload
        self.work = Work.of(work.prompt_tokens, work.lengths, work.group)
        self.ahead = LookAhead(
            self.experiment.cost,
            self.experiment.capacity,
            self.cell.workers,
            max_batch=self.experiment.max_batch,
            prefill_tokens=self.experiment.prefill_tokens,
            longest=work.longest,
        )
        siblings = np.bincount(work.group)[work.group]
        self.shares = work.prompt_tokens / siblings

    def _known(self) -> set[bool]:
        return {knowledge == "oracle" for _, knowledge, _ in _asked(self.experiment)}

    def runs(self) -> Iterator[Run]:
        for policy, knowledge, slowdown in _asked(self.experiment):
            ran = policy
            if policy == BEST_FIXED:
                assert slowdown is not None
                ran = self._best_fixed(knowledge, slowdown)
            summary = self._summary(ran, knowledge, slowdown if policy != BEST_FIXED else None)
            limit = summary.wall_s
            if slowdown is not None:
                limit = max(limit, self._summary("planned", knowledge).wall_s / (1 - slowdown))
            self.on_begin(f"{self.cell}, bound of {ran}")
            bound, reference = self._references(limit)
            yield Run(self.cell, policy, ran, knowledge, slowdown, summary, bound, reference)

    def _references(self, limit_s: float) -> tuple[float, float | None]:
        experiment, work = self.experiment, self.workload
        bound = least_occupied_s(
            experiment.cost, self.work, workers=self.cell.workers, max_batch=experiment.max_batch, limit_s=limit_s
        )
        prompts, lengths = work.prompt_tokens.astype(np.float64), work.lengths.astype(np.float64)
        outlook = clairvoyant(self.ahead, prompts, lengths, self.shares, limit_s)
        return bound, None if outlook is None else outlook.occupied_s

    def _best_fixed(self, knowledge: str | None, slowdown: float) -> str:
        """In hindsight the fixed number of workers that occupies least, among those that keep the throughput."""
        planned = self._summary("planned", knowledge)
        best, most = "planned", planned.occupied_rate
        lowest = (1 - max(self.experiment.max_slowdown)) * planned.throughput_tok_s * _HOPELESS
        slow = 0
        for count in fixed_counts(self.cell.workers):
            if self.experiment.capacity(count) < self.workload.longest + self.experiment.page_tokens or slow == 2:
                break
            try:
                found = self._summary(f"fixed:{count}", knowledge)
            except InputError:  # a request that may become longer than any does, and than memory holds
                break
            slow = slow + 1 if found.throughput_tok_s < lowest else 0
            kept = found.throughput_tok_s >= (1 - slowdown) * planned.throughput_tok_s
            if kept and found.occupied_rate > most:
                best, most = f"fixed:{count}", found.occupied_rate
        return best

    def _summary(self, policy: str, knowledge: str | None, slowdown: float | None = None) -> Summary:
        key = (policy, knowledge, slowdown)
        if key not in self._done:
            where = f"{self.cell}, {policy}"
            self.on_begin(f"{where}{f' {knowledge}' if knowledge else ''}")
            try:
                self._done[key] = self._simulate(policy, knowledge or "none", slowdown)
            except FlexFloorError as error:
                kind = InputError if isinstance(error, InputError) else FlexFloorError
                raise kind(f"{where}: {error}") from None
        return self._done[key]

    def _simulate(self, policy: str, knowledge: str, slowdown: float | None) -> Summary:
        experiment = self.experiment
        path = experiment.ledgers and experiment.ledgers / ledger_name(self.cell, policy, knowledge, slowdown)
        fleet = SimulatedFleet(
            experiment.shape,
            experiment.device,
            self.cell.workers,
            lengths=self.workload.by_id,
            max_batch=experiment.max_batch,
            prefill_tokens=experiment.prefill_tokens,
            page_tokens=experiment.page_tokens,
        )
        requests: Sequence[Request] = self.requests[knowledge == "oracle"]
        seen = self.workload.earlier if knowledge in ("history", "shuffled") else None
        return rollout(
            fleet,
            requests,
            policy=policy,
            knowledge=knowledge,
            lengths=make_lengths(knowledge, seen, self.cell.seed),
            max_slowdown=0.02 if slowdown is None else slowdown,
            profile=experiment.device,
            chunk=experiment.chunk,
            ledger=LedgerWriter(path, on_record=self.on_record),
        ).summary


def ledger_name(cell: Cell, policy: str, knowledge: str | None, slowdown: float | None) -> str:
    """`flexfloor-history-8x32-seed0-slowdown0.02.jsonl`: workers x load; no slowdown where none was asked for."""
    parts = [policy.replace(":", "-"), knowledge or "none", f"{cell.workers}x{cell.load}", f"seed{cell.seed}"]
    return "-".join(parts + ([] if slowdown is None else [f"slowdown{slowdown:g}"])) + ".jsonl"


def fixed_counts(workers: int) -> list[int]:
    """Fleets smaller than `workers` that are tried: ¾, ½, ⅜, ¼, … of it, down to one worker."""
    shares = [share / 2**halvings for halvings in range(workers.bit_length()) for share in _FIXED_SHARES]
    counts = {math.floor(workers * share) for share in shares}
    return sorted((count for count in counts if 1 <= count < workers), reverse=True)


def run_all(
    experiment: Experiment,
    cells: Sequence[Cell],
    *,
    jobs: int = 1,
    on_runs: Callable[[int], None] = lambda count: None,
    on_begin: Callable[[str], None] = lambda what: None,
    on_record: Callable[[Mapping[str, Any]], None] | None = None,
) -> list[Run]:
    """The runs of all cells, in the order of the cells. on_runs: told how many more are done; on_begin: what runs now.

    jobs: processes, at most one a cell; with one, everything happens in this one, and `on_record` is told every record
    of the ledgers. With more, `on_begin` is told about every second. However the call ends, no process is left.
    """
    if min(jobs, len(cells)) == 1:
        runs = []
        for cell in cells:
            for run in run_cell(experiment, cell, on_begin, on_record):
                runs.append(run)
                on_runs(1)
        return runs
    with _processes(min(jobs, len(cells))) as pool:
        with _interrupts_held():
            futures = {pool.submit(_run_cell, experiment, cell): cell for cell in cells}
        done: dict[Cell, list[Run]] = {}
        while left := [cell for cell in cells if cell not in done]:
            on_begin(str(left[0]))  # they are begun in this order
            ended, _ = wait([f for f in futures if futures[f] not in done], _TELL_S, FIRST_COMPLETED)
            for future in ended:
                done[futures[future]] = future.result()
                on_runs(len(done[futures[future]]))
    return [run for cell in cells for run in done[cell]]


def _run_cell(experiment: Experiment, cell: Cell) -> list[Run]:
    return list(run_cell(experiment, cell))


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that is ended at once when the block is left by an exception: a cell may take minutes."""
    before = set(multiprocessing.active_children())
    # Threads of this process (of numerical libraries) do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside the block never see Ctrl-C, which reaches the whole group; this one sees it afterwards.

    They inherit what is blocked, from their first moment on: with a handler they could be hit while they still import.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
