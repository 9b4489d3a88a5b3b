"""What the compiled parts of `batch` work on: requests as rows, each worker's lists of them, and its pages.

Each worker has two lists of rows, linked by `next` and `prev`: those that run, oldest first, and those that wait, next
one first.
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


class Limits(NamedTuple):
    """What a worker's scheduler is made with."""

    page_tokens: int
    max_batch: int
    prefill_tokens: int


class Scratch(NamedTuple):
    """Of the iteration at hand. Lists of rows: `gone` were preempted, `ended` have all their tokens."""

    end: np.ndarray  # int32 [rows], tokens computed after the iteration; 0: not part of it. Only of running rows
    gone: np.ndarray  # int32 [rows]
    gone_count: np.ndarray  # int64 [1]
    ended: np.ndarray  # int32 [rows]
    seen: np.ndarray  # int64 [groups], number of the last iteration that met a running row of the group
    oldest: np.ndarray  # int32 [groups], the row it met first
    now: np.ndarray  # int64 [1], number of the iteration


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
