"""Who runs and who waits on each worker, and what they hold: the compiled state of `batch`.

Rows are requests. Each worker has two lists of rows, linked by `next` and `prev`: those that run, oldest first, and
those that wait, next one first.

The pages of a prompt that siblings share belong to all of them that run on a worker. Who joined first fills them and is
the oldest of them in the list, so no table of shared prompts is needed: the oldest one carries `filled` for all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexfloor.world.jit import numba

compiled = numba.njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")

RUNNING, WAITING = 0, 1  # the two lists of a worker
NOBODY = -1


ROW = np.dtype(
    [
        ("prompt", np.int32),  # tokens
        ("length", np.int32),  # response tokens at which the request ends
        ("group", np.int32),  # 0 … groups - 1
        ("worker", np.int32),
        ("response", np.int32),  # tokens so far
        ("computed", np.int32),  # tokens whose KV is in pages
        ("kv_pages", np.int32),  # shared ones included
        ("filled", np.int32),  # tokens in the shared pages; read only where the row is the oldest that shares
        ("next", np.int32),
        ("prev", np.int32),
        ("running", np.bool_),
        ("finished", np.bool_),
    ],
    align=True,
)
LIST = np.dtype([("head", np.int32), ("tail", np.int32), ("count", np.int64)])
MEMORY = np.dtype([("pages", np.int64), ("free", np.int64)])


class State(NamedTuple):
    """Everything that changes while time goes on. NOBODY stands for no row and no worker."""

    rows: np.ndarray  # ROW [rows]
    lists: np.ndarray  # LIST [2, workers]
    memory: np.ndarray  # MEMORY [workers], KV pages


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
def append(s, which, worker, row):
    last = s.lists[which, worker].tail
    s.rows[row].prev, s.rows[row].next = last, NOBODY
    if last >= 0:
        s.rows[last].next = row
    else:
        s.lists[which, worker].head = row
    s.lists[which, worker].tail = row
    s.lists[which, worker].count += 1
    s.rows[row].running = which == RUNNING


@compiled
def prepend(s, which, worker, row):
    first = s.lists[which, worker].head
    s.rows[row].prev, s.rows[row].next = NOBODY, first
    if first >= 0:
        s.rows[first].prev = row
    else:
        s.lists[which, worker].tail = row
    s.lists[which, worker].head = row
    s.lists[which, worker].count += 1


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
    append(s, RUNNING, worker, row)


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
def unbind(s, row, page_tokens):
    """Take a live row from its worker."""
    worker = s.rows[row].worker
    if s.rows[row].running:
        stop_running(s, worker, row, page_tokens)
    else:
        unlink(s, WAITING, worker, row)
    s.rows[row].worker = NOBODY


@compiled
def bind(s, worker, row):
    """Last in the waiting line."""
    s.rows[row].worker = worker
    append(s, WAITING, worker, row)


@compiled
def unbind_all(s, rows, page_tokens):
    """Rows that are live; the others stay as they are."""
    for row in rows:
        if s.rows[row].worker >= 0 and not s.rows[row].finished:
            unbind(s, row, page_tokens)


@compiled
def bind_all(s, worker, rows):
    for row in rows:
        bind(s, worker, row)


@compiled
def rows_in_order(s):
    """Live rows (int64) by worker, running ones first, each list in its order."""
    rows, found = np.empty(s.lists.count.sum(), np.int64), 0
    for worker in range(len(s.memory)):
        for which in (RUNNING, WAITING):
            row = s.lists[which, worker].head
            while row >= 0:
                rows[found] = row
                found += 1
                row = s.rows[row].next
    return rows


@compiled
def pages_to_adopt(s, worker, row, page_tokens):
    """Pages of its own that a row takes on `worker` with all tokens but its newest in pages; siblings there share."""
    shared = shared_pages(s, row, page_tokens)
    here = shared if shared > 0 and sibling(s, s.lists[RUNNING, worker].head, s.rows[row].group) >= 0 else 0
    return pages_for(tokens_of(s, row) - 1, page_tokens) - here


@compiled
def adopt(s, worker, row, page_tokens):
    """An unbound row goes on decoding on `worker`: its KV arrives there, that of its prompt for its siblings too."""
    run(s, worker, row, page_tokens)
    pages = pages_for(tokens_of(s, row) - 1, page_tokens)
    s.memory[worker].free -= pages - s.rows[row].kv_pages
    s.rows[row].worker, s.rows[row].kv_pages, s.rows[row].computed = worker, pages, tokens_of(s, row) - 1
    shared = shared_pages(s, row, page_tokens)
    if shared > 0:
        s.rows[sibling(s, s.lists[RUNNING, worker].head, s.rows[row].group)].filled = shared * page_tokens
