"""Policies held against a baseline, by the summaries of their rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexfloor.ledger.accounting import Summary

BASELINES = ("static", "static-spread")


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One policy against the baseline. Ratios are its value over the baseline's, so above 1 is better; None where one
    of the two was cut off before its end.

    equal: both hashes are the baseline's. resizes: changes of the active set that were carried out.
    """

    policy: str
    iterations: int
    occupied_iterations: int
    tokens_per_occupied_iteration_ratio: float | None
    wall_s: float
    throughput_ratio: float | None
    tokens_per_occupied_s_with_regrow_ratio: float | None
    post_finish_share: float
    post_finish_share_iterations: float
    preemptions: int
    resizes: int
    equal: bool
    pace_valid: bool | None


def choose_baseline(policies: Sequence[str]) -> str:
    """The policy that the others are measured against."""
    return next((name for name in policies if name in BASELINES), policies[0])


def compare_summaries(summaries: Mapping[str, Summary], baseline: str | None = None) -> list[ComparisonRow]:
    """A row for each, in the order given. baseline: a key, `choose_baseline` of the keys if not given."""
    base = summaries[choose_baseline(list(summaries)) if baseline is None else baseline]
    return [
        ComparisonRow(
            policy=name,
            iterations=own.iterations,
            occupied_iterations=own.occupied_iterations,
            tokens_per_occupied_iteration_ratio=_ratio(own, base, _per_occupied_iteration),
            wall_s=own.wall_s,
            throughput_ratio=_ratio(own, base, lambda s: s.throughput_tok_s),
            tokens_per_occupied_s_with_regrow_ratio=_ratio(own, base, lambda s: s.occupied_rate),
            post_finish_share=own.post_finish_share,
            post_finish_share_iterations=own.post_finish_share_iterations,
            preemptions=own.preemptions,
            resizes=sum(1 for r in own.resizes if _changed_the_group(r)),
            equal=_hashes(own) == _hashes(base),
            pace_valid=own.pace_valid,
        )
        for name, own in summaries.items()
    ]


def _per_occupied_iteration(summary: Summary) -> float:
    return summary.response_tokens / max(1, summary.occupied_iterations)


def _ratio(own: Summary, base: Summary, value: Callable[[Summary], float]) -> float | None:
    if not (own.complete and base.complete):
        return None
    return value(own) / value(base) if value(base) > 0 else 0.0


def _hashes(summary: Summary) -> tuple[str | None, str | None]:
    return summary.responses_sha256, summary.logprobs_sha256


def _changed_the_group(resize: Mapping[str, Any]) -> bool:
    return resize.get("failed") is None and bool(resize.get("leaving") or resize.get("joining"))
