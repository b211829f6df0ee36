"""The device of this machine; needs the standard library alone."""

from __future__ import annotations

from pathlib import Path

PROFILES = ("gpu", "cpu")


def default_profile(root: Path = Path("/")) -> str:
    """`gpu` when an NVIDIA GPU is visible to this process, else `cpu`; `root` is where the file system begins.

    A container without a GPU still shows the host's driver in /proc. Under WSL2 any vendor's GPU is /dev/dxg, and the Windows
    driver of NVIDIA brings libcuda.
    """
    wsl = (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    return "gpu" if wsl or (root / "dev/nvidiactl").exists() else "cpu"
