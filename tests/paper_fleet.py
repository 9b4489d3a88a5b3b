"""A fleet in one process without a model: real arenas, page tables, schedulers and resizes. What a model would compute
is a number for each position, made from all tokens up to there, and read back from the pages before it is used."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from flexfloor.fleets.engine.arena import Arena, KVLayout
from flexfloor.fleets.engine.crew import Crew, PhaseFailedError
from flexfloor.fleets.engine.moving import Mover, Parcel
from flexfloor.fleets.engine.pages import PageAllocator
from flexfloor.fleets.engine.resizing import ResizeRun
from flexfloor.fleets.engine.scheduler import Scheduler, Sequence
from flexfloor.fleets.engine.worker import Worker
from flexfloor.progress import ModelShape, ResizeOutcome, WorkerStatus
from flexfloor.requests import Request
from flexfloor.world.experts import ExpertPlacement, place_contiguous
from flexfloor.world.memory import MemoryPlan
from flexfloor.world.resize import ResizePlan, check_plan, plan_regrow
from flexfloor.world.status import FleetStatus

PAGE_TOKENS = 4
LAYOUT = KVLayout(layers=1, kv_heads=1, page_tokens=PAGE_TOKENS, head_dim=2)
PAGE = LAYOUT.page_bytes(4)
SLOT = 3 * PAGE


def prefix_marks(tokens: Many[int]) -> list[float]:
    """For each position a number that depends on all tokens up to there; exact in float32."""
    marks, state = [], 0
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        marks.append(float(state % 2**20))
    return marks


def next_token(request_id: str, tokens: Many[int]) -> int:
    return zlib.crc32(f"{request_id} {len(tokens)} {prefix_marks(tokens)[-1]}".encode()) % 250


class PaperWorker:
    """Stands in for `Worker` as far as resizes and scheduling look at it."""

    def __init__(self, number: int, memory: MemoryPlan, placement: ExpertPlacement, batch: int, prefill: int) -> None:
        self.config = SimpleNamespace(worker=number, memory=memory)
        self.arena = Arena(memory, LAYOUT, torch.float32, torch.device("cpu"))
        self.allocator = PageAllocator(self.arena.page_count)
        self.scheduler = Scheduler(self.allocator, PAGE_TOKENS, batch, prefill)
        self.placement = placement
        self.mover = Mover(cast(Worker, self))
        for layer, expert, slot in placement.experts_on(number):
            self.arena.slots[self.arena.slot_row(slot)] = layer * 1000 + expert

    def join(self, *_: Any) -> None:
        return None

    def enter_epoch(self, placement: ExpertPlacement, group: None) -> None:
        self.placement = placement

    def release(self) -> None:
        assert self.scheduler.live == 0
        self.arena.release()
        self.allocator.resize(0)

    def rejoin(self) -> None:
        self.arena.restore()
        self.allocator.resize(self.arena.page_count)

    def step(self, finished: dict[str, list[int]]) -> int:
        """One iteration. Returns the preemptions in it."""
        for chunk in self.scheduler.schedule():
            sequence = chunk.sequence
            marks = prefix_marks(sequence.tokens)
            for position in range(chunk.end):
                cell = self.arena.pages[sequence.pages[position // PAGE_TOKENS], 0, 0, 0, position % PAGE_TOKENS]
                if position >= chunk.begin:
                    cell[:] = marks[position]
                assert cell[0] == cell[1] == marks[position], f"{sequence.request.request_id} reads what is not its own"
            self.scheduler.note_computed(chunk)
            if chunk.draws:
                sequence.tokens.append(next_token(sequence.request.request_id, sequence.tokens))
                sequence.logprobs.append(-float(len(sequence.tokens)))
                if sequence.response_length >= sequence.max_tokens:
                    self.scheduler.remove(sequence)
                    assert sequence.request.request_id not in finished
                    finished[sequence.request.request_id] = sequence.tokens[sequence.prompt_length :]
        self.allocator.check()
        return len(self.scheduler.take_preempted())

    def check(self) -> None:
        """Every expert of the placement lies where it should, and pages stay below the cut."""
        for layer, expert, slot in self.placement.experts_on(self.config.worker):
            assert bool((self.arena.slots[self.arena.slot_row(slot)] == layer * 1000 + expert).all()), (layer, expert)
        assert self.allocator.count <= self.arena.page_count
        self.allocator.check()

    @property
    def status(self) -> WorkerStatus:
        return WorkerStatus(
            self.config.worker,
            True,
            self.scheduler.live,
            self.allocator.free,
            self.allocator.count,
            peak_kv_bytes=self.allocator.peak * PAGE,
            peak_memory_bytes=0,
            arena_bytes=self.arena.nbytes,
            slots=self.arena.slot_count,
            requests=tuple(s.status for s in [*self.scheduler.running, *self.scheduler.waiting]),
        )


class PaperCrew:
    """Carries out the driver's commands in this process. fault: (verb, worker) that raises once, after the others."""

    def __init__(self, workers: Mapping[int, PaperWorker]) -> None:
        self.workers = workers
        self.fault: tuple[str, int] | None = None
        self.verbs: list[str] = []

    def call(self, verb: str, payloads: Mapping[int, tuple], may_fail: bool = False) -> dict[int, Any]:
        self.verbs.append(verb)
        victim = self.fault[1] if self.fault and self.fault[0] == verb and self.fault[1] in payloads else None
        if verb == "mover.transfer":
            if victim is None:
                return self._transfer(next(iter(payloads.values()))[2])
        else:
            answers = {w: self._method(w, verb)(*p) for w, p in payloads.items() if w != victim}
        if victim is not None:
            self.fault = None
            assert may_fail
            raise PhaseFailedError(victim, "fault injected")
        return answers

    def _method(self, worker: int, verb: str) -> Callable[..., Any]:
        found: Any = self.workers[worker]
        for part in verb.split("."):
            found = getattr(found, part)
        return found

    def _transfer(self, parcels: Many[Parcel]) -> dict[int, dict[int, int]]:
        sums: dict[int, dict[int, int]] = {w: {} for w in self.workers}
        for index, parcel in enumerate(parcels):
            name = "slot_bytes_of" if parcel.kind == "slot" else "page_bytes_of"
            source = getattr(self.workers[parcel.source].arena, name)(parcel.source_index)
            target = getattr(self.workers[parcel.target].arena, name)(parcel.target_index)
            target.copy_(source)
            sums[parcel.source][index] = sums[parcel.target][index] = int(source.to(torch.int64).sum())
        return sums

    def close(self) -> None:
        raise AssertionError("a commit went wrong")


