"""The machine: GPUs and their memory, disk for the planned checkpoints, main memory, loopback addresses."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.models.shape import read_shape
from shared.processes.owned_process import answers
from stage2_grpo.preflight.budget import memory
from stage2_grpo.preflight.budget.memory import GIB
from stage2_grpo.preflight.doctor.findings import Case, Finding, error, ok, warning
from stage2_grpo.preflight.doctor.packages import pinned

_OLDEST_DRIVER = {12: 525, 13: 580}  # NVIDIA driver by major version of the CUDA toolkit
_PROCESSES_GIB = 8  # main memory of Ray, gateway, controller and the libraries of trainer and vLLM, measured on a CPU
_PORTS = 16  # that a run opens: gateway, vLLM and its workers, rendezvous


@dataclass(frozen=True)
class Gpu:
    """One card as the driver reports it."""

    name: str
    gib: float
    driver: int  # major version


def check_gpu(case: Case, gpus: Sequence[Gpu] | None = None) -> Iterator[Finding]:
    """Enough GPUs, a driver that is new enough, and memory for both halves of a step."""
    config, name = case.config, "gpu"
    if config.profile == "cpu":
        yield ok(name, "none needed: CPU profile")
        return
    if config.grpo.ray_address:
        yield ok(name, f"those of the Ray cluster {config.grpo.ray_address}; counted when it is joined")
        return
    gpus = find_gpus() if gpus is None else gpus
    wanted = max(config.grpo.gpus_per_node, config.vllm.tensor_parallel)
    if len(gpus) < wanted:
        yield error(
            name,
            f"{len(gpus)} NVIDIA GPUs answer, {wanted} are needed (grpo.gpus_per_node, vllm.tensor_parallel).",
            why="Ray would wait for GPUs that never come.",
            fix="check `nvidia-smi` and CUDA_VISIBLE_DEVICES, lower the settings, or use --profile cpu.",
        )
        return
    cuda = int((pinned(case.root, "gpu", "cuda-toolkit") or "13").split(".")[0])
    oldest = _OLDEST_DRIVER.get(cuda, 0)
    if gpus[0].driver < oldest:
        yield error(
            name,
            f"NVIDIA driver {gpus[0].driver} is too old for CUDA {cuda}.",
            why="torch would find no GPU.",
            fix=f"install driver {oldest} or newer.",
        )
    elif case.model is None:
        yield ok(name, f"{len(gpus)} x {gpus[0].name}; memory not judged without a checkpoint")
    else:
        yield from _memory_of(min(gpus[:wanted], key=lambda gpu: gpu.gib), case, case.model)


def _memory_of(gpu: Gpu, case: Case, model: Path) -> Iterator[Finding]:
    fit = memory.fit(read_shape(model), case.config, gpu.gib)
    card = f"{gpu.name} ({gpu.gib:.0f} GiB)"
    if fit.episodes < 1:
        yield error(
            "gpu",
            f"{card}: after the weights the KV cache holds no episode of {case.config.agent.context_tokens} tokens.",
            why="vLLM refuses to start.",
            fix="raise vllm.gpu_memory_utilization, lower agent.context_tokens; `python -m stage2_grpo budget` helps.",
        )
    elif fit.rows < case.config.grpo.micro_batch_size:
        yield warning(
            "gpu",
            f"{card}: a training pass may take about {fit.pass_tokens} tokens, but grpo.micro_batch_size rows have up to "
            f"{case.config.grpo.micro_batch_size * memory.row_tokens(case.config)}.",
            why="the first long episode would end the run out of memory (an estimate).",
            fix="lower grpo.micro_batch_size or agent.context_tokens, or set grpo.gradient_checkpointing.",
        )
    else:
        yield ok("gpu", f"{card}: cache for {fit.episodes} long episodes at once, {fit.rows} longest rows in a pass")


def find_gpus() -> list[Gpu]:
    """The cards that nvidia-smi lists; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(result.stdout) if result.returncode == 0 else []


def parse_gpus(text: str) -> list[Gpu]:
    """nvidia-smi's lines `name, MiB, driver`, shortened to the cards that CUDA_VISIBLE_DEVICES leaves."""
    rows = [[part.strip() for part in line.rsplit(",", 2)] for line in text.splitlines() if line.count(",") >= 2]
    gpus = [Gpu(name, int(mib) / 1024, int(driver.split(".")[0])) for name, mib, driver in rows]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else gpus[: len([device for device in visible.split(",") if device.strip()])]


