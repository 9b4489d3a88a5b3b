"""The import layers of docs/architecture.md, read from the source: an import points down or sideways, never up."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

# Top to bottom; the longest matching prefix decides.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("flexfloor.cli", "flexfloor.report", "flexfloor.doctor", "flexfloor.__main__"),
    ("flexfloor.integrations",),
    ("flexfloor", "flexfloor.rollout", "flexfloor.simulate"),
    ("flexfloor.fleets",),
    ("flexfloor.fleet",),
    ("flexfloor.policy",),
    ("flexfloor.world",),
    ("flexfloor.ledger",),
    (
        "flexfloor.errors",
        "flexfloor.lengths_file",
        "flexfloor.outputs",
        "flexfloor.progress",
        "flexfloor.prompts",
        "flexfloor.requests",
        "flexfloor.settings",
    ),
)
WITHOUT_TORCH = ("flexfloor.policy", "flexfloor.world", "flexfloor.ledger")
MOST_LINES = 400
LONGER: dict[str, int] = {}
"""Modules that may be longer, with the number of lines they may have. Each entry needs a reason next to it."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((SOURCE / "flexfloor").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def layer_of(module: str) -> int:
    """Index into LAYERS, 0 on top. A module that no layer names fails the test that asks."""
    best, layer = "", -1
    for index, prefixes in enumerate(LAYERS):
        for prefix in prefixes:
            inside = module == prefix or (prefix != "flexfloor" and module.startswith(prefix + "."))
            # `flexfloor.cli` also stands for `flexfloor.cli_options`: a command split over several modules.
            inside = inside or (index == 0 and module.startswith(prefix + "_"))
            if inside and len(prefix) > len(best):
                best, layer = prefix, index
    assert layer >= 0, f"{module} belongs to no layer; name it in tests/test_layers.py"
    return layer


def imports_of(module: str) -> list[tuple[str, int]]:
    """(imported module, line) of every import, also of those inside functions."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                child = f"{base}.{alias.name}"
                found.append((child if child in MODULES else base, node.lineno))
    return found


def test_there_is_something_to_check():
    assert {"flexfloor.requests", "flexfloor.fleet", "flexfloor.ledger.events"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str):
    own = layer_of(module)
    upward = [
        f"line {line}: {module} imports {target}, which lies above it"
        for target, line in imports_of(module)
        if target.partition(".")[0] == "flexfloor" and layer_of(target) < own
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(WITHOUT_TORCH)])
def test_policy_world_and_ledger_do_without_torch(module: str):
    heavy = [target for target, _ in imports_of(module) if target.partition(".")[0] in {"torch", "transformers"}]
    assert not heavy


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("flexfloor.integrations")])
def test_nothing_but_commands_knows_integrations(module: str):
    if layer_of(module) == 0:
        return
    assert not [target for target, _ in imports_of(module) if target.startswith("flexfloor.integrations")]


@pytest.mark.parametrize("module", MODULES)
def test_modules_stay_short(module: str):
    lines = len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= LONGER.get(module, MOST_LINES), f"{module} has {lines} lines; its second concept wants to move out"
