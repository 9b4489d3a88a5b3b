"""A resize as the driver carries it out: prepare → commit → verify → release, by numbered commands."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from flexfloor.errors import FlexFloorError
from flexfloor.fleets.engine.crew import Crew, PhaseFailedError
from flexfloor.fleets.engine.moving import Parcel
from flexfloor.progress import ResizeOutcome
from flexfloor.world.resize import ExpertMove, RequestMove, ResizePlan
from flexfloor.world.status import FleetStatus


class ResizeRun:
    """One plan, carried out once. loaded: joining workers that have their experts already.

    tag: makes a fresh name for a group; timeout: seconds that one exchange of the transfer may take.
    """

    def __init__(
        self,
        crew: Crew,
        plan: ResizePlan,
        status: FleetStatus,
        tag: Callable[[], str],
        timeout: float,
        loaded: frozenset[int] = frozenset(),
    ) -> None:
        self._crew, self._plan, self._status, self._tag = crew, plan, status, tag
        self._timeout, self._loaded = timeout, loaded
        self._changes_epoch = plan.placement.epoch != status.epoch
        self._union = tuple(sorted({*plan.members, *plan.leaving}))
        self._moves = [m for m in plan.expert_moves if m.target not in loaded]
        self._landing: dict[int, list[ExpertMove]] = _by(self._moves, lambda m: m.target)
        self._sums: dict[int, dict[int, int]] = {}
        self._parcels: list[Parcel] = []

    def carry_out(self) -> ResizeOutcome:
        """Raises WorkerFailedError when a worker dies, FlexFloorError when the commit cannot be completed."""
        begin = time.monotonic()
        failed: str | None = None
        try:
            self._prepare()
        except PhaseFailedError as error:
            failed = str(error)
            self._crew.call("mover.abort", dict.fromkeys(self._union, ()))
        prepared = time.monotonic()
        if failed is None:
            self._commit()
            if self._plan.leaving:
                self._crew.call("release", dict.fromkeys(self._plan.leaving, ()))
        return self._outcome(prepared - begin, time.monotonic() - prepared, failed)

    # -- prepare: nothing is taken away, so that any failure can be undone -----------------------------------------

    def _prepare(self) -> None:
        plan = self._plan
        returning = [w for w in plan.joining if w not in self._loaded]
        self._call("rejoin", dict.fromkeys(returning, ()))
        self._call("mover.prepare", {w: (self._slots_during(w),) for w in self._union})
        self._parcels = [*self._pack_experts(), *self._pack_requests()]
        if self._parcels:
            everyone = tuple(sorted({p.source for p in self._parcels} | {p.target for p in self._parcels}))
            payload = (self._tag(), everyone, self._parcels, self._timeout)
            self._sums = self._call("mover.transfer", dict.fromkeys(everyone, payload))
            self._compare_sums()
        sourceless = _by((m for m in self._moves if m.source is None), lambda m: m.target)
        loads = {w: ([(m.layer, m.expert, m.slot) for m in own],) for w, own in sourceless.items()}
        self._call("mover.load_from_source", loads)
        if self._changes_epoch and len(plan.members) > 1:
            entry = (self._tag(), plan.placement.epoch, plan.members)
            self._call("mover.connect_next", dict.fromkeys(plan.members, entry))

    def _call(self, verb: str, payloads: dict[int, tuple]) -> dict[int, Any]:
        return self._crew.call(verb, payloads, may_fail=True) if payloads else {}

    def _slots_during(self, worker: int) -> int:
        landing = max((m.slot + 1 for m in self._landing.get(worker, [])), default=0)
        loaded = self._plan.placement.slots_needed(worker) if worker in self._loaded else 0
        return max(self._status.workers[worker].slots, landing, loaded)

    def _pack_experts(self) -> list[Parcel]:
        slot = self._status.placement.slot
        return [
            Parcel("slot", m.source, int(slot[m.layer, m.expert]), m.target, m.slot)
            for m in self._moves
            if m.source is not None
        ]

    def _pack_requests(self) -> list[Parcel]:
        parcels: list[Parcel] = []
        packed: dict[int, list] = defaultdict(list)
        origins: dict[int, list[int]] = defaultdict(list)
        by_source = _by(self._plan.request_moves, lambda m: m.source)
        answers = self._call(
            "mover.pack", {w: ([m.request_id for m in own], [m.with_kv for m in own]) for w, own in by_source.items()}
        )
        for source, own in by_source.items():
            for move, one in zip(own, answers[source], strict=True):
                packed[move.target].append(one)
                origins[move.target].append(source)
        wanted = self._call("mover.make_room", {w: (own,) for w, own in packed.items()})
        for target, requests in wanted.items():
            for source, pages in zip(origins[target], requests, strict=True):
                parcels += [Parcel("page", source, old, target, new) for old, new in pages]
        return parcels

    def _compare_sums(self) -> None:
        for index, parcel in enumerate(self._parcels):
            sent, arrived = self._sums[parcel.source].get(index), self._sums[parcel.target].get(index)
            if sent is None or sent != arrived:
                what = f"{parcel.kind} {parcel.target_index}"
                raise PhaseFailedError(parcel.target, f"{what} did not arrive as it was sent")

    # -- commit: short; what fails here ends the fleet -------------------------------------------------------------

    def _commit(self) -> None:
        plan, changes = self._plan, self._changes_epoch
        leaving = _by(plan.request_moves, lambda m: m.source)
        payloads = {
            w: (
                plan.placement if changes else None,
                self._final_slots(w),
                self._slot_moves(w),
                [m.request_id for m in leaving.get(w, [])],
            )
            for w in self._union
        }
        answers = self._crew.call("mover.commit", payloads)
        self._verify(answers)

    def _final_slots(self, worker: int) -> int:
        if worker in self._plan.leaving:
            return self._status.workers[worker].slots
        return self._plan.placement.slots_needed(worker)

    def _slot_moves(self, worker: int) -> dict[int, int]:
        """Slot in which an expert of `worker` lies after the transfer → slot where the placement has it."""
        if worker in self._plan.leaving or worker in self._loaded:
            return {}
        new, old = self._plan.placement, self._status.placement
        arrived = {(m.layer, m.expert): m.slot for m in self._landing.get(worker, [])}
        moves = {}
        for layer, expert in zip(*(i.tolist() for i in np.nonzero(new.worker == worker)), strict=True):
            here = arrived.get((layer, expert), int(old.slot[layer, expert]))
            if here != new.slot[layer, expert]:
                moves[here] = int(new.slot[layer, expert])
        return moves

    def _verify(self, answers: dict[int, tuple[list[str], bytes]]) -> None:
        """Every live request is on exactly one member, where the plan has it. Raises FlexFloorError."""
        expected: dict[int, set[str]] = {w: set() for w in self._union}
        homes = {m.request_id: m.target for m in self._plan.request_moves}
        for name, (worker, _) in self._status.requests.items():
            expected[homes.get(name, worker)].add(name)
        table = np.ascontiguousarray(self._plan.placement.worker).tobytes()
        for worker, (live, placement) in answers.items():
            if set(live) != expected[worker] or len(live) != len(expected[worker]) or placement != table:
                self._crew.close()
                raise FlexFloorError(f"worker {worker} disagrees with the driver after a resize; the fleet has ended")

    def _outcome(self, prepare_s: float, commit_s: float, failed: str | None) -> ResizeOutcome:
        plan, pages = self._plan, sum(p.kind == "page" for p in self._parcels)
        moves: tuple[RequestMove, ...] = plan.request_moves
        return ResizeOutcome(
            epoch=plan.placement.epoch,
            iteration=self._status.iteration,
            members=plan.members,
            leaving=plan.leaving,
            joining=plan.joining,
            experts=len(self._moves),
            expert_bytes=len(self._moves) * self._status.model.expert_bytes,
            requests=len(moves),
            requests_recomputed=sum(not m.with_kv for m in moves),
            kv_bytes=pages * self._status.page_bytes,
            prepare_s=prepare_s,
            commit_s=commit_s,
            reason=plan.reason,
            left_live=tuple(w for w in plan.leaving if self._status.workers[w].live_requests),
            predicted=plan.predicted,
            failed=failed,
        )


T = TypeVar("T")


def _by(entries: Iterable[T], key: Callable[[T], int]) -> dict[int, list[T]]:
    grouped: dict[int, list[T]] = {}
    for entry in entries:
        grouped.setdefault(key(entry), []).append(entry)
    return grouped
