"""How memory is divided, which KV pages are in use and what exchanges take stand in the ledger, of real fleets too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_accounting import hand_written, status
from test_decisions import run as run_simulated
from test_resize import Scripted, forced_requests, leave

import flexfloor
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import LedgerWriter, read_ledger, resize_record
from flexfloor.progress import ResizeOutcome
from flexfloor.world.costs import PROFILES, IterationCost
from flexfloor.world.model_config import shape_from_config

DIVISION = {"worker", "memory_bytes", "arena_bytes", "slots", "kv_pages"}
Records = list[dict[str, Any]]


def of_type(records: Records, kind: str) -> Records:
    return [r for r in records if r["type"] == kind]


@pytest.fixture(scope="module")
def real(checkpoint: Callable, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Three workers of which two leave while requests are live, read back from the file."""
    file = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    with flexfloor.Fleet.launch(checkpoint("qwen3_moe"), workers=3, page_tokens=4, worker_memory="80MiB") as fleet:
        policy = Scripted([(4, leave(1)), (16, leave(0))])
        flexfloor.rollout(fleet, forced_requests(), policy=policy, chunk=4, ledger=file)
    return read_ledger(file)


@pytest.fixture(scope="module", params=["real", "simulated"])
def records(request: pytest.FixtureRequest) -> Records:
    if request.param == "real":
        return request.getfixturevalue("real")
    return run_simulated("release", "oracle")[1]


def test_the_division_of_memory_before_the_first_request(records: Records) -> None:
    start = records[0]
    shape, workers = start["fleet"]["shape"], start["workers"]
    assert [w["worker"] for w in workers] == list(range(start["fleet"]["workers"]))
    assert all(set(w) == DIVISION for w in workers)
    assert start["page_bytes"] > 0
    assert start["page_bytes"] % shape["kv_token_bytes"] == 0
    for worker in workers:
        used = worker["slots"] * shape["expert_bytes"] + worker["kv_pages"] * start["page_bytes"]
        assert 0 <= worker["arena_bytes"] - used < start["page_bytes"], "the arena is pages and slots"
        assert worker["arena_bytes"] <= start["settings"]["worker_memory"] - shape["dense_bytes"]
    assert sum(w["slots"] for w in workers) == len(shape["moe_layers"]) * shape["experts"]


def test_a_resize_says_how_it_leaves_memory(records: Records) -> None:
    shape = records[0]["fleet"]["shape"]
    resizes = [r for r in of_type(records, "resize") if r["failed"] is None]
    assert any(r["leaving"] for r in resizes), "nobody has left: this shows nothing"
    for resize in resizes:
        assert [w["worker"] for w in resize["workers"]] == resize["members"]
        assert all(set(w) == DIVISION for w in resize["workers"])
        assert sum(w["slots"] for w in resize["workers"]) == len(shape["moe_layers"]) * shape["experts"]


def test_a_resize_that_failed_tells_of_no_memory() -> None:
    done = ResizeOutcome(1, 4, (0, 1), (2,), (), 2, 200, 1, 0, 10, prepare_s=1.0, commit_s=0.0, reason="why not")
    workers = status(2)
    assert [w["worker"] for w in resize_record(1.0, 2.0, done, workers)["workers"]] == [0, 1]
    assert "workers" not in resize_record(1.0, 2.0, replace(done, failed="lost"), workers)


def test_pages_in_use_are_those_of_live_requests(records: Records) -> None:
    held = {w["worker"]: w["kv_pages"] for w in records[0]["workers"]}
    most = 0
    for record in records:
        if record["type"] == "resize" and record["failed"] is None:
            held = {w["worker"]: w["kv_pages"] for w in record["workers"]}
        if record["type"] != "chunk":
            continue
        assert {w["worker"] for w in record["workers"]} == set(held), "chunks tell of active workers"
        for worker in record["workers"]:
            assert 0 <= worker["kv_pages"] <= held[worker["worker"]]
            most = max(most, worker["kv_pages"])
    assert most > 0
    assert all(w["kv_pages"] == 0 for w in of_type(records, "chunk")[-1]["workers"]), "all requests have ended"
    closing = records[-1]["workers"]
    assert [w["kv_pages"] for w in closing if not w["active"]] == [0] * sum(not w["active"] for w in closing)
    peaks = [w["peak_kv_bytes"] for w in closing]
    assert max(peaks) >= most * records[0]["page_bytes"]


def test_exchanges_are_a_part_of_the_seconds(records: Records) -> None:
    together = alone = 0
    for chunk in of_type(records, "chunk"):
        for worker in chunk["workers"]:
            exchange, seconds = np.array(worker["exchange_s"]), np.array(worker["seconds"])
            assert exchange.shape == seconds.shape
            assert (exchange >= 0).all()
            assert (exchange <= seconds).all()
            if len(chunk["workers"]) == 1:
                assert (exchange == 0).all()
                alone += len(exchange)
            else:
                assert (exchange > 0).all()
                together += len(exchange)
    assert together > 0
    assert alone > 0


def test_exchanges_of_the_cost_model_are_what_more_workers_add() -> None:
    """Links of half the speed and twice the latency: iterations last longer by just what exchanges took."""
    shape = shape_from_config("qwen3-30b-a3b")
    cost = IterationCost(PROFILES["h200"], shape)
    tokens, rows = np.array([64.0, 900.0]), np.array([16.0, 300.0])
    found = cost.exchange_seconds(8.0, tokens, rows)
    doubled = IterationCost(_with_links(PROFILES["h200"], 0.5), shape).exchange_seconds(8.0, tokens, rows)
    assert doubled == pytest.approx(2 * found)
    for index in range(2):
        given = (8.0, rows[index], tokens[index], 5000.0)
        slower = IterationCost(_with_links(PROFILES["h200"], 0.5), shape).seconds(*given)
        assert slower - cost.seconds(*given) == pytest.approx(found[index])
    assert (cost.exchange_seconds(1.0, tokens, rows) == 0).all()


def _with_links(profile: Any, factor: float) -> Any:
    return replace(
        profile,
        latency_s=tuple((size, seconds / factor) for size, seconds in profile.latency_s),
        node_link=profile.node_link * factor,
        cross_link=profile.cross_link * factor,
        gather_link=profile.gather_link * factor,
    )


def test_older_ledgers_do_without(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "ledger.jsonl")
    for record in hand_written():
        writer.write(record)
    writer.close()
    records = read_ledger(tmp_path / "ledger.jsonl")
    assert "workers" not in records[0]
    assert "page_bytes" not in records[0]
    assert not {"kv_pages", "exchange_s"} & set(of_type(records, "chunk")[0]["workers"][0])
    assert summarize(records).response_tokens == 8
