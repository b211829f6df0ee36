"""A process in which SQL written by a model runs; the operating system limits its memory, files and time.

It says when it is ready, then answers one request after the other from stdin on stdout, until stdin ends.
"""

from __future__ import annotations

import contextlib
import marshal
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import IO, Any

from shared.sql.sandbox import answer, official, unknown_name

_ALARM_AFTER_DEADLINE = 0.05  # seconds
_MEMORY_BYTES = 192 << 20  # of address space beyond what the idle process has
_OFFICIAL_MEMORY_BYTES = 1 << 30
_SHORT_SECONDS = 0.01  # in which no query fills much memory
_REQUESTS: dict[str, tuple[Callable[..., Any], int]] = {
    "answer": (answer, _MEMORY_BYTES),
    "unknown_name": (unknown_name, _MEMORY_BYTES),
    "official": (official, _OFFICIAL_MEMORY_BYTES),
}


def send(stream: IO[bytes], value: Any) -> None:
    """Write one plain value (tuples, texts, numbers, bytes, None) as its length and marshalled bytes."""
    data = marshal.dumps(value)
    stream.write(len(data).to_bytes(8) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read what `send` wrote. Raises EOFError when the other side is gone."""
    size = stream.read(8)
    data = stream.read(int.from_bytes(size)) if len(size) == 8 else b""
    if not data:
        raise EOFError
    return marshal.loads(data)


def serve() -> None:
    """Answer requests until stdin ends; each answer comes with whether this process can take another request."""
    idle = _mapped_bytes()
    for kind, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 32)):
        _limit(kind, value)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    send(sys.stdout.buffer, "ready")
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, uri, sql, seconds, *rest = receive(sys.stdin.buffer)
            started = time.monotonic()
            work, memory = _REQUESTS[name]
            _limit(resource.RLIMIT_AS, idle + memory)
            signal.setitimer(signal.ITIMER_REAL, seconds + _ALARM_AFTER_DEADLINE)
            result = work(uri, sql, seconds, *rest)
            signal.setitimer(signal.ITIMER_REAL, 0)
            # A process that has grown would refuse the next query for its memory.
            small = time.monotonic() < started + _SHORT_SECONDS or _mapped_bytes() < idle + _MEMORY_BYTES // 2
            try:
                send(sys.stdout.buffer, (result, small))
            except MemoryError:
                failure = "too_large", "The result needs too much memory; select fewer rows or shorter values."
                send(sys.stdout.buffer, ([failure] if isinstance(result, list) else failure, False))


def _limit(kind: int, value: int) -> None:
    """Set a limit of this process, within what its parent allows it."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
