"""The rollout: one synchronous generation of a batch of requests. The only place where policy meets mechanism."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flexfloor.errors import FlexFloorError, InputError, PlanRefusedError, interrupts_as_raised
from flexfloor.fleet import Fleet, Progress, refused
from flexfloor.ledger.accounting import Summary, summarize
from flexfloor.ledger.events import (
    LedgerWriter,
    assign_record,
    chunk_record,
    decision_record,
    end_record,
    resize_record,
    start_record,
    submit_record,
)
from flexfloor.requests import Request, Response, hash_responses, shared_sampling, shuffle
from flexfloor.world.lengths.base import Lengths, check_oracle
from flexfloor.world.lengths.observations import Split
from flexfloor.world.lengths.store import History, load_history, remember
from flexfloor.world.profiles import DeviceProfile, load_profile, profile_of
from flexfloor.world.status import FleetStatus

if TYPE_CHECKING:
    from flexfloor.policy import Policy

_busy: weakref.WeakSet[Fleet] = weakref.WeakSet()  # fleets with a rollout on them
_PAUSE_AFTER_FAILURE = 8  # looks of the driver


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """How far a rollout is. t: seconds; tokens_per_s: response tokens over the time since the last report."""

    t: float
    iteration: int
    requests: int
    finished: int
    live: int
    waiting: int
    response_tokens: int
    tokens_per_s: float


@dataclass(frozen=True)
class RolloutResult:
    """responses: in the order in which their requests were submitted; without tokens where the fleet is simulated."""

    responses: list[Response]
    summary: Summary


@dataclass(slots=True)
class _Partial:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)


class Rollout:
    """A rollout that takes requests while it runs: `submit` from any thread, `seal` when no more will come.

    Iterate over it to run it; it yields responses as they finish and ends when it is sealed and all are done.
    on_release: told the number of a worker once its memory is free and it is outside every group.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        policy: str | Policy = "static",
        knowledge: str = "auto",
        history: History | None = None,
        split: Split = "train",
        max_slowdown: float = 0.02,
        min_workers: int = 1,
        profile: str | Path | DeviceProfile | None = None,
        chunk: int = 16,
        ledger: LedgerWriter | Path | str | None = None,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        on_release: Callable[[int], None] | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        if chunk < 1:
            raise InputError(f"chunk is {chunk}; give at least 1 iteration")
        observed = load_history(history, split)  # as it is now, whoever adds to it meanwhile
        if knowledge == "auto":
            knowledge = "none" if observed is None else "history"
        if isinstance(policy, str):
            # Here, because numba and scipy take longer to load than all the rest of the package.
            from flexfloor.policy import make_policy
            from flexfloor.world.lengths.knowledge import make_lengths

            policy = make_policy(
                policy,
                lengths=make_lengths(knowledge, observed, split=split) if lengths is None else lengths,
                max_slowdown=max_slowdown,
                min_workers=min_workers,
                workers=fleet.info.workers,
                profile=load_profile(profile or profile_of(fleet.info)),
                time_scale=fleet.info.pace or 1.0,
            )
        self._fleet, self._policy, self._chunk = fleet, policy, chunk
        if isinstance(policy, type) or not all(hasattr(policy, name) for name in ("name", "admit", "decide")):
            raise InputError(f"policy {policy!r:.80} has no name, admit and decide; see flexfloor.policy.Policy")
        self._knowledge, self._history, self._split, self._on_release = knowledge, history, split, on_release
        self._ledger = ledger if isinstance(ledger, LedgerWriter) else LedgerWriter(Path(ledger) if ledger else None)
        self._on_progress = on_progress
        self._pause = 0  # looks of the driver until resizes are tried again
        self._warned = False  # that the fleet refused a plan
        self._arrived: deque[Request] = deque()
        self._sealed = False
        self._changed = threading.Condition()
        self._requests: dict[str, Request] = {}
        self._live: dict[str, _Partial] = {}
        self._responses: dict[str, Response] = {}
        self._tokens = 0
        self._origin: float | None = None
        self._finished_at = self._reported_at = 0.0
        self._reported_tokens = 0

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand requests over, all or none.

        Raises InputError for a request id that is known already or a request that can never run, FlexFloorError when
        sealed; the rollout itself goes on.
        """
        self._fleet.check(requests)
        if self._knowledge == "oracle":
            check_oracle(requests)
        with self._changed:
            if self._sealed:
                raise FlexFloorError("the rollout is sealed; it takes no more requests")
            fresh: dict[str, Request] = {}
            for request in requests:
                if request.request_id in self._requests or request.request_id in fresh:
                    raise InputError(f"request {request.request_id} was submitted twice")
                fresh[request.request_id] = request
            self._requests |= fresh
            self._arrived.extend(requests)
            self._changed.notify()

    def seal(self) -> None:
        """No more requests will come: the rollout ends with the last response."""
        with self._changed:
            self._sealed = True
            self._changed.notify()

    def run(self) -> RolloutResult:
        """Run to the end. Responses come in the order of submission."""
        for _ in self:
            pass
        return RolloutResult([self._responses[name] for name in self._requests], self.summary)

    @property
    def summary(self) -> Summary:
        """The account of what has run so far, made from the ledger."""
        return summarize(self._ledger.records)

    def __iter__(self) -> Iterator[Response]:
        with interrupts_as_raised():
            yield from self._run()

    def _run(self) -> Iterator[Response]:
        fleet = self._fleet
        if fleet in _busy:
            raise FlexFloorError("a rollout is running on this fleet; wait for its end, or close its iterator")
        _busy.add(fleet)
        queue: list[Request] = []
        try:
            fleet.start()
            while self._await_work(queue):
                # Who stays, then who gets what (a worker may leave before its first request), then who is left without.
                self._resize(queue)
                if queue:
                    queue = self._assign(queue)
                    if not queue:
                        self._resize(queue)
                if queue and not self._live:
                    waits = f"{len(queue)} requests wait and nobody is busy"
                    raise FlexFloorError(f"policy {self._policy.name} admits nothing, though {waits}")
                begin = self._now
                progress = fleet.advance(self._chunk)
                if (observe := getattr(self._policy, "observe", None)) is not None:
                    observe(progress)
                yield from self._record(progress, begin, waiting=len(queue))
            if self._origin is None:
                self._begin()  # sealed without a request: an empty rollout has an account too
            closing = fleet.status()
            self._end(closing, fleet.regrow())
            self._remember()
        finally:
            _busy.discard(fleet)
            self._ledger.close()

    def _remember(self) -> None:
        """The history learns from the responses. These are worth more: when it cannot, that is a warning."""
        if self._history is None or not self._responses or (info := self._fleet.info).simulated:
            return
        requests = list(self._requests.values())
        responses = [self._responses[name] for name in self._requests if name in self._responses]  # not as they ended
        try:
            remember(self._history, requests, responses, split=self._split, policy_version=info.weights_version)
        except FlexFloorError as error:
            warnings.warn(f"{error}; the history lacks this rollout", RuntimeWarning, stacklevel=2)

    def _assign(self, queue: list[Request]) -> list[Request]:
        """Bind what the policy admits; returns the requests that still wait."""
        status = self._fleet.status()
        assignment = self._policy.admit(queue, status)
        self._note_decisions(status.iteration)
        if not assignment:
            return queue
        if not isinstance(assignment, Mapping):
            raise FlexFloorError(f"policy {self._policy.name} admits {assignment!r:.80}, not worker → request ids")
        self._fleet.assign(assignment)
        return self._bind(queue, assignment, status.iteration)

    def _resize(self, queue: Sequence[Request]) -> None:
        """Carry out what the policy decides. What fails or is refused changes nothing; none is tried for a while."""
        if self._pause > 0:
            self._pause -= 1
            return
        status, plan, begin = self._fleet.status(), None, self._now
        try:
            plan = self._policy.decide(queue, status)
            self._note_decisions(status.iteration)
            if plan is None:
                return
            begin, outcome = self._now, self._fleet.apply(plan)
        except PlanRefusedError as error:
            outcome = refused(error, plan, status)
        self._ledger.write(resize_record(begin, self._now, outcome, self._fleet.status().workers))
        if outcome.failed is not None:
            self._pause = _PAUSE_AFTER_FAILURE
            if outcome.refused and not self._warned:
                self._warned, told = True, f"a plan of policy {self._policy.name} was refused: {outcome.failed}"
                warnings.warn(f"{told}; the rollout goes on without it", RuntimeWarning, stacklevel=2)
        elif self._on_release:
            for worker in outcome.leaving:
                self._on_release(worker)

    def _note_decisions(self, iteration: int) -> None:
        """What the policy decided beside resizes goes into the ledger."""
        if (take := getattr(self._policy, "take_decisions", None)) is not None:
            for decision in take():
                self._ledger.write(decision_record(self._now, iteration, decision))

    def _begin(self) -> None:
        """The clock of the rollout starts when the first request is handed over."""
        self._origin = self._fleet.clock()
        status = self._fleet.status()
        settings = {"chunk": self._chunk, "knowledge": self._knowledge, "worker_memory": status.worker_memory}
        settings |= shared_sampling(self._requests.values())
        now, own = datetime.now(UTC).isoformat(timespec="seconds"), self._policy.name
        self._ledger.write(start_record(self._fleet.info, own, settings, now, status.workers, status.page_bytes))

    @property
    def _now(self) -> float:
        return self._fleet.clock() - self._origin if self._origin is not None else 0.0

    def _await_work(self, queue: list[Request]) -> bool:
        """Take in what has arrived; block while nothing is live. False when sealed and done."""
        with self._changed:
            while not (self._arrived or queue or self._live or self._sealed):
                # A limit, so that Ctrl-C is seen while nothing happens.
                self._changed.wait(0.2)
            fresh = list(self._arrived)
            self._arrived.clear()
        if fresh:
            self._fleet.submit(fresh)  # refuses what cannot run, before anything is written
            if self._origin is None:
                self._begin()
            queue += fresh
            self._ledger.write(submit_record(self._now, len(fresh), sum(len(r.prompt_tokens) for r in fresh)))
        return bool(queue or self._live)

    def _bind(self, queue: list[Request], assignment: dict[int, list[str]], iteration: int) -> list[Request]:
        """Note what was assigned; returns the requests that still wait."""
        bound = {name for names in assignment.values() for name in names}
        self._live |= {name: _Partial() for name in bound}
        self._ledger.write(assign_record(self._now, iteration, assignment))
        return [r for r in queue if r.request_id not in bound]

    def _record(self, progress: Progress, t0: float, waiting: int) -> list[Response]:
        """Account for an advance; returns the responses that ended in it."""
        t1 = self._now
        finished: list[Response] = []
        totals: dict[str, tuple[int, int]] = {}
        self._tokens += sum(w.tokens for w in progress.workers)
        for part in progress.requests:
            partial = self._live[part.request_id]
            partial.tokens.extend(part.tokens)
            partial.logprobs.append(part.logprobs)
            if part.finish_reason is not None:
                request = self._requests[part.request_id]
                del self._live[part.request_id]
                totals[part.request_id] = (len(request.prompt_tokens), part.response_tokens)
                finished.append(
                    Response(
                        request.request_id,
                        request.prompt_key,
                        request.sample,
                        len(request.prompt_tokens),
                        partial.tokens,
                        np.concatenate(partial.logprobs),
                        part.finish_reason,
                    )
                )
        self._responses |= {r.request_id: r for r in finished}
        self._ledger.write(chunk_record(progress, t0, t1, totals))
        if finished:
            self._finished_at = t1
        if self._on_progress:
            self._on_progress(self._progress(progress, t1, waiting))
        return finished

    def _progress(self, progress: Progress, t: float, waiting: int) -> RolloutProgress:
        seconds = max(t - self._reported_at, 1e-9)
        rate = (self._tokens - self._reported_tokens) / seconds
        self._reported_at, self._reported_tokens = t, self._tokens
        return RolloutProgress(
            t=t,
            iteration=progress.first_iteration + progress.iterations,
            requests=len(self._requests),
            finished=len(self._responses),
            live=len(self._live),
            waiting=waiting,
            response_tokens=self._tokens,
            tokens_per_s=rate,
        )

    def _end(self, closing: FleetStatus, regrow_s: float) -> None:
        hashes = None if self._fleet.info.simulated else hash_responses(self._responses.values())
        self._ledger.write(end_record(self._finished_at, closing.workers, hashes, regrow_s))


def rollout(
    fleet: Fleet,
    requests: Sequence[Request],
    *,
    policy: str | Policy = "static",
    knowledge: str = "auto",
    history: History | None = None,
    split: Split = "train",
    max_slowdown: float = 0.02,
    min_workers: int = 1,
    profile: str | Path | DeviceProfile | None = None,
    order: str = "arrival",
    chunk: int = 16,
    ledger: LedgerWriter | Path | str | None = None,
    on_progress: Callable[[RolloutProgress], None] | None = None,
    on_release: Callable[[int], None] | None = None,
    lengths: Lengths | None = None,
) -> RolloutResult:
    """Generate a response to each request and account for the workers' time.

    policy: a name of `flexfloor.policy`. history: lengths of earlier rollouts, a file or a LengthHistory; it learns
    this rollout's when that has ended. split: `train` or `eval`: whose lengths count, and what is learned under.
    knowledge: what the policy knows of lengths: `none`, `history`, `shuffled` (other prompts' history, to see what a
    wrong one does) or `oracle` (the forced ones); `auto` is the history where there is one. lengths: forecasts of one's
    own, instead. max_slowdown: throughput that releasing workers may cost, reckoned on the device `profile`. order:
    `arrival` or `shuffle:SEED`, in which the requests reach the policy; responses come back in the order given. chunk:
    iterations between two looks of the driver. on_release: told the number of a worker that has given its memory back.
    ledger: file to write. Raises InputError before anything runs for a request that cannot fit.
    """
    if not requests:
        raise InputError("there are no requests; give at least one prompt")
    run = Rollout(
        fleet,
        policy=policy,
        knowledge=knowledge,
        history=history,
        split=split,
        max_slowdown=max_slowdown,
        min_workers=min_workers,
        profile=profile,
        chunk=chunk,
        ledger=ledger,
        on_progress=on_progress,
        on_release=on_release,
        lengths=lengths,
    )
    run.submit(shuffle(requests, order))
    run.seal()
    by_id = {r.request_id: r for r in run.run().responses}
    return RolloutResult([by_id[r.request_id] for r in requests], run.summary)
