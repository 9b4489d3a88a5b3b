"""What a policy may know of lengths, by name."""

from __future__ import annotations

from flexfloor.errors import InputError
from flexfloor.world.lengths.base import ForcedLengths, Lengths
from flexfloor.world.lengths.forecast import HistoryLengths
from flexfloor.world.lengths.observations import Observations, Split
from flexfloor.world.lengths.store import LengthHistory

KNOWLEDGE = ("none", "history", "shuffled", "oracle")


def make_lengths(
    knowledge: str, history: LengthHistory | Observations | None = None, seed: int = 0, *, split: Split = "train"
) -> Lengths:
    """none: what the rollout itself shows. history: earlier epochs. shuffled: those of other prompts, to see whether a
    wrong history does harm; seed: which others. oracle: the forced lengths. auto: history where there is one. split:
    whose lengths count.

    Raises InputError naming the choices, or what is missing.
    """
    if knowledge == "auto":
        knowledge = "none" if history is None else "history"
    if knowledge not in KNOWLEDGE:
        told = f"knowledge {knowledge!r} is not known; there is {', '.join(KNOWLEDGE)}"
        raise InputError(told, settings=("knowledge",))
    if knowledge == "oracle":
        return ForcedLengths()
    if knowledge == "none":
        return HistoryLengths(None)
    if history is None:
        told = f"knowledge {knowledge!r} needs a length history; give `history`"
        raise InputError(told, settings=("knowledge", "history"))
    return HistoryLengths(history, split=split, shuffle_seed=seed if knowledge == "shuffled" else None)
