"""The driver's side of the engine: starts workers, sends them numbered commands, watches over them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from multiprocessing.connection import wait as wait_for_pipes
from pathlib import Path
from typing import Any, NoReturn, Self

import torch.distributed as dist

from flexfloor.errors import FlexFloorError, InputError, UnsupportedError, WorkerFailedError
from flexfloor.fleet import Fleet, FleetInfo, FleetStatus, Progress, WorkerStatus, load_plugin
from flexfloor.fleets.engine.checkpoint import CheckpointInfo, inspect_checkpoint
from flexfloor.fleets.engine.launcher import WorkerHandle
from flexfloor.fleets.engine.numerics import BITWISE_PATHS, NumericsPath, cbwr_setting
from flexfloor.fleets.engine.pacing import Pace
from flexfloor.fleets.engine.plan import check_request, plan_memory, read_eos_token_ids
from flexfloor.fleets.engine.process import ERROR, HEARTBEAT, INPUT_ERROR, READY
from flexfloor.fleets.engine.worker import WorkerConfig
from flexfloor.requests import Request
from flexfloor.settings import EngineSettings
from flexfloor.world.experts import place_contiguous

_IMPORT_TIMEOUT = 300.0  # seconds; a first import on a cold disk is slow, and no heartbeat can tell
_COLLECTIVE_TIMEOUTS = 10  # worker_timeouts; the driver's watch must strike long before a group's own timeout

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
    **options: Any,
) -> EngineFleet:
    """Start a fleet of worker processes. options: fields of EngineSettings. on_phase: told what the launch does.

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
    return EngineFleet(info, workers, settings, requests, on_phase or (lambda phase: None))


