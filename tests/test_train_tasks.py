"""The table [task]: rows from files, functions and reasoning-gym; reward functions by name, and watched."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from flexfloor.errors import InputError
from flexfloor.integrations.trl.named import importable, load_named
from flexfloor.integrations.trl.origin import Origin
from flexfloor.integrations.trl.rewards import FirstBatch, RewardError, watch, watch_all
from flexfloor.integrations.trl.settings import TaskSettings
from flexfloor.integrations.trl.tasks import Task, answer_in, load_task

CONFIG = Origin.of(Path("c.toml"))
MODULE = """
import functools
from datasets import Dataset

class Judge:
    def __call__(self, completions, **_):
        return [1.0] * len(completions)

judge, number = Judge(), 3
def reward(completions, **_):
    return [0.0] * len(completions)
half = functools.partial(reward)
def rows(n=3, name="p"):
    return [{"prompt": f"{name} {i}", "n": i} for i in range(n)]
def dataset():
    return Dataset.from_list(rows())
def nothing():
    return []
def broken():
    raise ValueError("no\\nsuch file")
def strings():
    return ["a"]
"""


class Letters:
    """A tokenizer: one token a character."""

    chat_template = "x"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % 64 for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module of the user's in it."""
    (tmp_path / "own_task.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("import nonesuch_package\n")
    (tmp_path / "failing_module.py").write_text("1 / 0\n")
    with importable(tmp_path):
        yield tmp_path
    for name in ("own_task", "broken_module", "failing_module"):
        sys.modules.pop(name, None)


def load(**fields: Any) -> Task:
    if "reasoning_gym" not in fields:
        fields.setdefault("reward", "own_task:reward")
    return load_task(TaskSettings.parse(**fields), CONFIG, Letters(), vocab_size=64, max_context=90)


def test_rows_of_files_keep_their_columns(module: Path):
    jsonl, table = module / "p.jsonl", module / "p.parquet"
    chat = [{"role": "user", "content": "hi"}]
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in ({"prompt": "a", "n": 1}, {"prompt": chat, "m": 2})))
    parquet.write_table(pyarrow.table({"prompt": ["x", "y"], "solution": ["1", None]}), table)
    task = load(train=str(jsonl), eval=str(table))
    assert task.train == [{"prompt": "a", "n": 1, "m": None}, {"prompt": chat, "n": None, "m": 2}]
    assert task.eval == [{"prompt": "x", "solution": "1"}, {"prompt": "y", "solution": None}]
    assert task.rewards[0](completions=["a"]) == [0.0]


def test_rows_of_functions(module: Path):
    task = load(train="own_task:rows", arguments={"n": 2}, eval="own_task:rows", eval_arguments={"name": "e"})
    assert task.train == [{"prompt": "p 0", "n": 0}, {"prompt": "p 1", "n": 1}]
    assert [row["prompt"] for row in task.eval] == ["e 0", "e 1", "e 2"]
    assert load(train="own_task:dataset").train == load(train="own_task:rows").train


def test_rewards_by_name(module: Path):
    task = load(train="own_task:rows", reward=["own_task:reward", "own_task.judge", "own_task:half"])
    assert [reward(completions=[""]) for reward in task.rewards] == [[0.0], [1.0], [0.0]]
    assert load_named("c", "os.path:join") is load_named("c", "os.path.join")


