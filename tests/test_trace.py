"""Traces against the Chrome trace-event format, and against the times of the ledgers they are made from."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_accounting import hand_written
from test_accounting_resizes import chunk, ledger, resize
from test_decisions import run as run_simulated
from test_resize import Scripted, forced_requests, leave
from trace_format import ITERATIONS, Records, check, check_format, counters, tracks

import flexfloor
from flexfloor.cli import main
from flexfloor.ledger.events import LedgerWriter, read_ledger
from flexfloor.report.trace import DRIVER, MOST_SLICES, make_trace, write_trace


@pytest.fixture(scope="module")
def real(checkpoint: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of three workers of which two leave while requests are live."""
    file = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    with flexfloor.Fleet.launch(checkpoint("qwen3_moe"), workers=3, page_tokens=4) as fleet:
        policy = Scripted([(4, leave(1)), (16, leave(0))])
        flexfloor.rollout(fleet, forced_requests(), policy=policy, chunk=4, ledger=file)
    return file


@pytest.fixture(scope="module")
def simulated() -> Records:
    return json.loads(json.dumps(run_simulated("flexfloor", "none")[1], default=float))


def without_new_fields(records: Records) -> Records:
    """As versions wrote it that did not measure exchanges and pages."""
    old = json.loads(json.dumps(records))
    for record in old:
        if record["type"] in ("start", "resize"):
            record.pop("workers", None)
            record.pop("page_bytes", None)
        for worker in record.get("workers", ()) if record["type"] == "chunk" else ():
            worker.pop("exchange_s", None)
            worker.pop("kv_pages", None)
    return old


def test_a_real_run_in_which_workers_leave(real: Path) -> None:
    records = read_ledger(real)
    trace = check(records)
    facts = trace["otherData"]
    assert (facts["run"], facts["complete"], facts["workers"]) == ("real", True, 3)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "driver", 2: "worker 0", 3: "worker 1", 4: "worker 2"}
    orders = {e["pid"]: e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "process_sort_index"}
    assert min(orders, key=orders.__getitem__) == DRIVER
    assert sorted(orders, key=orders.__getitem__) == sorted(orders)
    released = {e["pid"]: e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "released"}
    leaving = {w: r["t1"] for r in records if r["type"] == "resize" for w in r["leaving"]}
    assert {pid - DRIVER - 1: e["ts"] for pid, e in released.items()} == {w: round(t * 1e6) for w, t in leaving.items()}
    last = max(r["t1"] for r in records if "t1" in r)
    assert {e["ts"] + e["dur"] for e in released.values()} == {round(last * 1e6)}
    assert [value for _, value in counters(trace, "active")] == [3, 2, 1]
    assert counters(trace, "live")[-1][1] == 0
    assert max(v for _, v in counters(trace, "live")) == len(forced_requests())
    for worker in range(3):
        pages = counters(trace, "KV", DRIVER + 1 + worker)
        assert max(v for _, v in pages) > 0
        assert pages[-1][1] == 0
    regrow = next(e for e in trace["traceEvents"] if e["name"] == "regrow")
    assert regrow["dur"] == pytest.approx(records[-1]["regrow_s"] * 1e6, abs=1)


def test_exchanges_lie_in_their_iterations(real: Path) -> None:
    records = read_ledger(real)
    for slices in tracks(make_trace(records)).values():
        for outer, inner in pairwise(slices):
            if inner["name"] != "exchange":
                continue
            assert outer["name"] in ITERATIONS
            assert outer["ts"] + outer["dur"] == inner["ts"] + inner["dur"]
            share = outer["args"]["exchange_s"] / outer["args"]["seconds"]
            assert inner["dur"] == pytest.approx(share * outer["dur"], abs=1)
    exchanges = [e for e in make_trace(records)["traceEvents"] if e["name"] == "exchange"]
    told = sum(sum(w["exchange_s"]) for r in records if r["type"] == "chunk" for w in r["workers"])
    assert sum(e["args"]["exchange_s"] for e in exchanges) == pytest.approx(told)


def test_prefill_is_told_from_decode_and_from_idling(real: Path) -> None:
    records = read_ledger(real)
    kinds: dict[str, int] = defaultdict(int)
    for r in records:
        for w in r["workers"] if r["type"] == "chunk" else ():
            for prefill, batch in zip(w["prefill_tokens"], w["batch"], strict=True):
                kinds["prefill" if prefill else "decode" if batch else "idle"] += 1
    slices = [e["name"] for e in make_trace(records)["traceEvents"] if e["ph"] == "X"]
    assert {kind: slices.count(kind) for kind in kinds} == kinds
    assert kinds["prefill"]
    assert kinds["decode"]


