"""Scheduling by forecast lengths: one queue, bound late, in the order that looks best, and live requests evened out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flexfloor.errors import PlanRefusedError
from flexfloor.policy.binding import bind_least_peak, even_out
from flexfloor.policy.book import Book, Draw, Live, tokens_of
from flexfloor.progress import Decision, LengthForecast, Progress
from flexfloor.requests import Request
from flexfloor.world.costs import DeviceProfile, IterationCost
from flexfloor.world.lengths.base import Lengths
from flexfloor.world.lookahead import Batch, LookAhead
from flexfloor.world.resize import ResizePlan, plan_moves
from flexfloor.world.status import FleetStatus

_FULL = 0.97  # of a worker's KV memory that a forecast peak may fill
_RESERVE = 0.05  # by which forecasts are raised for admission
_WARY = 0.1  # of that memory which is kept free of forecasts as long as no response has ended
_LEARNT = 0.5  # share of the responses that have ended when nothing is kept free any more
_SKIPS = 32  # requests that shorter ones may pass while they do not fit
_AHEAD = 2.0  # intervals between looks that a worker is given requests for
_UNEVEN = 0.04  # load above the mean that is evened out
_NEXT_PAGES = 2  # of a request, that a worker should have free
_SPARE = 0.1  # of the pages of a worker, free on another one
_LASTING = 6.0  # intervals between decisions for which a gain by moves is counted
_MOVE_GAIN = 2.0  # seconds gained for each one that moves take
LEADS = {
    0.0: "in order of arrival",
    0.5: "longer ones a little earlier",
    1.0: "longer ones earlier",
    np.inf: "longest first",
}  # weight of being long against having arrived early
_ORDER_GAIN = 0.01  # share of the time by which another order than that of arrival must be faster
_SETTLE = 0.1  # weight of the newest look in the ratio of real to predicted time
_LOOKS = 0.02  # of the iterations so far and to come, between two decisions


def best_lead(seconds: Mapping[float, float]) -> float:
    """seconds: by lead, those of a rollout. Another order than that of arrival must gain something."""
    return min(seconds, key=lambda lead: seconds[lead] * (1 - _ORDER_GAIN * (lead == 0)))


def places(members: Sequence[int], status: FleetStatus) -> np.ndarray:
    """Place of each worker of the fleet in `members`, -1 of others: int64 [workers]."""
    place = np.full(len(status.workers), -1)
    place[list(members)] = np.arange(len(members))
    return place


class PlannedPolicy:
    """All workers stay.

    Waiting requests go, while their forecast peak of KV fits, to the worker with the most room beside its own forecast
    peak. Their order, that of arrival or the longest first, is the one that is faster by look-ahead. Live requests move
    when one worker's KV sets the pace and moving takes less than it gains.
    """

    def __init__(
        self, lengths: Lengths, profile: DeviceProfile, name: str = "planned", time_scale: float = 1.0
    ) -> None:
        self.name = name
        self.scale = time_scale  # seconds of the fleet for one of the cost model
        self.book = Book(lengths)
        self._profile = profile
        self._cost: IterationCost | None = None
        self._ahead: LookAhead | None = None
        self._settled, self._first = False, True
        self._still = -1  # requests that waited at the last look
        self._next = 0  # iteration of the next decision
        self._interval = 16  # iterations between two looks
        self.lead = 0.0  # order of what waits, one of LEADS
        self.paused_s = 0.0  # what moves are expected to have taken
        self._decisions: list[Decision | LengthForecast] = []

    def admit(self, queue: Sequence[Request], status: FleetStatus) -> dict[int, list[str]]:
        self.take(queue, status)
        if not self.book.waiting:
            return {}
        workers, live = self.workers(status), self.book.live(status)
        place = places(workers, status)
        here = place[live.worker] >= 0
        rows = self.in_order(np.array(self.book.waiting), self.lead)
        limit = self.limits(workers, status) * (1 - self._wariness())
        homes = bind_least_peak(
            live.tokens[here],
            self.book.left(live.rows[here], live.generated[here], reserve=_RESERVE),
            place[live.worker[here]],
            self.book.prompt[rows] + float(status.page_tokens),
            self.book.left(rows, np.zeros(len(rows), dtype=np.int64), reserve=_RESERVE),
            limit,
            status.max_batch,
            _AHEAD * self._interval,
            _SKIPS,
            False,
        )
        bound = homes >= 0
        self.book.bind(rows[bound].tolist())
        assignment: dict[int, list[str]] = {}
        for row, home in zip(rows[bound].tolist(), homes[bound].tolist(), strict=True):
            assignment.setdefault(workers[home], []).append(self.book.requests[row].request_id)
        return assignment

    def _wariness(self) -> float:
        """Share of the memory that is kept free because forecasts may be wrong, all in one direction. What is bound
        stays, and forecasts get better while responses end, so that the first ones to be bound are the most at risk."""
        if self.book.certain:
            return 0.0
        return _WARY * max(1 - self.book.ended / _LEARNT, 0.0)

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        self.take(queue, status)
        self.settle(status)
        if status.live == 0:
            return None
        full = self.is_full(status)
        return self.even_out(status, full) if self.is_due(status) or full else None

    def take(self, queue: Sequence[Request], status: FleetStatus) -> bool:
        """Note what has arrived, whichever verb sees it first. Returns whether something has."""
        arrived = self.book.take(queue)
        if arrived:
            self.note_forecast()
            self._choose_order(status)
        return arrived

    def note_forecast(self) -> None:
        """For the ledger, what is expected of the requests that arrived last; nothing where lengths are known."""
        if (forecast := self.book.first_forecast()) is not None:
            self._decisions.append(forecast)

    def observe(self, progress: Progress) -> None:
        self.book.observe(progress)
        self._interval = progress.iterations

    def take_decisions(self) -> list[Decision | LengthForecast]:
        taken, self._decisions = self._decisions, []
        return taken

    def workers(self, status: FleetStatus) -> tuple[int, ...]:
        """Those that requests are bound to."""
        return status.active

    def settle(self, status: FleetStatus) -> None:
        """How much longer an iteration takes than one of this batch on the device of the profile."""
        if not status.live or status.iteration_s <= 0:
            return
        table, workers = status.live_requests, len(status.active)
        here = places(status.active, status)[table.worker]
        ratio = status.iteration_s / self._iteration_s(tokens_of(status), here, workers, status)
        if self._still == len(self.book.waiting) and table.decoding.all():
            self.scale += (ratio - self.scale) * (_SETTLE if self._settled else 1.0)
            self._settled = True
        elif not self._settled:  # prompts were computed too, which only makes it longer
            self.scale = ratio if self._first else min(self.scale, ratio)
        self._still, self._first = len(self.book.waiting), False

    def limits(self, workers: Sequence[int], status: FleetStatus) -> np.ndarray:
        """KV tokens that each of `workers` may be planned to hold: float64 [workers]."""
        return np.array([status.workers[w].kv_pages * status.page_tokens * _FULL for w in workers])

    def is_due(self, status: FleetStatus) -> bool:
        """Whether to decide now; looks get rarer as the rollout gets longer."""
        if status.iteration < self._next:
            return False
        live = self.book.live(status)
        ahead = float(np.median(self.book.left(live.rows, live.generated))) if len(live.rows) else 0.0
        self._next = status.iteration + int(_LOOKS * (status.iteration + ahead))
        return True

    def cost(self, status: FleetStatus) -> IterationCost:
        if self._cost is None:
            self._cost = IterationCost(self._profile, status.timed_model)
        return self._cost

    def ahead(self, status: FleetStatus) -> LookAhead:
        """Look-ahead on this fleet, whoever is active."""
        if self._ahead is None:
            arena = min(w.arena_bytes for w in status.workers if w.arena_bytes)

            def capacity(workers: int) -> float:
                slots = -(-status.placement.worker.size // workers)
                return (arena - slots * status.model.expert_bytes) // status.page_bytes * status.page_tokens

            self._ahead = LookAhead(
                self.cost(status),
                capacity,
                len(status.workers),
                max_batch=status.max_batch,
                prefill_tokens=status.prefill_tokens,
                longest=status.longest_tokens + status.page_tokens,
                moves=status.move_costs,
                moved=status.model,
            )
        return self._ahead

    def batch(self, live: Live, waiting: np.ndarray, draw: Draw, page_tokens: int) -> Batch:
        """What is to be done, by one draw of the forecast; `waiting` are rows, in the order they will be taken in."""
        return Batch(
            live.tokens,
            self.book.left(live.rows, live.generated, draw),
            self.book.prompt[waiting] + float(page_tokens),
            self.book.left(waiting, np.zeros(len(waiting), dtype=np.int64), draw),
            self.book.prompt[waiting].astype(np.float64),
            self.book.siblings,
        )

    def in_order(self, rows: np.ndarray, lead: float) -> np.ndarray:
        """Waiting rows in the order in which they are taken in. lead: one of LEADS."""
        if lead == 0:
            return rows
        rank = np.empty(len(rows))
        rank[np.argsort(-self.book.expected(rows), kind="stable")] = np.arange(len(rows))
        arrival = np.arange(len(rows)) if lead < np.inf else 0.0
        return rows[np.argsort(arrival + min(lead, 1.0) * rank, kind="stable")]

    def _choose_order(self, status: FleetStatus) -> None:
        """The order of what waits now, by rolling both forward on the workers that requests are bound to."""
        rows, live, ahead = np.array(self.book.waiting), self.book.live(status), self.ahead(status)
        workers, seconds = len(self.workers(status)), {}
        for lead in LEADS:
            ordered = self.in_order(rows, lead)
            batches = [self.batch(live, ordered, d, status.page_tokens) for d in self.book.draws()]
            seconds[lead] = self.scale * float(np.mean([ahead.roll(batch, workers).seconds for batch in batches]))
            if lead == 0 and all(ahead.takes_all(batch, workers) for batch in batches):
                break
        self.lead = best_lead(seconds)
        told = (
            "all fit at once" if len(seconds) == 1 else ", ".join(f"{s:.4g} s {LEADS[e]}" for e, s in seconds.items())
        )
        reason = f"{LEADS[self.lead]}, by look-ahead on {workers} workers: {told}"
        self._decisions.append(Decision("order", reason, {"remaining_s": seconds[self.lead]}))

    def is_full(self, status: FleetStatus) -> bool:
        """Whether a worker is about to run out of pages, and preempt, while another one has some to spare."""
        spare = [
            w.kv_pages_free - _NEXT_PAGES * w.live_requests for w in status.active_workers() if w.live_requests > 1
        ]
        return bool(spare) and min(spare) < 0 and max(spare) > _SPARE * max(w.kv_pages for w in status.active_workers())

    def even_out(self, status: FleetStatus, full: bool = False) -> ResizePlan | None:
        """Moves from the fullest workers to the emptiest, where that pays, or where one is full; the group stays."""
        workers = status.active
        if len(workers) < 2:
            return None
        live = self.book.live(status)
        here, limit = places(workers, status)[live.worker], self.limits(workers, status)
        left = self.book.left(live.rows, live.generated)
        homes = even_out(live.tokens, left, here, live.decoding, limit, status.max_batch, _UNEVEN)
        moving = np.nonzero(homes != here)[0]
        if not len(moving):
            return None
        before, after = (self.scale * self._iteration_s(live.tokens, h, len(workers), status) for h in (here, homes))
        # Evenness lasts until others end, not for as long as what is live.
        lasting = min(float(np.median(left)), _LASTING * max(self._next - status.iteration, 1))
        gain = (before - after) * lasting if not full else np.inf
        bytes_out = np.bincount(here[moving], live.own_pages[moving] * status.page_bytes).max()
        stall = status.move_costs.pause_s + bytes_out / status.move_costs.bytes_per_s
        if gain <= _MOVE_GAIN * stall:
            return None
        names = status.live_requests.ids
        plan = {names[i]: workers[homes[i]] for i in moving.tolist()}
        reason = f"{len(plan)} requests to emptier workers; iterations {1e3 * before:.3g} → {1e3 * after:.3g} ms"
        if full:
            reason = f"{len(plan)} requests to emptier workers, before a full one preempts"
        try:
            moves = plan_moves(status, plan, reason, {"stall_s": stall} | ({} if full else {"saved_s": gain}))
        except PlanRefusedError:
            return None
        self.paused_s += stall
        return moves

    def _iteration_s(self, tokens: np.ndarray, place: np.ndarray, workers: int, status: FleetStatus) -> float:
        batch = np.bincount(place, minlength=workers)
        kv = np.bincount(place, tokens, minlength=workers)
        return float(self.cost(status).seconds(workers, batch.max(), batch.sum(), kv.max()))
