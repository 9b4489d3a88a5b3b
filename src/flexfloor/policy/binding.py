"""Which worker takes which request: compiled loops over arrays, the same for every caller and fleet size.

Compiled for these types when the module is loaded (or taken from the cache): no rollout waits for a compiler.
"""

from __future__ import annotations

import numpy as np

from flexfloor.world.jit import numba

_TRIES = 4  # workers that are asked to take a request, the emptiest first


@numba.njit("f8(f8[::1], f8[::1], i8)", cache=True, error_model="numpy")
def _peak(tokens, left, count):
    """Most tokens that requests hold together from now on; sorted by `left`, the shortest first. Each gains one an
    iteration and gives all back at its end: the most are held just before one ends."""
    held, most = 0.0, 0.0
    for i in range(count - 1, -1, -1):
        held += tokens[i]
        most = max(most, held + (count - i) * left[i])
    return most


@numba.njit("i8(f8[::1], f8[::1], i8, f8, f8)", cache=True, error_model="numpy")
def _insert(tokens, left, count, new_tokens, new_left):
    at = count
    while at > 0 and left[at - 1] > new_left:
        tokens[at], left[at] = tokens[at - 1], left[at - 1]
        at -= 1
    tokens[at], left[at] = new_tokens, new_left
    return at


@numba.njit("void(f8[::1], f8[::1], i8, i8)", cache=True, error_model="numpy")
def _take_out(tokens, left, count, at):
    for i in range(at, count - 1):
        tokens[i], left[i] = tokens[i + 1], left[i + 1]


@numba.njit("void(f8[:, ::1], f8[:, ::1], i8[::1], f8[::1], f8[::1], i8[::1])", cache=True, error_model="numpy")
def _fill(tokens, left, counts, held_tokens, held_left, held_worker):
    order = np.argsort(held_left)
    for i in order:
        w = held_worker[i]
        tokens[w, counts[w]], left[w, counts[w]] = held_tokens[i], held_left[i]
        counts[w] += 1


@numba.njit(
    "i8[::1](f8[::1], f8[::1], i8[::1], f8[::1], f8[::1], f8[::1], i8, f8, i8, b1)", cache=True, error_model="numpy"
)
def bind_least_peak(held_tokens, held_left, held_worker, new_tokens, new_left, limit, max_batch, ahead, skips, force):
    """Home of each new request, in their order: the worker whose forecast peak leaves the most of its limit.

    held_*: of live requests, float64 [n] and the worker's place in `limit`, int64 [n]. new_tokens, new_left: float64
    [k]. limit: float64 [workers], tokens that may be held at once. max_batch: most requests that run on a worker at
    once. ahead: iterations until the next look; a worker gets more than max_batch as far as these would not fill them.
    skips: how many may be passed over because they do not fit, before the rest waits. force: whether all get a home,
    fitting or not. Returns int64 [k], -1 for those that wait. A worker with nothing takes a request whatever its size.
    """
    workers = len(limit)
    counts = np.zeros(workers, dtype=np.int64)
    for w in held_worker:
        counts[w] += 1
    most = counts.max() + len(new_tokens)
    if not force and ahead <= 0.0:
        most = max(max_batch, counts.max()) + 1
    filled = np.zeros(workers)  # places · iterations of those until the next look
    for i in range(len(held_left)):
        filled[held_worker[i]] += min(held_left[i], ahead)
    counts[:] = 0
    tokens, left = np.empty((workers, most)), np.empty((workers, most))
    _fill(tokens, left, counts, held_tokens, held_left, held_worker)
    peaks = np.zeros(workers)
    for w in range(workers):
        peaks[w] = _peak(tokens[w], left[w], counts[w])
    homes = np.full(len(new_tokens), -1)
    for i in range(len(new_tokens)):
        best = -1
        for w in range(workers):
            if (counts[w] < max_batch or filled[w] < max_batch * ahead) and (
                best < 0
                or limit[w] - peaks[w] > limit[best] - peaks[best]
                or (limit[w] - peaks[w] == limit[best] - peaks[best] and counts[w] < counts[best])
            ):
                best = w
        if best < 0:
            break
        at = _insert(tokens[best], left[best], counts[best], new_tokens[i], new_left[i])
        peak = _peak(tokens[best], left[best], counts[best] + 1)
        if peak <= limit[best] or counts[best] == 0 or force:
            counts[best] += 1
            filled[best] += min(new_left[i], ahead)
            peaks[best] = peak
            homes[i] = best
        else:
            _take_out(tokens[best], left[best], counts[best] + 1, at)
            skips -= 1
            if skips < 0:
                break
    return homes


