"""The records of a ledger file, one JSON object a line, in the order they happen.

start    once: what runs (schema, time, fleet, settings; of these `seed` and `step` go into the summary), and how each
         worker's memory is divided
submit   requests made known: the first ones at t = 0, others while the rollout runs
assign   requests bound to workers
chunk    one advance: per-worker arrays with one entry an iteration, responses that ended, preemptions; `tokens` counts
         what was generated, in all and per worker; `spans`, where it stands, has the iterations that each entry stands
         for, as their mean, and `last_live` the iterations of a worker up to its last one with a live request
decision what a policy decided beside resizes: `what`, `reason`, and what it counted with (`predicted`)
forecast what a policy that has forecasts expected of responses that had not begun: quantiles of their lengths
resize   a change of the active set, or moves without one: who, what, and how long it took; `failed` says why it was not
         carried out, `refused` whether it was not even begun; one that was carried out has the division of memory
         that it left (`workers`)
end      once, last: outcome, hashes, the closing status of every worker

Times `t*` are seconds since the first request was handed over.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from flexfloor.errors import FlexFloorError, InputError
from flexfloor.progress import Decision, FleetInfo, LengthForecast, Progress, ResizeOutcome, WorkerStatus

SCHEMA = 1
"""Version of the records' meaning; a reader refuses a ledger with another one."""


def start_record(
    info: FleetInfo,
    policy: str,
    settings: Mapping[str, Any],
    started_at: str,
    workers: Sequence[WorkerStatus] = (),
    page_bytes: int | None = None,
) -> dict[str, Any]:
    """workers: with their memory before the first request; page_bytes: of one KV page."""
    return (
        {"type": "start", "schema": SCHEMA, "started_at": started_at, "policy": policy}
        | {"fleet": asdict(info), "settings": dict(settings)}
        | _memory_of(workers)
        | ({} if page_bytes is None else {"page_bytes": page_bytes})
    )


def _memory_of(workers: Sequence[WorkerStatus]) -> dict[str, Any]:
    """How the memory of each active worker is divided."""
    names = ("worker", "memory_bytes", "arena_bytes", "slots", "kv_pages")
    divided = [{name: getattr(w, name) for name in names} for w in workers if w.active]
    return {"workers": divided} if divided else {}


def submit_record(t: float, requests: int, prompt_tokens: int) -> dict[str, Any]:
    return {"type": "submit", "t": t, "requests": requests, "prompt_tokens": prompt_tokens}


