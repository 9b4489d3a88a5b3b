"""Bringing workers into being: a process each, with settings, weights, a way to find the others, and numerics."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from flexfloor.errors import UnsupportedError
from flexfloor.fleet import load_plugin
from flexfloor.fleets.engine.checkpoint import CheckpointInfo
from flexfloor.fleets.engine.comm import open_store
from flexfloor.fleets.engine.crew import Crew
from flexfloor.fleets.engine.launcher import Launcher, WorkerHandle
from flexfloor.fleets.engine.machine import Machine
from flexfloor.fleets.engine.numerics import NumericsPath, cbwr_setting, paths_to_try
from flexfloor.fleets.engine.pacing import Pace
from flexfloor.fleets.engine.plan import read_eos_token_ids
from flexfloor.fleets.engine.weights import StagedWeights
from flexfloor.fleets.engine.worker import WorkerConfig
from flexfloor.settings import EngineSettings
from flexfloor.world.experts import ExpertPlacement
from flexfloor.world.memory import MemoryPlan

_COLLECTIVE_TIMEOUTS = 10  # worker_timeouts; the driver's watch must strike long before a group's own timeout


class Staff:
    """Starts the workers of a fleet, all of them at its launch and single ones later.

    checkpoint: of the model, whose weights a worker loads unless it was told to `keep` newer ones. memory: by worker.
    home: the placement they start with. launcher: starts the processes in place of the settings' one.
    """

    def __init__(
        self,
        crew: Crew,
        checkpoint: CheckpointInfo,
        memory: Sequence[MemoryPlan],
        home: ExpertPlacement,
        settings: EngineSettings,
        pace: Pace,
        launcher: Launcher | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._staged: StagedWeights | None = None
        self.launcher = launcher or load_plugin("flexfloor.launchers", settings.launcher)(settings.device)
        self._crew, self._memory, self._home, self._settings, self._pace = crew, memory, home, settings, pace
        self._store: dist.TCPStore | None = None

    def start(self, workers: Iterable[int]) -> None:
        numbers = list(workers)
        self._crew.add(dict(zip(numbers, self.launcher.start(numbers, self._environment()), strict=True)))
        if self._staged is not None:
            self._staged.spread(self.launcher, self.machines)
        interval = min(1.0, self._settings.worker_timeout / 4)
        self._crew.call("init", {w: (self._config(w), interval) for w in numbers})

    @property
    def machines(self) -> list[Machine]:
        """Where workers are, each machine once."""
        return list(dict.fromkeys(handle.machine for handle in self._crew.handles.values()))

    def park(self, worker: int) -> None:
        """A released worker keeps its process; what others count as taken by it, they may have."""
        self._crew.parked.add(worker)
        self.launcher.yield_device(self._crew.handles[worker])

    def recall(self) -> None:
        """Parked workers are going to compute again. Raises InputError when others have what is theirs."""
        self.launcher.reclaim_devices({w: self._crew.handles[w] for w in sorted(self._crew.parked)})
        self._crew.parked.clear()

    def load(self, workers: Iterable[int]) -> dict[int, int]:
        """Dense weights and the experts of the home placement. Returns expert bytes loaded, by worker."""
        return self._crew.call("load", dict.fromkeys(workers, ()))

    def open_store(self, workers: Iterable[int]) -> None:
        """Let workers reach the store in which members of a group find each other."""
        if self._store is None:
            # Owned by the driver, which is never released; one key prefix a group.
            self._store = open_store(self.launcher.home.address)
        address = (self.launcher.home.address, self._store.port)
        self._crew.call("open_store", dict.fromkeys(workers, (address,)))

    def choose_numerics(self) -> NumericsPath:
        """The fastest path that keeps what the settings promise, set on all workers. Raises UnsupportedError."""
        paths = paths_to_try(self._settings.resolved_numerics, "MKL_CBWR" in self._environment())
        for path in paths:
            if all(self._crew.call("check_numerics", dict.fromkeys(self._crew.handles, (path,))).values()):
                return path
        raise UnsupportedError(
            f"numerics 'bitwise' does not hold on this machine for {self.checkpoint.dtype} (tried "
            f"{', '.join(paths) or 'nothing'}); use `numerics` fast",
            settings=("numerics",),
        )

    def keep(self, staged: StagedWeights | None) -> None:
        """Weights for processes that start anew, until the next ones or `close`; those of before are removed."""
        if self._staged is not None:
            self._staged.remove()
        self._staged = staged

    def close(self) -> None:
        self.keep(None)
        self._store = None

    def _environment(self) -> dict[str, str]:
        threads = str(self._settings.threads_per_worker)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        if self._settings.resolved_numerics == "bitwise" and (setting := cbwr_setting(self.checkpoint.dtype)):
            environment["MKL_CBWR"] = setting
        if fault := os.environ.get("FLEXFLOOR_FAULT"):
            environment["FLEXFLOOR_FAULT"] = fault
        return environment

    def _config(self, worker: int) -> WorkerConfig:
        s, handle = self._settings, self._crew.handles[worker]
        return WorkerConfig(
            worker=worker,
            info=self.checkpoint if self._staged is None else self._staged.info_on(handle.machine),
            model=self.checkpoint.path,
            memory=self._memory[worker],
            placement=self._home,
            eos_token_ids=read_eos_token_ids(self.checkpoint),
            device=device_of(worker, handle, s),
            transport=s.resolved_transport,
            threads=s.threads_per_worker,
            page_tokens=s.page_tokens,
            max_batch=s.max_batch,
            prefill_tokens=s.prefill_tokens,
            group_timeout=s.worker_timeout * _COLLECTIVE_TIMEOUTS,
            pace=self._pace,
            machine=handle.machine,
        )


def device_of(worker: int, handle: WorkerHandle, settings: EngineSettings) -> str:
    """A worker's device, in torch's words."""
    if settings.device != "cuda":
        return "cpu"
    return "cuda:0" if handle.sees_one_device else f"cuda:{worker}"
