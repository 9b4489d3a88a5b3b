"""The length history on disk: one SQLite file, safe against crashes and against several writers.

SQLite's rollback journal is used, not its write-ahead log: the log needs memory shared by all writers, which the file
systems of clusters do not give. A step is written in one transaction, so that a crash loses that step and nothing else.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import numpy as np

from flexfloor.errors import FlexFloorError, InputError
from flexfloor.requests import Request, Response
from flexfloor.world.lengths.header import APPLICATION_ID, SCHEMA_VERSION, check_file, has_journal
from flexfloor.world.lengths.observations import MOST, SPLITS, Observations, Split, sampling_key

# What all responses of a batch share stands once; a response is five small integers, about 15 bytes.
_SCHEMA = """
CREATE TABLE prompts (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE);
CREATE TABLE samplings (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE);
CREATE TABLE batches (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, split INTEGER NOT NULL, sampling INTEGER NOT NULL,
    policy_version INTEGER NOT NULL, max_tokens INTEGER NOT NULL
);
CREATE TABLE responses (
    batch INTEGER NOT NULL, prompt INTEGER NOT NULL, tokens INTEGER NOT NULL, censored INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL
);
"""


class LengthHistory:
    """Observed response lengths in the file `path` (":memory:": in this process only).

    The file is made if there is none. create=False: it is read and not written to, and must hold a history. timeout:
    seconds that a writer waits for another one. Use it as a context manager, or `close` it. Raises InputError when the
    file is something else, damaged, or written by a newer version; the file is left as it is then.
    """

    def __init__(self, path: str | Path, *, create: bool = True, timeout: float = 30.0) -> None:
        self.path = str(path)
        self._timeout, self._create = timeout, create
        if self.path != ":memory:":
            check_file(Path(path), create)
        with self._explained():
            # Transactions are ours alone to begin and end.
            self._db = sqlite3.connect(self._address(), timeout=timeout, isolation_level=None, uri=True)
        try:
            with self._explained():
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> LengthHistory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def _address(self) -> str:
        """For SQLite. A step that a crash has left half-written is taken back by readers too, which is writing."""
        if self.path == ":memory:":
            return "file::memory:"
        only_read = not self._create and not has_journal(Path(self.path))
        return f"file:{quote(os.path.abspath(self.path))}?mode={'ro' if only_read else 'rwc' if self._create else 'rw'}"

    def _prepare(self) -> None:
        self._db.execute("PRAGMA synchronous = FULL")
        if self._is_new():
            if not self._create:
                raise InputError(f"{self.path}: is empty; name a history that a rollout or an import has written")
            with self._transaction():
                if self._is_new():  # and no other process was faster
                    for statement in _SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"prompts", "samplings", "batches", "responses"} <= tables:
            raise InputError(f"{self.path}: history lacks tables; restore a copy, or name another file")

    def _is_new(self) -> bool:
        return self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's errors in our words."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # ours
        except sqlite3.OperationalError as error:
            reason = str(error)
            if "locked" in reason:
                raise FlexFloorError(
                    f"{self.path}: another process has been writing the history for {self._timeout:g} s; try again"
                ) from None
            if "readonly" in reason:
                raise InputError(f"{self.path}: history cannot be written; make it writable, or copy it") from None
            raise InputError(f"{self.path}: history cannot be used ({reason}); name another file") from None
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise InputError(
                f"{self.path}: history is damaged ({error}); restore a copy, or name another file"
            ) from None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing; other writers wait from the start, so that epochs follow each other."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._check()
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def observe(
        self,
        requests: Sequence[Request],
        responses: Sequence[Response],
        *,
        split: Split = "train",
        policy_version: int = 0,
    ) -> int:
        """Remember a rollout's responses; requests: those they answer, in any order. Returns the epoch they got.

        Responses of forced length count as whole, whatever ended them; their limit is the longest of them.
        """
        by_id = {r.request_id: r.sampling for r in requests}
        samplings = [by_id[r.request_id] for r in responses]
        forced = np.array([s.forced_length is not None for s in samplings], bool)
        limit = np.array([s.max_tokens for s in samplings], np.int64)
        limit[forced] = limit[forced].max(initial=1)
        observed = Observations.from_lengths(
            *number([r.prompt_key for r in responses]),
            [len(r.tokens) for r in responses],
            max_tokens=limit,
            censored=np.array([r.finish_reason == "length" for r in responses], bool) & ~forced,
            prompt_tokens=[r.prompt_tokens for r in responses],
            policy_version=policy_version,
            split=split,
        )
        names, index = number([sampling_key(s) for s in samplings])
        return self.observe_lengths(replace(observed, samplings=names, sampling=index))

    def observe_lengths(self, observed: Observations, *, keep_epochs: bool = False) -> int:
        """Remember observations as one step, one transaction; the step is the newest epoch, which is returned.

        keep_epochs: they keep the epochs they have instead (the newest is returned).
        """
        with self._explained(), self._transaction():
            epoch = self._next_epoch()
            if keep_epochs:
                epochs = observed.epoch
                epoch = int(epochs.max(initial=0))
            else:
                epochs = np.full(len(observed), epoch)
            if epoch >= MOST:
                raise InputError(f"{self.path}: epoch {epoch} is too large; import a history with smaller epochs")
            prompts = self._ids("prompts", observed.keys, observed.prompt)
            samplings = self._ids("samplings", observed.samplings, observed.sampling)
            shared = np.stack(
                [epochs, observed.evaluation, samplings, observed.policy_version, observed.max_tokens], axis=1
            ).astype(np.int64)
            batches, batch = np.unique(shared, axis=0, return_inverse=True)
            first = self._db.execute("SELECT coalesce(max(id), 0) + 1 FROM batches").fetchone()[0]
            self._db.executemany(
                "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)",
                ([first + i, *row] for i, row in enumerate(batches.tolist())),
            )
            columns = (batch.reshape(-1) + first, prompts, observed.tokens, observed.censored, observed.prompt_tokens)
            self._db.executemany(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?)",
                zip(*(np.asarray(c, np.int64).tolist() for c in columns), strict=True),
            )
        return epoch

    def copy_to(self, path: Path) -> None:
        """The history as it is now, in a file that appears whole under its name or not at all; one there is replaced.

        Raises FlexFloorError when it cannot be written.
        """
        part = path.with_name(f".{path.name}.part")
        try:
            part.unlink(missing_ok=True)
            with closing(sqlite3.connect(part)) as copy:
                self._db.backup(copy)
            os.replace(part, path)
        except (OSError, sqlite3.DatabaseError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise FlexFloorError(f"{path}: {self.path} cannot be copied there ({reason}); make room for it") from None
        finally:
            part.unlink(missing_ok=True)

    def _check(self) -> None:
        """Nothing is added to, or taken for, a file that SQLite finds damaged anywhere: 0.2 s a million responses."""
        told = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if told != "ok":
            raise sqlite3.DatabaseError(" ".join(told.split()))

    def _next_epoch(self) -> int:
        return int(self._db.execute("SELECT coalesce(max(epoch), -1) + 1 FROM batches").fetchone()[0])

    def _ids(self, table: str, keys: Sequence[str], index: np.ndarray) -> np.ndarray:
        """Numbers in `table` of the keys that index points to, new ones given where needed."""
        used = np.unique(index)
        names = [keys[i] for i in used.tolist()]
        self._db.executemany(f"INSERT OR IGNORE INTO {table} (key) VALUES (?)", ((name,) for name in names))
        ids = np.zeros(len(keys), np.int64)
        find = f"SELECT id FROM {table} WHERE key = ?"
        ids[used] = [self._db.execute(find, (name,)).fetchone()[0] for name in names]
        return ids[index]

    def load(self) -> Observations:
        """Everything, in the order it was written; two calls without a writer between them give equal arrays."""
        with self._explained():
            self._db.execute("BEGIN")  # all reads see one moment
            try:
                self._check()
                prompts = self._db.execute("SELECT id, key FROM prompts ORDER BY id").fetchall()
                samplings = self._db.execute("SELECT id, key FROM samplings ORDER BY id").fetchall()
                batches = self._table("batches", "id, epoch, split, sampling, policy_version, max_tokens")
                responses = self._table("responses", "batch, prompt, tokens, censored, prompt_tokens")
            finally:
                self._db.execute("ROLLBACK")
        batch = self._find(batches[:, 0], responses[:, 0])
        _, epoch, split, sampling, version, limit = batches[batch].T
        return Observations(
            keys=[key for _, key in prompts],
            samplings=[key for _, key in samplings],
            prompt=self._find(np.array([i for i, _ in prompts], np.int64), responses[:, 1]),
            sampling=self._find(np.array([i for i, _ in samplings], np.int64), sampling),
            evaluation=split == SPLITS.index("eval"),
            epoch=epoch,
            policy_version=version,
            tokens=responses[:, 2],
            max_tokens=limit,
            censored=responses[:, 3] != 0,
            prompt_tokens=responses[:, 4],
        )

    def _table(self, table: str, columns: str) -> np.ndarray:
        """int64 [rows, columns] in the order of writing."""
        width = columns.count(",") + 1
        rows = self._db.execute(f"SELECT {columns} FROM {table} ORDER BY rowid")
        try:
            flat = np.fromiter((value for row in rows for value in row), np.int64)
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"{self.path}: table {table} of the history holds what is no whole number; restore a copy"
            ) from None
        return flat.reshape(-1, width)

    def _find(self, ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Where in `ids` (ascending) each of `wanted` stands."""
        at = np.searchsorted(ids, wanted)
        if len(wanted) and (not len(ids) or (ids[np.minimum(at, len(ids) - 1)] != wanted).any()):
            raise InputError(f"{self.path}: history is damaged (rows that belong to nothing); restore a copy")
        return at

    def prune(self, keep_epochs: int) -> int:
        """Forget all but the newest `keep_epochs` epochs, and shrink the file. Returns how many responses went."""
        with self._explained():
            with self._transaction():
                newest = self._db.execute(
                    "SELECT DISTINCT epoch FROM batches ORDER BY epoch DESC LIMIT ?", (keep_epochs,)
                ).fetchall()
                oldest = newest[-1][0] if newest else MOST
                old = "SELECT id FROM batches WHERE epoch < ?"
                gone = self._db.execute(f"DELETE FROM responses WHERE batch IN ({old})", (oldest,)).rowcount
                self._db.execute("DELETE FROM batches WHERE epoch < ?", (oldest,))
                self._db.execute("DELETE FROM prompts WHERE id NOT IN (SELECT prompt FROM responses)")
            self._db.execute("VACUUM")
        return gone

    def count(self) -> Mapping[str, int]:
        """Prompts, epochs and responses."""
        with self._explained():
            return {
                "prompts": self._one("SELECT count(*) FROM prompts"),
                "epochs": self._one("SELECT count(DISTINCT epoch) FROM batches"),
                "responses": self._one("SELECT count(*) FROM responses"),
            }

    def _one(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])