@numba.njit("f8[::1](f8[::1], f8[::1], i8[::1], i8)", cache=True, error_model="numpy")
def peaks_of(held_tokens, held_left, held_worker, workers):
    """Forecast peak of each worker, float64 [workers]; arguments as in `bind_least_peak`."""
    counts = np.zeros(workers, dtype=np.int64)
    for w in held_worker:
        counts[w] += 1
    most = max(counts.max(), 1)
    tokens, left = np.empty((workers, most)), np.empty((workers, most))
    counts[:] = 0
    _fill(tokens, left, counts, held_tokens, held_left, held_worker)
    found = np.empty(workers)
    for w in range(workers):
        found[w] = _peak(tokens[w], left[w], counts[w])
    return found


@numba.njit("i8[::1](f8[::1], f8[::1], i8[::1], b1[::1], f8[::1], i8, f8)", cache=True, error_model="numpy")
def even_out(tokens, left, worker, movable, limit, max_batch, tolerance):
    """New home of each request so that no worker holds much more than the others: int64 [n].

    tokens, left: float64 [n], what each holds and still generates; worker: int64 [n], place in `limit`; movable: bool
    [n]; limit: tokens a worker may hold. The largest first, from workers above (1 + tolerance) · mean to one of the
    emptiest whose forecast peak then keeps its limit, or at least is no more above it than the giver's was; where it
    makes a difference.
    """
    workers = len(limit)
    held, counts = np.zeros(workers), np.zeros(workers, dtype=np.int64)
    for i in range(len(tokens)):
        held[worker[i]] += tokens[i]
        counts[worker[i]] += 1
    mean = held.sum() / workers
    homes = worker.copy()
    # Of each worker, sorted by what is left.
    most = min(max_batch, len(tokens)) + counts.max()
    have, rest, which = np.empty((workers, most)), np.empty((workers, most)), np.zeros(workers, dtype=np.int64)
    _fill(have, rest, which, tokens, left, worker)
    peaks = np.zeros(workers)
    for w in range(workers):
        peaks[w] = _peak(have[w], rest[w], counts[w])
    refused = np.full(workers, -1)  # request that each worker has last had no room for when it has grown
    for i in np.argsort(-tokens, kind="mergesort"):
        source = homes[i]
        if not movable[i] or held[source] <= (1 + tolerance) * mean or counts[source] < 2:
            continue
        for _ in range(_TRIES):
            target = -1
            for w in range(workers):
                if counts[w] < max_batch and refused[w] != i and (target < 0 or held[w] < held[target]):
                    target = w
            if target < 0:
                break
            after = held[target] + tokens[i]
            if after > limit[target] or after >= held[source] - 0.3 * tokens[i]:
                break
            at = _insert(have[target], rest[target], counts[target], tokens[i], left[i])
            peak = _peak(have[target], rest[target], counts[target] + 1)
            if peak - limit[target] > max(peaks[source] - limit[source], 0.0):
                _take_out(have[target], rest[target], counts[target] + 1, at)
                refused[target] = i
                continue
            at = 0
            while have[source, at] != tokens[i] or rest[source, at] != left[i]:
                at += 1
            _take_out(have[source], rest[source], counts[source], at)
            held[source] -= tokens[i]
            held[target] = after
            counts[source] -= 1
            counts[target] += 1
            peaks[source] = _peak(have[source], rest[source], counts[source])
            peaks[target] = peak
            homes[i] = target
            break
    return homes
