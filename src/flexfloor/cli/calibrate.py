"""`flexfloor calibrate`: ledgers of real runs → a device profile, and how far it is off."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexfloor.cli.display import format_count, print_table
from flexfloor.errors import InputError
from flexfloor.outputs import atomic_write, check_outputs
from flexfloor.world.profiles import CALIBRATE, NOT_FITTED, format_profile, load_profile

if TYPE_CHECKING:
    from rich.table import Table

    from flexfloor.world.calibrate import Calibration, Run


def run_calibrate(ledgers: Sequence[Path], out: Path, base: str | None, cores: float | None) -> int:
    """Fit and write the profile, print its errors. Returns the exit code.

    base: profile for what the runs do not tell; None: `cpu` for runs on the CPU, else `h200`. cores: devices that the
    workers share; None: for runs on the CPU this machine's cores over the threads of a worker, else one each.
    Raises InputError.
    """
    check_outputs({"--out": out}, {f"ledger {path}": path for path in ledgers})
    if out.suffix != ".toml":
        raise InputError(f"--out {out} does not end in .toml, by which a profile's file is known; name one that does")
    from flexfloor.world.calibrate import calibrate, read_run

    runs = [read_run(path) for path in ledgers]
    fleet = runs[0].fleet
    on_cpu = fleet["device"] == "cpu"
    if cores is None:
        cores = max(1.0, len(os.sched_getaffinity(0)) / fleet["threads_per_worker"]) if on_cpu else math.inf
    found = calibrate(runs, load_profile(base or ("cpu" if on_cpu else "h200")), cores)
    with atomic_write(out) as file:
        file.write(format_profile(replace(found.profile, name=out.stem), _comments(found, runs)))
    print_table(_errors(found))
    print(f"  fitted to   {_count(found.fitted, 'iteration')} of {_count(len(runs), 'run')}")
    print(f"  kept out    {_count(found.held_out.iterations, 'iteration')}, for the errors above")
    print(f"  left out    {_count(found.outliers, 'iteration')}, too far off to say anything of the rest")
    print(f"  not fitted  {', '.join(found.kept)}")
    if found.note:
        print(f"  note        {found.note}")
    print(f"  profile     {out}")
    return 0


def _count(count: int, what: str) -> str:
    return f"{format_count(count)} {what}{'' if count == 1 else 's'}"


def _comments(found: Calibration, runs: Sequence[Run]) -> dict[str, str]:
    models = ", ".join(sorted({Path(run.fleet["model"]).name for run in runs}))
    fleet, held, groups = runs[0].fleet, found.held_out, ", ".join(map(str, found.by_workers))
    head = (
        f"{CALIBRATE}: fitted to {_count(found.fitted, 'iteration')} of {_count(len(runs), 'run')} of {models}\n"
        f"({fleet['dtype']}, {fleet['numerics_path']}, {fleet['device']}; workers {groups}); left out as too far off:"
        f" {format_count(found.outliers)}.\n"
        f"On {_count(held.iterations, 'iteration')} kept out of the fit: error {held.median:.1%} (median),"
        f" {held.p90:.1%} (90% of them); of their summed time {held.total:+.1%}."
    )
    vague = dict.fromkeys(found.vague, f"fitted in sum only, {' and '.join(found.vague)}")
    return {"": head} | dict.fromkeys(found.kept, NOT_FITTED) | vague


def _errors(found: Calibration) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE, title="Errors on iterations kept out of the fit", title_justify="left", title_style="bold"
    )
    for name in ("workers", "iterations", "median", "90% within", "of summed time"):
        table.add_column(name, justify="right")
    for name, held in [*((str(m), h) for m, h in found.by_workers.items()), ("all", found.held_out)]:
        numbers = (f"{held.median:.1%}", f"{held.p90:.1%}", f"{held.total:+.1%}")
        table.add_row(name, format_count(held.iterations), *numbers)
    return table
