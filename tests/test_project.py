"""What the project says about itself: version, documented commands and options, the map of modules, own paths only."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

import flexfloor
from flexfloor.cli.app import app
from flexfloor.cli.options import load_settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").glob("*.md"))]
MOST_LINES = 400
LONGER: dict[str, int] = {"examples/make_tiny_model.py": 480}  # a script that reads on its own
# In pieces, so that this file does not name them itself.
FOREIGN = [
    *(f"/{name}/" for name in ("work", "root", "home", "opt")),
    "/tmp" + "/dev",
    *(".".join(host) for host in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))),
    *(".".join(host) for host in (("deb", "debian"), ("download", "pytorch"))),
]


def project_files() -> list[Path]:
    """What belongs to the project: tracked, or new and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in sorted(set(listed.split("\0"))) if name and (ROOT / name).is_file()]


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of a language."""
    fenced = re.findall(r"^```(.*)\n((?:.*\n)*?)```$", README.read_text(encoding="utf-8"), re.MULTILINE)
    return [body for found, body in fenced if found == language]


def commands() -> list[list[str]]:
    """The README's `flexfloor` command lines, as arguments."""
    lines = "\n".join(blocks("")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("flexfloor ")]


def test_the_version_is_the_installed_one():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert version("flexfloor") == declared


def test_no_file_names_places_outside_of_the_project():
    found = []
    for file in project_files():
        text = file.read_text(encoding="utf-8", errors="replace")
        found += [f"{file.relative_to(ROOT)} names {place}" for place in FOREIGN if place in text]
    assert not found, "\n".join(found)


def test_scripts_and_tests_stay_short():
    """Modules of the package are held by test_layers."""
    long = []
    for file in project_files():
        name = file.relative_to(ROOT).as_posix()
        if file.suffix == ".py" and not name.startswith("src/"):
            lines = len(file.read_text(encoding="utf-8").splitlines())
            if lines > LONGER.get(name, MOST_LINES):
                long.append(f"{name} has {lines} lines")
    assert not long, "\n".join(long)


def test_commands_in_the_readme_use_options_that_exist():
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {arguments[0] for arguments in commands()} >= {"rollout", "doctor"}
    for command, *arguments in commands():
        options = {name for parameter in known[command].params for name in parameter.opts} | {"--help"}
        used = {a.partition("=")[0] for a in arguments if a.startswith("--")}
        assert used <= options, command


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"^\s*make ([a-z-]+)", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert named >= {"demo", "test"}
    assert named <= targets


def test_the_readme_config_is_one(tmp_path: Path):
    for number, block in enumerate(blocks("toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block, encoding="utf-8")
        load_settings(file, {})


def test_python_in_the_readme_uses_names_that_exist():
    assert blocks("python")
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "flexfloor":
                assert node.attr in flexfloor.__all__


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_map_names_every_module_and_no_other():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.py)`", text)}
    modules = {path.name for path in (ROOT / "src").rglob("*.py") if not path.name.startswith("__")}
    tests = {path.name for path in (ROOT / "tests").glob("*.py")}
    assert modules - named == set(), "modules that docs/architecture.md does not name"
    assert named - modules - tests == set(), "names in docs/architecture.md that are no modules"
