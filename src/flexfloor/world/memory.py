"""The memory of one worker: `worker_memory` = dense weights + arena + activation reserve.

The arena is one allocation: KV pages grow from one end, expert slots sit at the other, a cut lies between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexfloor.errors import InputError

MIB = 2**20


def format_bytes(count: float) -> str:
    """1536 → '1.5 KiB'."""
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if abs(count) < 1024:
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def activation_reserve(
    *, rows: int, logit_rows: int, hidden: int, widest: int, vocab: int, top_k: int, workers: int, itemsize: int
) -> int:
    """Bytes kept free for one iteration's intermediates, an upper bound by shapes.

    rows: most tokens a worker computes at once; logit_rows: most requests that draw a token at once;
    widest: largest inner width of a layer, in elements.
    """
    own = rows * (8 * hidden + 4 * widest) * itemsize
    exchanged = rows * (top_k + (0 if workers == 1 else 2 * workers + top_k)) * hidden * itemsize
    logits = min(logit_rows, 64) * vocab * (4 * 4 + 2 * 8)  # float32 logits and copies, float64 cumulative sums
    return own + exchanged + logits + 32 * MIB


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How one worker's memory is divided. Bytes unless named otherwise."""

    worker_memory: int
    dense: int
    reserve: int
    slot: int
    slots: int
    page: int
    page_tokens: int

    @property
    def arena(self) -> int:
        """Whole slots, so that slots counted from the far end start at multiples of their size."""
        return max(0, self.worker_memory - self.dense - self.reserve) // self.slot * self.slot

    @property
    def pages(self) -> int:
        return max(0, self.arena - self.slots * self.slot) // self.page

    def least(self, longest_tokens: int = 1) -> int:
        """The smallest worker_memory in which a request of `longest_tokens` alone fits."""
        # One slot more, because the arena is cut down to whole slots.
        return self.dense + self.reserve + (self.slots + 1) * self.slot + self._pages_for(longest_tokens) * self.page

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) + 1

    def check(self, longest_tokens: int = 1) -> None:
        """Raises InputError when a request of `longest_tokens` alone would not fit, naming the budget that does."""
        if self.pages >= self._pages_for(longest_tokens):
            return
        raise InputError(
            f"worker_memory {format_bytes(self.worker_memory)} is too small: dense weights "
            f"{format_bytes(self.dense)} + {self.slots} expert slots {format_bytes(self.slots * self.slot)} + "
            f"activation reserve {format_bytes(self.reserve)} + KV of {longest_tokens} tokens; "
            f"give at least {format_up(self.least(longest_tokens))}",
            settings=("worker_memory",),
        )


def format_up(count: int) -> str:
    """A size that can be typed back as an option and is not below `count`."""
    return f"{-(-count // MIB)}MiB"
