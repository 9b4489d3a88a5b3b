"""`flexfloor doctor`: what this machine can run, on one screen."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from threading import Thread
from typing import Literal

import psutil

from flexfloor.errors import FlexFloorError
from flexfloor.world.memory import MIB, format_bytes, format_up

Level = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. note: something that only limits what can be run; FAIL: a CPU rollout cannot run."""

    level: Level
    name: str
    text: str


def run_doctor(model: Path | None = None, workers: int = 4) -> int:
    """Print the findings. Returns 0 when a CPU rollout can run here (of `model`, when given), else 1."""
    failed = 0
    for check in CHECKS:
        failed += _show(_guard(check))
    if model is not None:
        failed += _show(_guard(lambda: check_model(model, workers)))
    print("a rollout on the CPU can run" if not failed else f"{failed} check{'s' * (failed > 1)} failed")
    return 1 if failed else 0


def _guard(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; what it raises is a finding too."""
    try:
        yield from check()
    except FlexFloorError as error:
        yield Finding("FAIL", "model", str(error))
    except Exception as error:  # a broken installation raises anything
        yield Finding("FAIL", getattr(check, "__name__", "check"), f"{type(error).__name__}: {error}")


def _show(findings: Iterator[Finding]) -> int:
    """Print findings as they come; how many failed."""
    failed = 0
    for finding in findings:
        print(f"  {finding.level:<4}  {finding.name:<14}{' '.join(finding.text.split())}", flush=True)
        failed += finding.level == "FAIL"
    return failed


def check_packages() -> Iterator[Finding]:
    """Python and every package that ours depends on, against the ranges its metadata states."""
    from packaging.requirements import Requirement

    yield Finding("ok", "python", f"{platform.python_version()} at {sys.executable}")
    try:
        wanted = [Requirement(line) for line in requires("flexfloor") or []]
        yield Finding("ok", "flexfloor", version("flexfloor"))
    except PackageNotFoundError:
        yield Finding("note", "flexfloor", "not installed, so that supported versions are not known; pip install it")
        wanted = [Requirement(name) for name in ("numba", "torch", "transformers")]
    for need in sorted(wanted, key=lambda n: (n.marker is not None, n.name)):
        optional = need.marker is not None
        if optional and not need.marker.evaluate({"extra": "parquet"}):  # type: ignore[union-attr]
            continue
        try:
            found = version(need.name)
        except PackageNotFoundError:
            missing = "not installed; pip install 'flexfloor[parquet]' reads Parquet prompts" if optional else "missing"
            yield Finding("note" if optional else "FAIL", need.name, missing)
            continue
        fits = need.specifier.contains(found, prereleases=True)
        limits = f" (needs {need.specifier})" if need.specifier else ""
        yield Finding("ok" if fits else "note" if optional else "FAIL", need.name, found + limits)


def check_cpu() -> Iterator[Finding]:
    """The processor, and how `bitwise` numerics will be reached on it."""
    import torch

    from flexfloor.fleets.engine.numerics import cbwr_setting

    capability = torch.backends.cpu.get_cpu_capability()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("ok", "cpu", f"{_cpu_model()}, {usable} usable cores, {capability}")
    if setting := cbwr_setting(torch.float32):
        yield Finding("ok", "bitwise", f"MKL with MKL_CBWR={setting}, else block kernels; proved at every start")
    else:
        why = "no MKL" if not torch.backends.mkl.is_available() else f"no row-invariant MKL mode for {capability}"
        yield Finding("note", "bitwise", f"block kernels ({why}); proved at every start")


def _cpu_model() -> str:
    """The processor's name, from Linux where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def check_memory() -> Iterator[Finding]:
    """Free memory, of the machine and of this process's control group, and shared memory."""
    machine = psutil.virtual_memory()
    yield Finding("ok", "memory", f"{format_bytes(machine.available)} free of {format_bytes(machine.total)}")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        yield Finding("note", "memory limit", f"{format_bytes(int(text))} for this container")
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield Finding("note", "/dev/shm", "missing")
    else:
        free = psutil.disk_usage(str(shared)).free
        yield Finding("ok" if free >= 64 * MIB else "note", "/dev/shm", f"{format_bytes(free)} free")


def check_devices() -> Iterator[Finding]:
    """GPUs. Having none limits nothing on the CPU."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        yield Finding("note", "gpu", "none that this torch can use; --device cuda will be refused")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding("ok", f"gpu {index}", f"{name}, {format_bytes(free)} free of {format_bytes(total)}")
    nccl = dist.is_nccl_available()
    yield Finding("ok" if nccl else "note", "nccl", "available" if nccl else "missing; GPU workers use Gloo")


def check_communication(limit_s: float = 10.0) -> Iterator[Finding]:
    """Two members of a group exchange numbers, over each of the ways that workers on a CPU can."""
    answer = _exchange("socket", limit_s)
    if answer is None:
        yield Finding("ok", "sockets", "two members exchange over Unix sockets")
    else:
        yield Finding("FAIL", "sockets", f"no exchange over Unix sockets ({answer})")
    answer = _exchange("gloo", limit_s)
    if answer is None:
        yield Finding("ok", "gloo", "two members exchange over loopback")
    else:
        yield Finding("note", "gloo", f"no exchange over the loopback interface ({answer})")


def _exchange(transport: Literal["socket", "gloo"], limit_s: float) -> object | None:
    """What went wrong between two members, each in a thread; None when nothing did."""
    import torch
    import torch.distributed as dist

    from flexfloor.fleets.engine.comm import join_group

    store = dist.HashStore()
    results: dict[int, object] = {}

    def take_part(worker: int) -> None:
        try:
            group = join_group(transport, store, "doctor", 0, (0, 1), worker, limit_s)
            results[worker] = group.share_counts([worker + 7], torch.device("cpu"))
            group.close()
        except Exception as error:
            results[worker] = error

    threads = [Thread(target=take_part, args=(worker,), daemon=True) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    return None if results == {0: [[7], [8]], 1: [[7], [8]]} else results.get(0, "no answer")


def check_model(model: Path, workers: int) -> Iterator[Finding]:
    """Whether a checkpoint is complete and of a kind we run, its sizes, and the memory that workers need."""
    from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
    from flexfloor.fleets.engine.plan import plan_memory
    from flexfloor.prompts import load_tokenizer
    from flexfloor.settings import EngineSettings
    from flexfloor.world.experts import place_contiguous

    info = inspect_checkpoint(model)
    shape = info.shape
    yield Finding("ok", "model", f"{shape.model_type}, checkpoint complete, {str(info.dtype).removeprefix('torch.')}")
    yield Finding(
        "ok",
        "sizes",
        f"{shape.layers} layers ({len(shape.moe_layers)} with experts), {shape.experts} experts top-{shape.top_k}, "
        f"vocabulary {shape.vocab_size}, context {shape.max_context}",
    )
    yield Finding(
        "ok",
        "bytes",
        f"dense {format_bytes(shape.dense_bytes)} on every worker, experts {format_bytes(shape.all_expert_bytes)} "
        f"shared out, KV {format_bytes(shape.kv_token_bytes)} a token",
    )
    for count in range(1, min(workers, shape.experts) + 1):
        placement = place_contiguous(len(shape.moe_layers), shape.experts, count)
        least = max(plan.least() for plan in plan_memory(info, placement, count, EngineSettings()))
        whole = max(plan.least(shape.max_context) for plan in plan_memory(info, placement, count, EngineSettings()))
        yield Finding(
            "ok",
            f"{count} worker{'s' * (count > 1)}",
            f"--worker-memory {format_up(least)} at least, {format_up(whole)} for a request of the whole context",
        )
    tokenizer = load_tokenizer(model)
    chat = "with" if getattr(tokenizer, "chat_template", None) else "without"
    if tokenizer is None:
        yield Finding("note", "tokenizer", "none; prompts must be prompt_tokens")
    else:
        yield Finding("ok", "tokenizer", f"{len(tokenizer)} tokens, {chat} chat template")


CHECKS = (check_packages, check_cpu, check_memory, check_devices, check_communication)
