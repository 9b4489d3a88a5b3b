"""Lengths of real rollouts from a CSV file: one row for each response."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flexfloor.errors import InputError

NEEDED = ("prompt_index", "input_tokens", "output_tokens")
PLACE = ("step", "dp_rank", "prompt_index")
"""The columns that together name a prompt; those beside prompt_index may be missing."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The responses of one workload of a trace.

    prompt_tokens: int64 [prompts]; lengths: response tokens of each prompt's siblings, int64 [siblings] a prompt.
    """

    workload: str | None
    prompt_tokens: np.ndarray
    lengths: tuple[np.ndarray, ...]

    @property
    def max_tokens(self) -> int:
        """The longest response: a trace does not tell the limit it was generated with."""
        return max(int(siblings.max()) for siblings in self.lengths)


def read_trace(path: Path, workload: str | None = None) -> Trace:
    """The responses in a file with the columns `workload, step, dp_rank, prompt_index, input_tokens, sample_index,
    output_tokens`; of these NEEDED must be there, and `workload` says nothing where all rows have the same.

    workload: the one to take; None where there is only one. Raises InputError naming the column, line or workload.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read(path, csv.reader(file), workload)
    except OSError as error:
        raise InputError(f"{path}: trace cannot be read ({error.strerror}); name a CSV file") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text; name a CSV file") from None
    except csv.Error as error:
        raise InputError(f"{path} is not a CSV file ({error})") from None


def _read(path: Path, rows: Any, workload: str | None) -> Trace:
    """rows: a csv.reader."""
    head = [name.strip() for name in next(rows, [])]
    missing = [name for name in NEEDED if name not in head]
    if missing:
        raise InputError(f"{path}: missing column {', '.join(missing)}; the first line names {', '.join(NEEDED)}")
    place = [head.index(name) for name in PLACE if name in head]
    asked, given = head.index("input_tokens"), head.index("output_tokens")
    named = head.index("workload") if "workload" in head else None
    found: dict[str, None] = {}
    prompts: dict[tuple[str, ...], tuple[int, list[int]]] = {}
    for row in rows:
        if not row:
            continue
        where = f"{path}: line {rows.line_num}"
        if len(row) != len(head):
            raise InputError(f"{where} has {len(row)} fields for {len(head)} columns; take it out or complete it")
        own = row[named] if named is not None else ""
        found.setdefault(own)
        if workload is not None and own != workload:
            continue
        key = (own, *(row[i] for i in place))
        tokens = _whole(where, "input_tokens", row[asked])
        expected, siblings = prompts.setdefault(key, (tokens, []))
        if tokens != expected:
            raise InputError(
                f"{where}: input_tokens is {tokens}, and {expected} in an earlier row of the same prompt; give "
                f"siblings the same, or tell prompts apart by {', '.join(PLACE)}"
            )
        siblings.append(_whole(where, "output_tokens", row[given]))
    if not found:
        raise InputError(f"{path} has no rows; give one for each response")
    if workload is None and len(found) > 1:
        raise InputError(f"{path} has the workloads {_list(list(found))}; choose one with --workload")
    if not prompts:
        raise InputError(f"{path} has no workload {workload!r}; there is {_list(list(found))}")
    return Trace(
        workload or next(iter(found)) or None,
        np.array([tokens for tokens, _ in prompts.values()], dtype=np.int64),
        tuple(np.array(siblings, dtype=np.int64) for _, siblings in prompts.values()),
    )


def _whole(where: str, column: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) < 1:
        raise InputError(f"{where}: {column} is {text[:40]!r}; give a whole number from 1")
    return int(text)


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in islice(names, 6))
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")
