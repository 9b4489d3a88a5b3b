"""Prompt files: JSONL or Parquet rows → tokens. A row that cannot be used is named with its line and its remedy.

A row has `prompt` (a string, or chat messages for the tokenizer's chat template) or `prompt_tokens` (token ids), and
may have `uid` (the prompt key) and `max_tokens`. Other fields, which datasets have plenty of, are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flexfloor.errors import InputError
from flexfloor.requests import Prompt

FIELDS = ("prompt", "prompt_tokens", "uid", "max_tokens")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def load_tokenizer(model: Path) -> Any | None:
    """The tokenizer of a checkpoint folder, or None when the folder holds no tokenizer files.

    Raises InputError when there are such files and they cannot be loaded.
    """
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{model}: the tokenizer cannot be loaded ({reason}); repair its files or remove them and use prompt_tokens"
        ) from None


def read_prompts(
    path: Path,
    tokenizer: Any | None,
    *,
    vocab_size: int | None = None,
    max_context: int | None = None,
    need_max_tokens: bool = False,
) -> list[Prompt]:
    """The prompts of a file, in its order. Parquet by the suffix `.parquet`, anything else one JSON object a line.

    tokenizer: a transformers tokenizer; None allows `prompt_tokens` only. vocab_size, max_context (tokens): of the
    model, to check the prompts against. need_max_tokens: every row must have its `max_tokens`.
    Raises InputError naming file, line or row, field and remedy.
    """
    prompts = []
    for where, row in read_rows(path):
        prompts.append(to_prompt(where, row, tokenizer, vocab_size, max_context))
        if need_max_tokens and prompts[-1].max_tokens is None:
            raise InputError(f"{where} has no max_tokens, which `force_lengths` prompts takes the length from; add it")
    if not prompts:
        raise InputError(f"{path}: holds no prompts; give at least one row")
    return prompts


def read_rows(path: Path, fields: Sequence[str] | None = FIELDS) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) of every row of a JSONL or Parquet file. fields: columns to read of Parquet; None: all.

    Raises InputError naming file, and line or row.
    """
    if path.is_dir():
        raise InputError(f"{path}: prompts is a folder; name a JSONL or Parquet file")
    return _parquet_rows(path, fields) if path.suffix.lower() == ".parquet" else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, row) of every line that is not blank."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: prompts cannot be read ({error.strerror}); name a JSONL or Parquet file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            yield where, json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise InputError(f"{where} is not UTF-8 text; save the file as UTF-8 (or name it .parquet)") from None
        except (ValueError, RecursionError):
            raise InputError(f"{where} is not JSON; write one JSON object a line") from None


def _parquet_rows(path: Path, fields: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """(file and row, row) with the fields named, counted from 1."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs pyarrow; pip install 'flexfloor[parquet]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = names if fields is None else [name for name in fields if name in names]
            number = 0
            for batch in file.iter_batches(columns=columns):
                # A batch without columns has no rows to list, though it counts them.
                for row in batch.to_pylist() or [{}] * batch.num_rows:
                    number += 1
                    yield f"{path}: row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise InputError(f"{path}: prompts cannot be read as Parquet ({reason})") from None


def to_prompt(where: str, row: Any, tokenizer: Any | None, vocab_size: int | None, max_context: int | None) -> Prompt:
    """A row as a prompt, see `read_prompts`. where: names the row in errors. Raises InputError."""
    if not isinstance(row, dict):
        raise InputError(f'{where} is not an object; write it like {{"prompt": "…"}}')
    prompt, tokens = row.get("prompt"), row.get("prompt_tokens")
    if prompt is None and tokens is None:
        raise InputError(f"{where} has no prompt; give prompt or prompt_tokens")
    if prompt is not None and tokens is not None:
        raise InputError(f"{where} has both prompt and prompt_tokens; give one of them")
    if tokens is not None:
        ids = _check_tokens(where, tokens)
    elif tokenizer is None:
        raise InputError(f"{where}: prompt is text but the model has no tokenizer; give prompt_tokens")
    else:
        ids = encode_prompt(where, prompt, tokenizer)
    if vocab_size is not None and max(ids) >= vocab_size:
        raise InputError(
            f"{where}: token id {max(ids)} is outside the model's vocabulary of {vocab_size}; "
            + ("use the tokenizer that belongs to the model" if tokens is None else "give ids below it")
        )
    if max_context is not None and len(ids) >= max_context:
        raise InputError(
            f"{where}: prompt has {len(ids)} tokens, which leaves no room in the model's context of {max_context}; "
            "shorten it"
        )
    return Prompt(
        ids, key=_check_uid(where, row.get("uid")), max_tokens=_check_max_tokens(where, row.get("max_tokens"))
    )


def _check_tokens(where: str, tokens: Any) -> tuple[int, ...]:
    if not isinstance(tokens, list):
        raise InputError(f"{where}: prompt_tokens is not a list; give a list of token ids")
    if not tokens:
        raise InputError(f"{where}: prompt_tokens is empty; give at least one token id")
    for token in tokens:
        if type(token) is not int or token < 0:
            raise InputError(f"{where}: prompt_tokens holds {token!r}; give whole numbers from 0")
    return tuple(tokens)


def encode_prompt(where: str, prompt: Any, tokenizer: Any, **template: Any) -> tuple[int, ...]:
    """A string with the special tokens its tokenizer adds, or chat messages through the chat template.

    where: what to call the prompt in an error. template: further arguments of `apply_chat_template`. Raises InputError.
    """
    if isinstance(prompt, list):
        text, add_special = _apply_template(where, prompt, tokenizer, template), False
    elif isinstance(prompt, str):
        text, add_special = prompt, True
    else:
        raise InputError(f"{where}: prompt is neither a string nor a list of chat messages")
    if not text:
        raise InputError(f"{where}: prompt is empty; give at least one token")
    if not _is_text(text):
        raise InputError(f"{where}: prompt holds half of a surrogate pair, which is not text; remove it")
    ids = tuple(tokenizer(text, add_special_tokens=add_special)["input_ids"])
    if not ids:
        raise InputError(f"{where}: prompt gives no tokens; give at least one")
    return ids


def _apply_template(where: str, messages: list[Any], tokenizer: Any, options: dict[str, Any]) -> str:
    if not messages:
        raise InputError(f"{where}: prompt has no messages; give at least one")
    clean = []
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InputError(f"{where}: prompt holds a message without role and content; give both as strings")
        # Parquet gives every message the fields of all messages, with nulls; templates tell absent from null.
        clean.append({key: value for key, value in message.items() if value is not None})
    if not (options.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        raise InputError(f"{where}: prompt is a chat but the tokenizer has no chat template; give a string")
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(clean, tokenize=False, add_generation_prompt=True, **options)
    except TemplateError as error:
        raise InputError(f"{where}: the chat template refuses prompt ({error}); change its messages") from None


def _check_uid(where: str, uid: Any) -> str | None:
    if uid is None:
        return None
    if isinstance(uid, bool) or not isinstance(uid, str | int) or uid == "":
        raise InputError(f"{where}: uid is {uid!r}; give a string or a whole number")
    if not _is_text(str(uid)):
        raise InputError(f"{where}: uid holds half of a surrogate pair, which is not text; remove it")
    return str(uid)


def _check_max_tokens(where: str, most: Any) -> int | None:
    if most is None:
        return None
    # A Parquet column of whole numbers with gaps often comes as floats.
    whole = int(most) if isinstance(most, float) and most.is_integer() else most
    if type(whole) is not int or whole < 1:
        raise InputError(f"{where}: max_tokens is {most!r}; give a whole number from 1")
    return whole


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
