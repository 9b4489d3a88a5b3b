"""Histories that travel as JSONL or Parquet, and the commands `flexfloor history …`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_history import rows_of, step

from flexfloor.cli import main
from flexfloor.errors import FlexFloorError, InputError
from flexfloor.world.lengths.exchange import export_history, import_history
from flexfloor.world.lengths.observations import MOST, Observations
from flexfloor.world.lengths.store import LengthHistory

ROW = {
    "prompt_key": "a",
    "split": "train",
    "sampling": "temperature=1",
    "epoch": 3,
    "policy_version": 0,
    "response_tokens": 12,
    "max_tokens": 100,
    "censored": False,
    "prompt_tokens": 7,
}


def full(path: Path | str = ":memory:", epochs: int = 3) -> LengthHistory:
    """Every prompt has its own length, which grows by a tenth from epoch to epoch; an eighth of the lengths is cut."""
    rng = np.random.default_rng(0)
    history = LengthHistory(path)
    own = np.repeat(rng.normal(5.0, 0.8, 100), 4)
    for epoch in range(epochs):
        wanted = np.exp(own + 0.1 * epoch + rng.normal(0, 0.2, 400)).astype(int) + 1
        history.observe_lengths(
            Observations.from_lengths(
                [f"prompt é{i}" for i in range(100)],
                np.repeat(np.arange(100), 4),
                np.minimum(wanted, 400),
                max_tokens=400,
                censored=wanted >= 400,
                prompt_tokens=20,
                policy_version=epoch,
            )
        )
    return history


@pytest.mark.parametrize("name", ["lengths.jsonl", "lengths.parquet"])
def test_a_history_travels(tmp_path: Path, name: str):
    with full() as history:
        before = history.load()
        assert export_history(history, tmp_path / name) == 1200
    with LengthHistory(tmp_path / "copy.db") as copy:
        assert import_history(copy, tmp_path / name) == 1200
        after = copy.load()
        assert rows_of(after) == rows_of(before)
        assert after.tokens.tolist() == before.tokens.tolist(), "in the same order"
        assert copy.observe_lengths(step()) == 3, "what is observed next is newer than all that was imported"


def within_its_limit(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"response_tokens": min(row["response_tokens"], row["max_tokens"])}


ROWS = st.fixed_dictionaries(
    {
        "prompt_key": st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        "split": st.sampled_from(["train", "eval"]),
        "sampling": st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        "epoch": st.integers(0, MOST - 2),
        "policy_version": st.integers(0, MOST - 1),
        "response_tokens": st.integers(0, MOST - 1),
        "max_tokens": st.integers(1, MOST - 1),
        "censored": st.booleans(),
        "prompt_tokens": st.integers(0, MOST - 1),
    }
).map(within_its_limit)


@given(st.lists(ROWS, min_size=1, max_size=8))
def test_any_rows_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, rows: list[dict]):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with LengthHistory(":memory:") as history:
        import_history(history, folder / "in.jsonl")
        export_history(history, folder / "out.jsonl")
    lines = (folder / "out.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines if line] == rows


REFUSED = {
    "no JSON": ("{oops\n", "line 1 is not JSON; write one JSON object a line"),
    "not UTF-8": (b"\xff\xfe\n", "line 1 is not JSON"),
    "no object": ("7\n", "line 1 is not an object; write the fields prompt_key, split"),
    "nothing": ("\n\n", "holds no responses; give at least one"),
    "NaN": (ROW | {"response_tokens": float("nan")}, "line 1: response_tokens is nan; give a whole number from 0"),
    "infinite": (ROW | {"response_tokens": float("inf")}, "line 1: response_tokens is inf"),
    "fraction": (ROW | {"response_tokens": 1.5}, "line 1: response_tokens is 1.5"),
    "negative": (ROW | {"response_tokens": -1}, "line 1: response_tokens is -1"),
    "huge": (ROW | {"response_tokens": 10**30}, "line 1: response_tokens is 1000"),
    "too large": (
        ROW | {"max_tokens": 2**60},
        "max_tokens is 1152921504606846976; give a whole number from 1 to 2^53 - 1",
    ),
    "above the limit": (
        ROW | {"response_tokens": 101},
        "line 1: response_tokens is 101, above max_tokens 100; give the",
    ),
    "no key": (ROW | {"prompt_key": ""}, "line 1: prompt_key is empty; give the prompt's"),
    "true": (ROW | {"epoch": True}, "line 1: epoch is True; give a whole number from 0"),
    "no limit": (ROW | {"max_tokens": 0}, "line 1: max_tokens is 0; give a whole number from 1"),
    "key": (ROW | {"prompt_key": 5}, "line 1: prompt_key is 5; give a string"),
    "half a character": (ROW | {"prompt_key": "\ud800"}, "line 1: prompt_key is '\\ud800'; give a string"),
    "split": (ROW | {"split": "test"}, "line 1: split is 'test'; give train or eval"),
    "censored": (ROW | {"censored": 1}, "line 1: censored is 1; give true or false"),
    "missing field": ({k: v for k, v in ROW.items() if k != "epoch"}, "line 1 has no epoch; give it"),
    "second line": (json.dumps(ROW) + "\n[]\n", "line 2 is not an object"),
    "epoch without end": (ROW | {"epoch": MOST - 1}, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_used_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    content, reason = REFUSED[name]
    source, file = tmp_path / "in.jsonl", tmp_path / "lengths.db"
    text = content if isinstance(content, str | bytes) else json.dumps(content) + "\n"
    source.write_bytes(text.encode() if isinstance(text, str) else text)
    with LengthHistory(file) as history:
        history.observe_lengths(step())
    before = file.read_bytes()
    code = main(["history", "import", str(file), "--from", str(source)])
    out, err = capsys.readouterr()
    if reason is None:
        assert code == 0
        with LengthHistory(file) as history, pytest.raises(InputError, match="is too large"):
            history.observe_lengths(step())
        return
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"flexfloor: error: {source}: ")
    assert reason in err
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"PAR1 but no more", b""], ids=["broken", "empty"])
def test_a_broken_parquet_file_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "in.parquet").write_bytes(content)
    with LengthHistory(":memory:") as history, pytest.raises(InputError, match="cannot be read as Parquet"):
        import_history(history, tmp_path / "in.parquet")


def test_nulls_in_parquet_are_named(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([ROW, ROW | {"max_tokens": None}]), tmp_path / "in.parquet")
    with LengthHistory(":memory:") as history, pytest.raises(InputError, match="row 2: max_tokens is None"):
        import_history(history, tmp_path / "in.parquet")


def test_without_pyarrow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with full() as history, pytest.raises(InputError, match=r"pip install 'flexfloor\[parquet\]'"):
        export_history(history, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_imported_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, source = tmp_path / "lengths.db", tmp_path / "in.jsonl"
    rows = [ROW, ROW, ROW | {"response_tokens": 30}, ROW | {"epoch": 4}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["history", "import", str(file), "--from", str(source)]
    assert main(command) == 0
    before = file.read_bytes()
    capsys.readouterr()
    assert main(command) == 2
    told = f"{source}: all its responses of epoch 3 are in {file} already, and would count twice; take the 2 epochs"
    assert told in capsys.readouterr().err
    # Another machine's responses of the same epoch are others, even where one is equal.
    source.write_text("".join(json.dumps(row) + "\n" for row in (ROW, ROW, ROW)))
    assert file.read_bytes() == before
    assert main(command) == 0
    source.write_text("".join(json.dumps(row) + "\n" for row in (ROW, ROW | {"epoch": 5})))
    assert main(command) == 2
    assert "take that epoch out of the file" in capsys.readouterr().err


def test_export_and_import_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full(tmp_path / "lengths.db").close()
    for name in ("out.jsonl", "out.parquet"):
        assert main(["history", "export", str(tmp_path / "lengths.db"), "--out", str(tmp_path / name)]) == 0
        assert main(["history", "import", str(tmp_path / f"{name}.db"), "--from", str(tmp_path / name)]) == 0
        with LengthHistory(tmp_path / "lengths.db") as one, LengthHistory(tmp_path / f"{name}.db") as other:
            assert rows_of(one.load()) == rows_of(other.load())
    assert "1 200 responses added to" in capsys.readouterr().out


Wrong = Callable[[Path], list[str]]
CALLS: dict[str, tuple[Wrong, str]] = {
    "no file": (lambda d: ["show", f"{d}/none.db"], "there is no history; name a file"),
    "no file to export": (lambda d: ["export", f"{d}/none.db", "--out", f"{d}/out"], "there is no history"),
    "foreign": (lambda d: ["show", f"{d}/text"], "is not a length history"),
    "onto itself": (lambda d: ["export", f"{d}/good.db", "--out", f"{d}/good.db"], "--out and FILE are the same file"),
    "from itself": (lambda d: ["import", f"{d}/good.db", "--from", f"{d}/good.db"], "is the history itself"),
    "into a folder": (lambda d: ["export", f"{d}/good.db", "--out", str(d)], "--out"),
    "from nowhere": (lambda d: ["import", f"{d}/new.db", "--from", f"{d}/none"], "cannot be read"),
    "from a folder": (lambda d: ["import", f"{d}/new.db", "--from", str(d)], "is a folder"),
    "one epoch": (lambda d: ["score", f"{d}/good.db"], "fewer than two epochs"),
    "no limit": (lambda d: ["forecast", f"{d}/good.db", "--max-tokens", "0"], "--max-tokens"),
    "no command": (lambda d: [], "Missing command"),
    "no out": (lambda d: ["export", f"{d}/good.db"], "--out"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_cannot_work_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    full(tmp_path / "good.db", epochs=1).close()
    (tmp_path / "text").write_text("hello")
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    arguments, reason = CALLS[name]
    code = main(["history", *arguments(tmp_path)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("flexfloor: error: ")
    assert err.count("\n") == 1
    assert reason in err
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_history_that_may_not_be_written_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full(tmp_path / "lengths.db").close()
    (tmp_path / "lengths.db").chmod(0o444)
    assert main(["history", "show", str(tmp_path / "lengths.db")]) == 0
    with LengthHistory(tmp_path / "lengths.db") as history, pytest.raises(InputError, match="cannot be written"):
        history.observe_lengths(step())


def test_a_copy_is_whole_or_not_there(tmp_path: Path):
    source, copy = tmp_path / "lengths.sqlite", tmp_path / "copy.sqlite"
    with full(source) as history:
        history.copy_to(copy)
        expected = rows_of(history.load())
        with LengthHistory(copy) as other:
            assert rows_of(other.load()) == expected
            other.observe_lengths(Observations.from_lengths(["new"], [0], [5], max_tokens=9))
        assert rows_of(history.load()) == expected, "the two are separate"
        history.copy_to(copy)  # in place of the one that is there
        with LengthHistory(copy, create=False) as other:
            assert rows_of(other.load()) == expected
        with pytest.raises(FlexFloorError, match=r"nowhere/copy\.sqlite: .*lengths\.sqlite cannot be copied there"):
            history.copy_to(tmp_path / "nowhere" / "copy.sqlite")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy.sqlite", "lengths.sqlite"]
