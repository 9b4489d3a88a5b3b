"""What the scripts that write checkpoints share: one-line errors, whole-or-nothing output, parameter counts."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn


class InputError(ValueError):
    """An option that cannot be honoured; the message is one line that names the option and the remedy."""


class OneLineParser(argparse.ArgumentParser):
    """argparse with one-line errors: no usage text, exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a directory beside `out` that becomes `out` at the end, or vanishes if the body fails.

    Raises InputError if `out` is not a new or empty directory or cannot be made.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"--out {out}: exists and is not an empty directory; choose another or remove it")
    partial = out.absolute().with_name(f".{out.absolute().name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be made ({error.strerror})") from error
    try:
        yield partial
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def quiet_transformers() -> None:
    """Keep progress bars of transformers off the terminal, if it is not imported yet (importing it takes seconds)."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def parameter_counts(model: Any) -> tuple[int, int]:
    """Parameters of a transformers MoE model: all, and those that take part in one token's forward pass."""
    total = sum(weight.numel() for weight in model.parameters())
    experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    config = model.config
    return total, total - experts + experts * config.num_experts_per_tok // config.num_experts