def test_a_simulated_run_is_called_so(simulated: Records) -> None:
    trace = check(simulated)
    assert trace["otherData"]["run"] == "simulated"
    assert "virtual" in trace["otherData"]["time"]
    driver = [e["args"] for e in trace["traceEvents"] if e["ph"] == "M" and e["pid"] == DRIVER]
    assert {"name": "driver (simulated)"} in driver
    assert {"labels": "simulated"} in driver
    decisions = [r for r in simulated if r["type"] == "decision"]
    instants = [e for e in trace["traceEvents"] if e.get("cat") == "decision"]
    assert decisions
    assert [e["args"]["reason"] for e in instants] == [r["reason"] for r in decisions]


def test_a_paced_run_is_called_emulated() -> None:
    records = hand_written()
    records[0]["fleet"] |= {"pace": 16.0, "profile": "h200"}
    trace = check(records)
    assert trace["otherData"]["run"] == "emulated"
    assert trace["otherData"]["pace"] == 16.0
    assert any(e["args"].get("labels") == "emulated: pace 16.0" for e in trace["traceEvents"] if e["ph"] == "M")


def test_a_run_that_was_cut_off(real: Path, simulated: Records) -> None:
    for records in (read_ledger(real), simulated):
        for length in (1, 2, 3, len(records) // 2, len(records) - 1):
            trace = check(records[:length])
            assert not trace["otherData"]["complete"]
            assert [e["name"] for e in trace["traceEvents"] if e.get("cat") == "incomplete"]


def test_ledgers_of_older_versions(real: Path, simulated: Records) -> None:
    for records in (read_ledger(real), simulated):
        trace = check(without_new_fields(records))
        assert not [e for e in trace["traceEvents"] if e["name"] in ("exchange", "KV")]
    check(hand_written())


def test_resizes_that_failed_or_were_refused_release_nobody() -> None:
    refused = resize(4.0, 4.0, 2, (0, 1), (2,), failed="no room") | {"refused": True}
    failed = resize(4.0, 5.0, 2, (0, 1), (2,), failed="lost")
    done = resize(7.0, 8.0, 4, (0, 1), (2,))
    batches = {0: [1, 1], 1: [1, 1], 2: [0, 0]}
    records = ledger(
        chunk(0.0, 4.0, 0, batches), refused, failed, chunk(5.0, 7.0, 2, batches), done,
        chunk(8.0, 9.0, 4, {0: [1, 1], 1: [1, 1]}),
    )  # fmt: skip
    trace = check(records)
    stalls = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == DRIVER and "what" in e["args"]]
    assert stalls == ["release worker 2 (refused)", "release worker 2 (failed)", "release worker 2"]
    assert [e["ts"] for e in trace["traceEvents"] if e["ph"] == "i" and e["name"] == "released"] == [8_000_000]
    assert [v for _, v in counters(trace, "active")] == [3, 2]


def test_long_runs_are_merged_within_the_limit(real: Path, simulated: Records) -> None:
    for records in (read_ledger(real), simulated):
        whole = check(records)
        for most in (150, 60, 20):
            trace = check(records, most)
            assert trace["otherData"]["iterations"].startswith("merged")
            mine = [s for slices in tracks(trace).values() for s in slices if s["name"] in {*ITERATIONS, "exchange"}]
            groups = sum(r["type"] == "resize" for r in records) + 1
            assert len(mine) <= most + 2 * groups * records[0]["fleet"]["workers"]
            for worker in range(records[0]["fleet"]["workers"]):
                for name in ("iterations", "seconds", "prefill_tokens"):
                    sums = [
                        sum(s["args"][name] for s in tracks(t)[DRIVER + 1 + worker] if s["name"] in ITERATIONS)
                        for t in (whole, trace)
                    ]
                    assert sums[0] == pytest.approx(sums[1])


@st.composite
def ledgers(draw: st.DrawFn) -> Records:
    """Runs of up to four workers with gaps of planning, resizes and times that no clock would measure."""
    workers, t, first = draw(st.integers(1, 4)), 0.0, 0
    active = list(range(workers))
    duration = st.floats(0, 1e4, allow_nan=False) | st.floats(0, 1e-5)
    middle = []
    for _ in range(draw(st.integers(0, 6))):
        t += draw(st.just(0.0) | duration)
        begin, t = t, t + draw(duration)
        if len(active) > 1 and draw(st.booleans()):
            leaving = draw(st.lists(st.sampled_from(active), max_size=len(active) - 1, unique=True))
            failed = draw(st.sampled_from([None, "lost"]))
            stay = [w for w in active if w not in leaving]
            middle.append(resize(begin, t, first, stay, leaving, failed=failed))
            active = active if failed else stay
            continue
        count = draw(st.integers(0, 5))
        made = chunk(
            begin, t, first, {w: draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)) for w in active}
        )
        for own in made["workers"]:
            own["seconds"] = draw(st.lists(duration, min_size=count, max_size=count))
            own["prefill_tokens"] = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
            if draw(st.booleans()):
                own["exchange_s"] = [s * draw(st.floats(0, 1)) for s in own["seconds"]]
                own["kv_pages"] = draw(st.integers(0, 99))
        first += count
        middle.append(made)
    records = ledger(*middle, workers=workers, regrow_s=draw(duration))
    return records[: draw(st.integers(1, len(records)))]


