"""The workers' continuous batching in virtual time, exact and without tensors.

For the same decisions a `BatchModel` counts what the engine counts: iterations, batches, prefill, context tokens,
preemptions, free pages. Its cost grows with events (admissions, prefill, ends, pages that run out), not with tokens:
between two events all running requests of a worker gain a token an iteration, and the model jumps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy as shallow_copy

import numpy as np
from numpy.typing import ArrayLike

from flexfloor.errors import PlanRefusedError
from flexfloor.world import batch_core as core
from flexfloor.world import batch_state as state
from flexfloor.world.batch_steps import Steps

__all__ = ["BatchModel", "PagesLackingError", "Steps"]


class PagesLackingError(PlanRefusedError, ValueError):
    """KV pages do not suffice. Nothing was changed, unless it was raised by `advance`."""


class BatchModel:
    """Requests are rows, numbered from 0; they are bound to workers, run there as its scheduler has it, and end at a
    length that is known here.

    pages: KV pages of each worker; page_tokens: tokens in a page; max_batch: most requests that run at once on a
    worker; prefill_tokens: most prompt (or recomputed) tokens an iteration of a worker.

    The arrays are to be read, not written.
    """

    def __init__(self, *, pages: Sequence[int], page_tokens: int, max_batch: int, prefill_tokens: int) -> None:
        if min(page_tokens, max_batch, prefill_tokens) < 1:
            raise ValueError("page_tokens, max_batch and prefill_tokens are at least 1")
        if min(pages, default=0) < 0:
            raise ValueError("a worker has fewer than 0 KV pages")
        self._limits = state.Limits(int(page_tokens), int(max_batch), int(prefill_tokens))
        self._group_numbers: dict[int, int] = {}  # replaced, never changed: copies share it
        self._group_prompts = np.empty(0, np.int32)  # the same
        lists = np.zeros((2, len(pages)), state.LIST)
        lists["head"] = lists["tail"] = state.NOBODY
        memory = np.empty(len(pages), state.MEMORY)
        memory["pages"] = memory["free"] = pages
        self._state = state.State(np.empty(0, state.ROW), lists, memory)

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def page_tokens(self) -> int:
        return self._limits.page_tokens

    @property
    def workers(self) -> int:
        return len(self._state.memory)

    @property
    def prompt(self) -> np.ndarray:
        """int32 [rows], tokens."""
        return self._state.rows["prompt"]

    @property
    def length(self) -> np.ndarray:
        """int32 [rows], response tokens at which a request ends."""
        return self._state.rows["length"]

    @property
    def group(self) -> np.ndarray:
        """int32 [rows], the same number for siblings: groups in the order in which they came."""
        return self._state.rows["group"]

    @property
    def worker(self) -> np.ndarray:
        """int32 [rows], -1 where not bound; a finished row stays bound to the worker where it ended."""
        return self._state.rows["worker"]

    @property
    def response(self) -> np.ndarray:
        """int32 [rows], response tokens so far."""
        return self._state.rows["response"]

    @property
    def computed(self) -> np.ndarray:
        """int32 [rows], tokens whose keys and values are in pages."""
        return self._state.rows["computed"]

    @property
    def kv_pages(self) -> np.ndarray:
        """int32 [rows], pages that a row reads, shared ones included; 0 unless it runs."""
        return self._state.rows["kv_pages"]

    @property
    def shared_pages(self) -> np.ndarray:
        """int32 [rows], of these, pages of the prompt that siblings on the same worker read too."""
        return np.where(self.running, (self.prompt - 1) // self.page_tokens, 0).astype(np.int32)

    @property
    def running(self) -> np.ndarray:
        """bool [rows]"""
        return self._state.rows["running"]

    @property
    def decoding(self) -> np.ndarray:
        """bool [rows], running with all but the newest token computed: its KV can move."""
        return self.running & (self.response > 0) & (self.computed == self.prompt + self.response - 1)

    @property
    def finished(self) -> np.ndarray:
        """bool [rows]"""
        return self._state.rows["finished"]

    @property
    def pages(self) -> np.ndarray:
        """int64 [workers]"""
        return self._state.memory["pages"]

    @property
    def free_pages(self) -> np.ndarray:
        """int64 [workers]"""
        return self._state.memory["free"]

    @property
    def live(self) -> np.ndarray:
        """int64 [workers], rows that run or wait there."""
        return self._state.lists["count"].sum(axis=0)

    def live_rows(self) -> np.ndarray:
        """int64: rows on a worker and not finished; by worker, those that run first, oldest first, then the line."""
        return state.rows_in_order(self._state)

    # -- what a driver does -------------------------------------------------------------------------------------------

    def add(
        self, prompt_tokens: ArrayLike, lengths: ArrayLike, groups: ArrayLike, responses: ArrayLike = 0
    ) -> np.ndarray:
        """New requests, bound to nobody. Returns their rows, int64 [n].

        prompt_tokens, lengths: int [n], tokens; lengths: of the response, at which the request ends; groups: int [n],
        equal where the prompt is the same, also as in earlier calls; responses: tokens that a request has already.
        Raises ValueError.
        """
        prompts, ends, names = (np.atleast_1d(np.asarray(a, dtype=np.int64)) for a in (prompt_tokens, lengths, groups))
        begun = np.broadcast_to(np.asarray(responses, dtype=np.int64), prompts.shape)
        if not prompts.shape == ends.shape == names.shape or prompts.ndim != 1:
            raise ValueError("prompt_tokens, lengths and groups are of different shapes")
        if prompts.min(initial=1) < 1 or begun.min(initial=0) < 0 or (ends <= begun).any():
            raise ValueError("a request has an empty prompt, or ends before it begins")
        if (prompts + ends).max(initial=0) > np.iinfo(np.int32).max // 2:
            raise ValueError("a request has more tokens than can be counted")
        group = self._number_groups(names, prompts)
        fresh = np.zeros(len(prompts), state.ROW)
        fresh["prompt"], fresh["length"], fresh["group"], fresh["response"] = prompts, ends, group, begun
        fresh["worker"] = fresh["next"] = fresh["prev"] = state.NOBODY
        first = len(self._state.rows)
        self._state = self._state._replace(rows=np.concatenate([self._state.rows, fresh]))
        return np.arange(first, first + len(fresh))

    def set_lengths(self, rows: ArrayLike, lengths: ArrayLike) -> None:
        """Let unfinished requests end elsewhere, for another draw from a forecast. Raises ValueError for lengths that
        they have reached already."""
        rows, lengths = self._rows(rows), np.asarray(lengths, dtype=np.int64)
        if self.finished[rows].any() or (lengths <= self.response[rows]).any():
            raise ValueError("a request has more response tokens than it would end with")
        self.length[rows] = lengths

    def assign(self, worker: int, rows: ArrayLike) -> None:
        """Put rows that nobody has at the end of a worker's waiting line, in this order. All their tokens are to be
        computed. Raises ValueError."""
        rows = self._unbound(rows)
        core.bind(self._state, self._known(worker), rows)

    def adopt(self, worker: int, rows: ArrayLike) -> None:
        """Let rows that nobody has, with response tokens already, run on a worker as if their KV had just arrived
        there. Raises ValueError, PagesLackingError (those before the row it names are adopted)."""
        rows = self._unbound(rows)
        if (self.response[rows] < 1).any():
            raise ValueError("a request without a response token has no complete KV")
        for row in rows.tolist():
            self._require_pages(row, self._known(worker))
            self._adopt(row, worker)

    def cancel(self, rows: ArrayLike) -> None:
        """Take rows from their workers; they could be assigned again. Those that nobody has, or that have finished,
        are left alone."""
        core.unbind(self._state, self._rows(rows), self.page_tokens)

    def move(self, row: int, target: int, with_kv: bool) -> None:
        """Let a live row go on elsewhere, as in a resize (where requests arrive source by source, in the plan's order).

        with_kv: its pages travel, and it is the youngest that runs there; else it waits there to be computed again.
        Raises ValueError, PagesLackingError.
        """
        one = self._rows(row)
        source = int(self.worker[row])
        if source < 0 or self.finished[row]:
            raise ValueError(f"request row {row} is not live; it cannot move")
        if self._known(target) == source:
            raise ValueError(f"request row {row} is on worker {target} already")
        if with_kv:
            if not self.decoding[row]:
                raise ValueError(f"request row {row} has no complete KV to move")
            self._require_pages(row, target)
        core.unbind(self._state, one, self.page_tokens)
        if with_kv:
            self._adopt(row, target)
        else:
            core.bind(self._state, target, one)

    def set_pages(self, worker: int, pages: int) -> None:
        """The cut between pages and experts has moved; 0 for a worker that was released. Raises PagesLackingError when
        more are in use."""
        used = int(self.pages[self._known(worker)] - self.free_pages[worker])
        if pages < used:
            raise PagesLackingError(f"worker {worker}: {used} KV pages are in use, {pages} would be left")
        self._state.memory[worker] = (pages, pages - used)

    def advance(self, iterations: int, workers: Iterable[int], detail: bool = False) -> Steps:
        """Up to `iterations` of the active `workers`, fewer when no request is live on any of them: all stop after the
        one in which the last of all ended. detail: with the steps of each worker.

        Raises ValueError when a worker that is not active has live requests, and PagesLackingError when a worker's next
        request does not fit into all its pages; other workers may have gone on then.
        """
        active = np.array([self._known(w) for w in workers], dtype=np.int64)
        idle = self.live
        idle[active] = 0
        if idle.any():
            raise ValueError(f"worker {int(idle.argmax())} has live requests but is not active")
        groups = len(self._group_prompts)
        tables, counts, tokens, stuck = core.advance(self._state, self._limits, groups, active, max(0, int(iterations)))
        if stuck >= 0:
            row = int(self._state.lists["head"][state.WAITING, stuck])
            need = -(-(int(self.prompt[row]) + int(self.response[row]) + 1) // self.page_tokens)
            raise PagesLackingError(
                f"worker {stuck} has {self.pages[stuck]} KV pages; request row {row} needs {need} to run"
            )
        records, finished, preempted = (table[:count] for table, count in zip(tables, counts, strict=True))
        return Steps.of(records, finished, preempted, tokens, detail)

    def copy(self) -> BatchModel:
        """One that goes its own way from here."""
        other = shallow_copy(self)
        other._state = state.State(*[a.copy() for a in self._state])
        return other

    def _number_groups(self, names: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """Groups as numbers from 0. Raises ValueError when the prompts of one differ in length."""
        found, first, index = np.unique(names, return_index=True, return_inverse=True)
        numbers, order = dict(self._group_numbers), np.argsort(first)
        for name in found[order].tolist():
            numbers.setdefault(name, len(numbers))
        group = np.array([numbers[name] for name in found.tolist()], dtype=np.int32)[index]
        lengths = np.zeros(len(numbers), np.int32)
        lengths[group] = prompts
        lengths[: len(self._group_prompts)] = self._group_prompts
        if (lengths[group] != prompts).any():
            raise ValueError("requests of one group have prompts of different lengths")
        self._group_numbers, self._group_prompts = numbers, lengths
        return group

    def _known(self, worker: int) -> int:
        if not 0 <= worker < self.workers:
            raise ValueError(f"worker {worker} is unknown")
        return int(worker)

    def _rows(self, rows: ArrayLike) -> np.ndarray:
        """int64 [n]. Raises ValueError for one that is not there."""
        known = np.atleast_1d(np.asarray(rows, dtype=np.int64))
        if known.min(initial=0) < 0 or known.max(initial=-1) >= len(self.prompt):
            raise ValueError(f"there are {len(self.prompt)} request rows, numbered from 0")
        return known

    def _unbound(self, rows: ArrayLike) -> np.ndarray:
        rows = self._rows(rows)
        if (self.worker[rows] >= 0).any() or len(np.unique(rows)) < len(rows):
            raise ValueError("a request is on a worker already, or given twice")
        return rows

    def _require_pages(self, row: int, worker: int) -> None:
        """Pages for all tokens of a row but its newest; siblings that run there have those of the prompt."""
        here = (int(self.prompt[row]) - 1) // self.page_tokens if self._sibling(row, worker) >= 0 else 0
        need, free = self._full_pages(row) - here, int(self.free_pages[worker])
        if need > free:
            raise PagesLackingError(f"worker {worker} has {free} KV pages free; request row {row} brings {need}")

    def _adopt(self, row: int, worker: int) -> None:
        """A row that nobody has goes on decoding: its KV arrives, that of its prompt for its siblings there too."""
        core.run(self._state, worker, np.int32(row), self.page_tokens)
        one, pages = self._state.rows[row], self._full_pages(row)
        self._state.memory["free"][worker] -= pages - one["kv_pages"]
        one["worker"], one["kv_pages"], one["computed"] = worker, pages, one["prompt"] + one["response"] - 1
        oldest = self._sibling(row, worker)
        self._state.rows["filled"][oldest] = (one["prompt"] - 1) // self.page_tokens * self.page_tokens

    def _full_pages(self, row: int) -> int:
        return -(-(int(self.prompt[row]) + int(self.response[row]) - 1) // self.page_tokens)

    def _sibling(self, row: int, worker: int) -> int:
        """The oldest row of the same group that runs on `worker`, -1 if there is none."""
        return core.sibling(self._state, self._state.lists["head"][state.RUNNING, worker], self.group[row])
