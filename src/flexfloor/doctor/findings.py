"""Findings: one line each, and how to mend what is wrong."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flexfloor.errors import FlexFloorError

Level = Literal["ok", "note", "warn", "FAIL"]
Check = Callable[[], Iterator["Finding"]]

_NAME = 12  # columns


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. note: limits what can be run, as intended or not; warn: to be mended, though a rollout on the
    CPU runs; FAIL: none can. remedy: how to mend it."""

    level: Level
    name: str
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def name_of(check: Check) -> str:
    """check_rollout → rollout."""
    return getattr(getattr(check, "func", check), "__name__", "check").removeprefix("check_")


def guarded(check: Check) -> Iterator[Finding]:
    """The findings of a check; what it raises is a finding too."""
    name = name_of(check)
    try:
        yield from check()
    except FlexFloorError as error:
        yield Finding("FAIL", name, str(error))
    except Exception as error:  # a broken installation raises anything
        yield Finding("FAIL", name, f"{type(error).__name__}: {error}", "install the package anew, or report this line")


def show(finding: Finding) -> None:
    """Print a finding, wrapped to the terminal; what mends it stands below."""
    indent = " " * (8 + _NAME)
    print(_wrap(f"  {finding.level:<4}  {finding.name:<{_NAME}}", finding.text, indent), flush=True)
    if finding.remedy:
        print(_wrap(f"{indent}mend: ", finding.remedy, indent + " " * 6), flush=True)


def _wrap(head: str, text: str, indent: str) -> str:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    lines = textwrap.wrap(
        " ".join(text.split()),
        max(40, columns),
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) or head.rstrip()


def verdict(findings: Sequence[Finding]) -> str:
    """The last line."""
    failed, warned = (sum(f.level == level for f in findings) for level in ("FAIL", "warn"))
    if failed:
        return f"a rollout on the CPU cannot run: {_count(failed, 'check')} failed"
    return "a rollout on the CPU can run" + (f"; {_count(warned, 'warning')}" if warned else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"
