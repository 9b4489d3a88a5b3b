"""What is installed: Python, the packages that ours needs or can use, and how torch was built."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import TYPE_CHECKING

from flexfloor.doctor.findings import Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_TOLD = ("transformers", "numba", "numpy")  # needed packages whose release says most, beside torch
_WITHOUT_RANGE = ("ray", "verl", "vllm")
"""Packages to run beside, of which our metadata wants no release."""
_DEVELOPMENT = "dev"


def check_packages() -> Iterator[Finding]:
    """Python, and every package that ours cannot do without, against the ranges of its metadata."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        wanted = [Requirement(line) for line in requires("flexfloor") or []]
        python = SpecifierSet(metadata("flexfloor")["Requires-Python"] or "")
        own = version("flexfloor")
    except PackageNotFoundError:
        wanted, python, own = [Requirement(n) for n in ("numba", "torch", "transformers")], SpecifierSet(), None
    fits = python.contains(platform.python_version(), prereleases=True)
    text = f"{platform.python_version()}, flexfloor {own or 'not installed: which releases it needs is not known'}"
    if fits:
        yield Finding("ok" if own else "warn", "python", text, "" if own else "pip install flexfloor")
    else:
        yield Finding("FAIL", "python", f"{text} (needs {python})", f"run it with a Python {python}")
    needed = [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    bad = list(_unfit(needed, "FAIL"))
    yield from bad
    if not bad:
        told = ", ".join(f"{name} {version(name)}" for name in _TOLD)
        yield Finding("ok", "packages", f"all {len(needed)} that it needs: {told}")


def _unfit(needed: list[Requirement], level: str) -> Iterator[Finding]:
    """Those that are missing or of a release that does not do."""
    for need in sorted(needed, key=lambda n: n.name):
        found = installed(need.name)
        if found is None or not need.specifier.contains(found, prereleases=True):
            text = f"{found} (needs {need.specifier})" if found else f"missing (needs {need.specifier or 'any'})"
            yield Finding(level, need.name, text, f"pip install '{need.name}{need.specifier}'")  # type: ignore[arg-type]


def installed(name: str) -> str | None:
    """The release of a package, None if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_extras() -> Iterator[Finding]:
    """Packages that some commands use: those of our extras against their ranges, and those that it can run beside."""
    found: dict[str, str] = {}
    absent: list[str] = []
    for extra, optional in _extras().items():
        # An extra named like a package is for that one; the others are there for its sake, or by chance.
        wanted = [need for need in optional if need.name == extra] or optional
        present = {need.name: release for need in wanted if (release := installed(need.name))}
        found |= present
        absent += [need.name for need in wanted if need.name not in present]
        for finding in _unfit(optional if extra in present else [n for n in wanted if n.name in present], "warn"):
            yield Finding("warn", finding.name, finding.text, f"pip install 'flexfloor[{extra}]'")
    for name in _WITHOUT_RANGE:
        if release := installed(name):
            found[name] = release
        else:
            absent.append(name)
    if found:
        yield Finding("ok", "extras", ", ".join(f"{name} {release}" for name, release in sorted(found.items())))
    if absent:
        yield Finding("note", "extras", f"not installed: {', '.join(sorted(set(absent)))}")


def _extras() -> dict[str, list[Requirement]]:
    """The packages of each extra of ours, as our metadata has them; none where we are not installed."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in requires("flexfloor") or []]
        extras = [e for e in metadata("flexfloor").get_all("Provides-Extra") or [] if e != _DEVELOPMENT]
    except PackageNotFoundError:
        return {}
    optional = [need for need in wanted if need.marker is not None and not need.marker.evaluate({"extra": ""})]
    return {e: [n for n in optional if n.marker is not None and n.marker.evaluate({"extra": e})] for e in extras}


def check_torch() -> Iterator[Finding]:
    """How torch was built."""
    import torch
    import torch.distributed as dist

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    libraries = {"MKL": torch.backends.mkl.is_available(), "oneDNN": torch.backends.mkldnn.is_available()}
    has = ", ".join(f"{'' if there else 'no '}{name}" for name, there in libraries.items())
    if not dist.is_available():
        remedy = "install a build of torch with torch.distributed, such as the ones of PyTorch's own index"
        yield Finding("FAIL", "torch", f"{torch.__version__} without torch.distributed", remedy)
        return
    yield Finding("ok", "torch", f"{torch.__version__}, built for {built}; {has}; {torch.get_num_threads()} threads")
