"""The arena: one allocation of bytes for KV pages and expert slots, with a movable cut between them.

Pages are counted from the near end, slots from the far end. Both views span the whole arena and overlap; the cut
alone says which bytes are pages and which are slots, so that moving it turns the one into the other.
"""

from __future__ import annotations

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
    def page_count(self) -> int:
        """Pages below the cut."""
        return (self._bytes.numel() - self.slot_count * self._slot_bytes) // self._page_bytes

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def slot_row(self, slot: int) -> int:
        assert 0 <= slot < self.slot_count, slot
        return len(self.slots) - 1 - slot
