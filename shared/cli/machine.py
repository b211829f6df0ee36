"""What this machine offers a run and whether that suffices: GPUs, driver, compiler, cores and main memory.

Such a shortage shows late: after gigabytes of downloads, in the first vLLM server, or when Ray waits for ever. So set-up,
the first stage and the doctor share one table of checks. Needs only the standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError

OLDEST_DRIVER = 580  # that runs CUDA 13, the toolkit in requirements/gpu.txt
_BFLOAT16 = 8.0  # compute capability from which a GPU computes in bfloat16, the dtype of training and serving
_BLACKWELL = 10  # major compute capability for which vLLM chooses FlashInfer's attention
_RAY_CORES = 4  # the trainer's actors reserve a core each
_MAIN_GIB = {"cpu": 14.0, "gpu": 28.0}  # of a whole run of the profile's own model; CPU measured, GPU computed
_OTHERS_GIB = 2.0  # of GPU memory that a desktop may take
_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version", "compute_cap")


@dataclass(frozen=True)
class Problem:
    """What is wrong, why it matters and how to fix it. Unless `fatal`, the run works, but worse than it could."""

    what: str
    why: str
    fix: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.what} Why it matters: {self.why} To fix it: {self.fix}"


Answer = str | Problem | None
"""What a check says: how well all is, in figures; a problem; or nothing, where there was nothing to look at."""


@dataclass(frozen=True)
class Gpu:
    """One card as the driver reports it; None where it reports nothing, as for memory that CPU and GPU share."""

    name: str
    gib: float | None
    free_gib: float | None
    driver: int | None  # major version
    capability: float | None  # compute capability, e.g. 8.9


@dataclass(frozen=True)
class Machine:
    """What checks look at. `gpus` are those that CUDA_VISIBLE_DEVICES leaves visible."""

    gpus: tuple[Gpu, ...]
    driver_loaded: bool  # by the kernel, which in a container is the host's
    cores: int  # as Ray counts them
    free_gib: float  # of main memory
    compiler: bool
    python_header: bool
    nvcc: bool


@dataclass(frozen=True)
class Needs:
    """What a run asks of its machine."""

    profile: str
    gpus: int = 1  # 0: they are in a Ray cluster
    main_gib: float | None = None  # of main memory; None: what the profile's own model takes
    before_setup: bool = False  # set-up chooses a Python with headers itself


def look(root: Path = Path("/")) -> Machine:
    """This machine; `root` is where its file system begins."""
    memory = (root / "proc/meminfo").read_text(encoding="utf-8")
    free = 1024 * int(re.findall(r"MemAvailable:\s+(\d+)", memory)[0])
    if limit := _numbers(root / "sys/fs/cgroup/memory.max"):
        used = _numbers(root / "sys/fs/cgroup/memory.stat")  # its first figure is memory that is no file cache
        free = min(free, limit[0] - sum(used[:1]))
    cores, quota = os.cpu_count() or 1, _numbers(root / "sys/fs/cgroup/cpu.max")
    return Machine(
        gpus=tuple(find_gpus()),
        driver_loaded=(root / "proc/driver/nvidia/version").exists(),
        cores=min(cores, quota[0] // quota[1]) if len(quota) == 2 else cores,
        free_gib=free / 2**30,
        compiler=any(map(shutil.which, (os.environ.get("CC") or "gcc", "clang"))),
        python_header=Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists(),
        nvcc=shutil.which("nvcc") is not None,
    )


def _numbers(file: Path) -> list[int]:
    """The numbers in a file of the container's control group; none without a limit."""
    text = file.read_text(encoding="utf-8") if file.exists() else "max"
    return [] if text.startswith("max") else [int(number) for number in re.findall(r"\b\d+\b", text)]


