"""Scalars of a rollout for TensorBoard, under the names that trainers log (`ledger/metrics.py`).

    DIR/<policy>/            one point for each rollout, at its step
    DIR/<policy>/step-<n>/   how it went, at the iterations: live requests, active workers, tokens/s

Each folder is a run of TensorBoard. The wall time of every point is when it happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexfloor.errors import FlexFloorError, InputError
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.metrics import PREFIX, rollout_metrics
from flexfloor.ledger.timing import split_time
from flexfloor.outputs import check_outputs
from flexfloor.report.live_state import LiveState

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MOST_POINTS = 500
"""Points of a time series; a rollout of more chunks has every n-th one, and the last."""


def check_tensorboard(folder: Path | None) -> None:
    """Raises InputError where scalars could not be written into the folder, before a rollout has been run for them."""
    if folder is None:
        return
    if find_spec("tensorboard") is None:
        raise InputError("--tensorboard needs the package tensorboard; pip install 'flexfloor[tensorboard]'")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--tensorboard {folder} is a file; name a folder")
    check_outputs({"--tensorboard": folder / "events"}, {})


def write_scalars(folder: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Adds the rollout that `records` tell of to the run of its policy. Returns the folder of that run.

    Raises FlexFloorError when the disk says no.
    """
    from torch.utils.tensorboard import SummaryWriter

    summary = summarize(records)
    run, step = folder / summary.policy.replace(":", "-"), summary.step or 0
    begun = datetime.fromisoformat(records[0]["started_at"]).timestamp()
    try:
        with SummaryWriter(str(run)) as writer:
            for name, value in rollout_metrics(summary, split_time(records)).items():
                writer.add_scalar(PREFIX + name, value, step, walltime=begun + summary.wall_s)
        with SummaryWriter(str(run / f"step-{step:06d}")) as writer:
            _write_series(writer, records, begun)
    except OSError as error:
        raise FlexFloorError(
            f"--tensorboard {run}: cannot be written ({error.strerror}); name another folder"
        ) from None
    return run


def _write_series(writer: SummaryWriter, records: Sequence[Mapping[str, Any]], begun: float) -> None:
    state = LiveState(records[0])
    count, chunks = sum(r["type"] == "chunk" for r in records), 0
    each = count // MOST_POINTS + 1
    for record in records[1:]:
        state.take(record)
        if record["type"] != "chunk":
            continue
        chunks += 1
        if chunks % each == 0 or chunks == count:
            values = {
                "live_requests": state.live,
                "active_workers": len(state.active),
                "tokens_per_s": state.tokens_per_s(),
            }
            for name, value in values.items():
                writer.add_scalar(PREFIX + name, value, state.iteration, walltime=begun + state.t)
    writer.add_text(f"{PREFIX}times", state.made_by or "real time")
