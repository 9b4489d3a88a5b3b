"""How a batch would run: a model in virtual time, counted in iterations."""

from __future__ import annotations

from collections.abc import Sequence

from flexfloor.world.memory import concurrent_pages

Held = tuple[float, float]
"""A request as memory sees it: tokens that it has, and those that it still gains, one an iteration."""

_MOST_TRIED = 4  # waiting requests that are tried, at each end of another one, before the next end is awaited


def pages_of(held: Sequence[Held], page_tokens: int) -> int:
    """Most KV pages that these requests take together from now on."""
    return concurrent_pages([tokens for tokens, _ in held], [left for _, left in held], page_tokens)


def fits(held: Sequence[Held], pages: int, page_tokens: int) -> bool:
    """Whether these requests never take more than `pages` together. Bounds that are quick to find come first."""
    if sum(-(-tokens // page_tokens) for tokens, _ in held) > pages:
        return False
    if sum(-(-(tokens + left) // page_tokens) for tokens, left in held) <= pages:
        return True
    return pages_of(held, page_tokens) <= pages


def iterations_to_end(
    running: Sequence[Held], waiting: Sequence[Held], pages: int, page_tokens: int, most: int
) -> float:
    """Iterations until all requests have ended, where `pages` KV pages are there for all of them together and `most`
    run at once.

    Those that wait are taken in longest first, each as soon as there are pages for all it will take beside what the
    running ones will; a request that is alone is taken in whatever it takes, so that the result is finite.
    """
    now, alive = 0.0, list(running)
    queue = sorted(waiting, key=lambda held: (-held[1], held[0]))
    while alive or queue:
        tried, at = 0, 0
        while at < len(queue) and tried < _MOST_TRIED:
            if len(alive) >= most:
                break
            if not alive or fits([*alive, queue[at]], pages, page_tokens):
                alive.append(queue.pop(at))
            else:
                at, tried = at + 1, tried + 1
        if not queue:
            return now + max(left for _, left in alive)
        step = min(left for _, left in alive)
        now += step
        alive = [(tokens + step, left - step) for tokens, left in alive if left > step]
    return now
