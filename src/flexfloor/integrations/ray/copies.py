"""Copies of a folder in the memory of other machines, through Ray's object store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flexfloor.errors import FlexFloorError
from flexfloor.fleets.engine.machine import Machine, make_folder
from flexfloor.integrations.ray.leases import one_line

CHUNK_BYTES = 64 * 2**20
"""Of an object in the store, which holds two at a time."""


def copy_folder(folder: Path, machines: Sequence[Machine]) -> dict[Machine, Path]:
    """See `flexfloor.fleets.engine.launcher.Launcher`. machines: their names are Ray's ids of nodes."""
    files = {path.relative_to(folder): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    made: dict[Machine, Path] = {}
    try:
        for machine in machines:
            made[machine] = ray.get(_on(machine, make_folder).remote(sum(files.values())))
        under_way: list[Any] = []
        for name, size in files.items():
            for begin in range(0, size, CHUNK_BYTES):
                chunk = ray.put(np.fromfile(folder / name, np.uint8, CHUNK_BYTES, offset=begin))
                writes = [_on(machine, _write).remote(target / name, begin, chunk) for machine, target in made.items()]
                ray.get(under_way)
                under_way = writes
        ray.get(under_way)
    except BaseException as error:
        remove_folders(made)
        if isinstance(error, RayError):
            raise FlexFloorError(f"weights cannot be copied to the other machines: {one_line(error)}") from None
        raise
    return made


def remove_folders(copies: Mapping[Machine, Path]) -> None:
    if ray.is_initialized() and copies:
        removals = [_on(machine, _remove).remote(folder) for machine, folder in copies.items()]
        ray.wait(removals, num_returns=len(removals), timeout=10.0)


def _on(machine: Machine, function: Callable[..., Any]) -> Any:
    """A task that takes nothing from anybody, on that machine or not at all."""
    where = NodeAffinitySchedulingStrategy(machine.name, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=where)


def _write(path: Path, begin: int, chunk: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.seek(begin)
        file.write(chunk.data)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
