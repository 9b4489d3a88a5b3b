"""`flexfloor trace`: a ledger → a file for Perfetto or chrome://tracing."""

from __future__ import annotations

from pathlib import Path

from flexfloor.ledger.events import read_ledger, refusing
from flexfloor.outputs import check_outputs
from flexfloor.report.trace import write_trace
from flexfloor.report.words import format_count


def run_trace(ledger: Path, out: Path) -> int:
    """Write the trace of one ledger. Returns the exit code. Raises InputError."""
    check_outputs({"--out": out}, {"the ledger": ledger})
    trace_ledger(ledger, out)
    return 0


def trace_ledger(ledger: Path, out: Path) -> None:
    """Write the trace of a ledger and say where it is. Raises InputError."""
    records = read_ledger(ledger)
    with refusing(ledger):
        events = write_trace(out, records)
    if records[-1]["type"] != "end":
        print("  incomplete  the run was cut off; the trace tells of it as far as the ledger goes")
    print(f"  trace       {out} ({format_count(events)} events)")