def check_disk(case: Case, free: int | None = None) -> Iterator[Finding]:
    """Room for the checkpoints that the settings plan, beyond what this run has written already; `free` in bytes."""
    if case.model is None:
        return
    folder = next(parent for parent in (case.run.grpo, *case.run.grpo.parents) if parent.exists())
    free = shutil.disk_usage(folder).free if free is None else free
    shape, name = read_shape(case.model), "disk"
    one, needed = memory.checkpoint_bytes(shape, case.config), memory.run_bytes(shape, case.config)
    written = sum(file.stat().st_size for file in case.run.grpo.rglob("*") if file.is_file())
    plan = f"{case.config.grpo.keep_checkpoints} checkpoints of {one / GIB:.1f} GiB"
    if free + written < needed:
        yield error(
            name,
            f"{free / GIB:.1f} GiB are free at {folder}, the run needs {(needed - written) / GIB:.1f} more ({plan}, up "
            "to four more: the best, two to go back to after a fault, one being written; the exported model).",
            why="the run would stop at a checkpoint, hours in.",
            fix="free space, set runs_dir to a larger disk, or lower grpo.keep_checkpoints.",
        )
    else:
        yield ok(name, f"{free / GIB:.0f} GiB free, {needed / GIB:.1f} GiB needed ({plan})")


def check_memory(case: Case, free: int | None = None) -> Iterator[Finding]:
    """Main memory for the processes of a run; `free` in bytes."""
    if case.model is None:
        return
    shape, config = read_shape(case.model), case.config
    free = psutil.virtual_memory().available if free is None else free
    needed = _PROCESSES_GIB * GIB
    if config.profile == "cpu":  # trainer (weights, sync copy, pass) and server live in main memory, too
        usual = config.grpo.micro_batch_size * memory.row_tokens(config) / 2  # tokens; few episodes fill their context
        needed += 10 * shape.parameters + config.vllm.cpu_kv_cache_gib * GIB
        needed += int(usual * memory.pass_bytes(shape, config))
    elif config.grpo.param_offload:
        needed += 4 * shape.parameters * config.grpo.gpus_per_node
    if free < needed:
        yield warning(
            "memory",
            f"{free / GIB:.1f} GiB of main memory are free, about {needed / GIB:.1f} GiB are needed.",
            why="the kernel may end the trainer or the server in the middle of a step.",
            fix="end other programs, lower vllm.cpu_kv_cache_gib or grpo.micro_batch_size.",
        )
    else:
        yield ok("memory", f"{free / GIB:.0f} GiB free, about {needed / GIB:.1f} GiB needed")


def check_endpoints(case: Case) -> Iterator[Finding]:
    """Loopback ports can be opened, none of an earlier start is still served, and no proxy stands in between."""
    name, well = "endpoints", True
    if (url := _earlier_gateway(case.run.grpo)) and answers(f"{url}/healthz"):
        well = False
        yield error(
            name,
            f"The gateway of an earlier start still answers at {url}.",
            why="its rollouts and the new run's would share controller, model and disk.",
            fix="end the process that listens there (`ss -ltnp`), then start again.",
        )
    try:
        _open_ports(_PORTS)
    except OSError as problem:
        well = False
        yield error(
            name,
            f"{_PORTS} ports on 127.0.0.1 cannot be opened ({problem}).",
            why="gateway, vLLM and trainer talk over loopback ports.",
            fix="check the limits of the container, `ip addr show lo` and net.ipv4.ip_local_port_range.",
        )
    proxies = {kind: proxy for kind, proxy in urllib.request.getproxies().items() if kind in ("http", "all")}
    if proxies and not urllib.request.proxy_bypass("127.0.0.1"):
        well = False
        yield error(
            name,
            f"The environment sends HTTP through a proxy ({next(iter(proxies.values()))}), also for 127.0.0.1.",
            why="Agent Lightning's trainer and gateway would look for each other behind that proxy.",
            fix="export NO_PROXY=127.0.0.1,localhost",
        )
    if well:
        yield ok(name, f"{_PORTS} loopback ports opened, no proxy in between")


def _open_ports(count: int) -> None:
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))


def _earlier_gateway(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "agents.json").read_text(encoding="utf-8"))["gateway_url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
