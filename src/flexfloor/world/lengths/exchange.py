"""A length history as JSONL or Parquet, for other tools and other machines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flexfloor.errors import InputError
from flexfloor.outputs import atomic_write
from flexfloor.world.lengths.observations import MOST, SPLITS, Observations
from flexfloor.world.lengths.store import LengthHistory, number

FIELDS = (
    "prompt_key",
    "split",
    "sampling",
    "epoch",
    "policy_version",
    "response_tokens",
    "max_tokens",
    "censored",
    "prompt_tokens",
)
_WHOLE = {"epoch": 0, "policy_version": 0, "response_tokens": 0, "max_tokens": 1, "prompt_tokens": 0}
"""Whole numbers, with the least they may be."""


def export_history(history: LengthHistory, path: Path) -> int:
    """Write every response, in the order observed. Parquet by the suffix `.parquet`, else JSONL. Returns their number.

    Raises InputError when Parquet needs pyarrow.
    """
    observed = history.load()
    columns = _columns(observed)
    if path.suffix.lower() == ".parquet":
        pyarrow, parquet = _pyarrow(path)
        with atomic_write(path) as file:
            parquet.write_table(pyarrow.table(columns), file.buffer)  # type: ignore[attr-defined]
    else:
        with atomic_write(path) as file:
            for row in zip(*columns.values(), strict=True):
                file.write(json.dumps(dict(zip(FIELDS, row, strict=True)), ensure_ascii=False) + "\n")
    return len(observed)


def _columns(observed: Observations) -> dict[str, list[Any]]:
    return {
        "prompt_key": [observed.keys[i] for i in observed.prompt.tolist()],
        "split": [SPLITS[i] for i in observed.evaluation.astype(int).tolist()],
        "sampling": [observed.samplings[i] for i in observed.sampling.tolist()],
        "epoch": observed.epoch.tolist(),
        "policy_version": observed.policy_version.tolist(),
        "response_tokens": observed.tokens.tolist(),
        "max_tokens": observed.max_tokens.tolist(),
        "censored": observed.censored.tolist(),
        "prompt_tokens": observed.prompt_tokens.tolist(),
    }


def import_history(history: LengthHistory, path: Path) -> int:
    """Add the responses of a file that `export_history` wrote, with their epochs, all or none. Returns their number.

    Raises InputError naming the line or row and the field, or an epoch that the history holds already.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a JSONL or Parquet file")
    rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _json_rows(path)
    observed = _observations(rows)
    if not len(observed):
        raise InputError(f"{path}: holds no responses; give at least one")
    twice = _epochs_held(observed, history.load())
    if len(twice):
        raise InputError(
            f"{path}: all its responses of epoch {twice[0]} are in {history.path} already, and would count twice; take "
            f"{'that epoch' if len(twice) == 1 else f'the {len(twice)} epochs of which that holds'} out of the file"
        )
    history.observe_lengths(observed, keep_epochs=True)
    return len(observed)


def _epochs_held(new: Observations, held: Observations) -> list[int]:
    """Epochs of `new` whose every response is in `held`, each as often."""
    shared = np.intersect1d(new.epoch, held.epoch)
    coming, there = (
        Counter(zip(*_columns(some.where(np.isin(some.epoch, shared))).values(), strict=True)) for some in (new, held)
    )
    place = FIELDS.index("epoch")
    lacking = {row[place] for row, count in coming.items() if there[row] < count}
    return sorted({row[place] for row in coming} - lacking)


def _observations(rows: Iterable[tuple[str, Any]]) -> Observations:
    columns: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for where, row in rows:
        for name, value in zip(FIELDS, _checked(where, row), strict=True):
            columns[name].append(value)
    keys, prompt = number(columns["prompt_key"])
    samplings, sampling = number(columns["sampling"])
    whole = {name: np.array(columns[name], np.int64) for name in _WHOLE}
    return Observations(
        keys=keys,
        samplings=samplings,
        prompt=prompt,
        sampling=sampling,
        evaluation=np.array([s == "eval" for s in columns["split"]], bool),
        epoch=whole["epoch"],
        policy_version=whole["policy_version"],
        tokens=whole["response_tokens"],
        max_tokens=whole["max_tokens"],
        censored=np.array(columns["censored"], bool),
        prompt_tokens=whole["prompt_tokens"],
    )


def _checked(where: str, row: Any) -> list[Any]:
    """The values of a row, in the order of FIELDS."""
    if not isinstance(row, dict):
        raise InputError(f"{where} is not an object; write the fields {', '.join(FIELDS)}")
    values = []
    for name in FIELDS:
        if name not in row:
            raise InputError(f"{where} has no {name}; give it")
        value = row[name]
        if name in _WHOLE:
            if type(value) is not int or not _WHOLE[name] <= value < MOST:
                least = _WHOLE[name]
                raise InputError(f"{where}: {name} is {_short(value)}; give a whole number from {least} to 2^53 - 1")
        elif name == "censored":
            if type(value) is not bool:
                raise InputError(f"{where}: censored is {_short(value)}; give true or false")
        elif not isinstance(value, str) or not _is_text(value):
            raise InputError(f"{where}: {name} is {_short(value)}; give a string")
        elif name == "prompt_key" and not value:
            raise InputError(f"{where}: prompt_key is empty; give the prompt's, by which it is known in other epochs")
        elif name == "split" and value not in SPLITS:
            raise InputError(f"{where}: split is {_short(value)}; give {' or '.join(SPLITS)}")
        values.append(value)
    if row["response_tokens"] > row["max_tokens"]:
        raise InputError(
            f"{where}: response_tokens is {row['response_tokens']}, above max_tokens {row['max_tokens']}; give "
            "the limit that the response was generated under"
        )
    return values


def _short(value: Any) -> str:
    return repr(value)[:60]


def _is_text(value: str) -> bool:
    """SQLite keeps texts as UTF-8, which has no place for half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, row) of every line that is not blank."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a JSONL or Parquet file") from None
    with file:
        for index, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"{path}: line {index}", json.loads(line.decode("utf-8-sig" if index == 1 else "utf-8"))
            except (ValueError, RecursionError):
                raise InputError(f"{path}: line {index} is not JSON; write one JSON object a line") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and row, row), counted from 1."""
    pyarrow, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in FIELDS if name in file.schema_arrow.names]
            index = 0
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist() or [{}] * batch.num_rows:
                    index += 1
                    yield f"{path}: row {index}", row
    except (OSError, pyarrow.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise InputError(f"{path}: cannot be read as Parquet ({reason}); name another file") from None


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: Parquet needs pyarrow; pip install 'flexfloor[parquet]'") from None
    return pyarrow, parquet
