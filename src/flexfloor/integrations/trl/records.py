"""What a training run leaves beside its checkpoints: the resolved config, the metrics of every log step, a result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from transformers import TrainerCallback

from flexfloor.errors import FlexFloorError
from flexfloor.outputs import atomic_write

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML of plain values, tables last; None, which TOML has no word for, as a comment."""
    lines: list[str] = []
    for key, value in values.items():
        if not isinstance(value, Mapping):
            lines.append(f"# {key} is not given" if value is None else f"{_key(key)} = {_value(value)}")
    for table, content in values.items():
        if isinstance(content, Mapping):
            lines += ["", f"[{_key(table)}]"]
            for key, value in content.items():
                lines.append(f"# {key} is not given" if value is None else f"{_key(key)} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # TOML wants the one control character escaped that JSON lets stand.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(`trl.max_steps`, 4, 8) for each value that differs; what one of them lacks is None."""
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{table}{key}.")
        elif before != after:
            yield f"{table}{key}", before, after


class MetricsFile(TrainerCallback):
    """One JSON object a log call: step, epoch and what the trainer logs. Values that are no finite numbers are null."""

    def __init__(self, path: Path, *, from_step: int, on_log: Callable[[dict[str, Any]], None]) -> None:
        """from_step: of a resumed run; lines of later steps go, they will be made again. on_log: told each object."""
        self._path, self._on_log = path, on_log
        self.records = [r for r in read_metrics(path) if r["step"] <= from_step] if from_step else []
        with atomic_write(path) as file:
            file.writelines(_line(record) for record in self.records)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        record = {"step": state.global_step, "steps": state.max_steps, **(logs or {})}
        record = {name: _plain(value) for name, value in record.items() if name not in ("total_flos",)}
        self.records.append(record)
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise FlexFloorError(
                f"{self._path} cannot be written ({error.strerror}); make room and go on with --resume"
            ) from None
        self._on_log(record)

    def close(self) -> None:
        with suppress(OSError):  # what could not be flushed was told before
            self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; none where there is no file."""
    records = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


@dataclass(frozen=True)
class Epoch:
    """One pass over the training prompts. reward: mean over its log steps.

    Over all of it, response tokens per occupied worker-second, with the time to bring workers back, and per occupied
    worker-iteration, which no other program on the machine disturbs.
    """

    epoch: int
    steps: int
    reward: float | None
    tokens_per_occupied_s_with_regrow: float | None
    tokens_per_occupied_iteration: float | None


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. reward_before, reward_after: on the held-out prompts, None where these were not evaluated."""

    steps: int
    reward_before: float | None
    reward_after: float | None
    epochs: list[Epoch]
    files: dict[str, Path]


def epochs_of(records: Iterable[Mapping[str, Any]]) -> list[Epoch]:
    """Per epoch, from the lines of the training steps; tokens and occupied time are summed before they are divided."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        if "reward" in record and record.get("epoch"):
            found.setdefault(math.ceil(record["epoch"] - 1e-6), []).append(record)
    return [_epoch(number, lines) for number, lines in sorted(found.items())]


def _epoch(number: int, lines: list[Mapping[str, Any]]) -> Epoch:
    rewards = [r["reward"] for r in lines if r["reward"] is not None]

    def per_occupied(what: str) -> float | None:
        rates = [(r.get("flexfloor/response_tokens"), r.get(f"flexfloor/tokens_per_occupied_{what}")) for r in lines]
        known = [(tokens, rate) for tokens, rate in rates if tokens and rate]
        occupied = sum(tokens / rate for tokens, rate in known)
        return sum(tokens for tokens, _ in known) / occupied if occupied else None

    reward = sum(rewards) / len(rewards) if rewards else None
    return Epoch(number, len(lines), reward, per_occupied("s_with_regrow"), per_occupied("iteration"))


def evaluations(records: Iterable[Mapping[str, Any]]) -> list[tuple[int, float | None]]:
    """(step, reward on the held-out prompts) of every evaluation."""
    return [(r["step"], r["eval_reward"]) for r in records if "eval_reward" in r]
