"""`flexfloor profile-comm`: how long dispatch and combine take on this machine, as a profile's latency table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flexfloor.cli.display import ProgressLines, print_table
from flexfloor.errors import InputError
from flexfloor.outputs import atomic_write, check_outputs
from flexfloor.settings import EngineSettings, explain
from flexfloor.world.model_config import shape_from_config
from flexfloor.world.profiles import MEASURED, format_profile, has_fitted_latencies, load_profile, read_comments

if TYPE_CHECKING:
    from rich.table import Table

    from flexfloor.fleets.engine.commbench import Exchange

DTYPES = {4: "float32", 2: "bfloat16"}


def run_profile_comm(
    *,
    out: Path,
    workers: str,
    tokens: str,
    model_config: str,
    base: str | None,
    repeats: int,
    quiet: bool,
    engine: Mapping[str, Any],
) -> int:
    """Measure, print and write. Returns the exit code.

    workers, tokens: whole numbers with commas between: sizes of groups, rows a worker has in an exchange. base: a
    profile to write with its latencies replaced, up to the largest size; None: the file holds the table alone.
    engine: fields of EngineSettings. Raises InputError before a process is started.
    """
    check_outputs({"--out": out}, {"--base": Path(base)} if base and base.endswith(".toml") else {})
    if out.suffix != ".toml":
        raise InputError(f"--out {out} does not end in .toml, by which a profile's file is known; name one that does")
    sizes = [m for m in numbers("--workers", workers) if m > 1]
    if not sizes:
        raise InputError(f"--workers {workers}: a worker alone exchanges nothing; name a size from 2, as in 2,4")
    rows = numbers("--tokens", tokens)
    profile = load_profile(base) if base else None
    beside = read_comments(base) if base else {}
    try:
        settings = EngineSettings(**engine)
    except ValidationError as error:
        field, message = explain(error)
        raise InputError(f"--{str(field[0]).replace('_', '-')}: {message}") from None
    dtype = None if settings.dtype == "auto" else settings.dtype
    shape = shape_from_config(model_config, dtype)
    show = ProgressLines(quiet)
    from flexfloor.fleets.engine.commbench import Traffic, measure_exchanges

    traffics = [Traffic(n, shape.hidden, shape.top_k, dtype or DTYPES[shape.itemsize]) for n in rows]
    found = measure_exchanges(sizes, traffics, settings, repeats=repeats, on_phase=show.phase)
    latencies = tuple((e.workers, float(f"{e.seconds:.4g}")) for e in found if e.traffic.tokens == rows[0])
    head = (
        f"Measured by `flexfloor profile-comm`: dispatch and combine by {settings.resolved_transport}, {rows[0]} row(s)"
        f" a worker\nof {shape.hidden} elements for {shape.top_k} experts, median of {repeats}."
    )
    if profile is None:
        table = ", ".join(f"[{size}, {seconds!r}]" for size, seconds in latencies)
        text = "".join(f"# {line}\n" for line in head.splitlines()) + f"latency_s = [{table}]\n"
    else:
        latencies += tuple(entry for entry in profile.latency_s if entry[0] > sizes[-1])
        words = beside | {
            "": f"{head}\nAll else is that of the profile {base}, whose file says:\n{beside[''] or 'nothing'}",
            "latency_s": f"{MEASURED} up to {sizes[-1]} workers",
        }
        text = format_profile(replace(profile, name=out.stem, latency_s=latencies), words)
    with atomic_write(out) as file:
        file.write(text)
    print_table(_table(found))
    print(f"  {'profile' if profile else 'table'}  {out}")
    if base and has_fitted_latencies(beside):
        print(
            f"flexfloor: warning: the latencies of --base {base} were fitted to runs, with the time that workers wait "
            "for each other; exchanges alone take less: for workers that share cores, keep that profile",
            file=sys.stderr,
        )
    return 0


def numbers(option: str, text: str) -> list[int]:
    """'1,2,4' → [1, 2, 4], in rising order. Raises InputError, also for a number that is there twice."""
    try:
        found = sorted(int(part) for part in text.split(","))
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise InputError(f"{option} {text!r} is not a list of whole numbers from 1; write it like 1,2,4")
    if len(set(found)) < len(found):
        raise InputError(f"{option} {text}: a value is given twice; give each once")
    return found


def _table(found: Sequence[Exchange]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Exchanges", title_justify="left", title_style="bold")
    for name in ("workers", "rows a worker", "dispatch", "combine", "taken in a worker"):
        table.add_column(name, justify="right")
    for e in found:
        taken = e.workers * e.traffic.tokens * e.traffic.row_bytes / e.dispatch_s
        times = (f"{e.dispatch_s * 1e6:.0f} µs", f"{e.combine_s * 1e6:.0f} µs")
        table.add_row(str(e.workers), str(e.traffic.tokens), *times, f"{taken / 1e9:.3f} GB/s")
    return table
