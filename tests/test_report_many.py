"""The report of several ledgers: of the same requests and of others, of more than there are colours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_report import Simulate, report, simulate, write  # noqa: F401  (a fixture)
from test_report_incomplete import own

from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import read_ledger
from flexfloor.report.html_charts import active_sets
from flexfloor.report.html_figure import PALETTE
from flexfloor.report.timeline import group_workers, make_timeline

Records = list[dict[str, Any]]


def of_step(records: Records, step: int, seed: int = 0, hashed: bool = True) -> Records:
    """As a trainer's rollout of that step, of a real fleet."""
    start = records[0] | {"settings": records[0]["settings"] | {"step": step, "seed": seed}}
    hashes = {"responses_sha256": "a" * 64, "logprobs_sha256": "b" * 64} if hashed else {}
    return [start, *records[1:-1], records[-1] | hashes]


def table_of(page: str) -> str:
    return own(page).split('data-table="comparison"')[1].split("</table>")[0]


def figures_of(page: str) -> dict[str, Any]:
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]


def test_a_trainings_rollouts_are_shown_by_absolute_values_in_file_order(tmp_path: Path, simulate: Simulate):  # noqa: F811
    ledgers = []
    for step in range(12):
        records = read_ledger(simulate("flexfloor", "history", 2 + step % 2))
        ledgers.append(write(tmp_path / f"train-{step:06d}.jsonl", *of_step(records, step)))
    page = report(tmp_path, *ledgers)
    table = table_of(page)
    assert "hashes" not in table
    assert "_ratio" not in table
    assert "no ratios are given" in own(page)
    told = [summarize(read_ledger(path)) for path in ledgers]
    for key in ("response_tokens", "tokens_per_occupied_s_with_regrow", "throughput_tok_s", "post_finish_share"):
        shown = [float(v) for v in re.findall(rf'data-key="{key}" data-value="([^"]*)"', table)]
        assert shown == [getattr(s, key) for s in told], key
    names = re.findall(r"train-\d+", table)
    assert list(dict.fromkeys(names)) == [path.stem for path in ledgers]
    drawn = figures_of(page).values()
    points = [f["data"][0] for f in drawn if f["data"][0].get("mode") == "lines+markers" and len(f["data"]) == 1]
    assert [s.response_tokens for s in told] in [p["y"] for p in points]
    assert [s.tokens_per_occupied_s_with_regrow for s in told] in [p["y"] for p in points]


@pytest.mark.parametrize("what", ["step", "requests", "ids"])
def test_ratios_are_for_the_same_requests_only(tmp_path: Path, simulate: Simulate, what: str):  # noqa: F811
    records = of_step(read_ledger(simulate("flexfloor")), 1)
    other = json.loads(json.dumps(of_step(records, 2 if what == "step" else 1)))
    for record in other:
        if what == "requests" and record["type"] == "submit":
            record["prompt_tokens"] += 1
        for entry in record.get("finished", ()) if what == "ids" else ():
            entry["request_id"] = "of-another-" + entry["request_id"]
    same = table_of(report(tmp_path, *(write(tmp_path / f"{n}.jsonl", *records) for n in "ab")))
    assert "throughput_ratio" in same
    assert same.count(">yes") == 2
    unlike = table_of(report(tmp_path, write(tmp_path / "a.jsonl", *records), write(tmp_path / "b.jsonl", *other)))
    assert "throughput_ratio" not in unlike
    assert "hashes" not in unlike


def test_hashes_of_another_seed_are_not_compared(tmp_path: Path, simulate: Simulate):  # noqa: F811
    records = read_ledger(simulate("flexfloor"))
    paths = [write(tmp_path / f"{seed}.jsonl", *of_step(records, 1, seed)) for seed in range(2)]
    table = table_of(report(tmp_path, *paths))
    assert "throughput_ratio" in table
    assert "hashes" not in table


def test_each_of_many_active_sets_can_be_told_from_the_others(simulate: Simulate):  # noqa: F811
    records = read_ledger(simulate("flexfloor"))
    line = make_timeline(records, summarize(records).wall_s)
    few = active_sets({f"run {i}": line for i in range(len(PALETTE))})
    assert len({trace.line.color for trace in few.data}) == len(PALETTE)
    assert few.layout.showlegend
    many = active_sets({f"run {i}": line for i in range(len(PALETTE) + 4)})
    (rows,) = many.data
    assert np.shape(rows.z) == (len(PALETTE) + 4, len(rows.x) - 1)
    assert list(rows.y) == list(range(1, len(PALETTE) + 5))
    assert {row[0] for row in rows.text} == {f"run {i}" for i in range(len(PALETTE) + 4)}
    seconds = np.diff(np.asarray(rows.x, dtype=float))
    assert np.nansum(rows.z[0] * seconds) == pytest.approx(summarize(records).occupied_worker_s, rel=1e-3)


def test_idle_workers_that_stay_share_rows():
    """The main state of a row hides what a minority of it does."""
    finished = [10.0 if worker % 5 else 2.0 for worker in range(1000)]  # every fifth is idle from 2 s on
    groups = group_workers([None] * 1000, finished, 64)
    mixed = [g for g in groups if len({finished[w] for w in g}) > 1]
    assert len(mixed) <= 1
    assert sum(finished[w] == 2.0 for g in groups if g not in mixed for w in g) >= 200 - len(groups[0])
    left = group_workers([1.0, None, 1.0, None], [0.5, 3.0, 0.9, 4.0], 2)
    assert left == [[3, 1], [2, 0]]