History = LengthHistory | Observations | Path | str
"""Of a rollout: a file, or an open one, which learn its lengths at its end; or observations, which do not."""


def number(names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """(different names in the order they come, index of each)."""
    known: dict[str, int] = {}
    index = np.array([known.setdefault(name, len(known)) for name in names], np.int64)
    return list(known), index


def load_history(history: History | None, split: str = "train") -> Observations | None:
    """What a history holds now; of a file that is missing or empty, nothing, and it is not made.

    split: of the lengths that are going to be added. Raises InputError, also where they could not be.
    """
    if split not in SPLITS:
        raise InputError(f"split {split!r} is not known; there is {', '.join(SPLITS)}")
    if isinstance(history, LengthHistory):
        return history.load()
    if not isinstance(history, Path | str):
        return history
    file = Path(history)
    check_file(file, create=True)
    needed = [p for p in (file, file.absolute().parent) if p.exists()]  # SQLite's journal lies beside the file
    if not all(os.access(p, os.W_OK) for p in needed):
        raise InputError(f"{file}: history cannot be written; make it and its folder writable, or copy it")
    if not file.exists() or (file.stat().st_size == 0 and not has_journal(file)):
        return Observations.from_lengths([], [], [], max_tokens=1)
    with LengthHistory(file, create=has_journal(file)) as opened:
        return opened.load()


def remember(
    history: History, requests: Sequence[Request], responses: Sequence[Response], *, split: Split, policy_version: int
) -> None:
    """Add a rollout's lengths, as one epoch; to observations nothing is added. Raises FlexFloorError."""
    if isinstance(history, Path | str):
        with LengthHistory(history) as file:
            file.observe(requests, responses, split=split, policy_version=policy_version)
    elif isinstance(history, LengthHistory):
        history.observe(requests, responses, split=split, policy_version=policy_version)
