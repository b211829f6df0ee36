"""A process in which SQL written by a model runs: caps on memory, files and time that the operating system keeps.

One request after the other comes in on stdin and is answered on stdout; the end of stdin ends the process.
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

from shared.sql.sandbox import answer, unknown_name
from shared.sql.sandbox_official import official

ALARM_AFTER_DEADLINE = 0.05  # seconds
_MEMORY_BYTES = 192 << 20  # of address space beyond what the idle process has
_OFFICIAL_MEMORY_BYTES = 1 << 30
_SHORT_SECONDS = 0.01  # in which no query fills much memory


def send(stream: IO[bytes], value: Any) -> None:
    """Write one plain value (tuples, texts, numbers, bytes, None) as length and marshalled bytes."""
    data = marshal.dumps(value)
    stream.write(len(data).to_bytes(8) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read what `send` wrote; EOFError when the other side is gone."""
    size = stream.read(8)
    data = stream.read(int.from_bytes(size)) if len(size) == 8 else b""
    if not data:
        raise EOFError
    return marshal.loads(data)


def _cap(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _cap_memory(allowed: int) -> None:
    """Let the process map at most `allowed` bytes; a later request may be allowed more."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


_REQUESTS: dict[str, tuple[Callable[..., Any], int]] = {
    "answer": (answer, _MEMORY_BYTES),
    "unknown_name": (unknown_name, _MEMORY_BYTES),
    "official": (official, _OFFICIAL_MEMORY_BYTES),
}


def serve() -> None:
    """Answer requests until stdin ends."""
    idle = _mapped_bytes()
    for kind, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 32)):
        _cap(kind, value)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, uri, sql, seconds, *rest = receive(sys.stdin.buffer)
            started = time.monotonic()
            work, memory = _REQUESTS[name]
            _cap_memory(idle + memory)
            signal.setitimer(signal.ITIMER_REAL, seconds + ALARM_AFTER_DEADLINE)
            result = work(uri, sql, seconds, *rest)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _reply(result)
            if time.monotonic() > started + _SHORT_SECONDS and _mapped_bytes() > idle + _MEMORY_BYTES // 2:
                return  # a process that stays large would refuse the next query


def _reply(result: Any) -> None:
    try:
        send(sys.stdout.buffer, result)
    except MemoryError:
        failure = "too_large", "The result needs too much memory; select fewer rows or shorter values."
        send(sys.stdout.buffer, [failure] if isinstance(result, list) else failure)