ROWS = "own_task:rows"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such file": ({"train": "none.jsonl"}, "c.toml: task.train: none.jsonl: prompts cannot be read"),
    "empty function": ({"train": "own_task:nothing"}, "own_task:nothing holds no prompts; give at least one row"),
    "function that fails": ({"train": "own_task:broken"}, "task.train: own_task:broken fails (ValueError: no)"),
    "wrong arguments": ({"train": ROWS, "arguments": {"m": 1}}, "task.train: own_task:rows fails (TypeError: "),
    "arguments of a file": ({"train": "p.jsonl", "arguments": {"a": 1}}, "p.jsonl is a file, which takes no arguments"),
    "no rows": ({"train": "own_task:strings"}, "own_task:strings: row 1 is not an object"),
    "not a function": ({"train": "own_task:number"}, "task.train: 'own_task:number' is no function (int); name one"),
    "no such module": ({"train": "nonesuch:rows"}, "there is no module 'nonesuch'; put nonesuch.py beside the config"),
    "no such function": ({"train": ROWS, "reward": "own_task:wrong"}, "module 'own_task' has no 'wrong'"),
    "no name": ({"train": ROWS, "reward": "reward"}, "task.reward: 'reward' names no function; write it like"),
    "reward that is a number": ({"train": ROWS, "reward": "own_task:number"}, "'own_task:number' is no function (int)"),
    "reward that is a class": ({"train": ROWS, "reward": "own_task:Judge"}, "is a class; name a function, or an"),
    "module that lacks another": (
        {"train": ROWS, "reward": "broken_module:x"},
        "module 'broken_module' needs 'nonesuch_package', which is not installed",
    ),
    "module that fails": (
        {"train": ROWS, "reward": "failing_module:x"},
        "module 'failing_module' cannot be imported (ZeroDivisionError: division by zero)",
    ),
    "prompt longer than the context": (
        {"train": ROWS, "arguments": {"name": "x" * 100}},
        "own_task:rows: row 1: prompt has 102 tokens, which leaves no room in the model's context of 90",
    ),
    "unknown reasoning-gym task": (
        {"reasoning_gym": "chain_sums"},
        "'chain_sums' is not known; did you mean 'chain",
    ),
    "unknown setting of it": (
        {"reasoning_gym": "chain_sum", "config": {"terms": 1}},
        "task.config: chain_sum does",
    ),
    "bad setting of it": ({"reasoning_gym": "chain_sum", "config": {"min_terms": 0}}, "min_terms must be positive"),
    "too narrow a task": (
        {"reasoning_gym": "chain_sum", "eval_size": 2, "config": {"max_terms": 2, "max_digits": 1}, "size": 8000},
        "task.eval_size is 2, but chain_sum makes only",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(module: Path, case: str):
    fields, told = REFUSED[case]
    if "reasoning_gym" in fields:
        pytest.importorskip("reasoning_gym")  # `make test-reasoning-gym` installs it
    with pytest.raises(InputError) as caught:
        load(**fields)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('{"n": 1}', "line 1 has no prompt; give it as a string or as chat messages"),
        ('{"prompt": ""}', "line 1: prompt is empty"),
        ('{"prompt": [{"role": "user"}]}', "line 1: prompt holds a message without role and content"),
        (
            '{"prompt": "a", "completions": 1}',
            "line 1 has a column 'completions', a name that TRL gives",
        ),
        ("[1]", "line 1 is not an object"),
    ],
)
def test_rows_that_cannot_be_used(module: Path, row: str, told: str):
    (module / "p.jsonl").write_text(row + "\n")
    with pytest.raises(InputError) as caught:
        load(train=str(module / "p.jsonl"))
    assert told in str(caught.value)


def test_a_missing_reasoning_gym_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"pip install 'flexfloor\[reasoning-gym\]'"):
        load(reasoning_gym="chain_sum")


def test_reasoning_gym_makes_prompts_and_judges():
    pytest.importorskip("reasoning_gym")
    task = load(
        reasoning_gym="chain_sum", size=40, eval_size=30, seed=7, prompt_template="{question}?", reward=(),
        config={"max_terms": 2, "max_digits": 1},
    )  # fmt: skip
    prompts = [row["prompt"] for row in (*task.train, *task.eval)]
    assert [len(task.train), len(task.eval)] == [40, 30]
    assert all(p.endswith("=?") for p in prompts)
    assert not {row["prompt"] for row in task.train} & {row["prompt"] for row in task.eval}
    again = load(reasoning_gym="chain_sum", size=40, seed=7, config={"max_terms": 2, "max_digits": 1})
    assert [row["prompt"] + "?" for row in again.train] == prompts[:40]
    assert again.eval == []
    (score,) = task.rewards
    assert score.__name__ == "chain_sum"
    right = [str(eval(p.split(":")[1].split("=")[0])) for p in prompts]
    items = [row["item"] for row in (*task.train, *task.eval)]
    assert score(completions=right, item=items) == [1.0] * 70
    assert score(completions=[f"so <answer> {r} </answer>" for r in right], item=items) == [1.0] * 70
    assert max(score(completions=[f"{r}1" for r in right], item=items)) < 1
    assert score(completions=[[{"role": "assistant", "content": right[3]}]], item=items[3:4]) == [1.0]


def test_reasoning_gym_as_chat_and_with_a_reward_beside(module: Path):
    pytest.importorskip("reasoning_gym")
    task = load(reasoning_gym="chain_sum", size=2, chat=True, reward="own_task:reward", config={"max_terms": 2})
    assert [m["role"] for m in task.train[0]["prompt"]] == ["user"]
    assert [r.__name__ for r in task.rewards] == ["chain_sum", "reward"]


def test_the_answer_in_a_completion():
    pytest.importorskip("reasoning_gym")
    assert answer_in(" 5 \n") == "5"
    assert answer_in("<answer>4</answer> no, <answer> 5 </answer>!") == "5"
    assert answer_in("<answer>5") == "<answer>5"


CALL: dict[str, Any] = {
    "prompts": ["a", "b"],
    "completions": ["x", "y" * 100],
    "trainer_state": SimpleNamespace(global_step=6),
}


def watched(function: Callable[..., Any], folder: Path) -> tuple[Callable[..., Any], list[float]]:
    seconds: list[float] = []
    return watch(function, seconds.append, folder / "out" / "error.txt", FirstBatch(1)), seconds


