"""How long the engine's exchanges take by size of the group: dispatch and combine of made-up rows, no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flexfloor.errors import InputError
from flexfloor.fleet import load_plugin
from flexfloor.fleets.engine.comm import EpochGroup, join_group, open_store
from flexfloor.fleets.engine.crew import Crew
from flexfloor.fleets.engine.machine import Machine
from flexfloor.fleets.engine.plan import check_device
from flexfloor.fleets.engine.staff import device_of
from flexfloor.fleets.engine.worker import process_memory
from flexfloor.settings import EngineSettings

_WARM_UP = 0.2  # of the repeats, before those that count


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one exchange carries: `tokens` rows of each worker, of `hidden` elements, for `top_k` experts each."""

    tokens: int
    hidden: int
    top_k: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        return self.hidden * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of one dispatch and of one combine among `workers`, medians over the repeats, mean over the workers."""

    workers: int
    traffic: Traffic
    dispatch_s: float
    combine_s: float

    @property
    def seconds(self) -> float:
        """The mean of both: what a profile's `latency_s` counts twice in a layer."""
        return (self.dispatch_s + self.combine_s) / 2


@dataclass(frozen=True)
class BenchConfig:
    """What a worker process of the benchmark is told at its start."""

    worker: int
    device: str
    transport: str
    threads: int
    group_timeout: float  # seconds
    machine: Machine

    def make_worker(self) -> CommBench:
        return CommBench(self)


class CommBench:
    """Takes the place of a Worker in its process: the same groups, and nothing that computes."""

    def __init__(self, config: BenchConfig) -> None:
        torch.set_num_threads(config.threads)
        self._config, self._device = config, torch.device(config.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._group: EpochGroup | None = None
        self._store: Any = None
        self.iteration = 0

    def note_memory(self) -> None:
        process_memory()

    def open_store(self, address: tuple[str, int]) -> None:
        self._store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)

    def connect(self, tag: str, epoch: int, members: Sequence[int]) -> None:
        """Enter a group in place of the one before. Collective over `members`."""
        c: Any = self._config
        self.leave()
        self._group = join_group(c.transport, self._store, tag, epoch, members, c.worker, c.group_timeout, c.machine)

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def measure(self, traffic: Traffic, repeats: int) -> tuple[float, float]:
        """Median seconds of one dispatch and of one combine, as `ExpertParallel` makes them. Collective.

        The experts of a token's k choices lie on workers in turn, so that each has an equal share of the results.
        """
        group, tokens = self._group, traffic.tokens
        assert group is not None
        dtype = getattr(torch, traffic.dtype)
        rows = torch.zeros(tokens, traffic.hidden + traffic.top_k, dtype=dtype, device=self._device)
        received = rows.new_empty(group.size * tokens, rows.shape[1])
        owned = np.bincount(np.arange(tokens * traffic.top_k) % group.size, minlength=group.size).tolist()
        back = [owned[group.rank]] * group.size
        results = rows.new_zeros(sum(back), traffic.hidden)
        combined = rows.new_empty(sum(owned), traffic.hidden)
        taken = np.empty((repeats, 2))
        for i in range(-max(1, int(_WARM_UP * repeats)), repeats):
            begin = self._now()
            group.all_gather(received, rows, [tokens] * group.size)
            middle = self._now()
            group.all_to_all(combined, results, owned, back)
            taken[i] = middle - begin, self._now() - middle
            self.iteration += 1
        dispatch, combine = np.median(taken, axis=0).tolist()
        return dispatch, combine

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def measure_exchanges(
    sizes: Sequence[int],
    traffics: Sequence[Traffic],
    settings: EngineSettings,
    *,
    repeats: int = 200,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> list[Exchange]:
    """Exchanges of each traffic in a group of each of the sizes, on workers that the settings' launcher starts.

    Of the settings, device, transport, threads_per_worker, launcher and worker_timeout count. No process is left when
    it returns or raises. Raises InputError, and WorkerFailedError when a worker ends.
    """
    if min(sizes) < 2:
        raise InputError(f"a group of {min(sizes)} exchanges nothing; give sizes from 2")
    check_device(settings, max(sizes))
    crew = Crew(settings.worker_timeout)
    try:
        on_phase(f"starting {max(sizes)} workers")
        home = _start(crew, max(sizes), settings)
        store = open_store(home.address)
        crew.call("open_store", dict.fromkeys(crew.handles, ((home.address, store.port),)))
        found = []
        for epoch, size in zip(count(1), sorted(set(sizes)), strict=False):
            members = tuple(range(size))
            on_phase(f"measuring groups of {size}")
            crew.call("connect", dict.fromkeys(members, (f"group{epoch}", epoch, members)))
            for traffic in traffics:
                taken = crew.call("measure", dict.fromkeys(members, (traffic, repeats)))
                dispatch_s, combine_s = np.mean(list(taken.values()), axis=0).tolist()
                found.append(Exchange(size, traffic, dispatch_s, combine_s))
            crew.call("leave", dict.fromkeys(members, ()))
        return found
    finally:
        crew.close()


def _start(crew: Crew, workers: int, settings: EngineSettings) -> Machine:
    """Returns the driver's machine."""
    threads = str(settings.threads_per_worker)
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    launcher = load_plugin("flexfloor.launchers", settings.launcher)(settings.device)
    crew.add(dict(enumerate(launcher.start(range(workers), environment))))
    interval = min(1.0, settings.worker_timeout / 4)
    configs = {
        worker: BenchConfig(
            worker,
            device_of(worker, crew.handles[worker], settings),
            settings.resolved_transport,
            settings.threads_per_worker,
            settings.worker_timeout,
            crew.handles[worker].machine,
        )
        for worker in range(workers)
    }
    crew.call("init", {worker: (config, interval) for worker, config in configs.items()})
    return launcher.home
