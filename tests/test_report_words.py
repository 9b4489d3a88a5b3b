"""What the report says: words, units, plurals, names of any length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulated import DEVICE, PAGE_TOKENS, SHAPE, known_lengths, lengths_of, make_requests, with_pages
from test_report import Simulate, report, simulate, write  # noqa: F401  (a fixture)
from test_report_incomplete import own

from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import LedgerWriter, read_ledger
from flexfloor.report.html import render_report
from flexfloor.report.html_charts import activity
from flexfloor.report.html_memory import fleet_memory
from flexfloor.report.html_run import Run
from flexfloor.report.html_words import key_figures, plural
from flexfloor.report.timeline import make_timeline
from flexfloor.report.timeline_memory import MemoryLine
from flexfloor.report.words import shorten_name
from flexfloor.rollout import rollout
from flexfloor.world.lengths.metrics import score
from flexfloor.world.memory import format_bytes


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (73 * 2**20, "73.0 MiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (7492.99 * 2**30, "7.32 TiB"),
        (5000 * 2**40, "5000.00 TiB"),
    ],
)
def test_bytes(count: float, shown: str):
    assert format_bytes(count) == shown


def test_the_axis_of_a_large_fleets_memory_is_in_large_units():
    held = np.full((1000, 2), 60 * 2.0**30)
    memory = MemoryLine(np.array([0.0, 1.0]), held, held / 2, held * 2, None)
    figure = fleet_memory(memory, 2.0)
    assert figure.layout.yaxis.title.text == "TiB"
    assert max(figure.data[2].y) == pytest.approx(120 * 1000 / 1024)


def test_stalls_are_of_resizes_and_of_moves(simulate: Simulate):  # noqa: F811
    labels = {f.key: f.label for f in key_figures(summarize(read_ledger(simulate("flexfloor"))))}
    assert labels["stall_s"] == "stalled by resizes and moves"
    body = own(render_report([Run.of(read_ledger(simulate("flexfloor")), "a")]))
    assert "stall (resize or move)" in body
    assert "stall (resize)" not in body
    assert "peak memory,<br>whole process" in body


def test_settings_have_units(tmp_path: Path, simulate: Simulate):  # noqa: F811
    records = read_ledger(simulate("flexfloor"))
    records[0]["settings"]["worker_memory"] = 76546048
    body = own(report(tmp_path, write(tmp_path / "a.jsonl", *records)))
    assert "worker_memory 73.0 MiB" in body
    assert "76546048" not in body


def test_one_is_not_plural():
    assert (plural(1, "response"), plural(2, "token"), plural(1000, "token")) == (
        "1 response",
        "2 tokens",
        "1 000 tokens",
    )


def test_one_worker_is_enough():
    """Where all but one leave, the reason reads well, and so does the page of a single response."""
    lengths = [1, 40]
    requests = make_requests(lengths)
    fleet = SimulatedFleet(SHAPE, with_pages(90, 2), 2, lengths=lengths_of(requests, lengths), page_tokens=PAGE_TOKENS)
    ledger = LedgerWriter()
    known = known_lengths("oracle", requests, lengths, 60)
    rollout(fleet, requests, policy="flexfloor", profile=DEVICE, chunk=4, ledger=ledger, lengths=known,
            knowledge="oracle")  # fmt: skip
    body = own(render_report([Run.of(ledger.records, "a")]))
    assert "1 is enough for what is left" in body
    assert "1 are enough" not in body
    cut = [*ledger.records[:-1]]
    ended = next(i for i, r in enumerate(cut) if r["type"] == "chunk" and r["finished"])
    assert "1 response, 1 token at most" in own(render_report([Run.of(cut[: ended + 1], "a")]))


def test_axes_that_count_have_no_ticks_between(simulate: Simulate):  # noqa: F811
    records = read_ledger(simulate("flexfloor"))
    figure = activity(make_timeline(records, summarize(records).wall_s))
    assert figure.layout.yaxis.dtick == 1  # 3 workers
    assert figure.layout.yaxis2.dtick is None  # 12 requests


def test_a_name_of_any_length_is_cut_and_whole_in_the_tooltip(tmp_path: Path, simulate: Simulate):  # noqa: F811
    name = "policy" * 500
    records = read_ledger(simulate("flexfloor"))
    records[0]["policy"] = name
    other = write(tmp_path / "long.jsonl", *records)
    for ledgers in ([other], [other, simulate("flexfloor")]):
        body = own(report(tmp_path, *ledgers)).split("<main>")[0 if len(ledgers) == 1 else 1].split('id="figures"')[0]
        assert f'title="{name}"' in body
        assert name not in body.replace(f'title="{name}"', "").replace(f'data-run="{name}"', "")
        assert f"{name[:47]}…" in body
    assert shorten_name("static-spread") == "static-spread"


def test_forecast_scores_are_the_scores_at_the_ledgers_quantiles(tmp_path: Path, simulate: Simulate):  # noqa: F811
    """The same function as `flexfloor history score`; which quantiles, and what unit, is said beside the number."""
    run = Run.of(read_ledger(simulate("flexfloor")), "a")
    made = run.forecast
    assert made is not None
    found = score(made.quantiles, made.tokens, levels=made.levels)
    body = own(render_report([run]))
    assert "pinball loss, mean over the quantiles 5%, 10%, 25%, 50%, 75%, 90%, 95%" in body
    assert f"<b>{found.pinball:.3g} tokens</b>" in body
    assert f"<b>{found.coverage_90:.1%} of responses</b>" in body