@pytest.mark.parametrize(
    ("returned", "rewards"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ((True, None), [1.0, None]),
        (np.array([1, 2]), [1.0, 2.0]),
        ([np.float32(0.5), np.int64(3)], [0.5, 3.0]),
    ],
)
def test_rewards_pass(tmp_path: Path, returned: Any, rewards: list[float | None]):
    function, seconds = watched(lambda **_: returned, tmp_path)
    assert function(**CALL) == rewards
    assert len(seconds) == 1


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1.0], "in step 7 returned 1 rewards for 2 rows; return one a row"),
        (None, "returned None; return a list of one number a row"),
        (1.0, "returned a float; return a list"),
        ("ab", "returned a str; return a list"),
        ([1.0, float("nan")], "returned nan for row 1 (prompt 'b', completion 'yyyy"),
        ([float("inf"), 1.0], "returned inf for row 0 (prompt 'a', completion 'x')"),
        ([1.0, "2"], "returned '2' for row 1"),
        ([[1.0], 2.0], "returned [1.0] for row 0"),
    ],
)
def test_what_is_no_reward_is_one_line(tmp_path: Path, returned: Any, told: str):
    def judge(**_: Any) -> Any:
        return returned

    with pytest.raises(RewardError) as caught:
        watched(judge, tmp_path)[0](**CALL)
    assert str(caught.value).startswith("reward function judge in step 7 returned ")
    assert told in str(caught.value)
    assert caught.value.exit_code == 2


def test_what_a_reward_function_raises_is_one_line_and_a_traceback(tmp_path: Path):
    def judge(**_: Any) -> Any:
        raise KeyError("solution")

    function, seconds = watched(judge, tmp_path)
    with pytest.raises(RewardError) as caught:
        function(**CALL)
    file = tmp_path / "out" / "error.txt"
    assert str(caught.value) == (
        "reward function judge in step 7 raised KeyError: 'solution' (first row: prompt 'a', completion 'x'); "
        f"see {file}"
    )
    assert 'raise KeyError("solution")' in file.read_text()
    assert len(seconds) == 1


def test_a_reward_function_that_exits_is_told_like_one_that_raises(tmp_path: Path):
    def judge(**_: Any) -> Any:
        raise SystemExit("bye")

    with pytest.raises(RewardError, match="reward function judge in step 7 raised SystemExit: bye"):
        watched(judge, tmp_path)[0](**CALL)


def test_asynchronous_rewards_are_watched_too(tmp_path: Path):
    async def judge(completions: list[str], **_: Any) -> list[float]:
        return [1.0 / len(completions[0])] * (2 if completions[0] != "bad" else 1)

    class Object:
        async def __call__(self, **_: Any) -> list[float]:
            raise ValueError("x")

    function, seconds = watched(judge, tmp_path)
    assert asyncio.iscoroutinefunction(function)
    assert asyncio.run(function(**CALL)) == [1.0, 1.0]
    with pytest.raises(RewardError, match="returned 1 rewards for 2 rows"):
        asyncio.run(function(**CALL | {"completions": ["bad", ""]}))
    with pytest.raises(RewardError, match="reward function Object in step 7 raised ValueError: x"):
        asyncio.run(watched(Object(), tmp_path)[0](**CALL))
    assert len(seconds) == 2


def test_names_that_trl_shows(tmp_path: Path):
    def judge(**_: Any) -> Any:
        return None

    assert watched(judge, tmp_path)[0].__name__ == "judge"
    assert watched(functools.partial(judge, x=1), tmp_path)[0].__name__ == "judge"


NONE: list[float | None] = [None, None]


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ([{"judge": NONE}], "reward function judge in step 7 returned None for every response (first row: prompt 'a'"),
        ([{"judge": NONE, "other": NONE}], "reward functions judge, other in step 7 returned None for every response"),
        ([{"judge": NONE, "other": [None, 1.0]}, {"judge": NONE, "other": NONE}], None),
        ([{"judge": [0.0, None]}, {"judge": NONE}], None),
    ],
)
def test_a_first_batch_without_any_reward(tmp_path: Path, batches: list[dict[str, list]], told: str | None):
    """One of several functions may stay silent, and all of them later on."""
    returned: dict[str, list] = {}

    def named(name: str) -> Callable[..., Any]:
        def reward(**_: Any) -> list:
            return returned[name]

        reward.__name__ = name
        return reward

    functions = watch_all([named(name) for name in batches[0]], lambda seconds: None, tmp_path / "error.txt")
    for batch in batches:
        returned |= batch
        *others, last = functions
        for function in others:
            function(**CALL)
        if told is None:
            last(**CALL)
            continue
        with pytest.raises(RewardError) as caught:
            last(**CALL)
        assert str(caught.value).startswith(told)
