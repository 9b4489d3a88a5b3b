"""The policy that looks ahead: a start on as many workers as pay, and workers that leave while the others generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from flexfloor.errors import PlanRefusedError
from flexfloor.policy.binding import bind_least_peak, peaks_of
from flexfloor.policy.book import Draw, Live
from flexfloor.policy.planned import LEADS, PlannedPolicy, best_lead, places
from flexfloor.requests import Request
from flexfloor.world.costs import DeviceProfile
from flexfloor.world.lengths.base import Lengths
from flexfloor.world.lookahead import PRICES, Batch, busiest
from flexfloor.world.resize import ResizePlan, plan_shrink
from flexfloor.world.status import FleetStatus

_UNLUCKY = 0.1  # probability of a longest response that is so much shorter that a plan must keep its time still


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to go on: on `workers` workers, fewer later where `price` says so; means over the draws."""

    workers: int
    price: float
    lead: float
    seconds: float
    occupied_s: float


class _Case:
    """What there is to do, on some draws of the forecast, and how long it may take."""

    def __init__(
        self,
        policy: FlexFloorPolicy,
        status: FleetStatus,
        live: Live,
        waiting: np.ndarray,
        draws: Sequence[Draw],
    ) -> None:
        self._policy, self._status, self._ahead = policy, status, policy.ahead(status)
        self._live, self._waiting, self._draws = live, waiting, draws
        self._by_lead: dict[float, list[Batch]] = {}
        self.fewest = max(self._ahead.fewest(b) for b in self._batches(policy.lead))
        whole = [self._ahead.roll(policy.whole(d, status), len(status.workers)).seconds for d in draws]
        before, since = policy.spent(status)
        reference = before + policy.scale * float(np.mean(whole)) * (1 + policy.pauses(status))
        self._limit = reference * (1 + policy.max_slowdown) - before - since
        self.stay = self.option(len(status.active), policy.lead, np.inf)

    def _batches(self, lead: float) -> list[Batch]:
        if lead not in self._by_lead:
            rows, page = self._policy.in_order(self._waiting, lead), self._status.page_tokens
            self._by_lead[lead] = [self._policy.batch(self._live, rows, d, page) for d in self._draws]
        return self._by_lead[lead]

    def takes_all(self, workers: int) -> bool:
        """Whether so many workers take in at once all that waits."""
        return all(self._ahead.takes_all(batch, workers) for batch in self._batches(self._policy.lead))

    def option(self, workers: int, lead: float, price: float) -> _Option:
        """To go on on so many workers; those that are active are kept at least until the next decision."""
        policy, active = self._policy, len(self._status.active)
        changes = workers < active
        hold = 0.0 if changes else float(policy.next_decision(self._status))
        found = [self._ahead.roll(b, workers, price=price, hold=hold) for b in self._batches(lead)]
        stall = policy.stall_s(workers, self._status) if changes else 0.0  # also before the first token
        seconds = policy.scale * float(np.mean([o.seconds for o in found])) + stall
        occupied = policy.scale * float(np.mean([o.occupied_s for o in found])) + active * stall
        return _Option(workers, price, lead, seconds, occupied)

    def keeps(self, option: _Option) -> bool:
        """Whether the time limit is kept, or as nearly as by not changing anything."""
        return option.seconds <= max(self._limit, self.stay.seconds)


