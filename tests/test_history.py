"""The length history on disk: what goes in comes out, crashes and other writers, files that are something else."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexfloor.errors import FlexFloorError, InputError
from flexfloor.requests import Prompt, Request, Response, SamplingParams, make_requests
from flexfloor.world.lengths.header import APPLICATION_ID, SCHEMA_VERSION
from flexfloor.world.lengths.observations import ARRAYS, Observations, sampling_key
from flexfloor.world.lengths.store import LengthHistory, load_history

REPOSITORY = Path(__file__).parents[1]


def step(first: int = 0, prompts: int = 4, samples: int = 2) -> Observations:
    """Lengths that tell the prompt: (first + prompt) * 10 + sample + 1."""
    index = np.repeat(np.arange(prompts), samples)
    tokens = (first + index) * 10 + np.tile(np.arange(samples), prompts) + 1
    return Observations.from_lengths([f"p{first + i}" for i in range(prompts)], index, tokens, max_tokens=100)


def answered(request: Request, tokens: int, reason: str = "stop") -> Response:
    return Response(
        request.request_id,
        request.prompt_key,
        request.sample,
        len(request.prompt_tokens),
        [1] * tokens,
        np.zeros(tokens, np.float32),
        reason,  # type: ignore[arg-type]
    )


def rows_of(observed: Observations) -> set[tuple]:
    """Every response as one tuple, whatever numbers prompts and samplings have."""
    columns = [getattr(observed, name).tolist() for name in ARRAYS if name not in ("prompt", "sampling")]
    keys = [observed.keys[i] for i in observed.prompt]
    return set(zip(keys, [observed.samplings[i] for i in observed.sampling], *columns, strict=True))


def child(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    script = "import os, signal, sys\nfrom test_history import *\nhistory = LengthHistory(sys.argv[1])\n" + code
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_responses_come_back_with_all_that_was_known_of_them(tmp_path: Path):
    warm = SamplingParams(max_tokens=7, temperature=0.7)
    requests = make_requests([Prompt((1, 2, 3), "a"), Prompt((4,), "b")], samples=2, sampling=warm)
    requests[3] = replace(requests[3], sampling=replace(warm, temperature=0.0, max_tokens=9))
    ends = ((3, "stop"), (7, "length"), (5, "stop"), (1, "stop"))
    responses = [answered(request, *end) for request, end in zip(requests, ends, strict=True)]
    with LengthHistory(tmp_path / "lengths.db") as history:
        assert history.observe(requests, responses[::-1], split="eval", policy_version=12) == 0
        assert history.observe(requests, responses[:1]) == 1
    with LengthHistory(tmp_path / "lengths.db", create=False) as history:
        observed = history.load()
        assert history.count() == {"prompts": 2, "epochs": 2, "responses": 5}
    warmth, cold = "temperature=0.7 top_p=1 top_k=0", "temperature=0 top_p=1 top_k=0"
    # key, sampling, of evaluation, epoch, policy version, tokens, limit, cut, prompt tokens
    assert rows_of(observed) == {
        ("a", warmth, True, 0, 12, 3, 7, False, 3),
        ("a", warmth, True, 0, 12, 7, 7, True, 3),
        ("b", warmth, True, 0, 12, 5, 7, False, 1),
        ("b", cold, True, 0, 12, 1, 9, False, 1),
        ("a", warmth, False, 1, 0, 3, 7, False, 3),
    }


def test_a_forced_length_is_whole_and_its_limit_says_nothing():
    forced = [
        replace(r, sampling=SamplingParams(max_tokens=n, ignore_eos=True))
        for r, n in zip(make_requests([(1,), (2,)]), (5, 30), strict=True)
    ]
    with LengthHistory(":memory:") as history:
        history.observe(forced, [answered(r, r.sampling.max_tokens, "length") for r in forced])
        observed = history.load()
    assert observed.tokens.tolist() == [5, 30]
    assert observed.max_tokens.tolist() == [30, 30]
    assert not observed.censored.any()
    assert list(observed.samplings) == ["forced"]


def test_sampling_keys_tell_what_shifts_lengths():
    base = SamplingParams()
    assert sampling_key(base) == sampling_key(replace(base, max_tokens=5, seed=3, step=9))
    others = [
        replace(base, temperature=0.5),
        replace(base, top_p=0.9),
        replace(base, top_k=5),
        replace(base, stop=("x",)),
        replace(base, stop_token_ids=(4,)),
        replace(base, stop=("x",), ignore_eos=True),
        replace(base, ignore_eos=True),
    ]
    assert len({sampling_key(s) for s in [base, *others]}) == len(others) + 1


def test_an_unknown_response_is_the_callers_fault_and_stores_nothing():
    requests = make_requests([(1,), (2,)])
    with LengthHistory(":memory:") as history:
        with pytest.raises(KeyError):
            history.observe(requests[:1], [answered(r, 3) for r in requests])
        assert history.count()["responses"] == 0


@pytest.mark.parametrize("create", [True, False])
def test_a_process_killed_while_it_writes_loses_that_step_only(tmp_path: Path, create: bool):
    """Whether the next one writes or only reads."""
    file = tmp_path / "lengths.db"
    code = """
