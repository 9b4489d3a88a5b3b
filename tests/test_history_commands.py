"""What `flexfloor history` shows and forecasts; damaged and empty files, which it leaves alone."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_history import step
from test_history_files import ROW, full

from flexfloor.cli import main
from flexfloor.errors import InputError
from flexfloor.world.lengths.observations import Observations
from flexfloor.world.lengths.store import LengthHistory


def test_show_tells_what_a_history_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full(tmp_path / "lengths.db").close()
    assert main(["history", "show", str(tmp_path / "lengths.db")]) == 0
    out = capsys.readouterr().out
    told = {line[:28].strip(): line[28:].strip() for line in out.splitlines()}
    assert told["responses"] == "1 200"
    assert told["prompts"] == "100"
    assert told["epochs"] == "3 (last 2)"
    assert told["sampling"] == "(not told)"
    share = int(told["explained by the prompt"].split("%")[0])
    assert 88 <= share <= 98, "0.8² of 0.8² + 0.2² is 94%"
    change = int(told["change from epoch to epoch"].split("%")[0])
    assert 7 <= change <= 14


def shown(file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["history", "show", str(file)]) == 0
    return {line[:28].strip(): line[28:].strip() for line in capsys.readouterr().out.splitlines()}


def history_of(file: Path, lengths: np.ndarray, prompt: np.ndarray, epochs: int = 1) -> Path:
    """lengths: [epochs · n], of `prompt` [n] in each epoch."""
    with LengthHistory(file) as history:
        for own in np.split(lengths, epochs):
            keys = [f"p{i}" for i in range(int(prompt.max()) + 1)]
            history.observe_lengths(Observations.from_lengths(keys, prompt, own, max_tokens=5000))
    return file


def test_show_does_not_take_a_guess_for_what_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rng = np.random.default_rng(1)
    alike = np.exp(rng.normal(5, 0.4, 4000)).astype(int) + 1
    told = shown(history_of(tmp_path / "alike.db", alike, np.repeat(np.arange(500), 4), 2), capsys)
    assert told["explained by the prompt"] == "under 1% of the variance of log length"
    assert told["change from epoch to epoch"] == "under 5%", "the least that forecasts reckon with"
    told = shown(history_of(tmp_path / "few.db", alike[:12], np.repeat(np.arange(3), 4)), capsys)
    share = alike[:12].reshape(3, 4)
    logs = np.log(share)
    within = logs.var(axis=1, ddof=1).mean()
    between = max(logs.mean(axis=1).var(ddof=1) - within / 4, 0.0)
    assert abs(int(told["explained by the prompt"].split("%")[0].split()[-1]) - 100 * between / (between + within)) < 12
    told = shown(history_of(tmp_path / "once.db", alike[:50], np.arange(50)), capsys)
    assert told["explained by the prompt"] == "not known: it takes several prompts with several responses"
    assert told["change from epoch to epoch"] == "not known: no prompt was seen in two epochs"
    told = shown(history_of(tmp_path / "one.db", alike[:8], np.zeros(8, int)), capsys)
    assert told["explained by the prompt"].startswith("not known")


def test_score_says_when_it_takes_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lengths = np.exp(np.random.default_rng(2).normal(5, 0.4, 2 * 20_001)).astype(int) + 1
    file = history_of(tmp_path / "lengths.db", lengths, np.arange(20_001) % 2000, 2)
    assert main(["history", "score", str(file)]) == 0
    assert "Forecasts of the last epoch (10 001 of its 20 001 responses, evenly taken)" in capsys.readouterr().out
    full(tmp_path / "small.db").close()
    assert main(["history", "score", str(tmp_path / "small.db")]) == 0
    assert "evenly" not in capsys.readouterr().out


DAMAGES = {
    "the middle": lambda size: size // 2,
    "a page early on": lambda size: 4096 + 8,
    "a page late": lambda size: size - 4096 + 8,
    "the third page": lambda size: 2 * 4096 + 8,
}


@pytest.mark.parametrize("place", DAMAGES)
def test_a_damaged_history_is_refused_by_every_command_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
):
    file, source = tmp_path / "lengths.db", tmp_path / "in.jsonl"
    full(file, epochs=12).close()
    source.write_text(json.dumps(ROW) + "\n")
    content = bytearray(file.read_bytes())
    at = DAMAGES[place](len(content))
    content[at : at + 2000] = b"\xee" * 2000
    file.write_bytes(content)
    before = file.read_bytes()
    more = {"export": ["--out", str(tmp_path / "out.jsonl")], "import": ["--from", str(source)]}
    for name in ("show", "score", "forecast", "export", "import"):
        assert main(["history", name, str(file), *more.get(name, [])]) == 2, name
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith(f"flexfloor: error: {file}: history is damaged"), name
        assert file.read_bytes() == before, name
    with LengthHistory(file) as history:
        for change in (lambda: history.observe_lengths(step()), lambda: history.prune(1)):
            with pytest.raises(InputError, match="history is damaged"):
                change()
    assert file.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "lengths.db"]


def test_an_index_that_lacks_a_prompt_is_damage(tmp_path: Path):
    file = tmp_path / "lengths.db"
    full(file, epochs=1).close()
    with sqlite3.connect(file) as db:
        page = db.execute("SELECT rootpage FROM sqlite_master WHERE type = 'index' LIMIT 1").fetchone()[0]
    db.close()
    content = bytearray(file.read_bytes())
    content[page * 4096 - 20 : page * 4096 - 4] = b"y" * 16  # keys stand at the end of their page
    file.write_bytes(content)
    for use in (LengthHistory.load, lambda history: history.observe_lengths(step())):
        with LengthHistory(file) as history, pytest.raises(InputError, match="history is damaged"):
            use(history)
    assert file.read_bytes() == content


@pytest.mark.parametrize("command", ["show", "score", "forecast", "export"])
def test_reading_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str):
    file = tmp_path / "lengths.db"
    more = ["--out", str(tmp_path / "out.jsonl")] if command == "export" else []
    file.touch()
    assert main(["history", command, str(file), *more]) == 2
    assert capsys.readouterr().err == (
        f"flexfloor: error: {file}: is empty; name a history that a rollout or an import has written\n"
    )
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == [("lengths.db", 0)]
    file.unlink()
    odd = tmp_path / "100%? of #1.db"
    full(odd).close()
    before = odd.read_bytes(), odd.stat().st_mtime_ns
    assert main(["history", command, str(odd), *more]) == 0
    assert (odd.read_bytes(), odd.stat().st_mtime_ns) == before
    with LengthHistory(odd, create=False) as history, pytest.raises(InputError, match="cannot be written"):
        history.observe_lengths(step())


def test_an_empty_history_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    LengthHistory(tmp_path / "lengths.db").close()
    assert main(["history", "show", str(tmp_path / "lengths.db")]) == 0
    assert "responses" in capsys.readouterr().out


def test_score_shows_what_history_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full(tmp_path / "lengths.db").close()
    assert main(["history", "score", str(tmp_path / "lengths.db")]) == 0
    lines = capsys.readouterr().out.splitlines()
    loss = {line.split()[0]: float(line.split()[2]) for line in lines if line.count("%") == 3}
    assert loss["history"] < 0.6 * loss["pooled"]
    assert loss["pooled"] < loss["none"]


def forecasts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[int]]:
    """Prompt → how often it was seen and quantiles, as `history forecast` shows them."""
    assert main(["history", "forecast", *arguments]) == 0
    rows = [re.split(" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    return {row[0]: [int(number) for number in row[1:]] for row in rows if row[-1].isdigit()}


def test_forecasts_by_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    prompt = np.repeat(np.arange(40), 4)
    own = np.exp(np.linspace(4, 6, 40))[prompt] * np.exp(np.random.default_rng(3).normal(0, 0.1, (3, 160)))
    file = str(history_of(tmp_path / "lengths.db", own.astype(int).reshape(-1), prompt, 3))
    assert main(["history", "forecast", file]) == 0
    out = capsys.readouterr().out
    assert "20 of 40 prompts of the last epoch" in out
    assert "response tokens, at most 5 000" in out
    told = forecasts(capsys, file, "p0", "p39", "[b]new", "p0", "--max-tokens", "300")
    assert list(told) == ["p0", "p39", "[b]new"]
    assert [row[0] for row in told.values()] == [12, 12, 0]
    assert told["p0"][2] == pytest.approx(np.median(own[:, :4]), rel=0.1)
    assert told["p39"][2:] == [300, 300, 300], "its limit"
    assert told["[b]new"][4] - told["[b]new"][1] > 3 * (told["p0"][4] - told["p0"][1])
    for row in told.values():
        assert sorted(row[1:]) == row[1:]
    LengthHistory(tmp_path / "none.db").close()
    assert main(["history", "forecast", str(tmp_path / "none.db")]) == 2
    assert "holds no responses to forecast from" in capsys.readouterr().err


def test_the_example_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = (Path(__file__).parents[1] / "docs" / "length-history.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/length-history.md", "exec"), names)
    short, _, long, _ = names["before"].tolist()
    assert 80 < short < 130
    assert 300 < long < 500
    assert len(capsys.readouterr().out.splitlines()) == 3
    with LengthHistory("lengths.db", create=False) as history:
        assert history.count() == {"prompts": 2, "epochs": 2, "responses": 16}
        assert history.load().censored.sum() == 2
