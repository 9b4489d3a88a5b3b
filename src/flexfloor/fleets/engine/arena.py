"""The arena: one allocation of bytes for KV pages and expert slots, with a movable cut between them.

Pages are counted from the near end, slots from the far end. Both views span the whole arena and overlap; the cut
alone says which bytes are pages and which are slots, so that moving it turns the one into the other.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flexfloor.world.memory import MemoryPlan


@dataclass(frozen=True)
class KVLayout:
    """Shape of one page: [layers, 2 (keys, values), kv_heads, page_tokens, head_dim]."""

    layers: int
    kv_heads: int
    page_tokens: int
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.kv_heads, self.page_tokens, self.head_dim)

    def page_bytes(self, itemsize: int) -> int:
        return self.layers * 2 * self.kv_heads * self.page_tokens * self.head_dim * itemsize


class Arena:
    """pages: [max pages, *layout.shape]; slots: [max slots, slot elements], in the model's dtype.

    Expert slot s is row `slot_row(s)` of `slots`, counted from the far end, so its number survives moves of the cut.
    """

    def __init__(self, plan: MemoryPlan, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
        assert plan.arena >= plan.slots * plan.slot, "checked before a worker is started"
        # Pages of the operating system are committed on first touch: an arena costs what is used of it.
        self._bytes = torch.empty(plan.arena, dtype=torch.uint8, device=device)
        self._slot_bytes, self._page_bytes = plan.slot, plan.page
        pages, slots = plan.arena // plan.page, plan.arena // plan.slot
        self.pages = self._bytes[: pages * plan.page].view(dtype).view(pages, *layout.shape)
        self.slots = self._bytes[: slots * plan.slot].view(dtype).view(slots, -1)
        self.slot_count = plan.slots

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    @property
    def page_count(self) -> int:
        """Pages below the cut."""
        return self.pages_beside(self.slot_count)

    def pages_beside(self, slots: int) -> int:
        """Pages below the cut, were there `slots` slots beyond it."""
        return max(0, self._bytes.numel() - slots * self._slot_bytes) // self._page_bytes

    def slot_bytes_of(self, slot: int) -> torch.Tensor:
        """The bytes of one expert slot: uint8 [slot bytes], a view."""
        return self.slots[self.slot_row(slot)].view(torch.uint8)

    def page_bytes_of(self, page: int) -> torch.Tensor:
        """The bytes of one KV page: uint8 [page bytes], a view."""
        return self.pages[page].view(-1).view(torch.uint8)

    def move_pages(self, moved: Mapping[int, int]) -> None:
        """Copy pages: old → new number; no new number is an old one."""
        for old, new in moved.items():
            self.pages[new].copy_(self.pages[old])

    def move_slots(self, moved: Mapping[int, int]) -> None:
        """Copy slots: old → new number, all at once: a new number may be the old one of another."""
        pending = {old: new for old, new in moved.items() if old != new}
        while pending:
            ready = [old for old, new in pending.items() if new not in pending]
            if not ready:  # a ring: one of it waits outside
                held, new = pending.popitem()
                outside = self.slots[self.slot_row(held)].clone()
                self.move_slots(pending)
                self.slots[self.slot_row(new)].copy_(outside)
                return
            for old in ready:
                self.slots[self.slot_row(pending.pop(old))].copy_(self.slots[self.slot_row(old)])

    def release(self) -> None:
        """Give the memory back; the address range stays, so that every view of it is good again after regrow."""
        self.slot_count = 0
        if self._bytes.device.type == "cpu":
            _forget(self._bytes)
        else:
            self._bytes.untyped_storage().resize_(0)
            torch.cuda.empty_cache()  # else torch keeps it for this process alone

    def restore(self) -> None:
        """The opposite of `release`: memory again, with nothing in it."""
        if self._bytes.device.type != "cpu":
            self._bytes.untyped_storage().resize_(self._bytes.numel())

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def slot_row(self, slot: int) -> int:
        assert 0 <= slot < self.slot_count, slot
        return len(self.slots) - 1 - slot


def _forget(tensor: torch.Tensor) -> None:
    """Hand a tensor's whole pages of memory back to the operating system; they read as zeros when touched again."""
    size = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // size) * size
    length = (tensor.data_ptr() + tensor.numel() - begin) // size * size
    libc = ctypes.CDLL(None, use_errno=True)
    if length > 0 and libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "memory of the arena cannot be given back")
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # what intermediates have left in the heap
