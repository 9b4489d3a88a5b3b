"""Forced response lengths: every response gets exactly its given length, for benchmarks and replays of earlier runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexfloor.errors import InputError
from flexfloor.requests import Request


def force_lengths(
    requests: Sequence[Request], lengths: Sequence[int], *, max_context: int | None = None
) -> list[Request]:
    """The requests, each with a response of exactly lengths[i] tokens: end ids, stop ids and stop strings are ignored.

    max_context: tokens of the model's context, to check against. Raises InputError naming the request.
    """
    assert len(lengths) == len(requests)
    forced = []
    for request, length in zip(requests, lengths, strict=True):
        if length < 1:
            raise InputError(f"request {request.request_id}: length {length} cannot be forced; give at least 1")
        prompt = len(request.prompt_tokens)
        if max_context is not None and prompt + length > max_context:
            raise InputError(
                f"request {request.request_id}: length {length} cannot be forced, its prompt of {prompt} tokens leaves "
                f"{max_context - prompt} in the model's context of {max_context}; give a shorter one"
            )
        sampling = replace(request.sampling, max_tokens=length, ignore_eos=True, stop_token_ids=(), stop=())
        forced.append(replace(request, sampling=sampling))
    return forced


def read_lengths(path: Path, requests: Sequence[Request]) -> list[int]:
    """The length of each request's response, tokens, in the requests' order.

    The file is either one whole number a line in that order (more than enough is fine), or JSONL with `request_id` and
    `length` or `tokens` (whose number counts), like responses.jsonl. Blank lines are skipped.
    Raises InputError naming the line or the request.
    """
    lines = list(_lines(path))
    if lines and lines[0][1].startswith("{"):
        return _from_objects(path, lines, requests)
    lengths = [_whole(where, text) for where, text in lines]
    if len(lengths) < len(requests):
        raise InputError(f"{path}: has {len(lengths)} lengths for {len(requests)} requests; give one for each")
    return lengths[: len(requests)]


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(file and line, stripped text) of every line that is not blank."""
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise InputError(f"{path}: lengths cannot be read ({error.strerror}); name a file, or 'prompts'") from None
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise InputError(f"{path}: line {number} is not UTF-8 text; save the file as UTF-8") from None
        if text:
            yield f"{path}: line {number}", text


def _whole(where: str, text: str) -> int:
    # int() alone takes signs, underscores and other digits than ours.
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) < 1:
        raise InputError(f"{where}: {text[:40]!r} is not a length; give a whole number from 1")
    return int(text)


def _from_objects(path: Path, lines: Sequence[tuple[str, str]], requests: Sequence[Request]) -> list[int]:
    known = {r.request_id for r in requests}
    found: dict[str, int] = {}
    for where, text in lines:
        name, length = _parse(where, text)
        if name not in known:
            raise InputError(
                f"{where}: no request has the id {name!r}; take out the line, or give the prompts it is of"
            )
        if name in found:
            raise InputError(f"{where}: request {name} has a line already; keep one of them")
        found[name] = length
    for request in requests:
        if request.request_id not in found:
            raise InputError(f"{path}: has no line for request {request.request_id}; give one for each request")
    return [found[r.request_id] for r in requests]


def _parse(where: str, text: str) -> tuple[str, int]:
    """(request id, length) of a line."""
    try:
        row: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is not JSON; write one JSON object a line") from None
    if not isinstance(row, dict) or not isinstance(row.get("request_id"), str):
        raise InputError(f"{where} has no request_id; give one as a string")
    if "length" in row:
        length = row["length"]
    elif isinstance(row.get("tokens"), list):
        length = len(row["tokens"])
    else:
        raise InputError(f"{where} has neither length nor tokens; give one of them")
    if type(length) is not int or length < 1:
        raise InputError(f"{where}: length is {length!r}; give a whole number from 1")
    return row["request_id"], length
