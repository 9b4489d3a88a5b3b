"""Continuous batching on one worker: which tokens of which requests go into the next iteration.

Requests wait in arrival order, are admitted while their KV fits, are prefilled in chunks next to the decoding ones,
and, when pages run out, the youngest are preempted: their KV is dropped and computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flexfloor.fleets.engine.pages import PageAllocator, SharedPrompt, SharedPrompts
from flexfloor.progress import RequestStatus
from flexfloor.requests import FinishReason, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A live request on this worker. `computed` counts tokens whose keys and values are in pages."""

    request: Request
    key: int  # of the random numbers, see `sampling.request_key`
    max_tokens: int  # clamped to the context
    tokens: list[int]  # prompt, then response
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    shared: SharedPrompt | None = None
    computed: int = 0
    is_running: bool = False
    reported: int = 0  # response tokens that the driver has seen
    finish_reason: FinishReason | None = None
    finish_iteration: int | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def is_decoding(self) -> bool:
        """All but the newest token are computed and a token was drawn before."""
        return self.computed == len(self.tokens) - 1 and self.response_length > 0

    @property
    def status(self) -> RequestStatus:
        return RequestStatus(
            self.request.request_id,
            self.prompt_length,
            self.response_length,
            kv_pages=len(self.pages),
            shared_pages=len(self.shared.pages) if self.shared else 0,
            decoding=self.is_running and self.is_decoding,
        )

    @property
    def waits_for_prefix(self) -> bool:
        """A sibling is still computing the shared prompt pages."""
        return self.shared is not None and self.computed < self.shared.capacity and not self.fills_prefix

    @property
    def fills_prefix(self) -> bool:
        return self.shared is not None and self.shared.holders[0] == self.request.request_id


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [begin, end) of a sequence to compute in this iteration."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def draws(self) -> bool:
        """The newest token is among them, so the iteration draws the next one."""
        return self.end == len(self.sequence.tokens)


class Scheduler:
    """max_batch: most live requests at once; prefill_tokens: most prompt (or recomputed) tokens an iteration."""

    def __init__(self, allocator: PageAllocator, page_tokens: int, max_batch: int, prefill_tokens: int) -> None:
        self.allocator = allocator
        self.page_tokens = page_tokens
        self.max_batch = max_batch
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preempted: list[str] = []  # request ids, since `take_preempted`
        self._prompts = SharedPrompts(allocator, page_tokens)

    @property
    def live(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def cancel(self, request_ids: Iterable[str]) -> None:
        gone = set(request_ids)
        self.waiting = deque(s for s in self.waiting if s.request.request_id not in gone)
        for sequence in [s for s in self.running if s.request.request_id in gone]:
            self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a running sequence out and give its pages back."""
        self.running.remove(sequence)
        sequence.is_running = False
        self._drop_pages(sequence)

    def find(self, request_id: str) -> Sequence:
        return next(s for s in [*self.running, *self.waiting] if s.request.request_id == request_id)

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Pages have got other numbers: old → new."""
        for sequence in self.running:
            sequence.pages = [moved.get(page, page) for page in sequence.pages]
        self._prompts.renumber(moved)

    def make_room(self, sequence: Sequence, pages: int) -> None:
        """Pages for a sequence whose keys and values arrive from elsewhere; those of its prompt are shared with
        siblings. It runs from `adopt` on; `drop` takes the pages back."""
        sequence.shared = self._prompts.hold(sequence.request.prompt_tokens, sequence.request.request_id)
        sequence.pages = list(sequence.shared.pages) if sequence.shared else []
        while len(sequence.pages) < pages:
            sequence.pages.append(self.allocator.take())

    def adopt(self, sequence: Sequence) -> None:
        """A sequence from another worker goes on here, or waits to be computed again."""
        if not sequence.pages:
            self.waiting.append(sequence)
            return
        if sequence.shared is not None:
            sequence.shared.filled = sequence.shared.capacity
        sequence.is_running = True
        self.running.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Take back what `make_room` gave."""
        self._drop_pages(sequence)

    def take_preempted(self) -> list[str]:
        taken, self.preempted = self.preempted, []
        return taken

    def schedule(self) -> list[Chunk]:
        """The next iteration's work; empty only when nothing is live."""
        chunks: list[Chunk] = []
        preempted_before = len(self.preempted)
        for sequence in list(self.running):  # oldest first: a preemption takes the youngest, never an older one
            if sequence.is_running and sequence.is_decoding and self._grow(sequence, len(sequence.tokens)):
                chunks.append(Chunk(sequence, sequence.computed, len(sequence.tokens)))
        budget = self.prefill_tokens
        for sequence in list(self.running):
            if budget == 0 or not sequence.is_running or sequence.is_decoding:
                continue
            budget -= self._prefill(sequence, budget, chunks)
        # A preemption may have hit a sequence that had its chunk already; nobody is admitted in the same breath.
        chunks = [c for c in chunks if c.sequence.is_running]
        if len(self.preempted) == preempted_before or not chunks:
            while self.waiting and budget > 0 and len(self.running) < self.max_batch and self._fits(self.waiting[0]):
                sequence = self.waiting.popleft()
                self._admit(sequence)
                budget -= self._prefill(sequence, budget, chunks)
        assert chunks or not self.live, "live requests but nothing to compute"
        return chunks

    def note_computed(self, chunk: Chunk) -> None:
        """The keys and values of a chunk are in the pages now."""
        sequence = chunk.sequence
        sequence.computed = chunk.end
        if sequence.shared is not None and sequence.fills_prefix:
            sequence.shared.filled = max(sequence.shared.filled, min(chunk.end, sequence.shared.capacity))

    def _fits(self, sequence: Sequence) -> bool:
        """Room for all known tokens, plus a page of growth for each running request: who comes back after a
        preemption does not push out the next one at once."""
        shared = self._prompts.find(sequence.request.prompt_tokens)
        known = -(-(len(sequence.tokens) + 1) // self.page_tokens) - (len(shared.pages) if shared else 0)
        return self.allocator.free >= known + len(self.running)

    def _admit(self, sequence: Sequence) -> None:
        entry = self._prompts.hold(sequence.request.prompt_tokens, sequence.request.request_id)
        sequence.shared = entry
        sequence.pages = list(entry.pages) if entry else []
        sequence.computed = entry.filled if entry else 0
        sequence.is_running = True
        self.running.append(sequence)

    def _prefill(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Plan up to `budget` tokens of a sequence that is not decoding. Returns the tokens planned."""
        if sequence.shared is not None and sequence.computed < sequence.shared.filled:
            sequence.computed = sequence.shared.filled
        if sequence.waits_for_prefix:
            return 0
        end = min(sequence.computed + budget, len(sequence.tokens))
        if not self._grow(sequence, end):
            return 0
        chunks.append(Chunk(sequence, sequence.computed, end))
        return end - sequence.computed

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for the first `tokens` tokens, preempting the youngest if needed. False if that was `sequence`."""
        while len(sequence.pages) * self.page_tokens < tokens:
            while self.allocator.free == 0:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    return False
            sequence.pages.append(self.allocator.take())
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preempted.append(sequence.request.request_id)

    def _drop_pages(self, sequence: Sequence) -> None:
        own = sequence.pages[len(sequence.shared.pages) if sequence.shared else 0 :]
        for page in own:
            self.allocator.give_back(page)
        if sequence.shared is not None:
            self._prompts.leave(sequence.shared, sequence.request.request_id)
        sequence.pages, sequence.shared, sequence.computed = [], None, 0
