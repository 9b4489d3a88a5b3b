"""A CPU as a platform of verl, for tests and for trying things out: it is no part of the rollout backend.

verl's trainer knows accelerators only. `VERL_USE_EXTERNAL_MODULES=flexfloor.integrations.verl_cpu` makes every verl
process import this module, and `VERL_PLATFORM=cpu` choose the platform; nobody else loads it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
import verl.utils.distributed as verl_distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _device_module() -> types.ModuleType:
    """What verl takes for `torch.<device>`: torch.cpu, and the functions that this one lacks, doing nothing."""
    module: Any = types.ModuleType("verl_cpu_device")
    module.__getattr__ = lambda name: getattr(torch.cpu, name)
    module.is_available = lambda: False  # verl's cleaning of caches then leaves it alone
    module.current_device = lambda: "cpu"
    module.device_count = lambda: 1
    module.get_device_name = lambda *_, **__: "CPU"
    module.get_rng_state = lambda *_, **__: torch.get_rng_state()
    module.mem_get_info = lambda *_, **__: (0, 0)
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *_, **__: 0)
    for name in (
        "empty_cache", "synchronize", "set_device", "manual_seed", "manual_seed_all", "ipc_collect",
        "reset_peak_memory_stats", "set_rng_state",
    ):  # fmt: skip
        setattr(module, name, lambda *_, **__: None)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Workers are counted as Ray's logical GPUs: `+ray_kwargs.ray_init.num_gpus=N`."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # by name alone, never by detection

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None:
        pass

    def synchronize(self, device_index: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, float]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _repair_process_group() -> None:
    """verl names the backends `cpu:gloo,<device>:<backend>`; with the CPU as the device torch refuses the double."""
    original = verl_distributed.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    verl_distributed.initialize_global_process_group_ray = initialize


def _repair_offload() -> None:
    """A reference model is offloaded into pinned memory, which needs an accelerator."""
    original = fsdp.CPUOffloadPolicy.__init__

    def without_pinning(self: Any, pin_memory: bool = True) -> None:
        original(self, pin_memory=False)

    fsdp.CPUOffloadPolicy.__init__ = without_pinning  # type: ignore[method-assign]


_repair_process_group()
_repair_offload()
