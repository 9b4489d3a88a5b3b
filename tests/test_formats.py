"""docs/formats.md names every field of summaries and ledgers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from test_decisions import run

from flexfloor.ledger.accounting import Summary, WorkerSummary
from flexfloor.progress import FleetInfo, ModelShape

TEXT = (Path(__file__).parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")
SUMMARY = TEXT[TEXT.index("## summary.json") : TEXT.index("## comparison.json")]
LEDGER = TEXT[TEXT.index("## ledger.jsonl") :]


def named(text: str) -> set[str]:
    return {name for quoted in re.findall(r"`([^`]+)`", text) for name in re.findall(r"\w+", quoted)}


def records() -> Iterator[dict]:
    for policy, knowledge in (("flexfloor", "none"), ("release", "oracle")):
        yield from run(policy, knowledge)[1]


def test_summaries() -> None:
    assert {f.name for kind in (Summary, WorkerSummary) for f in fields(kind)} - named(SUMMARY) == set()


def test_the_make_of_a_fleet() -> None:
    assert {f.name for kind in (FleetInfo, ModelShape) for f in fields(kind)} - named(LEDGER) == set()


@pytest.mark.parametrize("kind", ["start", "submit", "assign", "chunk", "decision", "resize", "end"])
def test_records(kind: str) -> None:
    found = [r for r in records() if r["type"] == kind]
    assert found, f"no {kind} record was written"
    keys = {key for r in found for key in r if key != "type"}
    keys |= {key for r in found for own in ("workers", "finished", "preemptions") for key in entries(r.get(own))}
    keys |= {key for r in found for key in r.get("predicted", ())}
    assert keys - named(LEDGER) == set()


def entries(listed: object) -> set[str]:
    return {key for entry in listed for key in entry} if isinstance(listed, list) else set()


def test_numbers_that_stand_beside_predictions() -> None:
    summary, _ = run("flexfloor", "none")
    actual = {name for r in (*summary.resizes, *summary.decisions) for name in r["actual"]}
    assert actual
    assert actual <= named(SUMMARY)
