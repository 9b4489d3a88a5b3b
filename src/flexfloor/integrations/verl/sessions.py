"""What belongs to a rollout under verl: announced prompts, the sessions of each, and which of them have come so far.

verl sends no batch to a rollout server, but one call for every turn of every session (a session is one sample of a
prompt: an agent loop). An announcement tells beforehand which sessions there will be. With it, the requests of a step
wait for one another, so that the policy sees all of them before it plans; and the rollout ends when the last session
has told that it generates no more. Plain data and rules, without Ray and without a fleet.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexfloor.errors import FlexFloorError
from flexfloor.requests import Request, SamplingParams
from flexfloor.world.lengths.observations import Split

_IN_A_STEP = 2**20  # announcements of one training step that get random numbers of their own
_VALIDATION = 2**62

Session = tuple[str, int]
"""verl's uid of a prompt (new in every step), and the number of the sample."""


@dataclass(frozen=True)
class AnnouncedPrompt:
    """key: stable across epochs; occurrence: how often the key came before in the same step."""

    uid: str
    key: str
    occurrence: int
    samples: int


@dataclass(frozen=True)
class Announcement:
    """The prompts of one call of verl's agent-loop manager. number: counts these calls within a step."""

    step: int
    number: int
    split: Split
    prompts: tuple[AnnouncedPrompt, ...]

    @property
    def sampling_step(self) -> int:
        """A number of its own for every call, the same after a resume: with it, its random numbers are its own."""
        return self.step * _IN_A_STEP + self.number + (_VALIDATION if self.split == "eval" else 0)

    @property
    def sessions(self) -> list[Session]:
        return [(p.uid, sample) for p in self.prompts for sample in range(p.samples)]


def prompt_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The prompt key of each row of a batch.

    rows: `raw_prompt` (messages), and where the dataset has them `data_source` and `extra_info` with an `index`. A row
    without an index, or whose index stands for another prompt in the same batch as well, gets a hash of its messages.
    """
    hashes = [_hash_messages(row["raw_prompt"]) for row in rows]
    named: dict[str, set[str]] = {}
    names: list[str | None] = []
    for row, digest in zip(rows, hashes, strict=True):
        index = (row.get("extra_info") or {}).get("index")
        name = None if index is None else f"{row.get('data_source') or 'data'}:{index}"
        names.append(name)
        if name is not None:
            named.setdefault(name, set()).add(digest)
    return [
        name if name is not None and len(named[name]) == 1 else digest
        for name, digest in zip(names, hashes, strict=True)
    ]


def announce(
    rows: Sequence[Mapping[str, Any]], *, step: int, number: int, split: Split, seen: Counter[str]
) -> Announcement:
    """rows: as of `prompt_keys`, with `uid` and `samples`. seen: keys of this step so far; it is brought up to date."""
    prompts = []
    for row, key in zip(rows, prompt_keys(rows), strict=True):
        prompts.append(AnnouncedPrompt(str(row["uid"]), key, seen[key], int(row["samples"])))
        seen[key] += 1
    return Announcement(step, number, split, tuple(prompts))


def _hash_messages(messages: Any) -> str:
    """16 hex digits of SHA-256 over the messages as JSON with sorted keys."""
    plain = json.dumps(list(messages), sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


@dataclass
class _Waiting:
    """An announcement whose first requests are still coming in."""

    missing: set[Session]
    held: list[tuple[Session, Request]] = field(default_factory=list)


@dataclass
class SessionBook:
    """Who was announced, who waits for whom, who is done. Every method may be told the same thing twice."""

    _prompts: dict[str, tuple[Announcement, AnnouncedPrompt]] = field(default_factory=dict)
    _open: set[Session] = field(default_factory=set)
    _turns: Counter[Session] = field(default_factory=Counter)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)  # by uid

    def announce(self, announcement: Announcement) -> None:
        sessions = announcement.sessions
        waiting = _Waiting(set(sessions))
        for prompt in announcement.prompts:
            self._prompts[prompt.uid] = (announcement, prompt)
            self._waiting[prompt.uid] = waiting
        self._open.update(sessions)

    @property
    def uids(self) -> tuple[str, ...]:
        """Of all prompts, in the order in which they were announced."""
        return tuple(self._prompts)

    @property
    def is_done(self) -> bool:
        """No session will generate any more."""
        return not self._open

    def request(self, session: Session, prompt: Sequence[int], sampling: SamplingParams) -> Request:
        """The next turn of a session, as a request. Raises FlexFloorError for a session nobody announced."""
        uid, sample = session
        if uid not in self._prompts or session not in self._open:
            raise FlexFloorError(f"sample {sample} of prompt {uid} belongs to no rollout that is under way")
        _, known = self._prompts[uid]
        turn = self._turns[session]
        self._turns[session] += 1
        key = known.key if turn == 0 else f"{known.key}@{turn}"
        return Request(f"{key}#{known.occurrence}/{sample}", key, sample, tuple(prompt), sampling)

    def sampling_step(self, session: Session) -> int:
        """Raises FlexFloorError for a session nobody announced."""
        if session[0] not in self._prompts:
            raise FlexFloorError(f"prompt {session[0]} was not announced")
        return self._prompts[session[0]][0].sampling_step

    def arrive(self, session: Session, request: Request) -> list[Request]:
        """Hand in a request; returns what can be submitted now, in an order that does not depend on arrival.

        First turns are held back until all sessions of their announcement have come or ended; later turns are not.
        """
        waiting = self._waiting.get(session[0])
        if waiting is None or session not in waiting.missing:
            return [request]
        waiting.held.append((session, request))
        return self._cross_off(waiting, session)

    def end(self, sessions: Iterable[Session]) -> list[Request]:
        """These sessions generate no more; returns what waited for nobody else."""
        ready: list[Request] = []
        for session in sessions:
            self._open.discard(session)
            waiting = self._waiting.get(session[0])
            if waiting is not None and session in waiting.missing:
                ready += self._cross_off(waiting, session)
        return ready

    def end_prompt(self, uid: str) -> list[Request]:
        """All sessions of a prompt generate no more."""
        samples = self._prompts[uid][1].samples if uid in self._prompts else 0
        return self.end((uid, sample) for sample in range(samples))

    def end_all(self) -> None:
        """Nothing more will come, whatever was announced."""
        self._open.clear()
        self._waiting.clear()

    def _cross_off(self, waiting: _Waiting, session: Session) -> list[Request]:
        waiting.missing.discard(session)
        if waiting.missing:
            return []
        order = {uid: index for index, uid in enumerate(self._prompts)}
        held, waiting.held = sorted(waiting.held, key=lambda entry: (order[entry[0][0]], entry[0][1])), []
        return [request for _, request in held]
