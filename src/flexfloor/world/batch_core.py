"""What a worker's scheduler does in an iteration, and in many at once: the compiled steps of `batch`.

Every rule here has its twin in the engine's scheduler; page numbers and token ids are left out, as no count depends on
them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexfloor.world.batch_state import (
    NOBODY,
    RUNNING,
    WAITING,
    compiled,
    is_decoding,
    pages_for,
    prepend,
    run,
    shared_pages,
    sibling,
    stop_running,
    tokens_of,
    unlink,
)


class Limits(NamedTuple):
    """What a worker's scheduler is made with."""

    page_tokens: int
    max_batch: int
    prefill_tokens: int


class _Scratch(NamedTuple):
    """Of the iteration at hand. Lists of rows: `gone` were preempted, `ended` have all their tokens."""

    end: np.ndarray  # int32 [rows], tokens computed after the iteration; 0: not part of it. Only of running rows
    gone: np.ndarray  # int32 [rows]
    gone_count: np.ndarray  # int64 [1]
    ended: np.ndarray  # int32 [rows]
    seen: np.ndarray  # int64 [groups], number of the last iteration that met a running row of the group
    oldest: np.ndarray  # int32 [groups], the row it met first
    now: np.ndarray  # int64 [1], number of the iteration


# -- one iteration, as the scheduler plans it -------------------------------------------------------------------------


@compiled
def _fits(s, worker, row, page_tokens):
    """Room for all known tokens of a waiting row, plus a page of growth for each running one."""
    room = s.memory[worker].free - s.lists[RUNNING, worker].count
    known, shared = pages_for(tokens_of(s, row) + 1, page_tokens), shared_pages(s, row, page_tokens)
    if known <= room:
        return True
    if known - shared > room or shared == 0:
        return False
    return sibling(s, s.lists[RUNNING, worker].head, s.rows[row].group) >= 0


@compiled
def _grow(s, worker, row, tokens, page_tokens, scratch):
    """Pages for the first `tokens` tokens, preempting the youngest if needed. False if that was `row`."""
    lacking = pages_for(tokens, page_tokens) - s.rows[row].kv_pages
    while lacking > 0:
        while s.memory[worker].free == 0:
            youngest = s.lists[RUNNING, worker].tail
            stop_running(s, worker, youngest, page_tokens)
            prepend(s, WAITING, worker, youngest)
            scratch.gone[scratch.gone_count[0]] = youngest
            scratch.gone_count[0] += 1
            if youngest == row:
                return False
        taken = min(lacking, s.memory[worker].free)
        s.memory[worker].free -= taken
        s.rows[row].kv_pages += taken
        lacking -= taken
    return True


@compiled
def _prefill(s, worker, row, oldest, budget, page_tokens, scratch):
    """Plan up to `budget` tokens of a row that is not decoding; oldest: the sibling that fills the prompt's pages.
    Returns the tokens planned, -1 if the row was preempted."""
    capacity = shared_pages(s, row, page_tokens) * page_tokens
    if capacity > 0:
        s.rows[row].computed = max(s.rows[row].computed, s.rows[oldest].filled)
        if s.rows[row].computed < capacity and row != oldest:
            return 0
    end = min(s.rows[row].computed + budget, tokens_of(s, row))
    if not _grow(s, worker, row, end, page_tokens, scratch):
        return -1
    scratch.end[row] = end
    return end - s.rows[row].computed


@compiled
def _plan_decoding(s, worker, page_tokens, scratch):
    """Returns whether any running row is not decoding."""
    others, row = False, s.lists[RUNNING, worker].head
    while row >= 0:
        scratch.end[row] = 0
        if is_decoding(s, row):
            if not _grow(s, worker, row, tokens_of(s, row), page_tokens, scratch):
                return others  # it was the youngest that was left
            scratch.end[row] = tokens_of(s, row)
        else:
            others = True
        row = s.rows[row].next
    return others


