"""What a training is refused for before anything is loaded or started: its folder, its policy, a fleet too small."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from flexfloor.errors import InputError, concerning
from flexfloor.integrations.trl.origin import Origin
from flexfloor.integrations.trl.settings import TrainSettings

if TYPE_CHECKING:
    from flexfloor.fleets.engine.checkpoint import CheckpointInfo

LOCK, CONFIG, METRICS, ERROR, MODEL, LEDGERS = ".lock", "config.toml", "metrics.jsonl", "error.txt", "model", "ledgers"
BEGIN = "begin.json"
"""Names in the output folder. BEGIN: what the run began with, see `resume`."""

_HISTORY = tuple(f"length_history.sqlite{end}" for end in ("", "-wal", "-shm", "-journal"))
_OF_A_START = {CONFIG, METRICS, ERROR, LEDGERS, BEGIN, "runs", *_HISTORY}
"""What a run may leave that ended before it had trained a step, BEGIN always. runs: of TensorBoard."""


def check_output(output: Path, origin: Origin, resume: bool) -> None:
    """Raises InputError for an output folder that this run would mix its files with."""
    where = origin.at("output")
    if output.exists() and not output.is_dir():
        raise InputError(f"{where}: output {output} is a file; name a folder")
    folder = next(p for p in (output.absolute(), *output.absolute().parents) if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{where}: output {output}: {folder} is not a folder that can be written to; name another")
    if not output.is_dir() or is_untrained(output):
        return
    if not resume:
        raise InputError(f"{where}: output {output} holds files already; name a new folder, or go on with --resume")
    if not (output / CONFIG).is_file():
        raise InputError(f"{where}: output {output} holds no run of flexfloor train (no {CONFIG}); name another")


def is_untrained(output: Path) -> bool:
    """Whether the folder holds nothing but what a run leaves that ended before its first step did."""
    from flexfloor.integrations.trl.records import read_metrics

    names = {file.name for file in output.iterdir()} - {LOCK}
    if names and not (BEGIN in names and names <= _OF_A_START):
        return False
    return not any(record["step"] for record in read_metrics(output / METRICS))


def clear_start(output: Path, *, keep: Iterable[Path]) -> None:
    """Take away what an earlier start has left, whose lengths and ledgers are not those of this run, but for `keep`.

    Nothing in a folder that lacks BEGIN: files of these names may be somebody's own there.
    """
    if not (output / BEGIN).is_file():
        return
    kept = {file.resolve() for file in keep}
    for file in (output / name for name in sorted(_OF_A_START)):
        if file.resolve() in kept:
            continue
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)


def check_policy(settings: TrainSettings) -> None:
    """Raises InputError for a policy, its limits or what it is to know. Loads no torch."""
    from flexfloor.policy import make_policy
    from flexfloor.world.lengths.knowledge import make_lengths
    from flexfloor.world.profiles import load_profile

    with concerning("profile"):
        profile = load_profile(settings.engine.resolved_profile)
    make_policy(
        settings.policy,
        lengths=make_lengths("none"),
        max_slowdown=settings.max_slowdown,
        min_workers=settings.min_workers,
        workers=settings.workers,
        profile=profile,
    )
    if settings.knowledge in ("history", "shuffled") and settings.history is False:
        told = f"knowledge {settings.knowledge!r} needs a length history; leave `history` as it is, or give a file"
        raise InputError(told, settings=("knowledge", "history"))


def check_fleet(settings: TrainSettings, info: CheckpointInfo, *, longest: int) -> None:
    """Raises InputError for what no fleet is started with. longest: tokens of a prompt with its response, at most."""
    from flexfloor.fleet import load_plugin
    from flexfloor.fleets.engine.pacing import Pace
    from flexfloor.fleets.engine.plan import check_device, plan_memory
    from flexfloor.world.experts import place_contiguous
    from flexfloor.world.lengths.store import load_history

    workers, shape = settings.workers, info.shape
    placement = place_contiguous(len(shape.moe_layers), shape.experts, workers)
    with concerning("pace_model"):
        Pace.of(settings.engine)
    check_device(settings.engine, workers)
    load_plugin("flexfloor.launchers", settings.engine.launcher)
    for plan in plan_memory(info, placement, workers, settings.engine):
        plan.check(min(longest, shape.max_context))
    if isinstance(settings.history, Path):
        with concerning("history"):
            load_history(settings.history)
