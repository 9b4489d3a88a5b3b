"""The machine: processor, threads, memory, open files, folders; with the limits of this process."""

from __future__ import annotations

import math
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from flexfloor.doctor.findings import Finding
from flexfloor.settings import EngineSettings
from flexfloor.world.memory import MIB, format_bytes, format_up

GROUPS = Path("/sys/fs/cgroup")
SHARED = Path("/dev/shm")

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_LEAST_MEMORY = 1024 * MIB  # of a driver and two workers that import torch
_LEAST_SHARED = 128 * MIB  # twice what container engines give if nobody asks
_LEAST_DISK = 64 * MIB


def cores() -> float:
    """Processors that this process may use: its affinity, and the quota of its control group."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.inf]
    for text in _group_files("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota != "max":
            quotas.append(int(quota) / int(period or 100_000))
    return min(usable, *quotas)


def _group_files(name: str) -> Iterator[str]:
    """The content of a file in the control group of this process and in those around it (version 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    for folder in (GROUPS / own, *(GROUPS / own).parents):
        if not folder.is_relative_to(GROUPS):
            return
        try:
            yield (folder / name).read_text(encoding="ascii").strip()
        except OSError:
            continue


def check_cpu() -> Iterator[Finding]:
    """The processor, and how `bitwise` numerics will be reached on it."""
    import torch

    from flexfloor.fleets.engine.numerics import cbwr_setting

    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("ok", "cpu", f"{_cpu_model()}, {cores():g} usable cores, {capability}")
    if cbwr_setting(torch.float32) is None:
        why = "no MKL" if not torch.backends.mkl.is_available() else f"no row-invariant MKL mode for {capability}"
        yield Finding("note", "bitwise", f"by block kernels ({why})")


def _cpu_model() -> str:
    """The processor's name, from Linux where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def check_threads(workers: int) -> Iterator[Finding]:
    """Thread settings of the environment, and workers against processors."""
    bad = {name: value for name in _THREADS if (value := os.environ.get(name)) is not None and not _is_count(value)}
    for name, value in bad.items():
        yield Finding(
            "warn", "threads", f"{name}={value!r} is no number of threads", f"unset {name}, or export {name}=1"
        )
    each = EngineSettings().threads_per_worker
    text = f"{workers} workers with {each} thread{'s' * (each > 1)} each on {cores():g} cores"
    if workers * each > cores():
        yield Finding("note", "threads", f"{text}: they take turns; --pace emulates a device for each")
    elif not bad:
        yield Finding("ok", "threads", text)


def _is_count(value: str) -> bool:
    """OpenMP takes one number for each level of nesting."""
    return all(part.strip().isdecimal() and int(part) > 0 for part in value.split(","))


def check_memory(workers: int) -> Iterator[Finding]:
    """Free memory, of the machine and of this process's control group, against what workers take by default."""
    machine = psutil.virtual_memory()
    free, total, where = machine.available, machine.total, ""
    limits = list(zip(_group_files("memory.max"), _group_files("memory.current"), strict=False))
    for limit, used in limits:
        if limit != "max" and int(limit) < total:
            total, where = int(limit), " of this control group"
            free = min(free, max(0, total - int(used)))
    text = f"{format_bytes(free)} free of {format_bytes(total)}{where}"
    default = EngineSettings().worker_memory
    if free < _LEAST_MEMORY:
        remedy = f"free {format_bytes(_LEAST_MEMORY)} or raise the limit"
        yield Finding("FAIL", "memory", f"{text}: too little for two workers", remedy)
    elif free < workers * default:
        fits = max(64, int(free * 0.8 / workers) // MIB)
        text += f"; {workers} workers take up to {format_bytes(workers * default)}"
        yield Finding("warn", "memory", text, f"give --worker-memory {fits}MiB, or fewer workers")
    else:
        yield Finding("ok", "memory", text)


def check_shared() -> Iterator[Finding]:
    """Shared memory, through which a trainer's weights reach the workers."""
    remedy = f"mount a tmpfs of {format_up(_LEAST_SHARED)} or more there; in a container: --shm-size"
    otherwise = "new weights go through a folder on disk"
    if not SHARED.is_dir():
        yield Finding("warn", str(SHARED), f"missing; {otherwise}", remedy)
        return
    free = psutil.disk_usage(str(SHARED)).free
    if problem := _cannot_write(SHARED):
        yield Finding("warn", str(SHARED), f"cannot be written ({problem}); {otherwise}", remedy)
    elif free < _LEAST_SHARED:
        yield Finding("warn", str(SHARED), f"{format_bytes(free)} free; larger weights go through the disk", remedy)
    else:
        yield Finding("ok", str(SHARED), f"{format_bytes(free)} free, can be written")


def check_files(workers: int) -> Iterator[Finding]:
    """How many files a process may have open, against what driver and workers need."""
    try:
        import resource
    except ImportError:
        return
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = files_needed(workers)
    allowed = "any number" if most == resource.RLIM_INFINITY else str(most)
    if most != resource.RLIM_INFINITY and most < need:
        higher = "" if hard == resource.RLIM_INFINITY or hard >= need else f"; the hard limit is {hard}, raise it first"
        text = f"{allowed} a process; {workers} workers need about {need}"
        yield Finding("FAIL", "open files", text, f"ulimit -n {max(1024, need)}{higher}")
    else:
        yield Finding("ok", "open files", f"{allowed} a process; {workers} workers need about {need}")


def files_needed(workers: int) -> int:
    """Open files of the driver, which has most of them: libraries and store, and for each worker its pipes, its errors
    and its connection to the store. A worker has a socket to each other one."""
    return 32 + 4 * workers


def check_folders() -> Iterator[Finding]:
    """Where temporary files and results go."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        if (given := os.environ.get(name)) and (problem := _cannot_write(Path(given))):
            text = f"{name}={given} cannot be written ({problem}) and is passed over"
            yield Finding("warn", "folders", text, f"unset {name}, or make it a folder that you may write to")
    try:
        temporary = Path(tempfile.gettempdir())
        problem = _cannot_write(temporary)
    except OSError as error:
        temporary, problem = Path("temporary folder"), error.strerror or str(error)
    if problem:
        remedy = "set TMPDIR to a folder that you may write to, with room"
        yield Finding("FAIL", "folders", f"{temporary}: no temporary file can be written ({problem})", remedy)
        return
    free = psutil.disk_usage(str(temporary)).free
    if free < _LEAST_DISK:
        yield Finding("warn", "folders", f"{temporary}: {format_bytes(free)} free", "make room, or set TMPDIR")
    here = Path("runs") if Path("runs").is_dir() else Path()
    if problem := _cannot_write(here):
        text = f"{here.absolute()} cannot be written ({problem})"
        yield Finding("warn", "folders", text, "work in another folder, or give outputs with --out and --out-dir")
    else:
        yield Finding("ok", "folders", f"{temporary} and {here if here.name else 'this folder'} can be written")


def _cannot_write(folder: Path) -> str | None:
    """Why no file can be written into a folder; None if one can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".flexfloor-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None
