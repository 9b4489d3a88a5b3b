"""`flexfloor doctor`: what this machine can run, what is wrong with it and how to mend it, on one screen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flexfloor.doctor.findings import Check, Finding, guarded, name_of, show, verdict
from flexfloor.doctor.machine import check_cpu, check_files, check_folders, check_memory, check_shared, check_threads
from flexfloor.doctor.model import check_model
from flexfloor.doctor.running import check_exchange, check_gpus, check_rollout
from flexfloor.doctor.software import check_extras, check_packages, check_torch

__all__ = ["Finding", "run_doctor"]


def run_doctor(model: Path | None = None, workers: int = 4, as_json: bool = False, quick: bool = False) -> int:
    """Print the findings. Returns 0 when a rollout on the CPU can run here (of `model`, when given), else 1.

    workers: that are to run; quick: without the rollout on a tiny model.
    """
    tell = (lambda finding: None) if as_json else show
    findings: list[Finding] = []
    # Each stage would stumble over what an earlier one has found, and hide it behind errors of its own: torch cannot
    # even be imported without a temporary folder, and ends the process where it gets no socket.
    for stage in stages(model, workers):
        why = "a check above failed" if any(stage.needs(f) for f in findings if f.level == "FAIL") else ""
        for check in stage.checks:
            if not why and quick and check is check_rollout:
                why = "--quick"
            findings += _tell(partial(_not_tried, check, why) if why else check, tell)
    good = not any(f.level == "FAIL" for f in findings)
    if as_json:
        print(json.dumps({"ok": good, "findings": [f.to_json() for f in findings]}, indent=2))
    else:
        print(verdict(findings))
    return 0 if good else 1


@dataclass(frozen=True, slots=True)
class Stage:
    """Checks, and whether what failed before makes them pointless."""

    checks: Sequence[Check]
    needs: Callable[[Finding], bool]


def stages(model: Path | None, workers: int) -> list[Stage]:
    """What is looked at without torch, what torch tells, and what is tried for real."""
    plain: list[Check] = [check_packages, check_extras, partial(check_threads, workers), partial(check_memory, workers)]
    plain += [check_shared, partial(check_files, workers), check_folders]
    of_torch: list[Check] = [check_torch, check_cpu, check_gpus]
    if model is not None:
        of_torch.append(partial(check_model, model, workers))
    return [
        Stage(plain, lambda failed: False),
        Stage(of_torch, lambda failed: failed.name in ("open files", "folders")),
        Stage([check_exchange], lambda failed: failed.name != "model"),
        Stage([check_rollout], lambda failed: failed.name != "model"),
    ]


def _not_tried(check: Check, why: str) -> Iterator[Finding]:
    yield Finding("note", name_of(check), f"not tried: {why}")


def _tell(check: Check, tell: Callable[[Finding], None]) -> Iterator[Finding]:
    """The findings of a check, each told as it comes."""
    for finding in guarded(check):
        tell(finding)
        yield finding
