"""The files a run leaves behind: checked before any work is done, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO, Any

from flexfloor.errors import FlexFloorError, InputError
from flexfloor.requests import Request, Response


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[str]]:
    """A text file that appears under its name when the block ends well, and not at all when it does not.

    The content passes through a temporary file in the same folder: a rename is atomic only inside a file system.
    Raises FlexFloorError when the disk says no.
    """
    # Follow a link, so that the rename replaces the file it points to and not the link.
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                yield file
                file.flush()
                os.chmod(file.fileno(), 0o666 & ~_umask())  # a temporary file is private, the result an ordinary one
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        _sync_folder(path.parent)
    except OSError as error:
        raise FlexFloorError(f"{path} cannot be written ({error.strerror}); make room or name another file") from None


def _sync_folder(folder: Path) -> None:
    """Put the rename on disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_responses(path: Path, responses: Iterable[Response]) -> None:
    """`responses.jsonl`: one object a line, in the order given."""
    with atomic_write(path) as file:
        for response in responses:
            file.write(json.dumps(response.to_json(), ensure_ascii=False, separators=(",", ":")) + "\n")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """One object, indented for people."""
    with atomic_write(path) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def check_outputs(outputs: Mapping[str, Path], inputs: Mapping[str, Path]) -> None:
    """See that every output can be written and overwrites nothing it must not, before any work is done.

    outputs, inputs: option name (`--out`) → path. Leaves nothing behind.
    Raises InputError naming the option.
    """
    taken = {path.resolve(): option for option, path in inputs.items()}
    for option, path in outputs.items():
        if path.is_dir():
            raise InputError(f"{option} {path} is a folder; name a file in it")
        if path.exists() and not path.is_file():
            raise InputError(f"{option} {path} is not a regular file; name one")
        if path.exists() and not os.access(path, os.W_OK):
            raise InputError(f"{option} {path} exists and is not writable; name another file")
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"{option} and {other} are the same file, {path}; give each its own")
        folder = next(p for p in path.absolute().parents if p.exists())
        if not folder.is_dir():
            raise InputError(f"{option} {path}: {folder} is not a folder; name a file in one")
        if not _takes_files(folder):
            raise InputError(f"{option} {path}: the folder {folder} is not writable; name a file in another one")


def _takes_files(folder: Path) -> bool:
    """Tried, because permissions do not tell of a file system that is full, read-only or made up by the kernel."""
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def decode_responses(responses: Iterable[Response], tokenizer: Any, requests: Iterable[Request] = ()) -> None:
    """Fill in `text` of every response, without special tokens; with stop strings it ends before the first of them.

    tokenizer: a transformers tokenizer, or None (texts stay None). requests: where the stop strings stand.
    """
    if tokenizer is None:
        return
    stops = {r.request_id: r.sampling.stop for r in requests}
    for response in responses:
        text = tokenizer.decode(response.tokens, skip_special_tokens=True)
        found = [at for at in (text.find(stop) for stop in stops.get(response.request_id, ())) if at >= 0]
        response.text = text[: min(found)] if found else text
