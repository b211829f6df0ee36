"""What a run costs: wall time and peak memory of each stage, kept in `<run>/usage.json`.

Memory is that of this process and everything below it, counted by PSS (a page shared by n processes counts 1/n in each)
so that forked workers and shared weights are not counted twice. Reading PSS costs the kernel a walk over all pages, so
sampling slows down by itself when it would take more than two percent of a core. Peaks between samples are missed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from shared.runs.manifest import MANIFEST, RunDirectory, write_json

FILE = "usage.json"
_SAMPLE_SECONDS = 2.0
_SAMPLING_SHARE = 0.02  # of one core, at most


class PeakMemory:
    """Context manager; `bytes` is the highest sum seen so far."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.bytes = max(self.bytes, tree_memory())

    def _sample(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            started = time.monotonic()
            self.bytes = max(self.bytes, tree_memory())
            pause = max(_SAMPLE_SECONDS, (time.monotonic() - started) / _SAMPLING_SHARE)


def tree_memory() -> int:
    """Bytes held by this process and its descendants."""
    me = psutil.Process()
    return sum(_pss(process) for process in [me, *me.children(recursive=True)])


def _pss(process: psutil.Process) -> int:
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", "rb") as stream:
            return next(int(line.split()[1]) * 1024 for line in stream if line.startswith(b"Pss:"))
    except (OSError, StopIteration):  # ended meanwhile, or changed its user
        with contextlib.suppress(psutil.Error):
            return int(process.memory_info().rss)
        return 0


@contextlib.contextmanager
def measured(run: RunDirectory, stage: str, folder: Path) -> Iterator[None]:
    """Record seconds and peak memory of one stage, unless it found its work in `folder` done already.

    The attempts of a stage that was interrupted add up.
    """
    before, started, peak = _manifest_mark(folder), time.monotonic(), PeakMemory()
    try:
        with peak:
            yield
    finally:
        after = _manifest_mark(folder)
        if after is None or after != before:
            _add(run.path / FILE, stage, time.monotonic() - started, peak.bytes, complete=after is not None)


def read_usage(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """Per stage: seconds, peak_bytes, complete. Empty when nothing was measured."""
    return _read(run.path / FILE)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def machine() -> dict[str, Any]:
    """What the run ran on: processor, usable cores, memory in bytes, accelerator if there is one."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": _gpu(),
    }


def commit() -> str:
    """Commit of the code, marked when files differ from it; "unknown" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
        ).stdout
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+changes" if changed else "")


def _add(file: Path, stage: str, seconds: float, peak: int, *, complete: bool) -> None:
    usage = _read(file)
    earlier = usage.get(stage)
    if earlier and not earlier["complete"]:
        seconds, peak = seconds + earlier["seconds"], max(peak, earlier["peak_bytes"])
    write_json(file, {**usage, stage: {"seconds": round(seconds, 1), "peak_bytes": peak, "complete": complete}})


def _manifest_mark(folder: Path) -> tuple[int, int] | None:
    try:
        status = (folder / MANIFEST).stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpu() -> str | None:
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return None
