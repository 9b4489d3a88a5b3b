"""The driver's side of the engine: starts workers, sends them numbered commands, watches over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np

from flexfloor.errors import FlexFloorError, InputError, PlanRefusedError, UnsupportedError, WorkerFailedError
from flexfloor.fleet import Fleet, FleetInfo, FleetStatus, Progress, ResizeOutcome, WorkerStatus
from flexfloor.fleets.engine.checkpoint import CheckpointInfo, inspect_checkpoint
from flexfloor.fleets.engine.crew import Crew
from flexfloor.fleets.engine.launcher import Launcher, Stopwatch
from flexfloor.fleets.engine.pacing import Pace
from flexfloor.fleets.engine.plan import check_device, check_request, plan_memory, total_tokens
from flexfloor.fleets.engine.resizing import ResizeRun
from flexfloor.fleets.engine.staff import Staff
from flexfloor.fleets.engine.weights import StagedWeights, Weights
from flexfloor.requests import Request
from flexfloor.settings import EngineSettings
from flexfloor.world.experts import place_contiguous
from flexfloor.world.resize import ResizePlan, check_plan, plan_regrow

UNSUPPORTED_OPTIONS = {
    "tensor_parallel_size": "tensor parallelism inside a worker",
    "pipeline_parallel_size": "pipeline parallelism",
    "enable_lora": "running LoRA adapters",
    "quantization": "quantisation",
    "speculative_config": "speculative decoding",
    "enable_return_routed_experts": "output of the routed experts",
}
"""Options of other engines that users will try, and what they would have asked for."""


def launch_engine(
    model: Path | str,
    workers: int = 2,
    *,
    requests: Sequence[Request] = (),
    on_phase: Callable[[str], None] | None = None,
    start_by: Launcher | None = None,
    **options: Any,
) -> EngineFleet:
    """Start a fleet of worker processes. options: fields of EngineSettings. on_phase: told what the launch does.

    start_by: starts the processes in place of the launcher that the settings name.
    requests: that are going to be submitted; one that cannot run is refused here already.
    Everything that can be refused is refused before a process is started. Raises InputError, UnsupportedError.
    """
    for name in options:
        if name in UNSUPPORTED_OPTIONS:
            raise UnsupportedError(f"{name}: {UNSUPPORTED_OPTIONS[name]} is not supported; leave the option out")
    settings = EngineSettings.parse(**options)
    if workers < 1:
        raise InputError(f"workers is {workers}; give at least 1")
    info = inspect_checkpoint(model, settings.dtype)
    return EngineFleet(info, workers, settings, requests, on_phase or (lambda phase: None), start_by)


class EngineFleet(Fleet):
    """A fleet of real workers. See `flexfloor.fleet.Fleet` for the verbs."""

    def __init__(
        self,
        info: CheckpointInfo,
        workers: int,
        settings: EngineSettings,
        requests: Sequence[Request],
        on_phase: Callable[[str], None],
        start_by: Launcher | None,
    ) -> None:
        self._checkpoint, self._settings = info, settings
        self._placement = place_contiguous(len(info.shape.moe_layers), info.shape.experts, workers)
        self._memory = plan_memory(info, self._placement, workers, settings)
        self._pace = Pace.of(settings)
        check_device(settings, workers, local=settings.launcher == "local" and start_by is None)
        for request in requests:  # first, so that a refused budget is answered with the size that does for all
            check_request(request, info, self._memory)
        for plan in self._memory:
            plan.check()
        self._home = self._placement
        self._members = tuple(range(workers))
        self._iteration = 0
        self._tags = 0
        self._has_source = True  # the checkpoint at hand holds the weights in use
        self._crew = Crew(settings.worker_timeout)
        self._staff = Staff(self._crew, info, self._memory, self._home, settings, self._pace, start_by)
        self._requests: dict[str, Request] = {}  # known and not finished
        self._bound: dict[str, int] = {}
        self._status: dict[int, WorkerStatus] = {}
        self._load: dict[int, np.ndarray] = {}
        self._stale = True  # workers were told something that their last status does not show
        self._seconds: dict[str, float] = {}
        try:
            self._launch(workers, on_phase)
        except BaseException:
            self.close()
            raise

    # -- launch ------------------------------------------------------------------------------------------------

    def _launch(self, workers: int, on_phase: Callable[[str], None]) -> None:
        settings, clock = self._settings, Stopwatch(self._seconds, on_phase)
        with clock.phase("start", f"starting {workers} workers"):
            self._staff.start(range(workers))
        with clock.phase("load", "loading weights"):
            loaded = self._staff.load(range(workers))
        with clock.phase("connect", "connecting"):
            self._staff.open_store(range(workers))
            self._call("connect", dict.fromkeys(self._members, (self._tag(), self._placement, self._members)))
        with clock.phase("self-check", "checking numerics"):
            path = self._staff.choose_numerics()
        self._info = FleetInfo(
            kind="engine",
            model=str(self._checkpoint.path),
            shape=self._checkpoint.shape,
            workers=workers,
            numerics=settings.resolved_numerics,
            numerics_path=path,
            dtype=str(self._checkpoint.dtype).removeprefix("torch."),
            device=settings.device,
            threads_per_worker=settings.threads_per_worker,
            versions={name: version(name) for name in ("flexfloor", "torch", "transformers", "numba")},
            expert_bytes_loaded=tuple(loaded[w] for w in self._members),
            start_s={name: round(seconds, 3) for name, seconds in self._seconds.items()},
            pace=settings.pace,
            profile=None if settings.pace is None else self._pace.profile.name,
        )
        self.start()

    def _tag(self) -> str:
        """A name for a group that no group of this fleet had before."""
        self._tags += 1
        return f"group{self._tags}"

    @property
    def _epoch(self) -> int:
        return self._placement.epoch

    def _call(self, verb: str, payloads: Mapping[int, tuple], may_fail: bool = False) -> dict[int, Any]:
        return self._crew.call(verb, payloads, may_fail)

    # -- the verbs ---------------------------------------------------------------------------------------------

    @property
    def info(self) -> FleetInfo:
        return self._info

    def start(self) -> None:
        self._call("start", dict.fromkeys(self._members, ()))
        self._requests, self._bound, self._iteration = {}, {}, 0
        self._load, self._iteration_s = {}, 0.0
        self._update_status()
        if len(self._members) < self._info.workers:  # a rollout that was given up had released workers
            self.regrow()
            self.start()

    def check(self, requests: Sequence[Request]) -> None:
        # Who stays has less room for KV beside the experts of those who left.
        memory = [replace(plan, slots=max(plan.slots, self._slots.get(w, 0))) for w, plan in enumerate(self._memory)]
        for request in requests:
            check_request(request, self._checkpoint, memory)

    def submit(self, requests: Sequence[Request]) -> None:
        self.check(requests)
        for request in requests:
            if request.request_id in self._requests:
                raise InputError(f"request {request.request_id} was submitted twice")
        self._requests |= {r.request_id: r for r in requests}

    def assign(self, assignment: Mapping[int, Sequence[str]]) -> None:
        seen: set[str] = set()
        for worker, names in assignment.items():
            if worker not in self._members:
                raise FlexFloorError(f"assign names worker {worker}, which is not active")
            for name in names:
                if name not in self._requests or name in self._bound or name in seen:
                    raise FlexFloorError(f"assign names request {name}, which is not waiting")
                seen.add(name)
        payload = {w: ([self._requests[n] for n in names],) for w, names in assignment.items() if names}
        self._call("assign", payload)
        self._stale = True
        self._bound |= {name: worker for worker, names in assignment.items() for name in names}

    def cancel(self, request_ids: Iterable[str]) -> None:
        by_worker: dict[int, list[str]] = {}
        for name in request_ids:
            self._requests.pop(name, None)
            if (worker := self._bound.pop(name, None)) is not None:
                by_worker.setdefault(worker, []).append(name)
        self._call("cancel", {w: (names,) for w, names in by_worker.items()})
        self._stale = True

    def advance(self, iterations: int) -> Progress:
        if not self._bound:
            return Progress(self._epoch, self._iteration, 0)
        results = self._call("advance", dict.fromkeys(self._members, (iterations,)))
        ordered = [results[w] for w in sorted(results)]
        done = {len(r.iterations.seconds) for r in ordered}
        assert len(done) == 1, f"workers disagree on the number of iterations: {done}"
        progress = Progress(
            epoch=self._epoch,
            first_iteration=self._iteration,
            iterations=done.pop(),
            requests=tuple(p for r in ordered for p in r.requests),
            workers=tuple(r.iterations for r in ordered),
            preemptions=tuple(p for r in ordered for p in r.preemptions),
        )
        self._iteration += progress.iterations
        if progress.iterations:
            slowest = np.max([r.iterations.seconds for r in ordered], axis=0)
            self._iteration_s = float(slowest.mean())
        self._status |= {r.status.worker: r.status for r in ordered}
        self._load |= {r.status.worker: r.expert_load for r in ordered}
        for part in progress.requests:
            if part.finish_reason is not None:
                del self._requests[part.request_id], self._bound[part.request_id]
        return progress

    def apply(self, plan: ResizePlan) -> ResizeOutcome:
        status = self.status()
        if not isinstance(plan, ResizePlan):
            raise PlanRefusedError(f"{plan!r:.80} is no ResizePlan; make one with plan_shrink or plan_moves")
        check_plan(plan, status)
        if plan.joining:
            raise PlanRefusedError("workers join between rollouts, by regrow")
        if not self._has_source and any(move.source is None for move in plan.expert_moves):
            raise PlanRefusedError("experts cannot be loaded again: the weights were replaced and are not kept")
        return self._carry_out(plan, status)

    @property
    def _slots(self) -> dict[int, int]:
        """Expert slots of the active workers."""
        return {w: self._placement.slots_on(w) for w in self._members}

    def _carry_out(self, plan: ResizePlan, status: FleetStatus, loaded: frozenset[int] = frozenset()) -> ResizeOutcome:
        run = ResizeRun(self._crew, plan, status, self._tag, self._settings.worker_timeout, loaded)
        outcome = run.carry_out()
        if outcome.failed is None:
            self._members, self._placement = plan.members, plan.placement
            self._bound |= {move.request_id: move.target for move in plan.request_moves}
            for worker in plan.leaving:
                if self._settings.release == "end":
                    self._crew.dismiss(worker)
                else:
                    self._staff.park(worker)
        self._update_status()
        return outcome

    def regrow(self) -> float:
        begin = time.monotonic()
        self._update_status()
        plan = plan_regrow(self.status(), self._home)
        if plan.placement.epoch == self._epoch:
            return 0.0  # nobody has left and no expert has moved
        ended = [w for w in plan.joining if w not in self._crew.handles]
        try:
            self._staff.recall()
        except FlexFloorError:
            self.close()
            raise
        if ended and not self._has_source:
            self.close()
            raise WorkerFailedError(ended[0], "was lost while it was parked, and its weights are kept nowhere else")
        if ended:
            self._staff.start(ended)
            self._staff.load(ended)
            self._staff.open_store(ended)
            self._call("model.set_numerics", dict.fromkeys(ended, (self._info.numerics_path,)))
            self._update_status()
        outcome = self._carry_out(plan, self.status(), frozenset(ended))
        if outcome.failed is not None:
            self.close()
            raise FlexFloorError(f"the workers could not come back: {outcome.failed}")
        return time.monotonic() - begin

    def load_weights(self, weights: Weights, version: int | None = None, *, only_here: bool = False) -> None:
        """only_here: `weights` is a folder that workers on other machines cannot read; each machine gets a copy."""
        if len(self._members) < self._info.workers or self._bound:
            raise FlexFloorError("weights are replaced between rollouts, when all workers are back")
        staged = StagedWeights(weights, self._checkpoint, only_here)
        try:
            staged.spread(self._staff.launcher, self._staff.machines)
            machines = {w: self._crew.handles[w].machine for w in self._members}
            self._call("load_weights", {w: (staged.info_on(machine),) for w, machine in machines.items()})
        except BaseException:
            staged.remove()
            raise
        self._info = replace(self._info, weights_version=self._info.weights_version + 1 if version is None else version)
        self._has_source = self._settings.release == "end"
        self._staff.keep(staged if self._has_source else None)  # processes that start anew load from it
        if not self._has_source:
            staged.remove()

    def sleep(self) -> int:
        """Give the memory of experts and KV back between two rollouts, for trainers that need the device meanwhile.

        What stays are the processes, their group and the dense weights. Until `wake` and then `load_weights` the fleet
        must not be used. Returns bytes. Raises FlexFloorError while workers are released or requests are not done.
        """
        status = self.status()
        if len(status.active) < self._info.workers or status.requests:
            raise FlexFloorError("a fleet sleeps between rollouts, when all workers are back and all requests are done")
        self._call("sleep", dict.fromkeys(self._members, ()))
        self._update_status()
        return sum(w.arena_bytes for w in status.workers)

    def wake(self) -> None:
        """Memory again after `sleep`, without experts in it: `load_weights` comes next, before any rollout."""
        self._call("wake", dict.fromkeys(self._members, ()))
        self._update_status()

    @property
    def processes(self) -> dict[int, int]:
        """Process ids on this machine, by worker; without those that are elsewhere, or have ended with a release."""
        return {w: handle.pid for w, handle in self._crew.handles.items() if hasattr(handle, "pid")}

    def status(self) -> FleetStatus:
        if self._stale:
            self._update_status()
        info = self._checkpoint
        longest = max((total_tokens(r, info) for r in self._requests.values()), default=1)
        return FleetStatus(
            model=info.shape,
            epoch=self._epoch,
            iteration=self._iteration,
            page_tokens=self._settings.page_tokens,
            page_bytes=self._memory[0].page,
            max_batch=self._settings.max_batch,
            longest_tokens=longest,
            workers=tuple(self._status[w] for w in sorted(self._status)),
            placement=self._placement,
            iteration_s=self._iteration_s,
            prefill_tokens=self._settings.prefill_tokens,
            clock_s=self.clock(),
            paced_as=self._pace.shape,
            worker_memory=self._settings.worker_memory,
            expert_load=sum(self._load.values(), np.zeros(self._placement.worker.shape, dtype=np.int64)),
        )

    def close(self) -> None:
        self._crew.close()
        self._staff.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _update_status(self) -> None:
        present = self._call("status", dict.fromkeys(self._crew.handles, ()))
        self._stale = False
        for worker, status in present.items():
            self._status[worker] = replace(status, active=worker in self._members)
        for worker in set(self._status) - set(present):  # ended until regrow
            self._status[worker] = replace(
                self._status[worker], active=False, live_requests=0, kv_pages=0, kv_pages_free=0, memory_bytes=0,
                slots=0, requests=(),
            )  # fmt: skip
