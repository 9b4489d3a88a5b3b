"""What a policy is, and what it knows about lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flexfloor.errors import InputError
from flexfloor.requests import Request
from flexfloor.world.resize import ResizePlan
from flexfloor.world.status import FleetStatus


class Policy(Protocol):
    """Decides between two advances. name: as reported in ledger and summary."""

    name: str

    def admit(self, queue: Sequence[Request], status: FleetStatus) -> dict[int, list[str]]:
        """Which waiting requests to bind now, in this order: worker → request ids."""

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        """A resize or moves to carry out now. queue: requests that are still not bound."""


class Lengths(Protocol):
    """How long responses are going to be. Tokens of the response, the ones generated so far included."""

    def total(self, request: Request, generated: int) -> float:
        """Expected length of a response that has `generated` tokens."""

    def high(self, request: Request, generated: int) -> float:
        """A length that is rarely exceeded: what memory is set aside for."""


class NoLengths:
    """Nothing is known beforehand: a response that has come this far is about half done, within its limit."""

    def total(self, request: Request, generated: int) -> float:
        return min(request.sampling.max_tokens, max(2 * generated, request.sampling.max_tokens / 4))

    def high(self, request: Request, generated: int) -> float:
        return min(request.sampling.max_tokens, max(3 * generated, request.sampling.max_tokens / 2))


class ForcedLengths:
    """Every response has the length that was forced upon it."""

    def total(self, request: Request, generated: int) -> float:
        return request.sampling.max_tokens

    high = total


KNOWLEDGE: dict[str, type[NoLengths] | type[ForcedLengths]] = {"none": NoLengths, "oracle": ForcedLengths}


def make_lengths(knowledge: str) -> Lengths:
    """Raises InputError naming the choices."""
    if knowledge not in KNOWLEDGE:
        raise InputError(f"knowledge {knowledge!r} is not known; there is {', '.join(KNOWLEDGE)}")
    return KNOWLEDGE[knowledge]()


def check_oracle(requests: Sequence[Request]) -> None:
    """Raises InputError for a request whose length is not forced."""
    for request in requests:
        if request.sampling.forced_length is None:
            raise InputError(
                f"knowledge 'oracle' needs forced lengths, and request {request.request_id} may end by itself; "
                "give --force-lengths"
            )
