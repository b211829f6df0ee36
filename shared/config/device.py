"""The device of this machine, and the profiles for it; needs the standard library alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Profile = Literal["gpu", "gpu24", "cpu", "evening"]
PROFILES: tuple[Profile, ...] = get_args(Profile)
_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version", "compute_cap")


@dataclass(frozen=True)
class Gpu:
    """One card as the driver reports it; None where it reports nothing, as for memory that CPU and GPU share."""

    name: str
    gib: float | None
    free_gib: float | None
    driver: int | None  # major version
    capability: float | None  # compute capability, e.g. 8.9


def device_of(profile: str) -> str:
    """`gpu` or `cpu`: the device that a profile runs on, and the name of its list in requirements/."""
    return "gpu" if profile.startswith("gpu") else "cpu"


def default_profile(root: Path = Path("/")) -> str:
    """`gpu` when an NVIDIA GPU is visible to this process, else `cpu`; `root` is where the file system begins.

    A container without a GPU still shows the host's driver in /proc. Under WSL2 any vendor's GPU is /dev/dxg, and the
    Windows driver of NVIDIA brings libcuda. The size of the card chooses nothing: a run must not change with the
    machine that continues it. Machine checks say which profile fits a card that is too small.
    """
    wsl = (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return "gpu" if wsl or (root / "dev/nvidiactl").exists() else "cpu"


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
    """nvidia-smi's lines of `_FIELDS`, chosen and ordered by CUDA_VISIBLE_DEVICES (indices, or beginnings of uuids)."""
    gpus: dict[tuple[str, str], Gpu] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= len(_FIELDS) - 1:
            numbers = [re.match(r"\d+(\.\d+)?", part) for part in (*parts[3:], "")]  # "[N/A]" is none
            total, free, driver, capability = (float(found.group()) if found else None for found in numbers[:4])
            gpus[parts[0], parts[1]] = Gpu(
                parts[2], total and total / 1024, free and free / 1024, int(driver) if driver else None, capability
            )
    if visible is None:
        return [*gpus.values()]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if any(name.startswith("MIG") for name in names):  # slices of cards, which nvidia-smi does not list
        return [*gpus.values()][: len(names)]
    return [gpu for name in names for (index, uuid), gpu in gpus.items() if index == name or uuid.startswith(name)]


def attention_backend(gpus: Sequence[Gpu]) -> str | None:
    """The attention backend that vLLM 0.20.2 must be told to use; None: its own choice.

    On compute capability 10.x it chooses FlashInfer, some of whose kernels are compiled with nvcc at the first start.
    """
    blackwell = any(gpu.capability is not None and int(gpu.capability) == 10 for gpu in gpus)
    return "TRITON_ATTN" if blackwell and shutil.which("nvcc") is None else None


def keep_one_gpu() -> None:
    """Leave this process the first visible GPU, before it initialises CUDA.

    With several, transformers' Trainer wraps the model in DataParallel, which TRL's patched forward does not survive.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
