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
_FIELDS = ("index", "name", "memory.total", "memory.free", "driver_version", "compute_cap", "compute_mode")


@dataclass(frozen=True)
class Gpu:
    """One card as the driver reports it; None where it reports nothing, as for memory that CPU and GPU share."""

    name: str
    gib: float | None
    free_gib: float | None
    driver: int | None  # major version
    capability: float | None  # compute capability, e.g. 8.9
    exclusive: bool = False  # whether only one process, or none, may use it


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
    for fields in (_FIELDS, _FIELDS[:5]):  # drivers before 510 do not know compute_cap
        query = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            result = subprocess.run(query, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return []
        if result.returncode == 0:
            return read_gpus(result.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return []


def read_gpus(text: str, visible: str | None = None) -> list[Gpu]:
    """nvidia-smi's lines of `_FIELDS`, chosen and ordered by the indices in CUDA_VISIBLE_DEVICES."""
    gpus: dict[str, Gpu] = {}
    for line in text.splitlines():
        values = dict(zip(_FIELDS, map(str.strip, line.split(",")), strict=False))
        if "driver_version" in values:
            found = [re.match(r"\d+(\.\d+)?", values.get(name, "")) for name in _FIELDS[2:6]]  # "[N/A]" is none
            total, free, driver, capability = (float(number.group()) if number else None for number in found)
            gpus[values["index"]] = Gpu(
                values["name"],
                total and total / 1024,
                free and free / 1024,
                int(driver) if driver else None,
                capability,
                exclusive=values.get("compute_mode", "").startswith(("Exclusive", "Prohibited")),
            )
    if visible is None:
        return [*gpus.values()]
    return [gpus[name.strip()] for name in visible.split(",") if name.strip() in gpus]


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
