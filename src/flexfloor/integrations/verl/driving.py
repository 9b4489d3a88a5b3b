"""One rollout under verl: runs on a thread of its own, while requests come in and responses go out on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexfloor.errors import FlexFloorError
from flexfloor.integrations.verl.sessions import Announcement, Session, SessionBook
from flexfloor.ledger.events import LedgerWriter
from flexfloor.ledger.metrics import rollout_metrics
from flexfloor.ledger.timing import split_time
from flexfloor.requests import Request, Response, SamplingParams
from flexfloor.rollout import Rollout
from flexfloor.world.lengths.observations import Split


class AbandonedError(FlexFloorError):
    """The rollout was given up before its end."""


@dataclass(frozen=True)
class Outcome:
    """What a rollout came to.

    uids: of its prompts, in the order of the batch. values: metrics without prefix. responses_sha256: None where
    nothing was generated. refused: what the first request was told that could not run.
    """

    step: int
    split: Split
    uids: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)
    responses_sha256: str | None = None
    refused: str | None = None


class StepRollout:
    """A rollout of one training step or validation. All methods belong to the event loop that made it.

    fleet: as of `flexfloor.fleet.Fleet`. options: arguments of `flexfloor.rollout.Rollout`. ledger: file. on_release:
    told the number of a worker that has given its memory back, on another thread. more_metrics: asked at the end.
    """

    def __init__(
        self,
        fleet: Any,
        first: Announcement,
        options: dict[str, Any],
        *,
        ledger: Path | None = None,
        on_release: Callable[[int], None] | None = None,
        more_metrics: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self.step, self.split = first.step, first.split
        self._book = SessionBook()
        self._book.announce(first)
        self._fleet, self._more_metrics = fleet, more_metrics
        self._ledger = LedgerWriter(ledger)
        self._rollout = Rollout(
            fleet,
            split=first.split,
            ledger=self._ledger,
            on_progress=self._look,
            on_release=on_release,
            **options,
        )
        self._loop = asyncio.get_running_loop()
        self._futures: dict[str, asyncio.Future[Response]] = {}
        self._ended: asyncio.Future[Outcome] = self._loop.create_future()
        self._ended.add_done_callback(_mark_seen)
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._refused: list[str] = []

    @property
    def takes_more(self) -> bool:
        """Some session may still generate."""
        return not self._book.is_done and not self._ended.done()

    def extend(self, announcement: Announcement) -> None:
        """Further prompts, while the rollout runs."""
        self._book.announce(announcement)

    def sampling_step(self, session: Session) -> int:
        return self._book.sampling_step(session)

    async def generate(self, session: Session, prompt: list[int], sampling: SamplingParams) -> Response:
        """One turn of a session. Raises InputError for a request that can never run, and what ends the rollout."""
        if self._ended.done():
            await self._ended  # raises what it ended with
            raise FlexFloorError(f"the rollout of step {self.step} has ended; it takes no more requests")
        request = self._book.request(session, prompt, sampling)
        try:
            self._fleet.check([request])
        except FlexFloorError as error:
            self._refused.append(str(error))
            self.end_sessions([session])  # nobody waits for it
            raise
        future = self._futures[request.request_id] = self._loop.create_future()
        self._submit(self._book.arrive(session, request))
        return await future

    def end_sessions(self, sessions: list[Session]) -> None:
        """These generate no more; with the last of them the rollout is sealed."""
        self._submit(self._book.end(sessions))
        self._seal_if_done()

    def end_prompt(self, uid: str) -> None:
        self._submit(self._book.end_prompt(uid))
        self._seal_if_done()

    def abandon(self) -> None:
        """Give up at the next look of the driver: who waits for a response gets AbandonedError."""
        self._abandoned = True
        self._book.end_all()
        self._seal_if_done()

    async def outcome(self) -> Outcome:
        """Waits for the end, with all workers back. Raises what the rollout failed with."""
        return await asyncio.shield(self._ended)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _submit(self, ready: list[Request]) -> None:
        if not ready or self._ended.done():
            return
        self._rollout.submit(ready)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"rollout-{self.step}", daemon=True)
            self._thread.start()

    def _seal_if_done(self) -> None:
        if not self._book.is_done:
            return
        self._rollout.seal()
        if self._thread is None and not self._ended.done():  # no session got as far as to ask for a token
            self._end(self._outcome({}))

    def _run(self) -> None:
        try:
            for response in self._rollout:
                self._tell(self._deliver, response)
            summary = self._rollout.summary
            values = rollout_metrics(summary, split_time(self._ledger.records))
            values |= self._more_metrics() if self._more_metrics else {}
            self._tell(self._end, self._outcome(values, summary.responses_sha256))
        except BaseException as error:
            self._tell(self._fail, error)

    def _outcome(self, values: dict[str, float], responses_sha256: str | None = None) -> Outcome:
        values = values | {"refused_requests": len(self._refused)}
        refused = self._refused[0] if self._refused else None
        return Outcome(self.step, self.split, self._book.uids, values, responses_sha256, refused)

    def _look(self, progress: Any) -> None:
        if self._abandoned:
            raise AbandonedError(f"the rollout of step {self.step} was given up")

    def _tell(self, what: Callable[[Any], None], value: Any) -> None:
        """Call on the event loop; it may be gone when the process ends."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, value)

    def _deliver(self, response: Response) -> None:
        future = self._futures.pop(response.request_id)
        if not future.done():  # its caller was cancelled: the response counts all the same
            future.set_result(response)

    def _end(self, outcome: Outcome) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)

    def _fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
        self._futures.clear()


def _mark_seen(future: asyncio.Future[Any]) -> None:
    """An error of a rollout is raised by whoever asks for its outcome; asyncio need not complain as well."""
    if not future.cancelled():
        future.exception()
