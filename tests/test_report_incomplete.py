"""The report of runs that were cut off: what is not known is not told, what is shown is as of the last record."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_cli import refusal
from test_report import Simulate, report, simulate, values, write  # noqa: F401  (a fixture)

from flexfloor.cli import main
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import read_ledger
from flexfloor.report.html import render_report
from flexfloor.report.html_run import Run
from flexfloor.report.timeline import PLANNING, make_timeline

Records = list[dict[str, Any]]


@pytest.fixture
def records(simulate: Simulate) -> Records:  # noqa: F811
    return read_ledger(simulate("flexfloor"))


def own(page: str) -> str:
    """Without the library that draws."""
    return re.sub(r"<script>/\*\*.*?</script>", "", page, flags=re.DOTALL)


def cut_off(records: Records) -> Records:
    """Up to a chunk in the middle, after a worker has left."""
    chunks = [i for i, r in enumerate(records) if r["type"] == "chunk"]
    kept = records[: chunks[len(chunks) // 2] + 1]
    assert any(r["type"] == "resize" and r["leaving"] for r in kept)
    return kept


def before_any_chunk(records: Records) -> Records:
    """Start, submit, and a resize of 0.12 s."""
    resize = next(r for r in records if r["type"] == "resize" and r["leaving"])
    begun = [r for r in records if r["type"] in ("start", "submit")]
    return [*begun, resize | {"t0": 0.25, "t1": 0.37, "iteration": 0, "left_live": []}]


@pytest.mark.parametrize("resized", [False, True])
def test_without_an_iteration_there_are_no_shares_and_no_charts(tmp_path: Path, records: Records, resized: bool):
    begun = before_any_chunk(records) if resized else records[:1]
    page = report(tmp_path, write(tmp_path / "begun.jsonl", *begun))
    body = own(page)
    assert "No iteration yet" in body
    assert 'class="chart"' not in body
    assert "of occupied</span>" not in body
    shown = values(page)
    assert not {"throughput_tok_s", "post_finish_share", "tokens_per_occupied_s", "regrow_s"} & set(shown)
    if resized:
        assert shown["wall_s"] == 0.37
        assert shown["stall_s"] == pytest.approx(0.12)
        assert shown["occupied_worker_s"] == pytest.approx(3 * 0.37)
        assert " left at 0.37 s" in body


def test_a_run_without_an_iteration_beside_a_whole_one(tmp_path: Path, records: Records):
    runs = [Run.of(records, "a"), Run.of(before_any_chunk(records), "b")]
    table = own(render_report(runs)).split('data-table="comparison"')[1].split("</table>")[0]
    assert "–" in table.split("<tr")[-1]


def test_what_only_the_end_tells_is_not_shown_of_a_cut_off_run(tmp_path: Path, records: Records):
    cut = cut_off(records)
    page = report(tmp_path, write(tmp_path / "cut.jsonl", *cut))
    told = summarize(cut)
    shown = values(page)
    assert not {"regrow_s", "tokens_per_occupied_s_with_regrow"} & set(shown)
    assert shown["tokens_per_occupied_s"] == told.tokens_per_occupied_s
    assert told.wall_s == max(r[name] for r in cut for name in ("t", "t1") if name in r)
    assert "time left" not in own(page), "nobody knows yet when the rollout ends"
    assert all("remaining_s" not in r["actual"] for r in told.resizes)


def test_the_time_after_the_last_advance_is_the_drivers(records: Records):
    kept = cut_off(records)
    cut = [*kept, {"type": "assign", "t": 1e3, "iteration": 4, "workers": {}}]
    line = make_timeline(cut, summarize(cut).wall_s)
    assert line.end_s == 1e3
    assert PLANNING in line.state[:, -1]
    assert line.active()[-1] == len(kept[-1]["workers"]) < 3


def test_forecasts_are_not_scored_by_the_short_responses_alone(tmp_path: Path, records: Records):
    whole = own(report(tmp_path, write(tmp_path / "whole.jsonl", *records)))
    assert "pinball loss" in whole
    assert "Forecast calibration" in whole
    ended = next(i for i, r in enumerate(records) if r["type"] == "chunk" and r["finished"])
    cut = own(report(tmp_path, write(tmp_path / "cut.jsonl", *records[: ended + 1])))
    assert "Forecasts are not scored" in cut
    assert "pinball loss" not in cut
    assert "Forecast calibration" not in cut
    assert "the shorter ones" in cut


@pytest.mark.parametrize("first", [False, True])
def test_ratios_of_a_cut_off_run_are_withheld(tmp_path: Path, records: Records, first: bool):
    """The baseline is one that ran to its end, wherever it stands."""
    cut = write(tmp_path / "cut.jsonl", *cut_off(records))
    whole = [write(tmp_path / f"{name}.jsonl", *records) for name in "ab"]
    page = own(report(tmp_path, *([cut, *whole] if first else [*whole, cut])))
    table = page.split('data-table="comparison"')[1].split("</table>")[0]
    rows = table.split("<tr")[2:]
    for row in rows:
        ratios = re.findall(r'data-key="\w+_ratio" data-value="([^"]*)"', row)
        assert ratios == ["", "", ""] if "incomplete" in row else ratios == ["1.0"] * 3
    assert sum("incomplete" in row for row in rows) == 1
    assert "incomplete" in rows[0 if first else 2]


def test_the_command_says_which_ledgers_are_incomplete(
    tmp_path: Path, records: Records, capsys: pytest.CaptureFixture[str]
):
    whole, cut = write(tmp_path / "whole.jsonl", *records), write(tmp_path / "cut.jsonl", *cut_off(records))
    report(tmp_path, whole, cut)
    err = capsys.readouterr().err
    assert f"incomplete  {cut}: the run was cut off" in err
    assert str(whole) not in err
    report(tmp_path, whole)
    assert capsys.readouterr().err == ""


def _with(records: Sequence[dict[str, Any]], kind: str, **more: Any) -> Records:
    at = next(i for i, r in enumerate(records) if r["type"] == kind)
    return [r | more if i == at else r for i, r in enumerate(records)]


@pytest.mark.parametrize("command", ["report", "trace"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "soon", None])
@pytest.mark.parametrize(
    ("kind", "name"), [("chunk", "t1"), ("resize", "t0"), ("submit", "t"), ("end", "regrow_s"), ("resize", "prepare_s")]
)
def test_times_that_are_no_numbers_are_refused(
    tmp_path: Path, records: Records, capsys: pytest.CaptureFixture[str], command: str, wrong: Any, kind: str, name: str
):
    ledger, out = tmp_path / "odd.jsonl", tmp_path / "out"
    write(ledger, *_with(records, kind, **{name: wrong}))
    number = 1 + next(i for i, r in enumerate(records) if r["type"] == kind)
    line = refusal(capsys, command, ledger, "--out", out)
    assert f"{ledger}: line {number}: {name} is not a finite number of seconds" in line
    assert not out.exists()


@pytest.mark.parametrize("command", ["report", "trace"])
def test_records_without_what_the_page_needs_are_refused(
    tmp_path: Path, records: Records, capsys: pytest.CaptureFixture[str], command: str
):
    """Also where only the page's words miss it."""
    odd = [{k: v for k, v in r.items() if k != "reason"} for r in records]
    ledger = write(tmp_path / "odd.jsonl", *odd)
    line = refusal(capsys, command, ledger, "--out", tmp_path / "out")
    assert f"{ledger}: a record lacks 'reason'; is this a ledger of this version?" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["report", "trace"])
def test_two_ledgers_in_one_file_are_refused(
    tmp_path: Path, records: Records, capsys: pytest.CaptureFixture[str], command: str
):
    ledger = write(tmp_path / "both.jsonl", *records, *records)
    line = refusal(capsys, command, ledger, "--out", tmp_path / "out")
    assert f"{ledger}: line {len(records) + 1} is a second start record" in line
    assert not (tmp_path / "out").exists()


def test_a_number_that_only_overflows_is_refused(tmp_path: Path, records: Records, capsys: pytest.CaptureFixture[str]):
    """JSON has no infinity, but 1e999 is one."""
    text = "".join(json.dumps(r) + "\n" for r in records)
    at = text.index('"seconds": [') + len('"seconds": [')
    ledger = tmp_path / "odd.jsonl"
    ledger.write_text(text[:at] + "1e999, " + text[text.index(", ", at) + 2 :])
    assert "seconds is not a finite number" in refusal(capsys, "report", ledger, "--out", tmp_path / "out")
    assert main(["report", str(ledger), "--out", str(tmp_path / "out")]) == 2
