"""The table [task]: rows to train on, held-out rows, and the functions that reward responses to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flexfloor.errors import InputError
from flexfloor.integrations.trl.named import is_named, load_named, told
from flexfloor.integrations.trl.origin import Origin
from flexfloor.integrations.trl.settings import TaskSettings
from flexfloor.prompts import read_rows, to_prompt

_TAKEN = (
    "prompts",
    "completions",
    "completion_ids",
    "prompt_ids",
    "logprobs",
    "trainer_state",
    "log_extra",
    "log_metric",
)
"""Names under which TRL gives reward functions something else than a column."""

_TRIES = 100  # questions made for one held-out question that is not among those to train on

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """Rows have a `prompt` and all the same columns. eval: empty without held-out prompts. source: what made them.
    longest_prompt: tokens."""

    train: Rows
    eval: Rows
    rewards: list[Callable[..., Any]]
    source: str
    longest_prompt: int


def load_task(task: TaskSettings, origin: Origin, tokenizer: Any, *, vocab_size: int, max_context: int) -> Task:
    """Read or make the rows and check every prompt against the model. max_context: tokens.

    Call it where modules beside the config file can be imported. Raises InputError naming file, row or field.
    """
    rewards = [_reward(origin.at("task.reward"), name) for name in task.reward]
    if task.reasoning_gym is not None:
        train, held_out, score = _reasoning_gym(task, origin)
        rewards.insert(0, score)
        source = f"reasoning-gym task {task.reasoning_gym}"
    else:
        assert task.train is not None
        train = _rows(origin, "train", task.train, "arguments", task.arguments)
        held_out = []
        if task.eval is not None:
            held_out = _rows(origin, "eval", task.eval, "eval_arguments", task.eval_arguments)
        source = task.train
    longest = 0
    for where, row in (*train, *held_out):
        # The row as a prompt file's: same checks, same words. Other columns belong to the reward functions.
        prompt = to_prompt(where, {"prompt": row.get("prompt")}, tokenizer, vocab_size, max_context)
        longest = max(longest, len(prompt.tokens))
    return Task(_columns(train), _columns(held_out), rewards, source, longest)


def _reward(where: str, name: str) -> Callable[..., Any]:
    reward = load_named(where, name)
    if not callable(reward):
        raise InputError(f"{where}: {name!r} is no function ({type(reward).__name__}); name one")
    if isinstance(reward, type):
        raise InputError(f"{where}: {name!r} is a class; name a function, or an object that can be called")
    return reward


def _rows(
    origin: Origin, field: str, source: str, of_arguments: str, arguments: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """(where it stands, row) of every row of a file or a function. field, of_arguments: names of the two settings."""
    where, called = origin.at(f"task.{field}"), origin.at(f"task.{field}", f"task.{of_arguments}")
    rows: Iterable[tuple[str, Any]]
    if is_named(source):
        function = load_named(where, source)
        if not callable(function):
            raise InputError(
                f"{where}: {source!r} is no function ({type(function).__name__}); name one that returns rows"
            )
        try:
            made = function(**arguments)
            rows = [(f"{source}: row {number}", row) for number, row in enumerate(made, 1)]
        except Exception as error:  # whatever the user's function raises
            raise InputError(f"{called}: {source} fails ({told(error)})") from error
    elif arguments:
        where = origin.at(f"task.{of_arguments}")
        raise InputError(f"{where}: {source} is a file, which takes no arguments; leave them out")
    else:
        try:
            rows = list(read_rows(Path(source), fields=None))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    found = []
    for at, row in rows:
        if not isinstance(row, Mapping):
            raise InputError(f"{at} is not an object; write it like {{'prompt': '…'}}")
        if row.get("prompt") is None:
            raise InputError(f"{at} has no prompt; give it as a string or as chat messages")
        if taken := [name for name in _TAKEN if name in row]:
            raise InputError(f"{at} has a column {taken[0]!r}, a name that TRL gives something else; rename it")
        found.append((at, dict(row)))
    if not found:
        raise InputError(f"{called}: {source} holds no prompts; give at least one row")
    return found


def _columns(rows: list[tuple[str, dict[str, Any]]]) -> Rows:
    """Every row with the columns of all of them; what a row lacks is None. TRL goes by the columns of the first."""
    names = dict.fromkeys(name for _, row in rows for name in row)
    return [{name: row.get(name) for name in names} for _, row in rows]


class ReasoningGymScore:
    """A reasoning-gym task's own judgement as a reward function: `score_answer` of the answer in the completion.

    The answer is what stands in the last <answer>…</answer>, or else the whole completion, without white space at its
    ends. Rows name their question by `item`.
    """

    def __init__(self, name: str, entries: list[dict[str, Any]], score: Callable[..., float]) -> None:
        self.__name__ = name
        self._entries, self._score = entries, score

    def __call__(self, completions: list[Any], item: list[int], **_: Any) -> list[float]:
        return [
            float(self._score(answer=answer_in(text_of(completion)), entry=self._entries[index]))
            for completion, index in zip(completions, item, strict=True)
        ]


def text_of(completion: Any) -> str:
    """A completion's text: of chat messages, the last one's."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def answer_in(text: str) -> str:
    """What stands in the last <answer>…</answer>, or else all of it."""
    from reasoning_gym.utils import extract_answer

    found = extract_answer(text)
    return text.strip() if found is None else found


def _reasoning_gym(
    task: TaskSettings, origin: Origin
) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, dict[str, Any]]], ReasoningGymScore]:
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise InputError(
            f"{origin.at('task.reasoning_gym')} needs reasoning-gym; pip install 'flexfloor[reasoning-gym]'"
        ) from None
    name = str(task.reasoning_gym)
    if name not in DATASETS:
        guess = get_close_matches(name, DATASETS, 1)
        remedy = f"did you mean {guess[0]!r}?" if guess else "see reasoning-gym's list of tasks"
        raise InputError(f"{origin.at('task.reasoning_gym')}: {name!r} is not known; {remedy}")
    try:
        # Held-out questions are the ones that the same seed would make next.
        made = create_dataset(name, size=task.size + _TRIES * task.eval_size, seed=task.seed, **task.config)
        train = [made[index] for index in range(task.size)]
        known = {entry["question"] for entry in train}
        held_out: list[dict[str, Any]] = []
        for index in range(task.size, len(made)):
            if len(held_out) == task.eval_size:
                break
            if made[index]["question"] not in known:
                held_out.append(made[index])
    except Exception as error:  # a task's checks are assertions; what else it raises is its own
        raise InputError(f"{origin.at('task.config')}: {name} does not take it ({told(error)})") from error
    if len(held_out) < task.eval_size:
        where = origin.at("task.eval_size", "task.size", "task.config")
        raise InputError(
            f"{where}: task.eval_size is {task.eval_size}, but {name} makes only {len(held_out)} questions that are "
            "not trained on; lower eval_size or size, or make the task wider by task.config"
        )
    entries = [*train, *held_out]
    rows = [(f"{name}: question {index}", _row(task, entry, index)) for index, entry in enumerate(entries)]
    return rows[: task.size], rows[task.size :], ReasoningGymScore(name, entries, made.score_answer)


def _row(task: TaskSettings, entry: Mapping[str, Any], index: int) -> dict[str, Any]:
    text = task.prompt_template.replace("{question}", entry["question"])
    return {"prompt": [{"role": "user", "content": text}] if task.chat else text, "item": index}