@compiled
def _plan_prefill(s, worker, limits, scratch):
    """Returns what is left of the budget."""
    budget = limits.prefill_tokens
    scratch.now[0] += 1
    row = s.lists[RUNNING, worker].head
    while row >= 0 and budget > 0:
        group = s.rows[row].group
        if scratch.seen[group] != scratch.now[0]:
            scratch.seen[group], scratch.oldest[group] = scratch.now[0], row
        if not is_decoding(s, row):
            planned = _prefill(s, worker, row, scratch.oldest[group], budget, limits.page_tokens, scratch)
            if planned < 0:
                break
            budget -= planned
        row = s.rows[row].next
    return budget


@compiled
def _takes_part(s, worker, scratch):
    row = s.lists[RUNNING, worker].head
    while row >= 0:
        if scratch.end[row] > 0:
            return True
        row = s.rows[row].next
    return False


@compiled
def _admit(s, worker, budget, limits, scratch):
    while budget > 0 and s.lists[WAITING, worker].count > 0 and s.lists[RUNNING, worker].count < limits.max_batch:
        row = s.lists[WAITING, worker].head
        if not _fits(s, worker, row, limits.page_tokens):
            break
        unlink(s, WAITING, worker, row)
        run(s, worker, row, limits.page_tokens)
        scratch.end[row] = 0
        oldest = sibling(s, s.lists[RUNNING, worker].head, s.rows[row].group)
        budget -= max(0, _prefill(s, worker, row, oldest, budget, limits.page_tokens, scratch))


@compiled
def _iterate(s, worker, limits, scratch):
    """One iteration. Returns its batch, context tokens of decoding rows, prefill tokens, drawn tokens, ended rows."""
    scratch.gone_count[0] = 0
    budget = limits.prefill_tokens
    if _plan_decoding(s, worker, limits.page_tokens, scratch):
        budget = _plan_prefill(s, worker, limits, scratch)
    if scratch.gone_count[0] == 0 or not _takes_part(s, worker, scratch):
        _admit(s, worker, budget, limits, scratch)
    batch = kv = prefill = drawn = ended = 0
    row = s.lists[RUNNING, worker].head
    while row >= 0:
        after, end = s.rows[row].next, scratch.end[row]
        if end > 0:
            batch += 1
            if is_decoding(s, row):
                kv += end
            else:
                prefill += end - s.rows[row].computed
            s.rows[row].computed = end
            capacity = shared_pages(s, row, limits.page_tokens) * limits.page_tokens
            s.rows[row].filled = max(s.rows[row].filled, min(end, capacity))
            if end == tokens_of(s, row):
                s.rows[row].response += 1
                drawn += 1
                if s.rows[row].response >= s.rows[row].length:
                    scratch.ended[ended] = row
                    ended += 1
        row = after
    for i in range(ended):
        stop_running(s, worker, scratch.ended[i], limits.page_tokens)
        s.rows[scratch.ended[i]].finished = True
    return batch, kv, prefill, drawn, ended


# -- many iterations at once ------------------------------------------------------------------------------------------


@compiled
def _growth(s, worker, iterations, page_tokens):
    """Pages that the running rows, all decoding, take in that many iterations."""
    pages, row = 0, s.lists[RUNNING, worker].head
    while row >= 0:
        pages += pages_for(tokens_of(s, row) + iterations - 1, page_tokens) - s.rows[row].kv_pages
        row = s.rows[row].next
    return pages


