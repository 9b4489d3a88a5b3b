"""Input that shows to be bad with a checkpoint at hand: refused on one line, no process started, nothing left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from flexfloor.cli import main
from flexfloor.world.lengths.observations import Observations
from flexfloor.world.lengths.store import LengthHistory


@dataclass
class Call:
    """A rollout that would work; cases spoil it. options: what its command line gives."""

    model: Path
    prompts: Path
    out: Path
    options: dict[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        fixed = ["rollout", "--model", str(self.model), "--prompts", str(self.prompts), "--out", str(self.out)]
        return [*fixed, *(part for name, value in self.options.items() for part in (f"--{name}", value))]

    def edit_config(self, **changes: object) -> None:
        file = self.model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    @property
    def weights(self) -> Path:
        return next(self.model.glob("*.safetensors"))

    def drop_tokenizer(self) -> None:
        for file in self.model.glob("tokenizer*"):
            file.unlink()


@pytest.fixture
def call(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Call:
    model = tmp_path / "model"
    shutil.copytree(checkpoint("tiny"), model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_tokens": [5, 6]}\n')
    return Call(model, prompts, tmp_path / "out" / "responses.jsonl", {"max-tokens": "8"})


def given(**options: str) -> Callable[[Call], object]:
    return lambda call: call.options.update({name.replace("_", "-"): value for name, value in options.items()})


def prompt(text: str) -> Callable[[Call], object]:
    return lambda call: call.prompts.write_text(text)


def truncate_weights(call: Call) -> None:
    os.truncate(call.weights, call.weights.stat().st_size // 2)


def lose_a_shard(call: Call) -> None:
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (call.model / "model.safetensors.index.json").write_text(json.dumps(index))


def stop_without_tokenizer(call: Call) -> None:
    call.drop_tokenizer()
    call.options["stop"] = "x"


def text_without_tokenizer(call: Call) -> None:
    call.drop_tokenizer()
    call.prompts.write_text('{"prompt": "hello"}\n')


def history(make: Callable[[Path], object]) -> Callable[[Call], object]:
    def spoil(call: Call) -> None:
        file = call.prompts.parent / "lengths.db"
        make(file)
        call.options["history"] = str(file)

    return spoil


def of_another_application(file: Path) -> None:
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE responses (x)")
        db.commit()


def truncated_history(file: Path) -> None:
    one_epoch(file)
    os.truncate(file, file.stat().st_size // 2)


def one_epoch(file: Path) -> None:
    with LengthHistory(file) as made:
        made.observe_lengths(Observations.from_lengths(["a"], [0] * 9, range(1, 10), max_tokens=20))


CASES: dict[str, tuple[Callable[[Call], object], str]] = {
    "unknown model type": (lambda c: c.edit_config(model_type="nonesuch"), "model_type 'nonesuch' is not supported"),
    "wrong expert count": (lambda c: c.edit_config(num_local_experts=17), "incomplete checkpoint"),
    "more layers in the file": (lambda c: c.edit_config(num_hidden_layers=2), "config.json"),
    "latent attention": (lambda c: c.edit_config(kv_lora_rank=8), "latent attention"),
    "truncated weights": (truncate_weights, "the file is damaged or incomplete"),
    "lost shard": (lose_a_shard, "model-00002-of-00002.safetensors: missing"),
    "no weights": (lambda c: c.weights.unlink(), "no *.safetensors files"),
    "damaged tokenizer": (lambda c: (c.model / "tokenizer.json").write_text("x"), "the tokenizer cannot be loaded"),
    "text without tokenizer": (text_without_tokenizer, "line 1: prompt is text but the model has no tokenizer"),
    "stop without tokenizer": (stop_without_tokenizer, "--stop needs a tokenizer"),
    "empty prompt file": (prompt(""), "holds no prompts; give at least one row"),
    "prompt longer than the context": (
        prompt(json.dumps({"prompt_tokens": [5] * 3000})),
        "line 1: prompt has 3000 tokens, which leaves no room in the model's context of 2048; shorten it",
    ),
    "token outside the vocabulary": (prompt('{"prompt_tokens": [512]}'), "line 1: token id 512 is outside"),
    "uid of two prompts": (
        prompt('{"prompt_tokens": [1], "uid": "a"}\n{"prompt_tokens": [2], "uid": "a"}\n'),
        "uid 'a' names two different prompts",
    ),
    "more workers than experts": (given(workers="17"), "workers is 17 but the model has 16 experts"),
    "budget below the floor": (given(worker_memory="32MiB"), "worker_memory 32.0 MiB is too small"),
    "unknown policy": (given(policy="best"), "policy 'best' is not known; there is static"),
    "unknown profile": (given(profile="b300"), "profile 'b300' is not known; there is h200, h800, slow"),
    "no history to plan by": (
        given(policy="planned", knowledge="history"),
        "knowledge 'history' needs a length history; give --history",
    ),
    "no history to shuffle": (given(knowledge="shuffled"), "knowledge 'shuffled' needs a length history"),
    "lengths that nobody forced": (
        given(policy="flexfloor", knowledge="oracle"),
        "knowledge 'oracle' needs forced lengths",
    ),
    "history that is text": (
        history(lambda file: file.write_text("x" * 200)),
        "lengths.db: is not a length history (no SQLite file); name another file",
    ),
    "history of another application": (
        history(of_another_application),
        "lengths.db: is not a length history (SQLite file of another application); name another file",
    ),
    "truncated history": (history(truncated_history), "lengths.db: history is damaged"),
    "history that is a folder": (history(lambda file: file.mkdir()), "--history "),
    "history in no folder": (
        given(history="nowhere/lengths.db"),
        "nowhere/lengths.db: the folder of the history does not exist; make it",
    ),
    "history that is the responses": (
        lambda c: c.options.update(history=str(c.out)),
        "--history and --out are the same file",
    ),
    "history that is the prompts": (
        lambda c: c.options.update(history=str(c.prompts)),
        "--history and --prompts are the same file",
    ),
    "new history and no prompts": (
        lambda c: (prompt("")(c), c.options.update(history=str(c.prompts.parent / "new.db"))),
        "holds no prompts; give at least one row",
    ),
    "profile that is no TOML": (
        lambda c: (c.prompts.with_name("p.toml").write_text("x"), given(profile=str(c.prompts.with_name("p.toml")))(c)),
        "p.toml",
    ),
    "unknown launcher": (given(launcher="cloud"), "launcher 'cloud' is not known; there is local"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_a_process_starts(
    case: str, call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    spoil, told = CASES[case]
    spoil(call)

    def fork(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    before = contents(call.prompts.parent)
    monkeypatch.setattr(subprocess, "Popen", fork)
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", fork)
    code = main([*call.arguments, "--quiet"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert told in err
    assert err.startswith("flexfloor: error: ")
    assert err.count("\n") == 1
    assert contents(call.prompts.parent) == before


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below it but the model's, and every folder."""
    found = (p for p in folder.rglob("*") if p.relative_to(folder).parts[0] != "model")
    return {str(p): p.read_bytes() if p.is_file() else None for p in found}


@pytest.mark.parametrize(
    ("signum", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_stopped_rollout_leaves_no_process_and_no_responses(call: Call, signum: signal.Signals, code: int, word: str):
    call.edit_config(eos_token_id=None)
    (call.model / "generation_config.json").unlink(missing_ok=True)
    call.options |= {"max-tokens": "2000", "samples": "64", "chunk": "4", "policy": "flexfloor"}
    history(one_epoch)(call)
    file = Path(call.options["history"])
    learned = file.read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-m", "flexfloor", *call.arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in the background of a shell has SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "iteration" in line:
            break
    assert "iteration" in lines[-1], lines
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    # As a terminal does it: the whole process group gets the signal.
    os.killpg(process.pid, signum)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1] == f"flexfloor: {word}"
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert [p.name for p in call.out.parent.iterdir()] == ["ledger.jsonl"]
    assert file.read_bytes() == learned
    assert not list(file.parent.glob("lengths.db-*"))
