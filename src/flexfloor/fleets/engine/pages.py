"""Who holds which KV page: free list, reference counts, and prompts shared inside a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexfloor.errors import PlanRefusedError


class PageAllocator:
    """Pages 0 … count-1; the lowest free page is handed out first, which keeps the side of the cut free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._sorted = True
        self._references = [0] * count
        self.peak = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def take(self) -> int:
        """One page with one reference. Raises IndexError when none is free: callers look at `free` first."""
        if not self._sorted:
            self._free.sort(reverse=True)
            self._sorted = True
        page = self._free.pop()
        self._references[page] = 1
        self.peak = max(self.peak, self.used)
        return page

    def share(self, page: int) -> None:
        assert self._references[page] > 0, f"page {page} is free"
        self._references[page] += 1

    def give_back(self, page: int) -> None:
        assert self._references[page] > 0, f"page {page} is free already"
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
            self._sorted = False

    def resize(self, count: int) -> dict[int, int]:
        """Change the number of pages. Used pages beyond the new end get the lowest free numbers: old → new.

        What they hold is for the caller to move. Raises PlanRefusedError when there are too few, changing nothing.
        """
        if self.used > count:
            raise PlanRefusedError(f"{self.used} KV pages are in use, {count} would be left")
        beyond = [page for page in range(count, self.count) if self._references[page]]
        free = [page for page in range(min(count, self.count)) if not self._references[page]]
        moved = dict(zip(beyond, free, strict=False))
        for old, new in moved.items():
            self._references[new] = self._references[old]
        self._references = (self._references + [0] * count)[:count]
        self.count = count
        self._free = [page for page in range(count - 1, -1, -1) if not self._references[page]]
        self._sorted = True
        return moved

    def check(self) -> None:
        """Raises AssertionError when the free list and the counts disagree."""
        assert sorted(self._free) == [p for p, n in enumerate(self._references) if n == 0]


@dataclass(slots=True)
class SharedPrompt:
    """The full pages of a prompt that several live siblings read. The last prompt token is never among them,
    because each sibling computes it to draw its own first token."""

    tokens: tuple[int, ...]
    pages: list[int]
    capacity: int  # tokens in the pages, all full
    filled: int = 0  # tokens whose keys and values are in the pages
    holders: list[str] = field(default_factory=list)  # request ids, oldest first; the first one fills


class SharedPrompts:
    """Shared prompts by their tokens; an entry lives as long as a sibling holds it."""

    def __init__(self, allocator: PageAllocator, page_tokens: int) -> None:
        self._allocator = allocator
        self._page_tokens = page_tokens
        self._entries: dict[tuple[int, ...], SharedPrompt] = {}

    def full_pages(self, prompt: tuple[int, ...]) -> int:
        return (len(prompt) - 1) // self._page_tokens

    def find(self, prompt: tuple[int, ...]) -> SharedPrompt | None:
        return self._entries.get(prompt)

    def hold(self, prompt: tuple[int, ...], request_id: str) -> SharedPrompt | None:
        """Join the siblings of `prompt`, allocating its pages if none is live. None for prompts below one page."""
        if self.full_pages(prompt) == 0:
            return None
        entry = self._entries.get(prompt)
        if entry is None:
            pages = [self._allocator.take() for _ in range(self.full_pages(prompt))]
            entry = self._entries[prompt] = SharedPrompt(prompt, pages, len(pages) * self._page_tokens)
        else:
            for page in entry.pages:
                self._allocator.share(page)
        entry.holders.append(request_id)
        return entry

    def leave(self, entry: SharedPrompt, request_id: str) -> None:
        entry.holders.remove(request_id)
        for page in entry.pages:
            self._allocator.give_back(page)
        if not entry.holders:
            del self._entries[entry.tokens]

    def renumber(self, moved: Mapping[int, int]) -> None:
        for entry in self._entries.values():
            entry.pages = [moved.get(page, page) for page in entry.pages]
