"""The file of a length history looked at without SQLite, which would already begin to repair what it finds."""

from __future__ import annotations

import struct
import time
from pathlib import Path

from flexfloor.errors import InputError

APPLICATION_ID = 0x464C5848  # "FLXH"
SCHEMA_VERSION = 1
_MAGIC = b"SQLite format 3\0"
_HEADER = 100


def check_file(path: Path, create: bool) -> None:
    """What SQLite's header tells. create: the file need not be there. Raises InputError naming the remedy."""
    if path.is_dir():
        raise InputError(f"{path}: history is a folder; name a file")
    if not path.exists():
        if not create:
            raise InputError(f"{path}: there is no history; name a file that a rollout or an import has written")
        if not path.absolute().parent.is_dir():
            raise InputError(f"{path}: the folder of the history does not exist; make it")
        return
    for attempt in range(3):
        header, size = _header(path)
        # A crash while the file was made leaves it empty, or incomplete with a journal that takes it back.
        if not header or has_journal(path):
            return
        if len(header) < _HEADER or not header.startswith(_MAGIC):
            raise InputError(f"{path}: is not a length history (no SQLite file); name another file")
        if not _lacks_pages(header, size):
            break
        if attempt == 2:
            raise InputError(f"{path}: history is damaged, it ends too early; restore a copy, or name another file")
        time.sleep(0.05)  # another process may have been writing between our two looks
    version, application = _field(header, 60), _field(header, 68)
    if application != APPLICATION_ID:
        raise InputError(f"{path}: is not a length history (SQLite file of another application); name another file")
    if version > SCHEMA_VERSION:
        raise InputError(
            f"{path}: history was written by a newer version (schema {version}, this one reads {SCHEMA_VERSION}); "
            "upgrade flexfloor"
        )


def has_journal(path: Path) -> bool:
    """Whether another process is writing, or a crash has left what takes its half-written step back."""
    return Path(f"{path}-journal").exists()


def _header(path: Path) -> tuple[bytes, int]:
    """(SQLite's header, size of the file)."""
    try:
        with path.open("rb") as file:
            return file.read(_HEADER), path.stat().st_size
    except OSError as error:
        raise InputError(f"{path}: history cannot be read ({error.strerror}); name another file") from None


def _lacks_pages(header: bytes, size: int) -> bool:
    """Whether the file is shorter than it says; an old SQLite that does not say is told by two differing counters."""
    page = int(struct.unpack_from(">H", header, 16)[0])
    says = _field(header, 24) == _field(header, 92)
    return says and _field(header, 28) * (65536 if page == 1 else page) > size


def _field(header: bytes, offset: int) -> int:
    """A big-endian number of SQLite's file header (sqlite.org/fileformat2.html, 1.3)."""
    return int(struct.unpack_from(">I", header, offset)[0])