def find_gpus() -> list[Gpu]:
    """The visible cards that nvidia-smi lists; none without a driver."""
    program = shutil.which("nvidia-smi") or "/usr/lib/wsl/lib/nvidia-smi"
    for fields in (_FIELDS, _FIELDS[:-1]):  # drivers before 510 do not know the last one
        query = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            result = subprocess.run(query, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return []
        if result.returncode == 0:
            return read_gpus(result.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return []


def read_gpus(text: str, visible: str | None = None) -> list[Gpu]:
    """nvidia-smi's lines of `_FIELDS`, shortened and ordered by CUDA_VISIBLE_DEVICES (indices, or beginnings of uuids)."""
    gpus: dict[tuple[str, str], Gpu] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= len(_FIELDS) - 1:
            total, free, driver, capability = (
                float(found.group()) if (found := re.match(r"\d+(\.\d+)?", part)) else None
                for part in (*parts[3:], "")[:4]
            )
            gpus[parts[0], parts[1]] = Gpu(
                parts[2], total and total / 1024, free and free / 1024, driver and int(driver), capability
            )
    if visible is None:
        return [*gpus.values()]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if any(name.startswith("MIG") for name in names):  # slices of cards, which nvidia-smi does not list
        return [*gpus.values()][: len(names)]
    return [gpu for name in names for (index, uuid), gpu in gpus.items() if index == name or uuid.startswith(name)]


def check_gpus(machine: Machine, needs: Needs) -> Answer:
    """Enough GPUs, a driver for the wheel's CUDA, and a compute capability with bfloat16."""
    if len(machine.gpus) < needs.gpus:
        hidden = machine.driver_loaded and not machine.gpus
        return Problem(
            f"{len(machine.gpus)} NVIDIA GPUs are visible here, and the run needs {needs.gpus}.",
            "vLLM does not start without them, and Ray waits for them for ever.",
            "start the container with `--gpus all`, and check CUDA_VISIBLE_DEVICES."
            if hidden
            else "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, lower grpo.gpus_per_node, or use --profile cpu.",
        )
    gpus = machine.gpus[: needs.gpus]
    for gpu in gpus:
        if gpu.driver is not None and gpu.driver < OLDEST_DRIVER:
            return Problem(
                f"NVIDIA driver {gpu.driver} is too old for torch's build for CUDA 13.",
                "torch finds no GPU under it.",
                f"install driver {OLDEST_DRIVER} or newer (in a container: on the host).",
            )
        if gpu.capability is not None and gpu.capability < _BFLOAT16:
            return Problem(
                f"{gpu.name} has compute capability {gpu.capability}, and bfloat16 needs {_BFLOAT16} (Ampere) or newer.",
                "vLLM refuses to serve the model, which is trained and served in bfloat16.",
                "use a newer GPU, choose another with CUDA_VISIBLE_DEVICES, or use --profile cpu.",
            )
    return f"{len(gpus)} x {gpus[0].name}, driver {gpus[0].driver}" if gpus else None


def check_attention(machine: Machine, needs: Needs) -> Answer:
    """Where vLLM chooses FlashInfer's attention there is a compiler for it."""
    blackwell = [gpu for gpu in machine.gpus[: needs.gpus] if int(gpu.capability or 0) == _BLACKWELL]
    if not blackwell or machine.nvcc:
        return None
    return Problem(
        f"vLLM computes attention on {blackwell[0].name} with FlashInfer, and nvcc, which compiles it, is not on PATH.",
        "the server may stop at its first request.",
        "install the CUDA 13 toolkit and put its bin folder on PATH.",
        fatal=False,
    )


def check_compiler(machine: Machine, needs: Needs) -> Answer:
    """Triton, which torch and vLLM use on every GPU, compiles its launchers with a C compiler against Python.h."""
    if machine.compiler and (machine.python_header or needs.before_setup):
        return None
    return Problem(
        "There is no C compiler (gcc or clang) on PATH."
        if not machine.compiler
        else f"Python's header {sysconfig.get_path('include', 'posix_prefix')}/Python.h is missing.",
        "Triton compiles with it, and without it the first vLLM server stops.",
        "install it (Debian, Ubuntu: `apt install gcc`), or set CC."
        if not machine.compiler
        else "install it (Debian, Ubuntu: `apt install python3.12-dev`), or delete .venv and set up again.",
    )


def check_cores(machine: Machine, needs: Needs) -> Answer:
    """Ray can place all actors of the trainer."""
    if machine.cores >= _RAY_CORES or not needs.gpus:
        return None
    return Problem(
        f"Ray sees {machine.cores} CPU cores here, and the trainer's actors reserve {_RAY_CORES}.",
        "Ray waits for them for ever, without an error.",
        f"give the machine or container {_RAY_CORES} cores or more.",
    )


def check_free_gpu(machine: Machine, needs: Needs) -> Answer:
    """No other program holds the GPUs' memory."""
    for gpu in machine.gpus[: needs.gpus]:
        if gpu.gib and gpu.free_gib is not None and gpu.gib - gpu.free_gib > _OTHERS_GIB:
            return Problem(
                f"Only {gpu.free_gib:.0f} of {gpu.gib:.0f} GiB of {gpu.name} are free.",
                "vLLM reserves its share (vllm.gpu_memory_utilization) of all memory, and stops when that is not free.",
                "end the programs that `nvidia-smi` lists, or choose another GPU with CUDA_VISIBLE_DEVICES.",
                fatal=False,
            )
    return None


def check_main_memory(machine: Machine, needs: Needs) -> Answer:
    """Main memory for all processes of a run."""
    needed = needs.main_gib or _MAIN_GIB[needs.profile]
    if machine.free_gib >= needed:
        return f"{machine.free_gib:.0f} GiB free, about {needed:.1f} GiB needed"
    lower = "vllm.cpu_kv_cache_gib or grpo.micro_batch_size" if needs.profile == "cpu" else "grpo.weight_bucket_mb"
    return Problem(
        f"{machine.free_gib:.1f} GiB of main memory are free, and a run takes about {needed:.1f} GiB.",
        "the kernel may end the trainer or the server in the middle of a step.",
        f"end other programs, or lower {lower}.",
        fatal=False,
    )


CHECKS: dict[str, Callable[[Machine, Needs], Answer]] = {
    "gpu": check_gpus,
    "attention": check_attention,
    "compiler": check_compiler,
    "cores": check_cores,
    "free gpu": check_free_gpu,
    "memory": check_main_memory,
}


def check(name: str, machine: Machine, needs: Needs) -> Answer:
    """What one check says; on a CPU only main memory matters."""
    return CHECKS[name](machine, needs) if needs.profile == "gpu" or name == "memory" else None


def refuse(machine: Machine, needs: Needs, *, only_warn: bool = False) -> None:
    """Print what would slow a run down; raise UserError for what would stop it, or print that, too."""
    for problem in (check(name, machine, needs) for name in CHECKS):
        if isinstance(problem, Problem):
            if problem.fatal and not only_warn:
                raise UserError(str(problem))
            print(f"warning: {problem}", flush=True)
