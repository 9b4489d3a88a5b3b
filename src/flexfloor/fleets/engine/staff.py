"""Bringing workers into being: a process each, with settings, weights, a way to find the others, and numerics."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from flexfloor.errors import UnsupportedError
from flexfloor.fleet import load_plugin
from flexfloor.fleets.engine.checkpoint import CheckpointInfo
from flexfloor.fleets.engine.crew import Crew
from flexfloor.fleets.engine.numerics import NumericsPath, cbwr_setting, paths_to_try
from flexfloor.fleets.engine.pacing import Pace
from flexfloor.fleets.engine.plan import read_eos_token_ids
from flexfloor.fleets.engine.worker import WorkerConfig
from flexfloor.settings import EngineSettings
from flexfloor.world.experts import ExpertPlacement
from flexfloor.world.memory import MemoryPlan

_COLLECTIVE_TIMEOUTS = 10  # worker_timeouts; the driver's watch must strike long before a group's own timeout


class Staff:
    """Starts the workers of a fleet, all of them at its launch and single ones later.

    checkpoint: whose weights a worker loads, may be set anew. memory: by worker. home: the placement they start with.
    """

    def __init__(
        self,
        crew: Crew,
        checkpoint: CheckpointInfo,
        memory: Sequence[MemoryPlan],
        home: ExpertPlacement,
        settings: EngineSettings,
        pace: Pace,
    ) -> None:
        self.checkpoint = checkpoint
        self._crew, self._memory, self._home, self._settings, self._pace = crew, memory, home, settings, pace
        self._store: dist.TCPStore | None = None

    def start(self, workers: Iterable[int]) -> None:
        settings, numbers = self._settings, list(workers)
        launcher = load_plugin("flexfloor.launchers", settings.launcher)()
        self._crew.add(dict(zip(numbers, launcher.start(len(numbers), self._environment()), strict=True)))
        interval = min(1.0, settings.worker_timeout / 4)
        self._crew.call("init", {w: (self._config(w), interval) for w in numbers})

    def load(self, workers: Iterable[int]) -> dict[int, int]:
        """Dense weights and the experts of the home placement. Returns expert bytes loaded, by worker."""
        return self._crew.call("load", dict.fromkeys(workers, ()))

    def open_store(self, workers: Iterable[int]) -> None:
        """Let workers reach the store in which members of a group find each other."""
        if self._store is None:
            # Owned by the driver, which is never released; one key prefix a group.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._crew.call("open_store", dict.fromkeys(workers, (("127.0.0.1", self._store.port),)))

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

    def close(self) -> None:
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
        s = self._settings
        return WorkerConfig(
            worker=worker,
            info=self.checkpoint,
            memory=self._memory[worker],
            placement=self._home,
            eos_token_ids=read_eos_token_ids(self.checkpoint),
            device=f"cuda:{worker}" if s.device == "cuda" else "cpu",
            transport=s.resolved_transport,
            threads=s.threads_per_worker,
            page_tokens=s.page_tokens,
            max_batch=s.max_batch,
            prefill_tokens=s.prefill_tokens,
            group_timeout=s.worker_timeout * _COLLECTIVE_TIMEOUTS,
            pace=self._pace,
        )