@settings(max_examples=200, deadline=None)
@given(ledgers(), st.sampled_from([3, 40, MOST_SLICES]))
def test_any_ledger_gives_a_trace_of_the_format(records: Records, most: int) -> None:
    trace = json.loads(json.dumps(make_trace(records, most)))
    check_format(trace)


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_writes_it_plain_or_gzipped(real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, packed = tmp_path / "run.trace.json", tmp_path / "deep" / "run.trace.json.gz"
    for out in (plain, packed):
        assert main(["trace", str(real), "--out", str(out)]) == 0
        told = capsys.readouterr()
        assert str(out) in told.out
        assert told.err == ""
    trace = json.loads(plain.read_text(encoding="utf-8"))
    check_format(trace)
    assert trace == make_trace(read_ledger(real))
    assert json.loads(gzip.decompress(packed.read_bytes())) == trace
    before = packed.read_bytes()
    write_trace(packed, read_ledger(real))
    assert packed.read_bytes() == before, "the same ledger gives the same file"
    assert len(before) < plain.stat().st_size / 3
    assert {p.name for p in tmp_path.iterdir()} == {"run.trace.json", "deep"}, "nothing half-written is left"


def test_a_cut_off_ledger_is_called_incomplete(real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "ledger.jsonl"
    cut.write_text(real.read_text(encoding="utf-8")[:-400], encoding="utf-8")
    assert main(["trace", str(cut), "--out", str(tmp_path / "t.json")]) == 0
    assert "incomplete" in capsys.readouterr().out
    check_format(json.loads((tmp_path / "t.json").read_text(encoding="utf-8")))


def bad_ledgers(folder: Path) -> Iterator[tuple[Path, str]]:
    """File, and what its refusal says."""
    writer = LedgerWriter(folder / "newer.jsonl")
    start = hand_written()[0] | {"schema": 2}
    writer.write(start)
    writer.close()
    yield folder / "newer.jsonl", "schema 2"
    foreign = folder / "foreign.jsonl"
    foreign.write_text('{"type": "start", "schema": 1}\n', encoding="utf-8")
    yield foreign, "fleet"
    text = folder / "prompts.jsonl"
    text.write_text('{"prompt": "hello"}\n', encoding="utf-8")
    yield text, "is this a ledger?"
    yield folder / "missing.jsonl", "cannot be read"


def test_what_is_no_ledger_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file, says in bad_ledgers(tmp_path):
        out = tmp_path / "t.json"
        assert main(["trace", str(file), "--out", str(out)]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.count("\n") == 1
        assert says in told.err
        assert str(file) in told.err
        assert not out.exists()


def test_the_ledger_is_not_overwritten(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = real.read_bytes()
    assert main(["trace", str(real), "--out", str(real)]) == 2
    assert "--out" in capsys.readouterr().err
    assert real.read_bytes() == before


def test_rollout_and_compare_write_them_too(
    checkpoint: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_tokens": [5, 6]}\n{"prompt_tokens": [7]}\n', encoding="utf-8")
    common = ["--model", str(checkpoint("tiny")), "--prompts", str(prompts), "--max-tokens", "5", "--workers", "1"]
    trace = tmp_path / "run.trace.json"
    files = ["--out", str(tmp_path / "run" / "responses.jsonl"), "--trace", str(trace)]
    assert main(["rollout", *common, *files, "--quiet"]) == 0
    assert str(trace) in capsys.readouterr().out
    written = json.loads(trace.read_text(encoding="utf-8"))
    check_format(written)
    assert written == make_trace(read_ledger(tmp_path / "run" / "ledger.jsonl"))
    folder = tmp_path / "compared"
    assert main(["compare", *common, "--policies", "static,planned", "--out-dir", str(folder), "--traces"]) == 0
    for policy in ("static", "planned"):
        written = json.loads(gzip.decompress((folder / policy / "trace.json.gz").read_bytes()))
        assert written["otherData"]["policy"].startswith(policy)
        assert written == make_trace(read_ledger(folder / policy / "ledger.jsonl"))


def test_a_trace_has_a_file_of_its_own(checkpoint: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_tokens": [5, 6]}\n', encoding="utf-8")
    given = ["--model", str(checkpoint("tiny")), "--prompts", str(prompts), "--out", str(tmp_path / "r.jsonl")]
    for taken in (prompts, tmp_path / "ledger.jsonl", tmp_path):
        assert main(["rollout", *given, "--trace", str(taken)]) == 2
        told = capsys.readouterr().err
        assert "--trace" in told
        assert told.count("\n") == 1