class PaperFleet:
    """pages: KV pages of each worker beside its experts at the start."""

    def __init__(
        self,
        workers: int = 3,
        *,
        experts: int = 6,
        layers: int = 2,
        pages: int = 30,
        batch: int = 16,
        prefill: int = 16,
    ) -> None:
        self.home = self.placement = place_contiguous(layers, experts, workers)
        self.model = ModelShape(
            "paper", layers, tuple(range(layers)), experts, 2, 250, 4096, 100, SLOT, PAGE // PAGE_TOKENS, 16, 4
        )
        plans = [
            # Whole slots: a budget that is none leaves a few pages less.
            MemoryPlan(n * SLOT + -(-pages * PAGE // SLOT) * SLOT, 0, 0, SLOT, n, PAGE, PAGE_TOKENS)
            for n in map(self.home.slots_on, range(workers))
        ]
        self.workers = {w: PaperWorker(w, p, self.home, batch, prefill) for w, p in enumerate(plans)}
        self.crew = PaperCrew(self.workers)
        self.members = tuple(range(workers))
        self.batch = batch
        self.iteration = self.preemptions = 0
        self.known: dict[str, int] = {}  # tokens that a request ends with
        self.finished: dict[str, list[int]] = {}

    def submit(self, requests: Many[Request]) -> None:
        """What is known beforehand, so that no resize takes the room of the longest."""
        self.known |= {r.request_id: len(r.prompt_tokens) + r.sampling.max_tokens for r in requests}

    def assign(self, assignment: Mapping[int, Many[str]], requests: Mapping[str, Request]) -> None:
        for worker, names in assignment.items():
            assert worker in self.members
            for name in names:
                request = requests[name]
                sequence = Sequence(request, 0, request.sampling.max_tokens, list(request.prompt_tokens))
                self.workers[worker].scheduler.add(sequence)

    def advance(self, iterations: int = 1) -> None:
        for _ in range(iterations):
            if not any(self.workers[w].scheduler.live for w in self.members):
                return
            for worker in self.members:
                self.preemptions += self.workers[worker].step(self.finished)
            self.iteration += 1

    def apply(self, plan: ResizePlan) -> ResizeOutcome:
        status = self.status()
        check_plan(plan, status)
        run = ResizeRun(cast(Crew, self.crew), plan, status, lambda: "tag", 1.0)
        outcome = run.carry_out()
        if outcome.failed is None:
            self.members, self.placement = plan.members, plan.placement
        self.check()
        return outcome

    def regrow(self) -> None:
        outcome = self.apply(plan_regrow(self.status(), self.home))
        assert outcome.failed is None

    def check(self) -> None:
        for worker in self.members:
            self.workers[worker].check()

    def status(self) -> FleetStatus:
        states = []
        for worker, one in self.workers.items():
            state = one.status
            states.append(state if worker in self.members else replace(state, active=False))
        return FleetStatus(
            self.model,
            self.placement.epoch,
            self.iteration,
            PAGE_TOKENS,
            PAGE,
            self.batch,
            max((tokens for name, tokens in self.known.items() if name not in self.finished), default=1),
            tuple(states),
            self.placement,
            np.zeros(self.placement.worker.shape, dtype=np.int64),
            0.01 if self.iteration else 0.0,
        )
