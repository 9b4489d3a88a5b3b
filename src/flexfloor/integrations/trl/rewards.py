"""Reward functions, watched: what they return is checked, how long they take is told, what they raise is one line."""

from __future__ import annotations

import inspect
import math
import time
import traceback
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from flexfloor.errors import InputError
from flexfloor.integrations.trl.named import told
from flexfloor.outputs import atomic_write


class RewardError(InputError):
    """A reward function raised, or returned what cannot be a reward. The step it belongs to was not trained."""


def name_of(reward: Any) -> str:
    """The name that TRL shows a reward function under."""
    while hasattr(reward, "func"):  # functools.partial
        reward = reward.func
    return str(getattr(reward, "__name__", None) or type(reward).__name__)


class FirstBatch:
    """Raises RewardError when no response of the first batch got a reward from any function.

    None, that a function does not count for a row, is right for some functions and rows. TRL takes it from all of them
    for all rows, and then trains nothing.
    """

    def __init__(self, functions: int) -> None:
        self._awaited = functions
        self._silent: list[str] | None = []  # functions that gave no reward; None once one of them did

    def see(self, name: str, rewards: Sequence[float | None], call: dict[str, Any]) -> None:
        """Told what each function returned, in any order."""
        if self._awaited == 0 or self._silent is None:
            return
        self._awaited -= 1
        if any(reward is not None for reward in rewards):
            self._silent = None
            return
        self._silent.append(name)
        if self._awaited == 0:
            plural = "s" if len(self._silent) > 1 else ""
            raise RewardError(
                f"reward function{plural} {', '.join(self._silent)}{_step(call)} returned None for every response "
                f"(first row: {_row(call, 0)}), which leaves nothing to train on; return a number where one counts"
            )


def watch_all(
    rewards: Sequence[Callable[..., Any]], seconds: Callable[[float], None], error_file: Path
) -> list[Callable[..., Any]]:
    """Each of them watched, and that not all of them stay silent. See `watch`."""
    first = FirstBatch(len(rewards))
    return [watch(reward, seconds, error_file, first) for reward in rewards]


def watch(
    reward: Callable[..., Any], seconds: Callable[[float], None], error_file: Path, first: FirstBatch
) -> Callable[..., Any]:
    """The reward function with its name, which raises RewardError for all that is wrong with it.

    seconds: told how long each call took. error_file: gets the traceback of what the function raised.
    """
    name = name_of(reward)

    def checked(returned: Any, call: dict[str, Any]) -> list[float | None]:
        rewards = _check(name, returned, call)
        first.see(name, rewards, call)
        return rewards

    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):

        async def watched_async(**call: Any) -> list[float | None]:
            begin = time.perf_counter()
            try:
                returned = await reward(**call)
            except (Exception, SystemExit) as error:
                raise _raised(name, error, call, error_file) from error
            finally:
                seconds(time.perf_counter() - begin)
            return checked(returned, call)

        watched_async.__name__ = name
        return watched_async

    def watched(**call: Any) -> list[float | None]:
        begin = time.perf_counter()
        try:
            returned = reward(**call)
        except (Exception, SystemExit) as error:
            raise _raised(name, error, call, error_file) from error
        finally:
            seconds(time.perf_counter() - begin)
        return checked(returned, call)

    watched.__name__ = name
    return watched


def _step(call: dict[str, Any]) -> str:
    state = call.get("trainer_state")
    return "" if state is None else f" in step {state.global_step + 1}"


def _raised(name: str, error: BaseException, call: dict[str, Any], file: Path) -> RewardError:
    where = ""
    try:
        with atomic_write(file) as out:
            out.write("".join(traceback.format_exception(error)))
        where = f"; see {file}"
    except Exception:  # a full disk must not hide what was raised
        pass
    return RewardError(f"reward function {name}{_step(call)} raised {told(error)} (first row: {_row(call, 0)}){where}")


def _check(name: str, returned: Any, call: dict[str, Any]) -> list[float | None]:
    """None is TRL's 'does not count for this row'."""
    count = len(call["completions"])
    if hasattr(returned, "tolist"):  # numpy, torch
        returned = returned.tolist()
    if isinstance(returned, str) or not isinstance(returned, Sequence):
        kind = "None" if returned is None else f"a {type(returned).__name__}"
        raise RewardError(f"reward function {name}{_step(call)} returned {kind}; return a list of one number a row")
    if len(returned) != count:
        raise RewardError(
            f"reward function {name}{_step(call)} returned {len(returned)} rewards for {count} rows; return one a row"
        )
    rewards: list[float | None] = []
    for row, value in enumerate(returned):
        if value is None:
            rewards.append(None)
            continue
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(
                f"reward function {name}{_step(call)} returned {value!r:.40} for row {row} ({_row(call, row)}); "
                "return finite numbers, or None where it does not count"
            )
        rewards.append(float(value))
    return rewards


def _row(call: dict[str, Any], row: int) -> str:
    """A row as short text."""
    prompt, completion = ([*call.get(key, ()), *[""] * (row + 1)][row] for key in ("prompts", "completions"))
    return f"prompt {_short(prompt)}, completion {_short(completion)}"


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content", value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…'"
