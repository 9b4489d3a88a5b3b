"""What a worker's scheduler does in an iteration, and in many at once: the compiled steps of `batch`.

Every rule here has its twin in the engine's scheduler; page numbers and token ids are left out, as no count depends on
them. The pages of a prompt that siblings share belong to all of them that run on a worker. Who joined first fills them
and is the oldest of them in the list, so no table of shared prompts is needed: the oldest carries `filled` for all.

All of it is one module, because the compiler's cache looks at the source file of the caller alone.
"""

from __future__ import annotations

import numpy as np

from flexfloor.world.batch_state import NOBODY, RUNNING, WAITING, Scratch, compiled


@compiled
def tokens_of(s, row):
    return np.int64(s.rows[row].prompt) + s.rows[row].response


@compiled
def is_decoding(s, row):
    """Of a running row: all but the newest token are computed and a token was drawn before."""
    return s.rows[row].computed == tokens_of(s, row) - 1 and s.rows[row].response > 0


@compiled
def shared_pages(s, row, page_tokens):
    """Full pages of its prompt without the last token: what it shares while it runs."""
    return (np.int64(s.rows[row].prompt) - 1) // page_tokens


@compiled
def pages_for(tokens, page_tokens):
    return (tokens + page_tokens - 1) // page_tokens


@compiled
def link(s, which, worker, row, before):
    """Put a row into a list, right behind `before`; first where that is NOBODY."""
    after = s.rows[before].next if before >= 0 else s.lists[which, worker].head
    s.rows[row].prev, s.rows[row].next = before, after
    if before >= 0:
        s.rows[before].next = row
    else:
        s.lists[which, worker].head = row
    if after >= 0:
        s.rows[after].prev = row
    else:
        s.lists[which, worker].tail = row
    s.lists[which, worker].count += 1
    s.rows[row].running = which == RUNNING


@compiled
def unlink(s, which, worker, row):
    before, after = s.rows[row].prev, s.rows[row].next
    if before >= 0:
        s.rows[before].next = after
    else:
        s.lists[which, worker].head = after
    if after >= 0:
        s.rows[after].prev = before
    else:
        s.lists[which, worker].tail = before
    s.rows[row].prev = s.rows[row].next = NOBODY
    s.lists[which, worker].count -= 1


@compiled
def sibling(s, row, group):
    """The first row of `group` from `row` on, -1 if there is none."""
    while row >= 0 and s.rows[row].group != group:
        row = s.rows[row].next
    return row


@compiled
def run(s, worker, row, page_tokens):
    """Append to the running ones, with the prompt's shared pages and what is in them."""
    shared, filled = shared_pages(s, row, page_tokens), 0
    if shared > 0:
        oldest = sibling(s, s.lists[RUNNING, worker].head, s.rows[row].group)
        if oldest >= 0:
            filled = s.rows[oldest].filled
        else:
            s.memory[worker].free -= shared
            s.rows[row].filled = 0
    s.rows[row].kv_pages, s.rows[row].computed = shared, filled
    link(s, RUNNING, worker, row, s.lists[RUNNING, worker].tail)


@compiled
def stop_running(s, worker, row, page_tokens):
    """Take a running row out and give its pages back; what is in shared ones is the next sibling's to carry on."""
    shared = shared_pages(s, row, page_tokens)
    s.memory[worker].free += s.rows[row].kv_pages - shared
    if shared > 0 and sibling(s, s.lists[RUNNING, worker].head, s.rows[row].group) == row:
        heir = sibling(s, s.rows[row].next, s.rows[row].group)
        if heir >= 0:
            s.rows[heir].filled = s.rows[row].filled
        else:
            s.memory[worker].free += shared
    unlink(s, RUNNING, worker, row)
    s.rows[row].running = False
    s.rows[row].kv_pages = s.rows[row].computed = 0


@compiled
def bind(s, worker, rows):
    """Last in the waiting line, in this order."""
    for row in rows:
        s.rows[row].worker = worker
        link(s, WAITING, worker, row, s.lists[WAITING, worker].tail)


@compiled
def unbind(s, rows, page_tokens):
    """Take rows from their workers; those that are not live stay as they are."""
    for row in rows:
        worker = s.rows[row].worker
        if worker >= 0 and not s.rows[row].finished:
            if s.rows[row].running:
                stop_running(s, worker, row, page_tokens)
            else:
                unlink(s, WAITING, worker, row)
            s.rows[row].worker = NOBODY


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
            link(s, WAITING, worker, youngest, NOBODY)
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
    # Whoever is the oldest always gets on: nobody takes part only when nobody runs any more.
    if scratch.gone_count[0] == 0 or s.lists[RUNNING, worker].count == 0:
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
    return ended


@compiled
def _with_room(table, rows):
    """`table`, or a longer copy of it, with room for that many rows. (Slices would take seconds to compile.)"""
    if rows <= len(table):
        return table
    larger = np.empty((max(rows, 2 * len(table)), table.shape[1]), np.int64)
    for r in range(len(table)):
        for c in range(table.shape[1]):
            larger[r, c] = table[r, c]
    return larger


@compiled
def _note(table, count, rows, row_count, at, worker):
    """Append (row, iteration, worker) for each row. Returns the table, maybe a longer one."""
    table = _with_room(table, count + row_count)
    for i in range(row_count):
        table[count + i, 0], table[count + i, 1], table[count + i, 2] = rows[i], at, worker
    return table


@compiled
def advance(s, limits, groups, workers, iterations):
    """Run each of `workers` (int64 [n]) for up to `iterations`, as long as it has live rows.

    Returns tables of int64 and the lengths of them that count: records (worker, first iteration, iterations, batch,
    context tokens of the first, prefill tokens), finished and preempted (row, iteration, worker), each in the order of
    `workers`, then of time; further the tokens drawn [workers], and a worker that could not go on, NOBODY if all could.
    """
    rows = len(s.rows)
    none, row_list = np.zeros(1, np.int64), np.empty((3, rows), np.int32)
    scratch = Scratch(
        row_list[0], row_list[1], none, row_list[2], np.zeros(groups, np.int64), np.empty(groups, np.int32), none.copy()
    )
    records, count = np.empty((4 * len(workers) + 16, 6), np.int64), 0
    finished, finished_count = np.empty((64, 3), np.int64), 0
    preempted, preempted_count = np.empty((16, 3), np.int64), 0
    tokens = np.zeros(len(s.memory), np.int64)
    stuck = np.int64(NOBODY)
    for i in range(len(workers)):
        worker, now = workers[i], 0
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
                    stuck = worker
                    break
            for j in range(ended):
                stop_running(s, worker, scratch.ended[j], limits.page_tokens)
                s.rows[scratch.ended[j]].finished = True
            records = _with_room(records, count + 1)
            records[count, 0], records[count, 1], records[count, 2] = worker, now, span
            records[count, 3], records[count, 4], records[count, 5] = batch, kv, prefill
            count += 1
            finished = _note(finished, finished_count, scratch.ended, ended, now + span - 1, worker)
            finished_count += ended
            preempted = _note(preempted, preempted_count, scratch.gone, gone, now, worker)
            preempted_count += gone
            tokens[worker] += drawn
            now += span
        if stuck >= 0:
            break
    return (records, finished, preempted), (count, finished_count, preempted_count), tokens, stuck
