"""`flexfloor report`: one HTML file from ledgers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flexfloor.outputs import check_outputs
from flexfloor.world.memory import format_bytes

_LARGE = 50 * 2**20  # bytes of a ledger that takes some seconds


def run_report(ledgers: Sequence[Path], out: Path) -> int:
    """Returns the exit code. Raises InputError for a file that is no ledger; nothing is written then."""
    check_outputs({"--out": out}, {f"ledger {path}": path for path in ledgers})
    from flexfloor.report.html import write_report

    for path in ledgers:
        if path.is_file() and (size := path.stat().st_size) >= _LARGE:
            print(f"reading {path} ({format_bytes(size)})", file=sys.stderr, flush=True)
    for path in write_report(out, ledgers):
        told = "the run was cut off; the report tells of it as far as the ledger goes"
        print(f"  incomplete  {path}: {told}", file=sys.stderr, flush=True)
    print(f"  report  {out} ({format_bytes(out.stat().st_size)})")
    return 0
