"""Looking ahead: how long a batch would take from here, and what it would occupy, on so many workers.

The batch is pooled: all workers together hold what is live, perfectly balanced, and requests move for free between
them; what differs from worker to worker is `world.batch`'s. Time goes in steps of some iterations, in which ends of
requests are counted by bins, so that a look costs steps, not tokens or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flexfloor.progress import ModelShape
from flexfloor.world.costs import IterationCost, MoveCosts, seconds_core
from flexfloor.world.jit import numba

_BINS = 192  # steps that the longest remaining response is divided into
_RING = 512
_SKIPS = 32  # waiting requests that shorter ones may pass, as the planner has it
_UNEVEN, _LUMP = 0.03, 0.55  # KV of the fullest worker above the mean: share of that, and requests of mean size
_BURST = 2.0  # prompt tokens of the busiest worker over the mean
_FILL = 0.97  # of the KV memory that is ever planned to be full
_HALVINGS = 6  # of the gap between two prices, by which the reference gets near the limit


@dataclass(frozen=True)
class Batch:
    """Requests as look-ahead sees them, float64 arrays.

    kv, left: of each live one, tokens it holds and those it still generates. wait_kv, wait_left: of each waiting one,
    in the order in which they are taken in: tokens it holds once it is computed, and those it generates after that.
    wait_prefill: tokens to compute for it where no sibling has computed them; siblings: requests of a prompt, on
    average, of which those on one worker compute it once.
    """

    kv: np.ndarray
    left: np.ndarray
    wait_kv: np.ndarray
    wait_left: np.ndarray
    wait_prefill: np.ndarray
    siblings: float = 1.0

    @property
    def longest(self) -> float:
        """Most iterations that one of the requests still takes."""
        return float(max(self.left.max(initial=0.0), self.wait_left.max(initial=0.0)))


@dataclass(frozen=True, slots=True)
class Outlook:
    """seconds to the end, worker-seconds occupied until then, workers at the end, iterations."""

    seconds: float
    occupied_s: float
    last_workers: int
    iterations: float


class LookAhead:
    """What a fleet of up to `most` workers would do with a batch.

    capacity: workers → KV tokens that each one holds beside its share of the experts. sizes: group sizes that are
    considered, those of `group_sizes` with room for one request of `longest` tokens.
    moves: what a change of the group takes; None for free ones, by which KV is perfectly even too. moved: the model
    whose experts and KV move, where it is not the one that iterations take their time from. time_scale: seconds in
    which moves are told for one of the cost model; may be set anew.
    """

    def __init__(
        self,
        cost: IterationCost,
        capacity: Callable[[int], float],
        most: int,
        *,
        max_batch: int,
        prefill_tokens: int,
        longest: float,
        moves: MoveCosts | None = None,
        moved: ModelShape | None = None,
    ) -> None:
        self.cost = cost
        self.time_scale = 1.0
        found = {m: capacity(m) for m in group_sizes(most)}
        kept = [m for m in sorted(found) if found[m] >= longest] or [most]
        self.sizes = np.array(kept, dtype=np.int64)
        self._caps = np.array([m * capacity(m) * _FILL for m in kept])
        self._max_batch, self._prefill = float(max_batch), float(prefill_tokens)
        shape = moved or cost.shape
        self._moves = np.zeros(3)
        self._scattered = moves is not None
        if moves is not None:
            rate = moves.bytes_per_s
            self._moves[:] = moves.switch_s, shape.all_expert_bytes / rate, shape.kv_token_bytes / rate

    def stall_s(self, before: int, after: int, kv_tokens: float) -> float:
        """Seconds, by the clock of `moves`, that a change from `before` to `after` workers stalls all."""
        return float(_stall(self._moves, before, after, kv_tokens))

    def fewest(self, batch: Batch) -> int:
        """The smallest size that holds what is live, now and as it grows."""
        fits = (self._caps >= _peak(batch.kv, batch.left)) & (self.sizes * self._max_batch >= len(batch.left))
        return int(self.sizes[fits][0]) if fits.any() else int(self.sizes[-1])

    def takes_all(self, batch: Batch, workers: int) -> bool:
        """Whether so many workers hold all that waits beside what is live, at once and as it grows, so that the order
        in which it is taken in does not matter."""
        index = self._index(workers)
        left = np.concatenate([batch.left, batch.wait_left])
        if len(left) > self.sizes[index] * self._max_batch:
            return False
        return bool(_peak(np.concatenate([batch.kv, batch.wait_kv]), left) <= self._caps[index])

    def _index(self, workers: int) -> int:
        """Of the largest size up to `workers`, else of the smallest one."""
        return max(int(np.searchsorted(self.sizes, workers, side="right")) - 1, 0)

    def roll(
        self,
        batch: Batch,
        workers: int,
        *,
        price: float = np.inf,
        hold: float = 0.0,
        bins: int = _BINS,
    ) -> Outlook:
        """Run `batch` from here on `workers` workers (the largest size up to that).

        price: worker-seconds that a second of the rollout is worth; the group shrinks where that lowers
        (workers + price) · time by more than the change costs, and with an infinite price never. hold: iterations
        before it may. Nobody leaves while requests wait.
        """
        index = self._index(workers)
        width = max(1.0, batch.longest / bins)
        # Siblings go to workers as if drawn by lot; a burst of prompts is not as even as what decodes.
        m = float(self.sizes[index])
        shares = m * (1 - (1 - 1 / m) ** batch.siblings) / batch.siblings if self._scattered else 1 / batch.siblings
        prefill = batch.wait_prefill * shares
        seconds, occupied, last, iterations = _roll(
            self.cost.coefficients, self.cost.latency, self.sizes, self._caps, index,
            self._moves / self.time_scale,
            batch.kv, batch.left, batch.wait_kv, batch.wait_left, prefill,
            price, hold, self._max_batch, self._prefill, width,
        )  # fmt: skip
        return Outlook(seconds, occupied, int(last), iterations)


def _peak(kv: np.ndarray, left: np.ndarray) -> float:
    """Most tokens that requests hold at once: each its `kv`, and one more in every iteration until it ends."""
    order = np.argsort(left)
    count = np.arange(len(order), 0, -1)
    return float((np.cumsum(kv[order][::-1])[::-1] + count * left[order]).max(initial=0.0))


def group_sizes(most: int) -> list[int]:
    """Sizes worth a look in a fleet of `most` workers: all small ones, then sixteenths of the fleet."""
    return sorted(set(range(1, min(most, 16) + 1)) | {-(-most * k // 16) for k in range(1, 17)})


# Compiled for these types when the module is loaded (or taken from the cache): no rollout waits for a compiler.
@numba.njit("Tuple((f8, f8))(f8, f8, f8, b1)", cache=True, error_model="numpy")
def busiest(workers, live, kv, perfect):
    """(requests, KV tokens) of the busiest worker, when requests are spread as evenly as pays: whole requests, which
    end at random, so that there is always one more here than there. perfect: KV is the same on all."""
    if live <= workers:
        return min(live, 1.0), kv / max(live, 1.0)
    even = kv / workers
    return np.ceil(live / workers - 1e-9), even if perfect else (1 + _UNEVEN) * even + _LUMP * kv / live


@numba.njit("f8(f8[::1], f8[:, ::1], f8, f8, f8, b1)", cache=True, error_model="numpy")
def _seconds(c, latency, workers, live, kv, perfect):
    """One iteration of a pooled batch without prefill. live, kv: on average in all."""
    per, kv_max = busiest(workers, live, kv, perfect)
    return seconds_core(c, latency, float(workers), per, live, kv_max, 0.0, 0.0, per)


@numba.njit("f8(f8[::1], f8, f8, f8)", cache=True, error_model="numpy")
def _stall(moves, before, after, kv):
    """Seconds of a change of the group: its fixed part, and the share of experts and KV that one worker moves: one
    that leaves sends all it has, one that stays takes in what it will have more. kv: tokens of all."""
    if moves[0] == 0.0 and moves[1] == 0.0:
        return 0.0
    return moves[0] + max(1 / before, 1 / after - 1 / before) * (moves[1] + moves[2] * kv)


@numba.njit(
    "Tuple((f8, f8, i8, f8))(f8[::1], f8[:, ::1], i8[::1], f8[::1], i8, f8[::1], f8[::1], f8[::1], f8[::1], f8[::1],"
    " f8[::1], f8, f8, f8, f8, f8)",
    cache=True,
    error_model="numpy",
)
def _roll(
    c, latency, sizes, caps, index, moves, kv, left, wait_kv, wait_left, wait_prefill, price, hold, max_batch, budget, w
):
    count = np.zeros(_RING)  # of the requests that end in a bin
    base = np.zeros(_RING)  # Σ (tokens − time) of these: tokens at time t are base + count · t
    ends = np.zeros(_RING)  # Σ of their end times
    usage = np.zeros(_RING)  # tokens of all live ones at the end of a bin
    peak = np.zeros(_RING)  # most of these from a bin on
    total, total_base, last_end, total_ends = 0.0, 0.0, 0.0, 0.0
    for i in range(len(kv)):
        b = int(np.ceil(left[i] / w - 1e-9)) - 1
        b = min(max(b, 0), _RING - 1)
        count[b] += 1
        base[b] += kv[i]
        ends[b] += left[i]
        total += 1
        total_base += kv[i]
        total_ends += left[i]
        last_end = max(last_end, left[i])
    after, after_base = 0.0, 0.0
    for b in range(_RING - 1, -1, -1):
        after += count[b]
        after_base += base[b]
        usage[b] = after_base + after * (b + 1) * w if after > 0 else 0.0
    perfect = moves[0] == 0.0 and moves[1] == 0.0  # with free moves
    seconds, occupied, iterations = 0.0, 0.0, 0.0
    head, waiting, step = 0, len(wait_kv), 0
    taken = np.zeros(waiting, dtype=np.bool_)
    peaks_known = False
    while total > 0.5 or head < waiting:
        t0 = step * w
        m = sizes[index]
        computed = 0.0
        at, skipped = head, 0
        while at < waiting and skipped <= _SKIPS:  # take in what fits
            if total >= m * max_batch:
                break
            if taken[at]:
                at += 1
                continue
            have = wait_kv[at]
            end = t0 + wait_left[at]
            last = max(int(np.ceil(end / w - 1e-9)) - 1, step)
            fits = True
            for b in range(step, last + 1):
                if total > 0 and usage[b % _RING] + have - t0 + (b + 1) * w > caps[index]:
                    fits = False
                    break
            if not fits:
                skipped += 1
                at += 1
                continue
            for b in range(step, last + 1):
                usage[b % _RING] += have - t0 + (b + 1) * w
            place = last % _RING
            count[place] += 1
            base[place] += have - t0
            ends[place] += end
            total += 1
            total_base += have - t0
            total_ends += end
            last_end = max(last_end, end)
            computed += wait_prefill[at]
            taken[at] = True
            at += 1
        while head < waiting and taken[head]:
            head += 1
        here = step % _RING
        span = w
        if head == waiting:
            span = min(w, max(last_end - t0, 1e-9))
            if not peaks_known:
                most = 0.0
                for b in range(step + _RING - 1, step - 1, -1):
                    most = max(most, usage[b % _RING])
                    peak[b % _RING] = most
                peaks_known = True
        ending, ending_base, ending_ends = count[here], base[here], ends[here]
        alive = min(max((ending_ends - ending * t0) / span, 0.0), ending)  # of those that end here, on average
        live = total - ending + alive
        middle = t0 + span / 2
        tokens = total_base - ending_base + (total - ending) * middle
        if ending > 0:
            tokens += alive / ending * ending_base + alive * (t0 + span / 4)
        now = _seconds(c, latency, m, live, tokens, perfect)
        if head == waiting and price < np.inf and t0 >= hold and index > 0:
            rest = max(total_ends / total - t0, span)
            best, best_gain = index, 0.0
            for j in range(index):
                if caps[j] < peak[here] or total > sizes[j] * max_batch:
                    continue
                then = _seconds(c, latency, sizes[j], live, tokens, perfect)
                gain = ((m + price) * now - (sizes[j] + price) * then) * rest
                gain -= (m + price) * _stall(moves, m, sizes[j], tokens)
                if gain > best_gain:
                    best, best_gain = j, gain
            if best != index:
                stall = _stall(moves, m, sizes[best], tokens)
                seconds += stall
                occupied += m * stall
                index = best
                m = sizes[index]
                now = _seconds(c, latency, m, live, tokens, perfect)
        spent = now * span
        if computed > 0:
            passes = max(1.0, np.ceil(computed / m / budget))
            each = computed / passes
            per, kv_max = busiest(m, live, tokens, perfect)
            most = each / m * (1.0 if perfect else min(_BURST, float(m)))
            with_it = seconds_core(c, latency, float(m), per, live, kv_max, most, each, per + most)
            spent += passes * max(with_it - now, 0.0)
        seconds += spent
        occupied += m * spent
        iterations += span
        total -= ending
        total_base -= ending_base
        total_ends -= ending_ends
        count[here] = base[here] = ends[here] = usage[here] = 0.0
        step += 1
    return seconds, occupied, sizes[index], iterations


def clairvoyant(
    ahead: LookAhead, prompt_tokens: np.ndarray, lengths: np.ndarray, prefill: np.ndarray, limit_s: float
) -> Outlook | None:
    """The least occupied schedule that looks possible in `limit_s` seconds with every length known.

    Longest first, perfectly balanced, moves and changes of the group free (`ahead` without `moves`), at each step the
    group size that lowers (workers + price) · time the most, never a larger one than before; the best over start sizes
    and prices. None where none keeps the limit. prompt_tokens, lengths, prefill: float64 [n], as in `Batch`.
    A reference, not a bound: it takes in requests in one order only.
    """
    order = np.argsort(-lengths, kind="stable")
    empty = np.zeros(0)
    batch = Batch(empty, empty, prompt_tokens[order], lengths[order], prefill[order])
    kept: list[Outlook] = []
    for workers in ahead.sizes.tolist():
        rolled = {price: ahead.roll(batch, workers, price=price, bins=256) for price in PRICES}
        kept += [o for o in rolled.values() if o.seconds <= limit_s]
        # The best price lies between one that misses the limit and one that keeps it.
        slow = max((p for p, o in rolled.items() if o.seconds > limit_s), default=0.0)
        fast = min((p for p, o in rolled.items() if o.seconds <= limit_s), default=0.0)
        for _ in range(_HALVINGS if slow < fast else 0):
            middle = (max(slow, 0.1) * fast) ** 0.5
            found = ahead.roll(batch, workers, price=middle, bins=256)
            if found.seconds <= limit_s:
                kept.append(found)
                fast = middle
            else:
                slow = middle
    return min(kept, key=lambda outlook: outlook.occupied_s, default=None)


PRICES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 512.0, 1e9)
"""Prices of a second, in worker-seconds, that plans are compared under."""
