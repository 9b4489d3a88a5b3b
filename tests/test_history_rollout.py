"""The length history in real rollouts: epochs that learn from each other, and every way in which one may not count."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import epochs
import pytest

import flexfloor
from flexfloor.cli import main
from flexfloor.errors import InputError
from flexfloor.ledger.events import read_ledger
from flexfloor.lengths_file import force_lengths
from flexfloor.world.lengths.observations import Observations
from flexfloor.world.lengths.store import LengthHistory

LONG, SHORT = ("p0", "p2", "p4"), ("p1", "p3", "p5")


@pytest.fixture(scope="module")
def fleet(checkpoint: Callable) -> Iterator[flexfloor.Fleet]:
    with flexfloor.Fleet.launch(checkpoint("tiny"), workers=2) as launched:
        yield launched


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lengths.db"


def requests_of(step: int = 0, long: tuple[str, ...] = LONG) -> list[flexfloor.Request]:
    """Six prompts with two siblings each; responses of `long` are forced to about 40 tokens, those of others to 5."""
    sampling = flexfloor.SamplingParams(step=step)
    prompts = [flexfloor.Prompt((7 + i,) * (3 + 5 * i), key=f"p{i}") for i in range(6)]
    requests = flexfloor.make_requests(prompts, samples=2, sampling=sampling)
    return force_lengths(requests, [(40 if r.prompt_key in long else 5) + r.sample + step for r in requests])


def hashes(result: flexfloor.RolloutResult) -> tuple[str | None, str | None]:
    return result.summary.responses_sha256, result.summary.logprobs_sha256


def first_of(ledger: Path) -> set[str]:
    """The prompts that worker 0 got first. `release` gives it the half of the requests that it forecasts to be long."""
    assigned = next(r["workers"] for r in read_ledger(ledger) if r["type"] == "assign")
    return {name.partition("#")[0] for name in assigned["0"]}


def load(file: Path) -> Observations:
    with LengthHistory(file, create=False) as history:
        return history.load()


def count(file: Path) -> tuple[int, int]:
    with LengthHistory(file, create=False) as history:
        found = history.count()
    return found["epochs"], found["responses"]


def test_epochs_learn_from_each_other_and_no_token_changes(fleet: flexfloor.Fleet, file: Path, tmp_path: Path):
    for epoch in range(3):
        requests = requests_of(step=epoch)
        alone = flexfloor.rollout(fleet, requests, policy="release", ledger=tmp_path / "alone.jsonl")
        learned = flexfloor.rollout(fleet, requests, policy="release", history=file, ledger=tmp_path / "l.jsonl")
        assert hashes(learned) == hashes(alone)
        assert count(file) == (epoch + 1, 12 * (epoch + 1))
        assert first_of(tmp_path / "alone.jsonl") == {"p0", "p1", "p2"}, "nothing is known: in order of arrival"
        assert first_of(tmp_path / "l.jsonl") == set(LONG if epoch else ("p0", "p1", "p2"))
        told = [read_ledger(tmp_path / name)[0]["settings"]["knowledge"] for name in ("alone.jsonl", "l.jsonl")]
        assert told == ["none", "history"]
        own = load(file)
        newest = own.where(own.epoch == epoch)
        assert sorted(newest.tokens.tolist()) == sorted(len(r.tokens) for r in learned.responses)
        assert {own.keys[i] for i in newest.prompt} == {r.prompt_key for r in requests}


def test_policies_on_a_history_of_responses_that_end_by_themselves(
    fleet: flexfloor.Fleet, file: Path, requests_of: Callable
):
    requests = requests_of(prompts=6, samples=2, max_tokens=40)
    base = flexfloor.rollout(fleet, requests, history=file)
    cut = [r.finish_reason == "length" for r in base.responses]
    assert set(cut) == {True, False}
    assert load(file).censored.tolist() == cut, "in the order of the requests, whoever ended first"
    for policy, knowledge in (("planned", "history"), ("flexfloor", "shuffled"), ("flexfloor", "history")):
        again = flexfloor.rollout(fleet, requests, policy=policy, knowledge=knowledge, history=file)
        assert load(file).tokens.tolist()[-len(requests) :] == [len(r.tokens) for r in again.responses]
        assert hashes(again) == hashes(base)
    assert count(file) == (4, 48)


def test_a_shuffled_history_deceives_and_is_added_to_under_the_right_keys(
    fleet: flexfloor.Fleet, file: Path, tmp_path: Path
):
    options: dict[str, Any] = {"policy": "release", "history": file, "ledger": tmp_path / "l.jsonl"}
    flexfloor.rollout(fleet, requests_of(), **options)
    flexfloor.rollout(fleet, requests_of(), knowledge="shuffled", **options)
    assert first_of(tmp_path / "l.jsonl") not in (set(LONG), {"p0", "p1", "p2"})
    flexfloor.rollout(fleet, requests_of(), **options)
    assert first_of(tmp_path / "l.jsonl") == set(LONG)


def test_evaluations_are_kept_apart(fleet: flexfloor.Fleet, file: Path, tmp_path: Path):
    options: dict[str, Any] = {"policy": "release", "history": file, "ledger": tmp_path / "l.jsonl"}
    flexfloor.rollout(fleet, requests_of(), **options)
    for _ in range(2):
        flexfloor.rollout(fleet, requests_of(long=SHORT), split="eval", **options)
    assert first_of(tmp_path / "l.jsonl") == set(SHORT), "evaluations are forecast from evaluations"
    flexfloor.rollout(fleet, requests_of(), **options)
    assert first_of(tmp_path / "l.jsonl") == set(LONG), "and training from training"
    assert [bool(load(file).evaluation[load(file).epoch == e].all()) for e in range(4)] == [False, True, True, False]
    with pytest.raises(InputError, match="split 'test' is not known; there is train, eval"):
        flexfloor.rollout(fleet, requests_of(), split="test", history=file)  # type: ignore[arg-type]


def test_lengths_carry_the_version_of_the_weights(fleet: flexfloor.Fleet, file: Path, checkpoint: Callable):
    before = fleet.info.weights_version
    flexfloor.rollout(fleet, requests_of(), history=file)
    fleet.load_weights(checkpoint("tiny"))
    flexfloor.rollout(fleet, requests_of(), history=file)
    observed = load(file)
    versions = [set(observed.policy_version[observed.epoch == e].tolist()) for e in range(2)]
    assert versions == [{before}, {before + 1}]


class Gives(Exception):
    pass


def test_a_rollout_that_does_not_end_adds_nothing(fleet: flexfloor.Fleet, file: Path):
    flexfloor.rollout(fleet, requests_of(), history=file)
    before = file.read_bytes()

    def give_up(progress: flexfloor.RolloutProgress) -> None:
        if progress.finished:
            raise Gives

    with pytest.raises(Gives):
        flexfloor.rollout(fleet, requests_of(), history=file, on_progress=give_up)
    run = flexfloor.Rollout(fleet, history=file, chunk=4)
    run.submit(requests_of())
    responses = iter(run)
    next(responses)
    responses.close()  # type: ignore[attr-defined]
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_a_rollout_that_takes_requests_while_it_runs_is_one_epoch(fleet: flexfloor.Fleet, file: Path):
    first, second = requests_of()[:6], requests_of()[6:]
    run = flexfloor.Rollout(fleet, policy="flexfloor", history=file)
    run.submit(first)
    done: list[int] = []

    def work() -> None:
        """In a thread of its own: a file of SQLite belongs to the thread that opened it."""
        for response in run:
            done.append(len(response.tokens))
            if len(done) == 1:
                run.submit(second)
                run.seal()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert len(done) == 12
    assert count(file) == (1, 12)


def test_a_history_that_is_busy_takes_no_response_away(fleet: flexfloor.Fleet, file: Path):
    LengthHistory(file).close()
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with LengthHistory(file, timeout=0.1) as history:
        with pytest.warns(RuntimeWarning, match="another process has been writing.*; the history lacks this rollout"):
            result = flexfloor.rollout(fleet, requests_of(), history=history)
        assert len(result.responses) == 12
        other.execute("ROLLBACK")
        flexfloor.rollout(fleet, requests_of(), history=history)
    other.close()
    assert count(file) == (1, 12)


def test_observations_are_read_only(fleet: flexfloor.Fleet, file: Path, tmp_path: Path):
    flexfloor.rollout(fleet, requests_of(), history=file)
    observed = load(file)
    flexfloor.rollout(fleet, requests_of(), policy="release", history=observed, ledger=tmp_path / "l.jsonl")
    assert first_of(tmp_path / "l.jsonl") == set(LONG)
    assert count(file) == (1, 12)


def test_histories_that_cannot_be_used_are_refused_before_anything_runs(
    fleet: flexfloor.Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "text").write_text("x" * 200)
    monkeypatch.setattr(fleet, "start", lambda: pytest.fail("the rollout began"))
    for history, told in {
        tmp_path / "text": "is not a length history",
        tmp_path: "history is a folder; name a file",
        tmp_path / "no" / "lengths.db": "the folder of the history does not exist; make it",
    }.items():
        with pytest.raises(InputError, match=told):
            flexfloor.rollout(fleet, requests_of(), history=history)
    for knowledge in ("history", "shuffled"):
        with pytest.raises(InputError, match=f"knowledge '{knowledge}' needs a length history; give `history`"):
            flexfloor.rollout(fleet, requests_of(), knowledge=knowledge)
    LengthHistory(tmp_path / "lengths.db").close()
    # Whoever runs this may be allowed to write everything, so the answer is made up.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    for name in ("lengths.db", "new.db"):
        with pytest.raises(InputError, match=rf"{name}: history cannot be written; make it and its folder writable"):
            flexfloor.rollout(fleet, requests_of(), history=str(tmp_path / name))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lengths.db", "text"]


def test_a_rollout_in_virtual_time_adds_nothing(fleet: flexfloor.Fleet, file: Path, monkeypatch: pytest.MonkeyPatch):
    real = type(fleet).info.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(type(fleet), "info", property(lambda self: replace(real(self), simulated=True)))
    flexfloor.rollout(fleet, requests_of(), history=file)
    assert not file.exists()


@pytest.fixture
def command(tmp_path: Path, checkpoint: Callable) -> list[str]:
    """Options that `rollout` and `compare` share."""
    rows = [{"prompt_tokens": [5 + i] * (3 + i), "uid": f"p{i}", "max_tokens": 5 + 20 * (i % 2)} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--model", str(checkpoint("tiny")), "--prompts", str(tmp_path / "p.jsonl")]
    return [*files, "--samples", "3", "--force-lengths", "prompts", "--history", str(tmp_path / "lengths.db")]


def test_a_comparison_is_one_epoch_and_shows_every_policy_the_same_history(
    command: list[str], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[int] = []
    real = flexfloor.rollout

    def rollout(*arguments: Any, history: Observations, **options: Any) -> flexfloor.RolloutResult:
        seen.append(len(history))
        return real(*arguments, history=history, **options)

    monkeypatch.setattr(flexfloor, "rollout", rollout)
    compare = ["compare", *command, "--out-dir", str(tmp_path / "out"), "--policies", "release,static,flexfloor"]
    for epoch in range(2):
        assert main([*compare, "--quiet", "--step", str(epoch)]) == 0
        assert count(file) == (epoch + 1, 12 * (epoch + 1))
    assert seen == [0, 0, 0, 12, 12, 12]
    assert first_of(tmp_path / "out" / "release" / "ledger.jsonl") == {"p1", "p3"}
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert (written["equal"], written["knowledge"], written["history_responses"]) == (True, "history", 12)


def test_two_rollouts_at_once_on_one_history(fleet: flexfloor.Fleet, file: Path, checkpoint: Callable):
    def work(own: flexfloor.Fleet, step: int) -> None:
        for _ in range(3):
            flexfloor.rollout(own, requests_of(step=step), policy="planned", history=file)

    with flexfloor.Fleet.launch(checkpoint("tiny"), workers=1) as other:
        threads = [threading.Thread(target=work, args=pair) for pair in ((fleet, 0), (other, 100))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    observed = load(file)
    assert count(file) == (6, 72)
    shortest = [int(observed.tokens[observed.epoch == epoch].min()) for epoch in range(6)]
    assert sorted(shortest) == [5] * 3 + [105] * 3, "an epoch is one rollout's"


def test_a_command_of_its_own_split(command: list[str], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out" / "r.jsonl"
    for split in ("train", "eval"):
        assert main(["rollout", *command, "--out", str(out), "--policy", "flexfloor", "--split", split]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "history" in line]
    assert [line.split("s  ")[1] for line in told] == ["history of 0 responses", "history of 12 responses"]
    assert count(file) == (2, 24)
    assert load(file).evaluation.tolist() == [False] * 12 + [True] * 12
    assert main(["history", "show", str(file)]) == 0
    assert "50.0%" in next(line for line in capsys.readouterr().out.splitlines() if "of evaluations" in line)


def test_a_history_that_fails_at_the_end_costs_the_command_its_exit_code_only(
    command: list[str], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise InputError("lengths.db: history cannot be used (database or disk is full)")

    monkeypatch.setattr("flexfloor.cli.rollout.remember", full)
    out = tmp_path / "out" / "r.jsonl"
    assert main(["rollout", *command, "--out", str(out), "--quiet"]) == 1
    assert capsys.readouterr().err.endswith("(database or disk is full); the history lacks this rollout\n")
    assert len(out.read_text().splitlines()) == 12
    assert (out.parent / "summary.json").exists()


def test_the_example_with_epochs_of_its_own(
    file: Path, tmp_path: Path, checkpoint: Callable, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt_tokens": [{i}, 9]}}\n' for i in range(5, 9)))
    paths = {"--model": checkpoint("tiny"), "--prompts": tmp_path / "p.jsonl", "--history": file}
    given = [str(part) for pair in paths.items() for part in pair]
    assert epochs.main([*given, "--epochs", "2", "--samples", "2", "--max-tokens", "20"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("; nothing was known")
    assert "pinball loss of the forecasts" in second
    assert count(file) == (2, 16)
