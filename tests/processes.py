"""Finding the processes of a run, whoever started them, and waiting for what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def of_run(folder: Path) -> list[psutil.Process]:
    """Living processes that name the folder in their command line or environment, as all that a run starts do."""
    wanted, found = str(folder).encode(), []
    for process in psutil.process_iter():
        try:
            texts = [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if any(wanted in text for text in texts) and process.pid != os.getpid():
            found.append(process)
    return found


def command_line(process: psutil.Process) -> str:
    """Its arguments in one line; "" when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_for(condition: Callable[[], object], seconds: float, pause: float = 0.5) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(pause)
    return False