class Killed:
    def __init__(self, db): self.db = db
    def execute(self, sql, *values):
        if sql == "COMMIT": os.kill(os.getpid(), signal.SIGKILL)
        return self.db.execute(sql, *values)
    def __getattr__(self, name): return getattr(self.db, name)
history.observe_lengths(step(0))
history._db.execute("PRAGMA cache_size = 2")  # pages go to the file before the end of the transaction
history._db = Killed(history._db)
history.observe_lengths(step(100, prompts=3000))
"""
    assert child(code, file).wait(60) == -signal.SIGKILL
    assert Path(f"{file}-journal").exists()
    assert file.stat().st_size > 100_000, "nothing of the step had reached the file; this test shows nothing"
    with LengthHistory(file, create=create) as history:
        assert rows_of(history.load()) == rows_of(step(0))
    with LengthHistory(file) as history:
        assert history.observe_lengths(step(7)) == 1
        assert len(history.load()) == 16


def test_a_process_killed_at_any_moment_leaves_whole_steps(tmp_path: Path):
    file = tmp_path / "lengths.db"
    writer = child("print('ready', flush=True)\nfor i in range(10**6): history.observe_lengths(step(i))", file)
    assert writer.stdout
    writer.stdout.readline()
    time.sleep(0.5)
    writer.kill()
    writer.wait(60)
    with LengthHistory(file) as history:
        observed = history.load()
    steps = len(observed) // 8
    assert len(observed) == steps * 8
    assert steps > 0
    assert observed.epoch.tolist() == np.repeat(np.arange(steps), 8).tolist()


def test_two_processes_write_at_once_and_nothing_is_lost(tmp_path: Path):
    file = tmp_path / "lengths.db"
    code = "for i in range(25): history.observe_lengths(step(int(sys.argv[2]) + i))"
    writers = [child(code, file, str(first)) for first in (0, 1000)]
    assert [w.wait(60) for w in writers] == [0, 0]
    with LengthHistory(file) as history:
        observed = history.load()
    assert len(observed) == 400
    for epoch in range(50):
        own = observed.where(observed.epoch == epoch)
        first = int(own.tokens.min()) // 10
        assert {row[0] for row in rows_of(own)} == {f"p{first + i}" for i in range(4)}, "an epoch is one writer's"


def test_a_writer_that_waits_too_long_says_so(tmp_path: Path):
    file = tmp_path / "lengths.db"
    LengthHistory(file).close()
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with LengthHistory(file, timeout=0.1) as history:
        assert len(history.load()) == 0, "reading goes on"
        with pytest.raises(FlexFloorError, match=r"another process has been writing the history for 0\.1 s; try again"):
            history.observe_lengths(step())
        other.execute("ROLLBACK")
        history.observe_lengths(step())
    other.close()


def test_pruning_keeps_the_newest_epochs(tmp_path: Path):
    file = tmp_path / "lengths.db"
    with LengthHistory(file) as history:
        for i in range(5):
            history.observe_lengths(step(i * 100, prompts=400))
        large = file.stat().st_size
        assert history.prune(keep_epochs=2) == 2400
        observed = history.load()
        assert np.unique(observed.epoch).tolist() == [3, 4]
        assert set(observed.keys) == {f"p{i}" for i in range(300, 800)}
        assert file.stat().st_size < large
        assert history.observe_lengths(step()) == 5, "epochs are never used twice"


def foreign(file: Path) -> None:
    db = sqlite3.connect(file)
    db.execute("CREATE TABLE responses (x)")
    db.commit()
    db.close()


def newer(file: Path) -> None:
    LengthHistory(file).close()
    db = sqlite3.connect(file)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()


def without_tables(file: Path) -> None:
    db = sqlite3.connect(file)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute("CREATE TABLE prompts (x)")
    db.commit()
    db.close()


def filled(file: Path) -> None:
    with LengthHistory(file) as history:
        for i in range(20):
            history.observe_lengths(step(i, prompts=200))


def truncated(file: Path) -> None:
    filled(file)
    os.truncate(file, file.stat().st_size // 2)


def cut_by_a_page(file: Path) -> None:
    filled(file)
    os.truncate(file, file.stat().st_size - 4096)


def scrambled(file: Path) -> None:
    filled(file)
    content = bytearray(file.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    file.write_bytes(content)


def with_text_for_tokens(file: Path) -> None:
    filled(file)
    db = sqlite3.connect(file)
    db.execute("UPDATE responses SET tokens = 'many' WHERE rowid = 7")
    db.commit()
    db.close()


def with_orphans(file: Path) -> None:
    filled(file)
    db = sqlite3.connect(file)
    db.execute("DELETE FROM batches WHERE id = 3")
    db.commit()
    db.close()


BAD = {
    "text": (lambda file: file.write_text("hello\n" * 100), "not a length history (no SQLite file); name another"),
    "short": (lambda file: file.write_text("hi"), "not a length history (no SQLite file)"),
    "foreign": (foreign, "SQLite file of another application"),
    "newer": (newer, f"newer version (schema {SCHEMA_VERSION + 1}, this one reads {SCHEMA_VERSION}); upgrade"),
    "without tables": (without_tables, "lacks tables; restore a copy"),
    "truncated": (truncated, "history is damaged"),
    "cut by a page": (cut_by_a_page, "history is damaged"),
    "scrambled": (scrambled, "history is damaged"),
    "text for tokens": (with_text_for_tokens, "holds what is no whole number"),
    "orphans": (with_orphans, "rows that belong to nothing"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_good_history_is_refused_and_kept(tmp_path: Path, name: str):
    spoil, reason = BAD[name]
    file = tmp_path / "lengths.db"
    spoil(file)
    before = file.read_bytes()
    with pytest.raises(InputError) as refused, LengthHistory(file) as history:
        history.load()
    assert str(refused.value).startswith(f"{file}: ")
    assert reason in str(refused.value)
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["lengths.db"]


def test_a_history_that_lacks_its_end_is_not_written_to(tmp_path: Path):
    file = tmp_path / "lengths.db"
    cut_by_a_page(file)
    before = file.read_bytes()
    with pytest.raises(InputError, match="ends too early; restore a copy"), LengthHistory(file) as history:
        history.observe_lengths(step())
    assert file.read_bytes() == before


def test_places_where_no_history_can_be(tmp_path: Path):
    with pytest.raises(InputError, match="is a folder; name a file"):
        LengthHistory(tmp_path)
    with pytest.raises(InputError, match="folder of the history does not exist"):
        LengthHistory(tmp_path / "none" / "lengths.db")
    with pytest.raises(InputError, match="there is no history"):
        LengthHistory(tmp_path / "lengths.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_becomes_a_history(tmp_path: Path):
    file = tmp_path / "lengths.db"
    file.touch()  # what a crash leaves that comes before the first transaction
    with LengthHistory(file) as history:
        history.observe_lengths(step())
        assert len(history.load()) == 8


def test_an_empty_file_is_left_alone_until_there_is_something_to_write(tmp_path: Path):
    file = tmp_path / "lengths.db"
    file.touch()
    assert len(load_history(file) or []) == 0
    assert file.stat().st_size == 0


def test_a_response_takes_few_bytes(tmp_path: Path):
    file = tmp_path / "lengths.db"
    with LengthHistory(file) as history:
        for _ in range(5):
            history.observe_lengths(step(prompts=1000, samples=8))
    assert file.stat().st_size / 40_000 < 25


def test_a_shuffled_history_keeps_lengths_together():
    observed = step(prompts=50, samples=3)
    other = observed.shuffled(seed=1)
    assert rows_of(other) == rows_of(observed.shuffled(seed=1))
    assert rows_of(other) != rows_of(observed.shuffled(seed=2))
    assert sorted(other.keys) == sorted(observed.keys)
    assert sum(a == b for a, b in zip(other.keys, observed.keys, strict=True)) < 10
    for index in range(50):
        assert other.tokens[other.prompt == index].tolist() == [index * 10 + 1, index * 10 + 2, index * 10 + 3]