class EngineFleet(Fleet):
    """A fleet of real workers. See `flexfloor.fleet.Fleet` for the verbs."""

    def __init__(
        self,
        info: CheckpointInfo,
        workers: int,
        settings: EngineSettings,
        requests: Sequence[Request],
        on_phase: Callable[[str], None],
    ) -> None:
        self._checkpoint, self._settings = info, settings
        self._placement = place_contiguous(len(info.shape.moe_layers), info.shape.experts, workers)
        self._memory = plan_memory(info, self._placement, workers, settings)
        self._pace = Pace.of(settings)
        _check_device(settings, workers)
        for request in requests:  # first, so that a refused budget is answered with the size that does for all
            check_request(request, info, self._memory)
        for plan in self._memory:
            plan.check()
        self._epoch = 0
        self._iteration = 0
        self._number = 0
        self._handles: dict[int, WorkerHandle] = {}
        self._requests: dict[str, Request] = {}  # known and not finished
        self._bound: dict[str, int] = {}
        self._store: Any = None
        self._status: dict[int, WorkerStatus] = {}
        self._seconds: dict[str, float] = {}
        try:
            self._launch(workers, on_phase)
        except BaseException:
            self.close()
            raise

    # -- launch ------------------------------------------------------------------------------------------------

    def _launch(self, workers: int, on_phase: Callable[[str], None]) -> None:
        settings, clock = self._settings, _Stopwatch(self._seconds, on_phase)
        with clock.phase("start", f"starting {workers} workers"):
            launcher = load_plugin("flexfloor.launchers", settings.launcher)()
            for worker, handle in enumerate(launcher.start(workers, self._environment())):
                self._handles[worker] = handle
            self._await_ready()
        members = tuple(range(workers))
        with clock.phase("load", "loading weights"):
            interval = min(1.0, settings.worker_timeout / 4)
            self._call("init", {w: (self._worker_config(w), interval) for w in members})
            loaded = self._call("load", dict.fromkeys(members, ()))
        with clock.phase("connect", "connecting"):
            # Owned by the driver, which is never released; one key prefix an epoch.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            address = ("127.0.0.1", self._store.port)
            self._call("connect", dict.fromkeys(members, (self._epoch, members, address)))
        with clock.phase("self-check", "checking numerics"):
            path = self._choose_numerics(members)
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
            expert_bytes_loaded=tuple(loaded[w] for w in members),
            start_s={name: round(seconds, 3) for name, seconds in self._seconds.items()},
            pace=settings.pace,
            profile=None if settings.pace is None else self._pace.profile.name,
        )
        self.start()

    def _environment(self) -> dict[str, str]:
        threads = str(self._settings.threads_per_worker)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        if self._settings.resolved_numerics == "bitwise" and (setting := cbwr_setting(self._checkpoint.dtype)):
            environment["MKL_CBWR"] = setting
        return environment

    def _worker_config(self, worker: int) -> WorkerConfig:
        s = self._settings
        return WorkerConfig(
            worker=worker,
            info=self._checkpoint,
            memory=self._memory[worker],
            placement=self._placement,
            eos_token_ids=read_eos_token_ids(self._checkpoint),
            device=f"cuda:{worker}" if s.device == "cuda" else "cpu",
            transport=s.resolved_transport,
            threads=s.threads_per_worker,
            page_tokens=s.page_tokens,
            max_batch=s.max_batch,
            prefill_tokens=s.prefill_tokens,
            group_timeout=s.worker_timeout * _COLLECTIVE_TIMEOUTS,
            pace=self._pace,
        )

    def _choose_numerics(self, members: Sequence[int]) -> NumericsPath:
        wanted = self._settings.resolved_numerics
        paths: tuple[NumericsPath, ...] = ("fast",) if wanted == "fast" else BITWISE_PATHS
        if "MKL_CBWR" not in self._environment():
            paths = tuple(p for p in paths if p != "cbwr")
        if wanted == "bitwise" and (forced := os.environ.get("FLEXFLOOR_NUMERICS_PATH")):
            paths = tuple(p for p in paths if p == forced)
        for path in paths:
            if all(self._call("check_numerics", dict.fromkeys(members, (path,))).values()):
                return path
        raise UnsupportedError(
            f"numerics 'bitwise' does not hold on this machine for {self._checkpoint.dtype} (tried "
            f"{', '.join(paths) or 'nothing'}); use --numerics fast"
        )

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _IMPORT_TIMEOUT
        waiting = set(self._handles)
        while waiting:
            for worker in self._receivable(waiting, deadline - time.monotonic()):
                number, status, _ = self._receive(worker)
                if (number, status) == (HEARTBEAT, READY):
                    waiting.discard(worker)
            if time.monotonic() > deadline:
                self._fail(min(waiting), f"did not start within {_IMPORT_TIMEOUT:.0f} s")

    # -- the verbs ---------------------------------------------------------------------------------------------

    @property
    def info(self) -> FleetInfo:
        return self._info

    def start(self) -> None:
        self._requests, self._bound, self._iteration = {}, {}, 0
        self._call("start", dict.fromkeys(self._handles, ()))
        self._update_status()

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._requests:
                raise InputError(f"request {request.request_id} was submitted twice")
            check_request(request, self._checkpoint, self._memory)
        self._requests |= {r.request_id: r for r in requests}

    def assign(self, assignment: Mapping[int, Sequence[str]]) -> None:
        for worker, names in assignment.items():
            if worker not in self._handles:
                raise FlexFloorError(f"assign names worker {worker}, which is not active")
            for name in names:
                if name not in self._requests or name in self._bound:
                    raise FlexFloorError(f"assign names request {name}, which is not waiting")
        payload = {w: ([self._requests[n] for n in names],) for w, names in assignment.items() if names}
        self._call("assign", payload)
        self._bound |= {name: worker for worker, names in assignment.items() for name in names}

    def cancel(self, request_ids: Iterable[str]) -> None:
        by_worker: dict[int, list[str]] = {}
        for name in request_ids:
            self._requests.pop(name, None)
            if (worker := self._bound.pop(name, None)) is not None:
                by_worker.setdefault(worker, []).append(name)
        self._call("cancel", {w: (names,) for w, names in by_worker.items()})

    def advance(self, iterations: int) -> Progress:
        if not self._bound:
            return Progress(self._epoch, self._iteration, 0)
        results = self._call("advance", dict.fromkeys(self._handles, (iterations,)))
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
        self._status = {r.status.worker: r.status for r in ordered}
        for part in progress.requests:
            if part.finish_reason is not None:
                del self._requests[part.request_id], self._bound[part.request_id]
        return progress

    def move(self, moves: Mapping[str, int]) -> None:
        raise UnsupportedError("this fleet does not move live requests between workers")

    def resize(self, plan: Any) -> None:
        raise UnsupportedError("this fleet does not change its active workers while it generates")

    def regrow(self) -> float:
        return 0.0  # all workers are active and the experts lie as they were loaded

    def load_weights(self, weights: Any) -> None:
        raise UnsupportedError("this fleet does not replace weights; launch a new one on the new checkpoint")

    def status(self) -> FleetStatus:
        self._update_status()
        workers = tuple(self._status[w] for w in sorted(self._status))
        return FleetStatus(self._checkpoint.shape, self._epoch, self._iteration, self._settings.page_tokens, workers)

    def close(self) -> None:
        handles, self._handles = self._handles, {}
        # Closing the pipes tells the workers to end; who is stuck is killed.
        for handle in handles.values():
            with contextlib.suppress(OSError):
                handle.pipe.close()
        deadline = time.monotonic() + 0.5
        for handle in handles.values():
            handle.wait(max(0.0, deadline - time.monotonic()))
            handle.kill()
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _update_status(self) -> None:
        self._status = self._call("status", dict.fromkeys(self._handles, ()))

    # -- messages ----------------------------------------------------------------------------------------------

    def _call(self, verb: str, payloads: Mapping[int, tuple]) -> dict[int, Any]:
        """Send one numbered command and wait for every addressed worker. Raises InputError, WorkerFailedError."""
        if not self._handles:
            raise FlexFloorError("the fleet is closed")
        self._number += 1
        heard = dict.fromkeys(self._handles, time.monotonic())
        for worker, arguments in payloads.items():
            self._send(worker, verb, arguments)
        replies: dict[int, Any] = {}
        refused: list[str] = []
        pending = set(payloads)
        timeout = self._settings.worker_timeout
        while pending:
            for worker in self._receivable(set(self._handles), min(1.0, timeout / 4)):
                number, status, value = self._receive(worker)
                heard[worker] = time.monotonic()
                if number == HEARTBEAT:
                    continue
                assert number == self._number, f"worker {worker} answered command {number}, not {self._number}"
                if status == ERROR:
                    self._fail_after_error(worker, value)
                elif status == INPUT_ERROR:
                    refused.append(value)
                pending.discard(worker)
                replies[worker] = value
            silent = min(self._handles, key=heard.__getitem__)
            if time.monotonic() - heard[silent] > timeout:
                self._fail(silent, f"gave no sign of life for {timeout:g} s (worker_timeout)")
        if refused:
            self.close()
            raise InputError(refused[0])
        return replies

    def _send(self, worker: int, verb: str, arguments: tuple) -> None:
        try:
            self._handles[worker].pipe.send((self._number, verb, arguments))
        except OSError:
            self._fail(worker, self._exit_reason(worker))

    def _receivable(self, workers: set[int], seconds: float) -> list[int]:
        pipes: dict[Any, int] = {self._handles[w].pipe: w for w in sorted(workers)}
        return [pipes[pipe] for pipe in wait_for_pipes(list(pipes), timeout=max(0.0, seconds))]

    def _receive(self, worker: int) -> tuple[int, str, Any]:
        try:
            return self._handles[worker].pipe.recv()
        except (EOFError, OSError):
            self._fail(worker, self._exit_reason(worker))

    def _exit_reason(self, worker: int) -> str:
        handle = self._handles[worker]
        handle.wait(1.0)
        return handle.exit_reason() or "closed its pipe"

    def _fail_after_error(self, worker: int, value: tuple[str, str]) -> NoReturn:
        """An exchange breaks on every survivor when a peer dies: look for who is really gone before naming one."""
        message, trace = value
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            for other, handle in self._handles.items():
                if reason := handle.exit_reason():
                    self._fail(other, reason)
            time.sleep(0.05)
        if os.environ.get("FLEXFLOOR_DEBUG"):
            print(trace)
        self._fail(worker, f"failed: {' '.join(message.split())[:500]}")

    def _fail(self, worker: int, reason: str) -> NoReturn:
        for handle in self._handles.values():
            handle.kill()
        self.close()
        raise WorkerFailedError(worker, reason)


class _Stopwatch:
    def __init__(self, seconds: dict[str, float], on_phase: Callable[[str], None]) -> None:
        self._seconds, self._on_phase = seconds, on_phase

    @contextlib.contextmanager
    def phase(self, name: str, text: str) -> Any:
        self._on_phase(text)
        begin = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - begin


def _check_device(settings: EngineSettings, workers: int) -> None:
    if (settings.resolved_transport == "nccl") != (settings.device == "cuda"):
        choices = "nccl" if settings.device == "cuda" else "socket or gloo"
        raise InputError(f"transport {settings.transport!r} does not go with device {settings.device}; use {choices}")
    if settings.device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise InputError("device is cuda, but torch sees no GPU; use --device cpu")
    if torch.cuda.device_count() < workers:
        raise InputError(
            f"{workers} workers need {workers} GPUs, there are {torch.cuda.device_count()}; give fewer workers"
        )
