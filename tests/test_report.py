"""`flexfloor report`: what the page says, what it refuses, and that it does with whatever a killed run has left."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated import DEVICE, PAGE_TOKENS, SHAPE, known_lengths, lengths_of, make_requests, with_pages
from test_cli import refusal

from flexfloor.cli import main
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.comparison import compare_summaries
from flexfloor.ledger.events import read_ledger
from flexfloor.report.html import render_report
from flexfloor.report.html_run import Run, name_runs
from flexfloor.report.html_words import (
    decision_log,
    key_figures,
    significant,
    tell_resize,
    warnings_of,
    where_times_come_from,
    with_unit,
)
from flexfloor.rollout import rollout

LENGTHS = [3, 40, 8, 90, 5, 12, 7, 33, 21, 60, 4, 9]
MOST = 100

Simulate = Callable[..., Path]


@pytest.fixture(scope="session")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Simulate:
    """simulate(policy, knowledge, workers) → the ledger of a small simulated rollout."""
    folder = tmp_path_factory.mktemp("ledgers")

    def run(policy: str, knowledge: str = "history", workers: int = 3) -> Path:
        path = folder / f"{policy.replace(':', '-')}-{knowledge}-{workers}.jsonl"
        if path.exists():
            return path
        requests = make_requests(LENGTHS, most=None if knowledge == "oracle" else MOST)
        device = with_pages(90, workers)
        fleet = SimulatedFleet(
            SHAPE, device, workers, lengths=lengths_of(requests, LENGTHS), page_tokens=PAGE_TOKENS, model="round"
        )
        lengths = known_lengths(knowledge, requests, LENGTHS, MOST)
        rollout(fleet, requests, policy=policy, profile=DEVICE, chunk=4, ledger=path, lengths=lengths,
                knowledge=knowledge)  # fmt: skip
        return path

    return run


def values(page: str, run: int = 0) -> dict[str, Any]:
    """data-key → data-value of the key numbers of a rollout."""
    part = page.split('<dl class="figures">')[run + 1].split("</dl>")[0]
    return {key: float(value) for key, value in re.findall(r'data-key="([\w.]+)" data-value="([^"]*)"', part)}


def report(tmp_path: Path, *ledgers: Path) -> str:
    out = tmp_path / "out" / "report.html"
    assert main(["report", *map(str, ledgers), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_numbers_are_those_of_the_summary(simulate: Simulate, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ledger = simulate("flexfloor")
    page = report(tmp_path, ledger)
    assert "report" in capsys.readouterr().out
    told = json.loads(json.dumps(summarize(read_ledger(ledger)).to_json()))
    shown = values(page)
    assert len(shown) >= 12
    assert shown == {key: told[key] for key in shown}
    assert "simulated on round" in page
    assert "incomplete" not in page.split("<script", 1)[0]
    assert "Nothing here was measured" in page


def test_nothing_is_asked_from_any_network(simulate: Simulate, tmp_path: Path):
    page = report(tmp_path, simulate("flexfloor"))
    own = page.replace(re.search(r"<script>/\*\*.*?</script>", page, re.DOTALL)[0], "")  # type: ignore[index]
    assert len(own) < len(page) / 4, "plotly.js is not where it is looked for"
    assert not re.findall(r"(?:src|href)=[\"'](?!#|data:)", own)
    assert "http" not in own.replace("http-equiv", "")
    assert "default-src 'none'" in own


def test_several_ledgers_are_compared(simulate: Simulate, tmp_path: Path):
    ledgers = [simulate(policy, "oracle") for policy in ("release", "static", "flexfloor")]
    page = report(tmp_path, *ledgers)
    summaries = {s.policy: s for s in (summarize(read_ledger(path)) for path in ledgers)}
    rows = compare_summaries(summaries, "static-spread")
    table = page.split('data-table="comparison"')[1].split("</table>")[0]
    shown = re.findall(
        r'data-key="(tokens_per_occupied_s_with_regrow_ratio|throughput_ratio)" data-value="(.*?)"', table
    )
    assert [float(v) for k, v in shown if k == "tokens_per_occupied_s_with_regrow_ratio"] == [
        row.tokens_per_occupied_s_with_regrow_ratio for row in rows
    ]
    assert [float(v) for k, v in shown if k == "throughput_ratio"] == [row.throughput_ratio for row in rows]
    assert "Ratios to <b>static-spread</b>" in page
    assert "hashes" not in table, "a simulated fleet has none"
    assert "did not generate the same tokens" not in page
    for index, ledger in enumerate(ledgers):
        told = summarize(read_ledger(ledger))
        assert values(page, index)["wall_s"] == told.wall_s
    other = report(tmp_path, simulate("static", "oracle"), simulate("static", "oracle", 2))
    assert "static-spread (static-oracle-2)" in other


def test_unlike_work_is_said(simulate: Simulate, tmp_path: Path):
    records = read_ledger(simulate("static"))
    for record in records:
        for entry in record.get("finished", ()):
            entry["response_tokens"] += 1
    runs = [Run.of(read_ledger(simulate("flexfloor")), "a"), Run.of(records, "b")]
    assert "did not generate the same tokens" in render_report(runs)


def test_every_truncated_ledger_gives_an_incomplete_report(simulate: Simulate, tmp_path: Path):
    lines = simulate("flexfloor").read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    for kept in range(1, len(lines)):
        cut.write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        run = Run.of(read_ledger(cut), str(cut))
        assert not run.summary.complete
        if kept in (1, 2, len(lines) // 2, len(lines) - 1):
            page = report(tmp_path, cut)
            assert '<span class="chip bad">incomplete</span>' in page
            assert "has no end record" in page
            assert values(page)["response_tokens"] == run.summary.response_tokens


def test_a_ledger_of_an_older_version_does(simulate: Simulate, tmp_path: Path):
    """Without the fields that came later."""
    old = tmp_path / "old.jsonl"
    records = [r for r in read_ledger(simulate("flexfloor")) if r["type"] != "forecast"]
    for record in records:
        record.pop("page_bytes", None)
        if record["type"] in ("start", "resize"):
            record.pop("workers", None)
        if record["type"] == "start":
            record["settings"].pop("worker_memory")
        for entry in record["workers"] if record["type"] == "chunk" else ():
            entry.pop("kv_pages", None)
    old.write_text("".join(json.dumps(r) + "\n" for r in records))
    page = report(tmp_path, old)
    assert "does not tell what lay in memory" in page
    assert "has no forecasts" in page


def test_names_from_ledgers_are_only_text(simulate: Simulate, tmp_path: Path):
    evil = "</script><script>alert(1)</script>"
    records = read_ledger(simulate("flexfloor"))
    records[0]["fleet"]["model"] = records[0]["policy"] = evil
    for record in records:
        if "reason" in record:
            record["reason"] = evil
    page = render_report([Run.of(records, evil)])
    assert "alert(1)" in page
    assert "<script>alert" not in page


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([{"prompt": "hello"}], "line 1 is not a ledger record; is this a ledger?"),
        ([{"type": "start", "schema": 2}], "ledger schema 2, this version reads 1"),
        ([{"type": "start", "schema": 1}], "a record lacks 'fleet'"),
        ([{"type": "start", "schema": 1, "fleet": 7, "settings": {}}], "a record is not what those of a ledger are"),
        ([[1, 2]], "line 1 is not a ledger record"),
        ([], "does not begin with a start record"),
    ],
)
def test_foreign_files_are_refused(
    tmp_path: Path, simulate: Simulate, capsys: pytest.CaptureFixture[str], records: Sequence[object], told: str
):
    ledger = write(tmp_path / "odd.jsonl", *records)
    out = tmp_path / "new" / "report.html"
    line = refusal(capsys, "report", simulate("static"), ledger, "--out", out)
    assert f"{ledger}: {told}" in line
    assert not out.parent.exists()


def test_other_refusals(tmp_path: Path, simulate: Simulate, capsys: pytest.CaptureFixture[str]):
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_bytes(simulate("static").read_bytes())
    before = ledger.read_bytes()
    assert "are the same file" in refusal(capsys, "report", ledger, "--out", ledger)
    assert ledger.read_bytes() == before
    assert "is a folder" in refusal(capsys, "report", ledger, "--out", tmp_path)
    assert "No such file" in refusal(capsys, "report", tmp_path / "none.jsonl", "--out", tmp_path / "r.html")
    assert "cannot be read as a ledger" in refusal(capsys, "report", tmp_path, "--out", tmp_path / "r.html")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert "not UTF-8" in refusal(capsys, "report", tmp_path / "binary", "--out", tmp_path / "r.html")
    assert "LEDGER" in refusal(capsys, "report", "--out", tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_decisions_in_words(simulate: Simulate):
    summary = summarize(read_ledger(simulate("flexfloor")))
    log = decision_log(summary)
    assert len(log) == len(summary.resizes) + len(summary.decisions)
    left = [entry for entry in log if entry.kind == "resize"]
    assert left
    assert all(re.search(r"left at [\d.]+ s: .*moved, everyone stalled for .* ms", entry.told) for entry in left)
    assert any("predicted gain" in entry.told for entry in left)
    assert all(" → " in entry.outcome for entry in left)


def test_a_resize_in_words():
    record: dict[str, Any] = {
        "t0": 3.07, "t1": 3.1, "leaving": [2], "joining": [], "requests": 14, "kv_bytes": 2 * 2**20, "experts": 32,
        "expert_bytes": 96 * 2**20, "predicted": {"saved_worker_s": 4.2}, "failed": None, "reason": "it pays",
    }  # fmt: skip
    assert tell_resize(record) == (
        "Worker 2 left at 3.10 s: 14 requests (2.0 MiB of KV) and 32 experts (96.0 MiB) moved, everyone stalled for "
        "30 ms; predicted gain 4.20 worker-s"
    )
    moves = record | {"leaving": [], "experts": 0, "requests": 1, "predicted": {}}
    assert tell_resize(moves) == "1 request (2.0 MiB of KV) moved between workers at 3.10 s, everyone stalled for 30 ms"


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0312345, "s", ("0.0312", "s")),
        (12.0, "s", ("12.0", "s")),
        (385.2, "tokens/s", ("385", "tokens/s")),
        (999.7, "s", ("1 000", "s")),
        (1234567, "", ("1 234 567", "")),
        (0.0, "s", ("0", "s")),
        (0.3241, "%", ("32.4", "%")),
        (25200000, "bytes", ("24.0", "MiB")),
    ],
)
def test_numbers_with_units(value: float, unit: str, shown: tuple[str, str]):
    assert with_unit(value, unit) == shown


def test_where_times_come_from_is_said(simulate: Simulate):
    simulated = summarize(read_ledger(simulate("static")))
    assert where_times_come_from(simulated)[0] == "simulated on round"
    real = replace(simulated, simulated=False, pace=None)
    assert where_times_come_from(real)[0] == "real time"
    paced = replace(simulated, simulated=False, pace=16.0, profile="h200", pace_valid=False, paced_overrun_share=0.03)
    assert where_times_come_from(paced)[0] == "emulated: 16 × h200"
    assert [list(warnings_of(s)) for s in (simulated, real)] == [[], []]
    assert any("not valid: 3.0%" in told for told in warnings_of(paced))
    emulated = {"wall_s": 0.5, "throughput_tok_s": 9.0}
    figures = {f.key: f.value for f in key_figures(replace(paced, emulated=emulated))}
    assert (figures["emulated.wall_s"], figures["emulated.throughput_tok_s"]) == (0.5, 9.0)


def test_significant_digits_are_kept():
    assert [significant(v) for v in (0.75, 5.9, 48.06, 4.2)] == ["0.750", "5.90", "48.1", "4.20"]


def test_names_tell_runs_apart():
    paths = [Path("a/ledger.jsonl"), Path("b/ledger.jsonl"), Path("c/seed1.jsonl"), Path("d/seed1.jsonl")]
    assert name_runs(["static", "release", "planned", "flexfloor"], paths) == [
        "static",
        "release",
        "planned",
        "flexfloor",
    ]
    assert name_runs(["x", "x", "y", "x"], paths) == ["x (a)", "x (b)", "y", "x (seed1)"]
    assert name_runs(["x", "y", "x", "x"], paths) == ["x (a)", "y", "x (seed1) #3", "x (seed1) #4"]
