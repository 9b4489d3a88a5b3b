"""Communication of one membership epoch: exchanges between the workers that are in it, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class EpochGroup:
    """The process group of one epoch. members: worker numbers in rank order; this worker is members[rank].

    Every method is collective: all members call the same ones in the same order.
    """

    def __init__(
        self, store: dist.Store, epoch: int, members: Sequence[int], worker: int, device: torch.device, timeout: float
    ) -> None:
        self.epoch = epoch
        self.members = tuple(members)
        self.rank = self.members.index(worker)
        self.exchanges = 0
        prefixed = dist.PrefixStore(f"epoch{epoch}", store)
        limit = timedelta(seconds=timeout)
        if device.type == "cuda" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = dist.ProcessGroupNCCL(prefixed, self.rank, self.size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = limit
            # Workers of one machine talk over loopback: no host name has to resolve, no port is open to the network.
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
            self._group = dist.ProcessGroupGloo(prefixed, self.rank, self.size, options)

    @property
    def size(self) -> int:
        return len(self.members)

    def all_to_all(
        self, out: torch.Tensor, source: torch.Tensor, out_splits: Sequence[int], source_splits: Sequence[int]
    ) -> None:
        """Send source_splits[r] rows of `source` to each rank r and receive out_splits[r] from it, in rank order."""
        self.exchanges += 1
        self._group.alltoall_base(out, source, list(out_splits), list(source_splits), dist.AllToAllOptions()).wait()

    def share_counts(self, counts: Sequence[int], device: torch.device) -> list[list[int]]:
        """Every member's small integers, in rank order."""
        width = len(counts)
        source = torch.tensor([counts] * self.size, dtype=torch.int64, device=device)
        out = torch.empty_like(source)
        ones = [1] * self.size
        self.all_to_all(out, source, ones, ones)
        return out.view(self.size, width).tolist()

    def close(self) -> None:
        if hasattr(self._group, "abort"):
            self._group.abort()
        del self._group
