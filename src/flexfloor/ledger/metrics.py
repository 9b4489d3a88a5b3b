"""The scalars of a rollout that loggers get, under the same names from a trainer and outside of one."""

from __future__ import annotations

from flexfloor.ledger.accounting import Summary
from flexfloor.ledger.timing import TimeSplit

PREFIX = "flexfloor/"
"""What the names begin with in a log."""


def rollout_metrics(summary: Summary, split: TimeSplit) -> dict[str, float]:
    """Of one rollout: name without prefix → value; units stand in the names.

    A name that `summary.json` has, too, is the same quantity. released_workers: that gave their memory back before it
    ended. A run without its end lacks what only that tells: `regrow_s`, and the rate in which it counts.
    """
    resizes = [r for r in summary.resizes if r["failed"] is None]
    shown: dict[str, float] = {
        "tokens_per_occupied_s": summary.tokens_per_occupied_s,
        "tokens_per_occupied_iteration": summary.response_tokens / max(1, summary.occupied_iterations),
        "throughput_tok_s": summary.throughput_tok_s,
        "post_finish_share": summary.post_finish_share,
        "response_tokens": summary.response_tokens,
        "iterations": summary.iterations,
        "occupied_iterations": summary.occupied_iterations,
        "resizes": len(resizes),
        "released_workers": sum(len(r["leaving"]) for r in resizes),
        "preemptions": summary.preemptions,
        "moved_mib": summary.moved_bytes / 2**20,
        "plan_s": split.plan_s,
        "prefill_s": split.prefill_s,
        "decode_s": split.decode_s,
        "resize_s": split.resize_s,
    }
    if summary.regrow_s is not None and summary.tokens_per_occupied_s_with_regrow is not None:
        shown["tokens_per_occupied_s_with_regrow"] = summary.tokens_per_occupied_s_with_regrow
        shown["regrow_s"] = summary.regrow_s
    if summary.paced_overrun_share is not None:
        shown["paced_overrun_share"] = summary.paced_overrun_share
    return shown