@compiled
def _quiet(s, worker, limits, most):
    """Iterations, up to `most`, in which all running rows decode, nobody is admitted and nobody preempted; a row may
    end in the last one. Returns them with the context tokens of the first."""
    kv, iterations, row = 0, most, s.lists[RUNNING, worker].head
    while row >= 0:
        if not is_decoding(s, row):
            return 0, 0
        kv += tokens_of(s, row)
        iterations = min(iterations, s.rows[row].length - s.rows[row].response)
        row = s.rows[row].next
    batch, waiting = s.lists[RUNNING, worker].count, s.lists[WAITING, worker].head
    if batch == 0 or (waiting >= 0 and batch < limits.max_batch and _fits(s, worker, waiting, limits.page_tokens)):
        return 0, 0
    if batch * (iterations // limits.page_tokens + 1) > s.memory[worker].free:
        enough, short = 0, iterations + 1
        if _growth(s, worker, iterations, limits.page_tokens) <= s.memory[worker].free:
            enough = iterations
        else:
            short = iterations
        while short - enough > 1:
            middle = (enough + short) // 2
            if _growth(s, worker, middle, limits.page_tokens) <= s.memory[worker].free:
                enough = middle
            else:
                short = middle
        iterations = enough
    return iterations, kv


@compiled
def _jump(s, worker, iterations, page_tokens, scratch):
    """Carry out quiet iterations. Returns the ended rows."""
    ended, row = 0, s.lists[RUNNING, worker].head
    while row >= 0:
        s.rows[row].response += iterations
        s.rows[row].computed += iterations
        pages = pages_for(np.int64(s.rows[row].computed), page_tokens)
        s.memory[worker].free -= pages - s.rows[row].kv_pages
        s.rows[row].kv_pages = pages
        if s.rows[row].response >= s.rows[row].length:
            scratch.ended[ended] = row
            ended += 1
        row = s.rows[row].next
    for i in range(ended):
        stop_running(s, worker, scratch.ended[i], page_tokens)
        s.rows[scratch.ended[i]].finished = True
    return ended


@compiled
def _with_room(table, rows):
    """`table`, or a longer copy of it, with room for that many rows."""
    if rows <= len(table):
        return table
    larger = np.empty((max(rows, 2 * len(table)), table.shape[1]), np.int64)
    larger[: len(table)] = table
    return larger


@compiled
def advance(s, limits, groups, workers, iterations):
    """Run each of `workers` (int64 [n]) for up to `iterations`, as long as it has live rows.

    Returns tables of int64: records (worker, first iteration, iterations, batch, context tokens of the first, prefill
    tokens), finished and preempted (row, iteration, worker), each in the order of `workers`, then of time; the tokens
    drawn [workers]; and a worker that could not go on, -1 if all could.
    """
    rows = len(s.rows)
    scratch = _Scratch(
        np.empty(rows, np.int32),
        np.empty(rows, np.int32),
        np.zeros(1, np.int64),
        np.empty(rows, np.int32),
        np.zeros(groups, np.int64),
        np.empty(groups, np.int32),
        np.zeros(1, np.int64),
    )
    records, count = np.empty((4 * len(workers) + 16, 6), np.int64), 0
    finished, finished_count = np.empty((64, 3), np.int64), 0
    preempted, preempted_count = np.empty((16, 3), np.int64), 0
    tokens = np.zeros(len(s.memory), np.int64)
    for worker in workers:
        now = 0
        while now < iterations and s.lists[RUNNING, worker].count + s.lists[WAITING, worker].count > 0:
            batch, prefill, gone = s.lists[RUNNING, worker].count, 0, 0
            span, kv = _quiet(s, worker, limits, iterations - now)
            if span > 0:
                drawn = span * batch
                ended = _jump(s, worker, span, limits.page_tokens, scratch)
            else:
                span = 1
                batch, kv, prefill, drawn, ended = _iterate(s, worker, limits, scratch)
                gone = scratch.gone_count[0]
                if batch == 0:
                    return (records[:count], finished[:finished_count], preempted[:preempted_count], tokens, worker)
            records = _with_room(records, count + 1)
            records[count] = (worker, now, span, batch, kv, prefill)
            count += 1
            finished = _with_room(finished, finished_count + ended)
            for i in range(ended):
                finished[finished_count] = (np.int64(scratch.ended[i]), now + span - 1, worker)
                finished_count += 1
            preempted = _with_room(preempted, preempted_count + gone)
            for i in range(gone):
                preempted[preempted_count] = (np.int64(scratch.gone[i]), now, worker)
                preempted_count += 1
            tokens[worker] += drawn
            now += span
    return records[:count], finished[:finished_count], preempted[:preempted_count], tokens, NOBODY
