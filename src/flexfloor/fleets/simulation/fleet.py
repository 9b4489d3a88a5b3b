"""The fleet protocol over `BatchModel` (what runs when) and `IterationCost` (how long it takes)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Self

import numpy as np

from flexfloor.errors import FlexFloorError, InputError, PlanRefusedError
from flexfloor.fleet import (
    Fleet,
    FleetInfo,
    FleetStatus,
    ModelShape,
    Preemption,
    Progress,
    RequestProgress,
    ResizeOutcome,
    WorkerIterations,
    WorkerStatus,
)
from flexfloor.progress import LiveRequests
from flexfloor.requests import Request
from flexfloor.world.batch import BatchModel, Steps
from flexfloor.world.costs import DeviceProfile, IterationCost, MoveCosts
from flexfloor.world.experts import spread_experts
from flexfloor.world.memory import format_bytes
from flexfloor.world.resize import ResizePlan, check_plan, plan_regrow

_ENTRIES = 1024  # of an advance that the ledger gets for all workers together
_NO_LOGPROBS = np.zeros(0, dtype=np.float32)


class SimulatedFleet(Fleet):
    """Workers of one device profile each, with as much memory as that has; every token costs what the profile says.

    timed_as: the model that iterations take their time from, where it is another one than that whose memory they use.
    lengths: request id → response tokens, at most its max_tokens; those it does not name end at their max_tokens.
    memory_bytes: of one worker, the profile's by default. Routing is taken to be even over the experts. Moves and
    resizes are pauses: a fixed part, and the bytes of the worker that sends or receives most. Bringing the workers back
    costs the same. A group may have more workers than a layer has experts: some then have none of that layer.

    Raises InputError where the experts do not fit into the memory of `workers` workers.
    """

    def __init__(
        self,
        shape: ModelShape,
        profile: DeviceProfile,
        workers: int,
        *,
        lengths: Mapping[str, int] | None = None,
        memory_bytes: float | None = None,
        max_batch: int = 256,
        prefill_tokens: int = 8192,
        page_tokens: int = 16,
        model: str = "",
        timed_as: ModelShape | None = None,
    ) -> None:
        if workers < 1:
            raise InputError(f"workers is {workers}; give at least 1")
        self._shape, self._cost = shape, IterationCost(profile, timed_as or shape)
        self._timed_as = timed_as
        self._moves = MoveCosts.of(profile, shape)
        self._lengths = lengths or {}
        self._max_batch, self._prefill_tokens, self._page_tokens = max_batch, prefill_tokens, page_tokens
        self._page_bytes = page_tokens * shape.kv_token_bytes
        memory = profile.memory_bytes if memory_bytes is None else memory_bytes
        self._memory = int(memory)
        self._arena = int(memory - profile.reserve_bytes - shape.dense_bytes)
        self._home = spread_experts(len(shape.moe_layers), shape.experts, workers)
        self._slots_at_home = [self._home.slots_needed(w) for w in range(workers)]
        if self._pages_beside(max(self._slots_at_home)) < 1:
            raise InputError(
                f"memory of {format_bytes(memory)} a worker is too small for {workers} workers: dense weights "
                f"{format_bytes(shape.dense_bytes)}, reserve {format_bytes(profile.reserve_bytes)}, experts "
                f"{format_bytes(max(self._slots_at_home) * shape.expert_bytes)}; give more workers or memory"
            )
        self._info = FleetInfo(
            kind="simulation",
            model=model or shape.model_type,
            shape=shape,
            workers=workers,
            numerics="none",
            numerics_path="none",
            dtype=f"{8 * shape.itemsize} bit",
            device=profile.name,
            threads_per_worker=0,
            versions={name: version(name) for name in ("flexfloor", "numpy")},
            profile=profile.name,
            simulated=True,
        )
        self._clock = 0.0
        self.start()

    @property
    def info(self) -> FleetInfo:
        return self._info

    def clock(self) -> float:
        return self._clock

    def start(self) -> None:
        workers = self._info.workers
        self._placement = self._home
        self._slots = list(self._slots_at_home)
        self._members: tuple[int, ...] = tuple(range(workers))
        pages = [self._pages_beside(s) for s in self._slots]
        self._batch = BatchModel(
            pages=pages, page_tokens=self._page_tokens, max_batch=self._max_batch, prefill_tokens=self._prefill_tokens
        )
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        self._prompt, self._longest = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._groups: dict[str, int] = {}
        self._peak = np.zeros(workers, dtype=np.int64)
        self._iteration, self._iteration_s = 0, 0.0

    def _pages_beside(self, slots: int) -> int:
        return max(0, (self._arena - slots * self._shape.expert_bytes) // self._page_bytes)

    def check(self, requests: Sequence[Request]) -> None:
        room = self._pages_beside(max(self._slots[w] for w in self._members)) * self._page_tokens
        for request in requests:
            longest = len(request.prompt_tokens) + request.sampling.max_tokens + self._page_tokens
            if longest > room:
                raise InputError(
                    f"request {request.request_id} may take {longest} tokens of KV, a worker has room for {room} "
                    "beside its experts; lower max_tokens or give more memory or workers"
                )

    def submit(self, requests: Sequence[Request]) -> None:
        self.check(requests)
        first = len(self._names)
        rows = {r.request_id: first + i for i, r in enumerate(requests)}
        if len(rows) < len(requests) or not rows.keys().isdisjoint(self._rows):
            raise InputError("a request was submitted twice")
        self._rows |= rows
        self._names += rows
        most = np.array([r.sampling.max_tokens for r in requests], dtype=np.int64)
        lengths = np.array([self._lengths.get(r.request_id, r.sampling.max_tokens) for r in requests], dtype=np.int64)
        if (lengths < 1).any() or (lengths > most).any():
            wrong = requests[int(np.nonzero((lengths < 1) | (lengths > most))[0][0])]
            raise InputError(f"the length of request {wrong.request_id} is not in 1 … {wrong.sampling.max_tokens}")
        prompt = np.array([len(r.prompt_tokens) for r in requests], dtype=np.int64)
        groups = [self._groups.setdefault(_group(r.request_id), len(self._groups)) for r in requests]
        self._prompt = np.concatenate([self._prompt, prompt])
        self._longest = np.concatenate([self._longest, prompt + most])
        self._batch.add(prompt, lengths, np.array(groups, dtype=np.int64))

    def assign(self, assignment: Mapping[int, Sequence[str]]) -> None:
        for worker, names in assignment.items():
            if worker not in self._members:
                raise FlexFloorError(f"assign names worker {worker}, which is not active")
            self._batch.assign(worker, np.array([self._rows[n] for n in names], dtype=np.int64))

    def cancel(self, request_ids: Iterable[str]) -> None:
        self._batch.cancel(np.array([self._rows[n] for n in request_ids], dtype=np.int64))

    def advance(self, iterations: int) -> Progress:
        steps = self._batch.advance(iterations, self._members, detail=True)
        first, self._iteration = self._iteration, self._iteration + steps.iterations
        seconds = self._cost.seconds(
            float(len(self._members)),
            *(a.astype(np.float64) for a in (steps.batch_max, steps.batch_total, steps.kv_max)),
            *(a.astype(np.float64) for a in (steps.prefill_max, steps.prefill_total, steps.rows_max)),
        )
        self._clock += float(seconds @ steps.spans) + self._cost.profile.look_s * bool(steps.iterations)
        self._iteration_s = float(seconds @ steps.spans) / max(steps.iterations, 1)
        self._peak = np.maximum(self._peak, self._batch.pages - self._batch.free_pages)
        ended = zip(steps.finished.tolist(), steps.finished_at.tolist(), steps.finished_worker.tolist(), strict=True)
        lengths, most = self._batch.response, self._longest - self._prompt
        preempted = zip(
            steps.preempted.tolist(), steps.preempted_worker.tolist(), steps.preempted_at.tolist(), strict=True
        )
        spans, workers = self._worker_entries(steps, seconds)
        return Progress(
            epoch=self._placement.epoch,
            first_iteration=first,
            iterations=steps.iterations,
            requests=tuple(
                RequestProgress(
                    self._names[row], worker, (), _NO_LOGPROBS, "length" if lengths[row] >= most[row] else "stop",
                    first + at, int(lengths[row]),
                )
                for row, at, worker in ended
            ),
            workers=workers,
            preemptions=tuple(Preemption(self._names[row], worker, first + at) for row, worker, at in preempted),
            spans=spans,
        )  # fmt: skip

    def _worker_entries(self, steps: Steps, seconds: np.ndarray) -> tuple[np.ndarray, tuple[WorkerIterations, ...]]:
        """What the ledger gets: so many entries as are bearable, each the mean of the steps it stands for."""
        assert steps.batch is not None
        assert steps.prefill_tokens is not None
        assert steps.kv_tokens is not None
        count = len(steps.spans)
        wanted = max(1, min(count, _ENTRIES // self._info.workers))
        cuts = np.unique(np.linspace(0, count, wanted, endpoint=False).astype(int)) if count else np.zeros(0, int)
        spans = np.add.reduceat(steps.spans, cuts) if count else steps.spans

        def mean(values: np.ndarray) -> np.ndarray:
            if not count:
                return np.zeros((*values.shape[:-1], 0))
            return np.round(np.add.reduceat(values * steps.spans, cuts, axis=-1) / spans, 9)

        mean_s, batch, prefill, kv = map(mean, (seconds, steps.batch, steps.prefill_tokens, steps.kv_tokens))
        chosen = self._shape.top_k / self._shape.experts
        touched = 1 - (1 - chosen) ** (batch + prefill).sum(axis=0)
        tokens, rows = (steps.batch_total + steps.prefill_total).astype(np.float64), steps.rows_max.astype(np.float64)
        exchange_s = mean(self._cost.exchange_seconds(float(len(self._members)), tokens, rows))
        pages = (self._batch.pages - self._batch.free_pages).tolist()
        zeros = np.zeros(len(spans), dtype=np.int64)
        return spans, tuple(
            WorkerIterations(
                w, mean_s, batch[w], prefill[w], kv[w], np.round(touched * self._slots[w], 1), zeros,
                tokens=int(steps.tokens[w]), last_live=int(steps.last_live[w]),
                kv_pages=pages[w], exchange_s=exchange_s,
            )
            for w in self._members
        )  # fmt: skip

    def apply(self, plan: ResizePlan) -> ResizeOutcome:
        status = self.status()
        if not isinstance(plan, ResizePlan):
            raise PlanRefusedError(f"{plan!r:.80} is no ResizePlan; make one with plan_shrink or plan_moves")
        check_plan(plan, status)
        if plan.joining:
            raise PlanRefusedError("workers join between rollouts, by regrow")
        return self._carry_out(plan, status)

    def _carry_out(self, plan: ResizePlan, status: FleetStatus) -> ResizeOutcome:
        workers = self._info.workers
        sent, received = np.zeros(workers), np.zeros(workers)
        for expert in plan.expert_moves:
            assert expert.source is not None
            sent[expert.source] += self._shape.expert_bytes
            received[expert.target] += self._shape.expert_bytes
        for move in plan.request_moves:
            free = int(self._batch.free_pages[move.target])
            self._batch.move(self._rows[move.request_id], move.target, move.with_kv)
            if move.with_kv:  # pages that siblings there have already do not travel
                took = (free - int(self._batch.free_pages[move.target])) * self._page_bytes
                sent[move.source] += took
                received[move.target] += took
        for worker in plan.leaving:
            self._batch.set_pages(worker, 0)
            self._slots[worker] = 0
        for worker in plan.members:
            self._slots[worker] = plan.placement.slots_needed(worker)
            self._batch.set_pages(worker, self._pages_beside(self._slots[worker]))
        regroups = plan.placement.epoch != status.epoch
        fixed = self._moves.switch_s if regroups else self._moves.pause_s
        stall = fixed + float(max(sent.max(), received.max())) / self._moves.bytes_per_s
        self._clock += stall
        expert_bytes = len(plan.expert_moves) * self._shape.expert_bytes
        self._members, self._placement = plan.members, plan.placement
        return ResizeOutcome(
            epoch=plan.placement.epoch,
            iteration=self._iteration,
            members=plan.members,
            leaving=plan.leaving,
            joining=plan.joining,
            experts=len(plan.expert_moves),
            expert_bytes=expert_bytes,
            requests=len(plan.request_moves),
            requests_recomputed=sum(not m.with_kv for m in plan.request_moves),
            kv_bytes=int(sent.sum()) - expert_bytes,
            prepare_s=stall - fixed,
            commit_s=fixed,
            reason=plan.reason,
            left_live=tuple(w for w in plan.leaving if status.workers[w].live_requests),
            predicted=plan.predicted,
        )

    def regrow(self) -> float:
        status = self.status()
        plan = plan_regrow(status, self._home)
        if plan.placement.epoch == status.epoch:
            return 0.0
        begin = self._clock
        self._carry_out(plan, status)
        return self._clock - begin

    def load_weights(self, weights: Any, version: int | None = None) -> None:
        if len(self._members) < self._info.workers:
            raise FlexFloorError("weights are replaced between rollouts, when all workers are back")
        self._info = replace(self._info, weights_version=self._info.weights_version + 1 if version is None else version)

    def status(self) -> FleetStatus:
        batch = self._batch
        rows = batch.live_rows()
        open_ = ~batch.finished
        table = LiveRequests(
            [self._names[row] for row in rows.tolist()],
            batch.worker[rows].astype(np.int64),
            self._prompt[rows],
            batch.response[rows].astype(np.int64),
            batch.kv_pages[rows].astype(np.int64),
            batch.shared_pages[rows].astype(np.int64),
            batch.decoding[rows] & batch.running[rows],
        )
        pages, free, live = batch.pages.tolist(), batch.free_pages.tolist(), batch.live.tolist()
        members = set(self._members)
        states = tuple(
            WorkerStatus(
                worker=w,
                active=w in members,
                live_requests=live[w],
                kv_pages_free=free[w],
                kv_pages=pages[w],
                peak_kv_bytes=int(self._peak[w]) * self._page_bytes,
                peak_memory_bytes=0,
                arena_bytes=self._arena,
                slots=self._slots[w],
            )
            for w in range(self._info.workers)
        )
        return FleetStatus(
            model=self._shape,
            epoch=self._placement.epoch,
            iteration=self._iteration,
            page_tokens=self._page_tokens,
            page_bytes=self._page_bytes,
            max_batch=self._max_batch,
            longest_tokens=int(self._longest[open_].max(initial=1)),
            workers=states,
            placement=self._placement,
            expert_load=np.zeros(self._placement.worker.shape, dtype=np.int64),
            iteration_s=self._iteration_s,
            prefill_tokens=self._prefill_tokens,
            clock_s=self._clock,
            move_costs=self._moves,
            table=table,
            paced_as=self._timed_as,
            worker_memory=self._memory,
        )

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _group(request_id: str) -> str:
    return request_id.rpartition("/")[0]
