"""What this machine offers a run and whether that suffices: GPUs, driver, compiler, cores and main memory.

Such a shortage shows late: after gigabytes of downloads, in the first vLLM server, or when Ray waits for ever. So
set-up, the first stage and the doctor share one table of checks. Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shared.config.device import Gpu, device_of, find_gpus
from shared.errors import UserError

if TYPE_CHECKING:
    from shared.config.schema import Config

OLDEST_DRIVER = 580  # that runs CUDA 13, the toolkit in requirements/gpu.txt
_BFLOAT16 = 8.0  # compute capability from which a GPU computes in bfloat16, the dtype of training and serving
CORES_PER_GPU = 3  # that VERL reserves in Ray (max_colocate_count); its task runner takes one more
_MAIN_GIB = {"cpu": 14.0, "evening": 19.0, "gpu": 26.0, "gpu24": 26.0}
"""Of main memory for a whole run of the profile's own model; CPU measured, GPU computed."""
_CARD_GIB = {"gpu": 38.0, "gpu24": 22.0}
"""Of GPU memory for the profile's own model, as `stage2_grpo budget` computes it."""
_OTHERS_GIB = 2.0  # of GPU memory that a desktop may take
_SHARED_GIB = 1.0  # of /dev/shm for NCCL's buffers; a container has 64 MiB unless it is told otherwise


class Drawback(UserError):
    """A problem with which a run works, but worse than it could."""


@dataclass(frozen=True)
class Machine:
    """What checks look at. `gpus` are those that CUDA_VISIBLE_DEVICES leaves visible."""

    gpus: tuple[Gpu, ...]
    driver_loaded: bool  # by the kernel, which in a container is the host's
    cores: int  # as Ray counts them
    free_gib: float  # of main memory
    shared_gib: float  # of /dev/shm
    compiler: bool
    python_header: bool
    visible: str = ""  # CUDA_VISIBLE_DEVICES
    libnuma: bool = True


@dataclass(frozen=True)
class Needs:
    """What a run asks of its machine."""

    profile: str
    gpus: int = 1  # 0: they are in a Ray cluster
    main_gib: float | None = None  # of main memory; None: what the profile's own model takes
    before_setup: bool = False  # set-up chooses a Python with headers itself


def needs_of(config: Config) -> Needs:
    """What the settings ask of this machine; the GPUs of a Ray cluster are counted when it is joined."""
    gpus = 0 if config.grpo.ray_address else max(config.grpo.gpus_per_node, config.vllm.tensor_parallel)
    return Needs(config.profile, gpus)


def look(root: Path = Path("/")) -> Machine:
    """This machine; `root` is where its file system begins."""
    memory = (root / "proc/meminfo").read_text(encoding="utf-8")
    free = 1024 * int(re.findall(r"MemAvailable:\s+(\d+)", memory)[0])
    if limit := _numbers(root / "sys/fs/cgroup/memory.max"):
        used = _numbers(root / "sys/fs/cgroup/memory.stat")  # its first figure is memory that is no file cache
        free = min(free, limit[0] - sum(used[:1]))
    cores, quota = os.cpu_count() or 1, _numbers(root / "sys/fs/cgroup/cpu.max")
    shared = root / "dev/shm"
    return Machine(
        gpus=tuple(find_gpus()),
        driver_loaded=(root / "proc/driver/nvidia/version").exists(),
        cores=min(cores, quota[0] // quota[1]) if len(quota) == 2 else cores,
        free_gib=free / 2**30,
        shared_gib=shutil.disk_usage(shared).total / 2**30 if shared.exists() else 0.0,
        compiler=any(map(shutil.which, (os.environ.get("CC") or "gcc", "clang"))),
        python_header=Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        libnuma=_loads("libnuma.so.1"),
    )


def _loads(library: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL(library))
    return False


def _numbers(file: Path) -> list[int]:
    """The numbers in a file of the container's control group; none without a limit."""
    text = file.read_text(encoding="utf-8") if file.exists() else "max"
    return [] if text.startswith("max") else [int(number) for number in re.findall(r"\b\d+\b", text)]


def check_gpus(machine: Machine, needs: Needs) -> str:
    """Enough whole GPUs, open to several processes, a driver for the wheel's CUDA, a capability with bfloat16."""
    gpus = machine.gpus[: needs.gpus]
    if needs.gpus and not re.fullmatch(r"[-\d\s,]*", machine.visible):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES is {machine.visible!r}, and vLLM reads nothing but numbers there, so that no server "
            "would start; give the numbers that `nvidia-smi -L` lists (a slice of a GPU has none and cannot be used)."
        )
    if len(gpus) < needs.gpus:
        fix = "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, lower grpo.gpus_per_node, or use --profile cpu"
        if machine.driver_loaded and not gpus:  # the kernel is the host's
            fix = "start the container with `--gpus all` (and `utility` in NVIDIA_DRIVER_CAPABILITIES, for nvidia-smi)"
        raise UserError(f"The run needs {needs.gpus} NVIDIA GPU(s), but {len(gpus)} are visible here; {fix}.")
    for gpu in gpus:
        if gpu.exclusive:
            raise UserError(
                f"{gpu.name} is open to only one process (compute mode), and trainer and vLLM share it; let the "
                "administrator of the machine run `nvidia-smi -c DEFAULT`."
            )
        if gpu.driver is not None and gpu.driver < OLDEST_DRIVER:
            raise UserError(
                f"NVIDIA driver {gpu.driver} is too old for the CUDA 13 build of torch, which would find no GPU; "
                f"install driver {OLDEST_DRIVER} or newer (for a container: on its host)."
            )
        if gpu.capability is not None and gpu.capability < _BFLOAT16:
            raise UserError(
                f"{gpu.name} has compute capability {gpu.capability}, and bfloat16, in which models are trained and "
                f"served, needs {_BFLOAT16} (Ampere) or newer; use another GPU, or --profile cpu."
            )
    return f"{len(gpus)} x {gpus[0].name}, driver {gpus[0].driver}" if gpus else "those of the Ray cluster"


