"""What an advance of `batch` brought: spans of iterations in which no worker's batch changes, and sums over workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexfloor.world.batch_state import compiled


@dataclass(frozen=True, slots=True)
class Steps:
    """An advance, cut into steps wherever an event of any worker falls; shapes [steps] unless stated.

    batch, prefill_tokens and kv_tokens are those of `WorkerIterations`. Over a step a worker's batch and prefill tokens
    stay the same and its context tokens grow evenly: they are given for the middle of it, which is their mean. Workers
    that are not advanced count 0.

    finished, preempted: rows, in the order of iterations, then of workers; `*_at`: iteration, from 0 at the begin of
    this advance; `*_worker`: where.
    """

    iterations: int  # done; fewer than asked for when no request was live any more on any worker
    spans: np.ndarray  # int64, iterations of each step; their sum is `iterations`
    batch_max: np.ndarray  # int64, of the largest worker
    batch_total: np.ndarray  # int64, of all workers
    kv_max: np.ndarray  # float64
    kv_total: np.ndarray  # float64
    prefill_max: np.ndarray  # int64
    prefill_total: np.ndarray  # int64
    rows_max: np.ndarray  # int64, batch + prefill_tokens of the largest worker
    tokens: np.ndarray  # int64 [workers], response tokens drawn
    last_live: np.ndarray  # int64 [workers], iterations up to and with the last one that began with a live request
    kv_mean: np.ndarray  # float64 [workers], context tokens, mean over all iterations
    finished: np.ndarray  # int64 [finished]
    finished_at: np.ndarray  # int64 [finished]
    finished_worker: np.ndarray  # int64 [finished]
    preempted: np.ndarray  # int64 [preempted]
    preempted_at: np.ndarray  # int64 [preempted]
    preempted_worker: np.ndarray  # int64 [preempted]
    batch: np.ndarray | None = None  # int64 [workers, steps]; with detail only, like the next two
    prefill_tokens: np.ndarray | None = None  # int64 [workers, steps]
    kv_tokens: np.ndarray | None = None  # float64 [workers, steps]

    @classmethod
    def of(
        cls, records: np.ndarray, finished: np.ndarray, preempted: np.ndarray, tokens: np.ndarray, detail: bool
    ) -> Steps:
        """From the tables of `batch_core.advance`."""
        workers = len(tokens)
        done = int((records[:, 1] + records[:, 2]).max(initial=0))
        start, sums, kv, last_live, kv_sum, counts, contexts = _merge(records, done, workers, detail)
        finished, preempted = (t[np.argsort(t[:, 1], kind="stable")] for t in (finished, preempted))
        return cls(
            done,
            np.diff(start),
            batch_max=sums[0],
            batch_total=sums[1],
            kv_max=kv[0],
            kv_total=kv[1],
            prefill_max=sums[2],
            prefill_total=sums[3],
            rows_max=sums[4],
            tokens=tokens,
            last_live=last_live,
            kv_mean=kv_sum / max(1, done),
            finished=finished[:, 0],
            finished_at=finished[:, 1],
            finished_worker=finished[:, 2],
            preempted=preempted[:, 0],
            preempted_at=preempted[:, 1],
            preempted_worker=preempted[:, 2],
            batch=counts[0] if detail else None,
            prefill_tokens=counts[1] if detail else None,
            kv_tokens=contexts if detail else None,
        )


@compiled
def _merge(records, done, workers, detail):
    """Returns begins of the steps and the end of the last [s + 1]; batch max, total, prefill max, total, rows max
    [5, s]; context max, total [2, s]; last iteration begun live and sum of context tokens [workers]; with detail batch
    and prefill [2, workers, s], and context tokens [workers, s]."""
    begins = np.zeros(done + 1, np.bool_)
    for r in range(len(records)):
        begins[records[r, 1]] = begins[records[r, 1] + records[r, 2]] = True
    index = np.empty(done + 1, np.int64)  # of the step that begins at an iteration
    steps = 0
    for at in range(done):
        index[at] = steps
        steps += begins[at]
    start = np.empty(steps + 1, np.int64)
    start[steps] = done
    for at in range(done):
        if begins[at]:
            start[index[at]] = at
    sums, kv = np.zeros((5, steps), np.int64), np.zeros((2, steps), np.float64)
    last_live, kv_sum = np.zeros(workers, np.int64), np.zeros(workers, np.float64)
    kept = workers if detail else 0
    counts, contexts = np.zeros((2, kept, steps), np.int64), np.zeros((kept, steps), np.float64)
    for r in range(len(records)):
        worker, first, span = records[r, 0], records[r, 1], records[r, 2]
        batch, context, prefill = records[r, 3], records[r, 4], records[r, 5]
        end = first + span
        last_live[worker] = max(last_live[worker], end)
        grown = batch if prefill == 0 else 0  # a record with prefill is a single iteration
        kv_sum[worker] += span * (context + grown * (span - 1) / 2)
        step = index[first]
        while start[step] < end:
            middle = context + grown * ((start[step] + start[step + 1] - 1) / 2 - first)
            sums[0, step] = max(sums[0, step], batch)
            sums[1, step] += batch
            sums[2, step] = max(sums[2, step], prefill)
            sums[3, step] += prefill
            sums[4, step] = max(sums[4, step], batch + prefill)
            kv[0, step] = max(kv[0, step], middle)
            kv[1, step] += middle
            if detail:
                counts[0, worker, step], counts[1, worker, step] = batch, prefill
                contexts[worker, step] = middle
            step += 1
    return start, sums, kv, last_live, kv_sum, counts, contexts
