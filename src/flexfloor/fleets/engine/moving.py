"""A worker's part in a resize: making room, sending and taking in memory, then switching over or going back.

Until `commit` nothing is taken away: sources keep what they send, targets hold it apart, the old group stays. `abort`
therefore only lets go of what was prepared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from flexfloor.fleets.engine.comm import EpochGroup
from flexfloor.fleets.engine.pages import SharedPrompt
from flexfloor.fleets.engine.sampling import request_key
from flexfloor.fleets.engine.scheduler import Sequence
from flexfloor.requests import Request
from flexfloor.world.experts import ExpertPlacement

if TYPE_CHECKING:
    from flexfloor.fleets.engine.worker import Worker

ROUND_BYTES = 16 * 2**20
"""Most bytes that one exchange of a transfer carries in all: its copies must fit into a worker's reserve."""

Phase = Literal["prepare", "transfer", "commit", "release"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A piece of memory that travels: an expert slot or a KV page, from one worker's index to another's."""

    kind: Literal["slot", "page"]
    source: int
    source_index: int
    target: int
    target_index: int


@dataclass(frozen=True, slots=True)
class PackedRequest:
    """A live request on its way. pages: of the source worker, in order; empty when it is to be computed again."""

    request: Request
    max_tokens: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reported: int
    computed: int
    pages: tuple[int, ...]

    def unpack(self) -> Sequence:
        return Sequence(
            self.request,
            request_key(self.request),
            self.max_tokens,
            list(self.tokens),
            list(self.logprobs),
            computed=self.computed if self.pages else 0,
            reported=self.reported,
        )


@dataclass(slots=True)
class _Prepared:
    slots_before: int
    arriving: list[Sequence] = field(default_factory=list)
    filling: list[SharedPrompt] = field(default_factory=list)  # prompts whose pages are on their way
    group: EpochGroup | None = None


class Mover:
    """Verbs that the driver calls in the order of the methods; all members of a collective one at the same time."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._prepared: _Prepared | None = None

    def prepare(self, slots: int) -> None:
        """Make the arena hold `slots` expert slots: pages beyond the cut move below it."""
        worker = self._worker
        inject_fault("prepare", worker.config.worker)
        if self._prepared is None:
            self._prepared = _Prepared(worker.arena.slot_count)
        self._move_cut(slots)

    def pack(self, request_ids: Many[str], with_kv: Many[bool]) -> list[PackedRequest]:
        """Live requests of this worker, to be unpacked elsewhere. Changes nothing here."""
        packed = []
        for name, keep in zip(request_ids, with_kv, strict=True):
            s = self._worker.scheduler.find(name)
            pages = tuple(s.pages) if keep else ()
            packed.append(
                PackedRequest(
                    s.request, s.max_tokens, tuple(s.tokens), tuple(s.logprobs), s.reported, s.computed, pages
                )
            )
        return packed

    def make_room(self, packed: Many[PackedRequest]) -> list[list[tuple[int, int]]]:
        """Pages for requests that arrive: for each, the (source page, page here) that have to travel."""
        prepared, scheduler = self._require(), self._worker.scheduler
        wanted = []
        for one in packed:
            sequence = one.unpack()
            prepared.arriving.append(sequence)
            if one.pages:
                scheduler.make_room(sequence, len(one.pages))
            wanted.append(list(zip(one.pages, sequence.pages, strict=True))[self._pages_here(sequence) :])
        return wanted

    def _pages_here(self, sequence: Sequence) -> int:
        """First pages of a sequence that siblings have, or bring, already."""
        shared, prepared = sequence.shared, self._require()
        if shared is None:
            return 0
        if shared.filled == shared.capacity or any(shared is entry for entry in prepared.filling):
            return len(shared.pages)
        prepared.filling.append(shared)
        return 0

    def load_from_source(self, wanted: Many[tuple[int, int, int]]) -> int:
        """Experts (layer, expert, slot) from the checkpoint. Returns bytes."""
        return self._worker.model.load_experts(wanted)

    def transfer(self, tag: str, union: Many[int], parcels: Many[Parcel], timeout: float) -> dict[int, int]:
        """Carry out the exchange. Collective over `union`, on a group of its own, so that a failure leaves the epoch's
        group as it is. Returns a sum over the bytes of every parcel that was sent or has arrived here, by its index."""
        worker = self._worker
        group = worker.join(tag, -1, union, timeout)
        if group is None:
            return {}
        try:
            inject_fault("transfer", worker.config.worker)
            return exchange(worker, group, parcels)
        finally:
            group.close()

    def connect_next(self, tag: str, epoch: int, members: Many[int]) -> None:
        """Enter the group that the resize leads to. Collective over `members`."""
        self._require().group = self._worker.join(tag, epoch, members)

    def commit(
        self,
        placement: ExpertPlacement | None,
        slots: int,
        moved_slots: Mapping[int, int],
        leaving: Many[str],
    ) -> tuple[list[str], bytes]:
        """Switch over. placement: of the new epoch, None when only requests move; slots: expert slots from now on;
        moved_slots: landing slot → slot; leaving: requests that live elsewhere now.

        Returns the live requests of this worker and the placement it follows, for the driver to compare.
        """
        worker, prepared = self._worker, self._require()
        inject_fault("commit", worker.config.worker)
        worker.scheduler.cancel(leaving)
        for sequence in prepared.arriving:
            worker.scheduler.adopt(sequence)
        if placement is not None:
            worker.arena.move_slots(moved_slots)
            self._move_cut(slots)
            worker.enter_epoch(placement, prepared.group)
        self._prepared = None
        live = [s.request.request_id for s in [*worker.scheduler.running, *worker.scheduler.waiting]]
        return live, worker.placement.worker.tobytes()

    def abort(self) -> None:
        """Go back to what was before `prepare`. Safe to call when nothing was prepared."""
        if self._prepared is None:
            return
        for sequence in self._prepared.arriving:
            if sequence.pages:
                self._worker.scheduler.drop(sequence)
        if self._prepared.group:
            self._prepared.group.close()
        self._move_cut(self._prepared.slots_before)
        self._prepared = None

    def digest(self) -> dict[str, dict]:
        """What this worker holds: sums over the bytes of its experts and of its requests' KV, and the slots and pages
        that they lie in. The sums are the state that a model computes with; the numbers are where it happens to be."""
        worker = self._worker
        experts = worker.placement.experts_on(worker.config.worker)
        running = worker.scheduler.running
        return {
            "experts": {(layer, expert): _sum(worker.arena.slot_bytes_of(slot)) for layer, expert, slot in experts},
            "kv": {s.request.request_id: [_sum(worker.arena.page_bytes_of(page)) for page in s.pages] for s in running},
            "slots": {(layer, expert): slot for layer, expert, slot in experts},
            "pages": {s.request.request_id: list(s.pages) for s in running},
        }

    def _move_cut(self, slots: int) -> None:
        worker = self._worker
        pages = worker.arena.pages_beside(slots)
        moved = worker.allocator.resize(pages)
        worker.arena.move_pages(moved)
        worker.scheduler.renumber(moved)
        if self._prepared:
            for sequence in self._prepared.arriving:
                sequence.pages = [moved.get(page, page) for page in sequence.pages]
        worker.arena.slot_count = slots

    def _require(self) -> _Prepared:
        assert self._prepared is not None, "nothing was prepared"
        return self._prepared


def exchange(worker: Worker, group: EpochGroup, parcels: Many[Parcel]) -> dict[int, int]:
    """Send and take in parcels, in rounds of bounded bytes that all members cut alike."""
    me, sums = worker.config.worker, {}
    rank = {member: index for index, member in enumerate(group.members)}
    sizes = {"slot": worker.config.memory.slot, "page": worker.config.memory.page}
    for round_ in _rounds(parcels, sizes):
        outgoing = sorted((i for i in round_ if parcels[i].source == me), key=lambda i: rank[parcels[i].target])
        incoming = sorted((i for i in round_ if parcels[i].target == me), key=lambda i: rank[parcels[i].source])
        given, taken = [0] * group.size, [0] * group.size
        for i in outgoing:
            given[rank[parcels[i].target]] += sizes[parcels[i].kind]
        for i in incoming:
            taken[rank[parcels[i].source]] += sizes[parcels[i].kind]
        views = [_bytes(worker, parcels[i].kind, parcels[i].source_index) for i in outgoing]
        empty = torch.empty(0, dtype=torch.uint8, device=worker.device)
        source = torch.cat(views) if views else empty
        out = empty.new_empty(sum(taken))
        group.all_to_all(out, source, taken, given)
        for i, view in zip(outgoing, views, strict=True):
            sums[i] = _sum(view)
        at = 0
        for i in incoming:
            target = _bytes(worker, parcels[i].kind, parcels[i].target_index)
            target.copy_(out[at : at + len(target)])
            sums[i] = _sum(target)
            at += len(target)
    return sums


def _rounds(parcels: Many[Parcel], sizes: Mapping[str, int]) -> Iterator[list[int]]:
    round_: list[int] = []
    total = 0
    for index, parcel in enumerate(parcels):
        if round_ and total + sizes[parcel.kind] > ROUND_BYTES:
            yield round_
            round_, total = [], 0
        round_.append(index)
        total += sizes[parcel.kind]
    if round_:
        yield round_


def _bytes(worker: Worker, kind: str, index: int) -> torch.Tensor:
    return worker.arena.slot_bytes_of(index) if kind == "slot" else worker.arena.page_bytes_of(index)


def _sum(view: torch.Tensor) -> int:
    """Changes with any flipped bit of any 16-bit word; the types that models are computed in have at least that."""
    return int(view.view(torch.int16).sum(dtype=torch.int64))


def inject_fault(phase: Phase, worker: int) -> None:
    """Raise where FLEXFLOOR_FAULT=PHASE:WORKER asks for it: how the tests see that a resize survives its failures."""
    if os.environ.get("FLEXFLOOR_FAULT") == f"{phase}:{worker}":
        raise RuntimeError(f"fault injected into {phase}")
