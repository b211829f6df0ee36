"""The device of this machine; needs the standard library alone."""

from __future__ import annotations

from pathlib import Path

PROFILES = ("gpu", "cpu")


def default_profile() -> str:
    """`gpu` when an NVIDIA driver answers, else `cpu`."""
    return "gpu" if Path("/proc/driver/nvidia/version").exists() else "cpu"