def assign_record(t: float, iteration: int, assignment: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    return {
        "type": "assign",
        "t": t,
        "iteration": iteration,
        "workers": {str(w): list(r) for w, r in assignment.items()},
    }


def chunk_record(progress: Progress, t0: float, t1: float, totals: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """totals: for each request that ended in this chunk, (prompt tokens, response tokens)."""
    finished = [p for p in progress.requests if p.finish_reason is not None]
    spans = {} if progress.spans is None else {"spans": progress.spans.tolist()}
    return {
        "type": "chunk",
        "epoch": progress.epoch,
        "first_iteration": progress.first_iteration,
        "iterations": progress.iterations,
        "t0": t0,
        "t1": t1,
        "tokens": sum(w.tokens for w in progress.workers),
        **spans,
        "workers": [
            {
                "worker": w.worker,
                "tokens": w.tokens,
                **{name: value for name in ("last_live", "kv_pages") if (value := getattr(w, name)) is not None},
                "seconds": np.round(w.seconds, 7).tolist(),
                **({} if w.exchange_s is None else {"exchange_s": np.round(w.exchange_s, 7).tolist()}),
                **{
                    name: getattr(w, name).tolist()
                    for name in ("batch", "prefill_tokens", "kv_tokens", "experts_touched", "overran")
                },
            }
            for w in progress.workers
        ],
        "finished": [
            {
                "request_id": p.request_id,
                "worker": p.worker,
                "iteration": p.finish_iteration,
                "finish_reason": p.finish_reason,
                "prompt_tokens": totals[p.request_id][0],
                "response_tokens": totals[p.request_id][1],
            }
            for p in finished
        ],
        "preemptions": [asdict(p) for p in progress.preemptions],
    }


def decision_record(t: float, iteration: int, decision: Decision | LengthForecast) -> dict[str, Any]:
    """A `decision` record; of a forecast, a `forecast` record."""
    if isinstance(decision, Decision):
        return {"type": "decision", "t": t, "iteration": iteration} | asdict(decision)
    return {
        "type": "forecast",
        "t": t,
        "levels": list(decision.levels),
        "requests": list(decision.requests),
        "tokens": np.rint(decision.tokens).astype(np.int64).tolist(),
    }


def resize_record(t0: float, t1: float, outcome: ResizeOutcome, workers: Sequence[WorkerStatus] = ()) -> dict[str, Any]:
    """workers: as the resize has left them."""
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(outcome).items()}
    return {"type": "resize", "t0": t0, "t1": t1} | fields | ({} if outcome.failed else _memory_of(workers))


def end_record(
    t: float, workers: Sequence[WorkerStatus], hashes: tuple[str, str] | None, regrow_s: float
) -> dict[str, Any]:
    """hashes: of responses and log-probabilities; None where there are none, in virtual time."""
    return {
        "type": "end",
        "t": t,
        "responses_sha256": hashes[0] if hashes else None,
        "logprobs_sha256": hashes[1] if hashes else None,
        "regrow_s": regrow_s,
        "workers": [{k: v for k, v in asdict(w).items() if k != "requests"} for w in workers],
    }


class LedgerWriter:
    """Writes records to a file at its final name, valid after every line, and keeps them; path None only keeps them.

    The file is opened, and its folder made, by the first record; until it is closed no other writer can have it.
    on_record: told each record once it is written; it must not change it. `write` raises InputError when the file
    cannot be had, FlexFloorError when the disk is full.
    """

    def __init__(self, path: Path | None = None, on_record: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self._path = path
        self._on_record = on_record
        self._file: IO[str] | None = None

    def write(self, record: dict[str, Any]) -> None:
        if self._path and not self.records:
            self._file = _open(self._path)
        self.records.append(record)
        if self._file:
            try:
                self._file.write(json.dumps(record, separators=(",", ":"), default=_plain) + "\n")
                self._file.flush()
            except OSError as error:
                raise FlexFloorError(f"{self._path}: the ledger cannot be written ({error.strerror})") from None
        if self._on_record:
            self._on_record(record)

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def _open(path: Path) -> IO[str]:
    """For writing, from its beginning, and by nobody else until it is closed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")  # empties nothing before the file is ours
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise InputError(f"{path}: another run is writing this ledger; name another file, or wait for it") from None
        except OSError:
            pass  # a file system that knows no locks
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.truncate(0)
        return file
    except OSError as error:
        raise InputError(f"{path}: the ledger cannot be written ({error.strerror}); name another file") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not belong into a ledger")


@contextmanager
def refusing(path: Path | str) -> Iterator[None]:
    """Around what is made from the records of a ledger: records that are none of a ledger's raise InputError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        lacks = isinstance(error, KeyError)
        told = f"a record lacks {error}" if lacks else "a record is not what those of a ledger are"
        raise InputError(f"{path}: {told}; is this a ledger of this version?") from None


def _check_times(record: Mapping[str, Any]) -> str | None:
    """What is wrong with the times of a record, if anything is: every other number of it is a count."""
    for name in ("t", "t0", "t1", "prepare_s", "commit_s", "regrow_s"):
        if not _finite(record.get(name, 0.0)):
            return name
    if record["type"] == "chunk":
        try:
            seconds = sum(sum(entry["seconds"]) + sum(entry.get("exchange_s", ())) for entry in record["workers"])
        except (KeyError, TypeError):
            return None  # no chunk at all, as whoever needs it will find
        return None if _finite(seconds) else "seconds"
    return None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """All records of a ledger file; a half-written last line (a killed run) is left out.

    Raises InputError naming file and line for anything else that is not a record of this schema.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: cannot be read as a ledger ({reason})") from None
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise InputError(f"{path}: line {number} is not JSON; is this a ledger?") from None
        if not isinstance(record, dict) or "type" not in record:
            raise InputError(f"{path}: line {number} is not a ledger record; is this a ledger?")
        if records and record["type"] == "start":
            raise InputError(
                f"{path}: line {number} is a second start record: these are several ledgers in one file; give each "
                "rollout a file of its own"
            )
        if (wrong := _check_times(record)) is not None:
            raise InputError(f"{path}: line {number}: {wrong} is not a finite number of seconds; is this a ledger?")
        records.append(record)
    if not records or records[0]["type"] != "start":
        raise InputError(f"{path}: does not begin with a start record; is this a ledger?")
    if records[0].get("schema") != SCHEMA:
        raise InputError(f"{path}: ledger schema {records[0].get('schema')}, this version reads {SCHEMA}")
    return records