class FlexFloorPolicy(PlannedPolicy):
    """Consolidates live requests on fewer and fewer workers, as far as time allows.

    At each decision, what is left is rolled forward on every size of group that memory allows, with later shrinks
    under a range of prices of time, on several draws of the forecast. Of those by which the whole rollout takes at most
    1 + max_slowdown times as long as on all workers from its start, the least occupied one is taken; who has the most
    KV stays. Nobody leaves unless the worker-seconds saved are more than those that the change stalls.
    """

    def __init__(
        self,
        lengths: Lengths,
        profile: DeviceProfile,
        max_slowdown: float,
        min_workers: int = 1,
        time_scale: float = 1.0,
    ) -> None:
        super().__init__(lengths, profile, "flexfloor", time_scale)
        self.max_slowdown, self._min_workers = max_slowdown, min_workers
        self._lead_of_all = 0.0
        self._start = 0.0
        self._origin: tuple[float, np.ndarray, np.ndarray] | None = None  # clock, generated and rows at that time

    def take(self, queue: Sequence[Request], status: FleetStatus) -> bool:
        arrived = super().take(queue, status)
        if arrived:
            self._begin(status)
            self._start = status.clock_s
            self._next = 0
        return arrived

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        self.take(queue, status)
        self.settle(status)
        if not self.book.waiting and status.live == 0:
            return None
        full = self.is_full(status)
        if self.is_due(status):
            return self._shrink(status) or self.even_out(status, full)
        return self.even_out(status, full) if full else None

    def _begin(self, status: FleetStatus) -> None:
        """From here on, and with what is there to do now, the slowdown is reckoned."""
        live = self.book.live(status)
        rows = np.concatenate([live.rows, np.array(self.book.waiting, dtype=np.int64)])
        done = np.concatenate([live.generated, np.zeros(len(self.book.waiting), dtype=np.int64)])
        self._origin = (status.clock_s, done, rows)
        self._lead_of_all = self.lead  # which is for all workers

    def spent(self, status: FleetStatus) -> tuple[float, float]:
        """Seconds from the start to the origin, and from there to now."""
        assert self._origin is not None
        return self._origin[0] - self._start, status.clock_s - self._origin[0]

    def pauses(self, status: FleetStatus) -> float:
        """Share of the time that moves without a change of the group have taken; all workers would pay it too."""
        return self.paused_s / max(status.clock_s - self._start - self.paused_s, self.paused_s, 1e-9)

    def next_decision(self, status: FleetStatus) -> int:
        """Iterations until the next decision."""
        return max(self._next - status.iteration, 1)

    def _shrink(self, status: FleetStatus) -> ResizePlan | None:
        active = len(status.active)
        if active <= self._min_workers or self._origin is None:
            return None
        self.ahead(status).time_scale = self.scale
        if active == len(status.workers):
            self._begin(status)  # nothing is lost so far, whatever look-ahead has said
        live, waiting = self.book.live(status), np.array(self.book.waiting, dtype=np.int64)
        leads = tuple(LEADS) if status.iteration == 0 and len(waiting) else (self.lead,)
        expected = _Case(self, status, live, waiting, self.book.draws()[:1] if self.book.certain else self.book.draws())

        @cache  # only asked of what is better than to stay
        def sooner() -> _Case:
            """Time that a small group wins back at the end is not there when the end comes sooner than is foreseen,
            because the longest ones are shorter; which of a few is likely and of many is not."""
            cut = _UNLUCKY ** (1 / max(len(live.rows) + len(waiting), 1))
            return _Case(self, status, live, waiting, (Draw(cut=cut),))

        best: _Option | None = None
        smaller = [
            m for m in self.ahead(status).sizes.tolist() if max(self._min_workers, expected.fewest) <= m < active
        ]
        for workers in (*smaller, active):
            if workers == active and best is None:
                break
            choice = leads[:1] if len(leads) > 1 and expected.takes_all(workers) else leads
            plain = {lead: expected.option(workers, lead, np.inf) for lead in choice}
            lead = best_lead({lead: option.seconds for lead, option in plain.items()})
            for price in (np.inf, *reversed(PRICES)):
                option = plain[lead] if price == np.inf else expected.option(workers, lead, price)
                if not expected.keeps(option):
                    break
                if best is not None and option.occupied_s >= best.occupied_s:
                    continue
                if self.book.certain or sooner().keeps(sooner().option(workers, lead, price)):
                    best = option
        return None if best is None or best.workers == active else self._plan(best, expected.stay, status)

    def whole(self, draw: Draw, status: FleetStatus) -> Batch:
        """All that there was to do at the origin, by what is known now."""
        assert self._origin is not None
        _, done, rows = self._origin
        totals = self.book.total[rows].astype(np.float64)
        now = np.zeros(len(self.book.total), dtype=np.int64)
        live = self.book.live(status)
        now[live.rows] = live.generated
        open_ = totals < 0
        totals[open_] = now[rows[open_]] + self.book.left(rows[open_], now[rows[open_]], draw)
        left, tokens = np.maximum(totals - done, 1.0), self.book.prompt[rows] + done + float(status.page_tokens)
        begun = done > 0
        waits = np.nonzero(~begun)[0]
        place = np.empty(len(self.book.total), dtype=np.int64)
        place[rows[waits]] = waits
        waits = place[self.in_order(rows[waits], self._lead_of_all)]
        return Batch(tokens[begun], left[begun], tokens[waits], left[waits], tokens[waits], self.book.siblings)

    def stall_s(self, workers: int, status: FleetStatus) -> float:
        """Seconds of the fleet that a change to so many workers takes."""
        kv = sum(w.kv_pages_used for w in status.active_workers()) * status.page_tokens
        return self.ahead(status).stall_s(len(status.active), workers, float(kv))

    def _plan(self, option: _Option, stay: _Option, status: FleetStatus) -> ResizePlan | None:
        """The plan by which `option.workers` stay, or some more where what is live does not fit on those."""
        saved = stay.occupied_s - option.occupied_s
        if saved <= 0 or not self._pays(option.workers, status):
            return None
        by_kv = sorted(status.active, key=lambda w: (-status.workers[w].kv_pages_used, w))
        for count in range(option.workers, len(status.active)):
            stay_on = sorted(by_kv[:count])
            homes = self._homes(stay_on, status)
            if homes is None:
                continue
            predicted = {
                "stall_s": self.stall_s(count, status),
                "remaining_s": option.seconds - self.stall_s(option.workers, status),
                "remaining_occupied_s": option.occupied_s,
                "saved_worker_s": saved,
            }
            enough = f"{count} {'is' if count == 1 else 'are'} enough"
            reason = f"{enough} for what is left; saves {saved:.3g} worker-s of {stay.occupied_s:.3g}"
            try:
                plan = plan_shrink(status, sorted(by_kv[count:]), homes, reason, predicted)
            except PlanRefusedError:
                continue
            self.lead = option.lead
            return plan
        return None

    def _pays(self, workers: int, status: FleetStatus) -> bool:
        """Whether leaving now is worth its stall by the time that half of what is live has ended."""
        if status.iteration == 0:
            return True
        live, active = self.book.live(status), len(status.active)
        if not len(live.rows):
            return True
        left = float(np.median(self.book.left(live.rows, live.generated)))
        tokens, count = float(live.tokens.sum()), len(live.rows)
        now, then = (self._pooled_s(m, count, tokens, status) for m in (active, workers))
        saved = self.scale * (active * now - workers * then) * left
        return saved > active * self.stall_s(workers, status)

    def _pooled_s(self, workers: int, live: int, tokens: float, status: FleetStatus) -> float:
        """An iteration of so many requests that hold `tokens` tokens, spread evenly."""
        batch, kv = busiest(workers, live, tokens, False)
        return float(self.cost(status).seconds(workers, batch, live, kv))

    def _homes(self, members: Sequence[int], status: FleetStatus) -> dict[str, int] | None:
        """Homes of the requests of those who leave, the largest first, where they leave the most room; None when the
        forecast peaks do not fit."""
        live = self.book.live(status)
        left = self.book.left(live.rows, live.generated)
        here, slots = places(members, status)[live.worker], -(-status.placement.worker.size // len(members))
        limit = np.array(
            [status.pages_beside(w, max(slots, status.workers[w].slots)) * status.page_tokens for w in members], float
        )
        movers = np.nonzero(here < 0)[0]
        movers = movers[np.argsort(-live.tokens[movers], kind="stable")]
        stays = here >= 0
        homes = bind_least_peak(
            live.tokens[stays], left[stays], here[stays], live.tokens[movers], left[movers], limit,
            status.max_batch, 0.0, 0, True,
        )  # fmt: skip
        if (homes < 0).any():
            return None
        here[movers] = homes
        if (peaks_of(live.tokens, left, here, len(members)) > limit).any():
            return None
        names = status.live_requests.ids
        return {names[i]: members[here[i]] for i in movers.tolist()}