def fitting_profile(gpu: Gpu) -> str | None:
    """The profile whose own model fits a card; None if none does."""
    return next((profile for profile, least in _CARD_GIB.items() if gpu.gib is None or gpu.gib >= least), None)


def check_gpu_memory(machine: Machine, needs: Needs) -> None:
    """The cards are large enough for the profile's own model; the doctor computes it for the model at hand."""
    for gpu in machine.gpus[: needs.gpus]:
        least, fitting = _CARD_GIB[needs.profile], fitting_profile(gpu)
        if gpu.gib is not None and gpu.gib < least:
            smaller = "gpu24 with a smaller model (--set model=Qwen/Qwen2.5-Coder-0.5B-Instruct)"
            raise Drawback(
                f"{gpu.name} has {gpu.gib:.0f} GiB of memory, and profile {needs.profile} needs {least:.0f} GiB for "
                f"its own model, so a run would end out of memory; use --profile {fitting or smaller}."
            )


def check_compiler(machine: Machine, needs: Needs) -> None:
    """Triton, which torch and vLLM use on every GPU, compiles its launchers with a C compiler against Python.h."""
    if not machine.compiler:
        raise UserError(
            "There is no C compiler on PATH, and without one Triton stops the first vLLM server; install gcc (Debian, "
            "Ubuntu: `apt install gcc`), or set CC."
        )
    if not machine.python_header and not needs.before_setup:
        raise UserError(
            f"{sysconfig.get_path('include', 'posix_prefix')}/Python.h is missing, and without it Triton stops the "
            "first vLLM server; install python3.12-dev, or delete .venv and set up again."
        )


def check_cores(machine: Machine, needs: Needs) -> None:
    """Ray can place all actors of the trainer."""
    needed = CORES_PER_GPU * needs.gpus + 1
    if machine.cores < needed and needs.gpus:
        raise UserError(
            f"Ray sees {machine.cores} CPU cores and would wait for ever for the {needed} that VERL reserves "
            f"({CORES_PER_GPU} for each GPU and one); give the machine or container more cores."
        )


def check_free_gpu(machine: Machine, needs: Needs) -> None:
    """No other program holds the GPUs' memory."""
    for gpu in machine.gpus[: needs.gpus]:
        if gpu.gib and gpu.free_gib is not None and gpu.gib - gpu.free_gib > _OTHERS_GIB:
            raise Drawback(
                f"Only {gpu.free_gib:.0f} of {gpu.gib:.0f} GiB of {gpu.name} are free, and vLLM does not start unless "
                "its share (vllm.gpu_memory_utilization) is; end the programs that `nvidia-smi` lists, or choose "
                "another GPU with CUDA_VISIBLE_DEVICES."
            )


def check_shared_memory(machine: Machine, needs: Needs) -> None:
    """Several GPUs exchange data through /dev/shm."""
    if needs.gpus > 1 and machine.shared_gib < _SHARED_GIB:
        raise Drawback(
            f"/dev/shm holds {machine.shared_gib:.2f} GiB, and NCCL fails when it cannot place its buffers there for "
            f"{needs.gpus} GPUs; start the container with `--shm-size=8g`."
        )


def check_main_memory(machine: Machine, needs: Needs) -> str:
    """Main memory for all processes of a run."""
    needed = needs.main_gib or _MAIN_GIB[needs.profile]
    if machine.free_gib < needed:
        lower = "lower grpo.micro_batch_size or vllm.cpu_kv_cache_gib"
        if device_of(needs.profile) == "gpu":
            lower = "keep the weights on the GPU (grpo.param_offload=false)"
        raise Drawback(
            f"{machine.free_gib:.1f} GiB of main memory are free and a run takes about {needed:.1f} GiB, so the kernel "
            f"may end trainer or server in the middle of a step; end other programs, or {lower}."
        )
    return f"{machine.free_gib:.0f} GiB free, about {needed:.1f} GiB needed"


def check_libnuma(machine: Machine, needs: Needs) -> str | None:
    """vLLM's CPU build is linked against libnuma, which slim container images leave out."""
    if device_of(needs.profile) == "gpu":
        return None
    if not machine.libnuma:
        raise UserError(
            "The library libnuma.so.1 is missing, and without it vLLM does not start on a CPU; install libnuma1 "
            "(Debian, Ubuntu: `apt install libnuma1`)."
        )
    return "libnuma.so.1 loads"


CHECKS: dict[str, Callable[[Machine, Needs], str | None]] = {
    "gpu": check_gpus,
    "gpu memory": check_gpu_memory,
    "compiler": check_compiler,
    "cores": check_cores,
    "free gpu": check_free_gpu,
    "shared memory": check_shared_memory,
    "memory": check_main_memory,
    "libnuma": check_libnuma,
}
_ON_CPU = ("memory", "libnuma")


def check(name: str, machine: Machine, needs: Needs) -> str | None:
    """What one check says when all is well; on a CPU few of them matter. Raises UserError, also as a Drawback."""
    return CHECKS[name](machine, needs) if device_of(needs.profile) == "gpu" or name in _ON_CPU else None


def refuse(machine: Machine, needs: Needs, *, only_warn: bool = False) -> None:
    """Print the drawbacks of the machine; raise UserError for what would stop a run, or print that, too."""
    for name in CHECKS:
        try:
            check(name, machine, needs)
        except UserError as problem:
            if not only_warn and not isinstance(problem, Drawback):
                raise
            print(f"warning: {problem}", flush=True)
