"""Whether the trainer's rollout servers still live, asked from outside.

Nobody tells the trainer when vLLM has died (out of memory, say): it would wait minutes for a server that takes no weights, or
go on with steps all of whose episodes are lost. The trainer writes the addresses down when the servers are up; stage.py asks
them for their health while it waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from shared.errors import UserError
from shared.runs.manifest import read_object, write_json

_FILE = "servers.json"
_PAUSE_SECONDS = 2.0  # between two questions
_PATIENCE_SECONDS = 20.0  # a trainer that ends takes its servers along, and knows better why


def announce(folder: Path, addresses: Sequence[str]) -> None:
    """Called by the trainer: its servers answer at these addresses (host:port)."""
    write_json(folder / _FILE, {"addresses": list(addresses)})


class ServerWatch:
    """Asks the servers that the trainer of stage folder `folder` will announce; made before the trainer starts."""

    def __init__(self, folder: Path, *, pause: float = _PAUSE_SECONDS, patience: float = _PATIENCE_SECONDS) -> None:
        self._file, self._log = folder / _FILE, folder / "logs" / "trainer.log"
        self._file.unlink(missing_ok=True)  # those of an earlier start
        self._pause, self._patience = pause, patience
        self._asked = 0.0
        self._seen: set[str] = set()  # alive; one that never answered may just be out of reach from here
        self._dead_since: dict[str, float] = {}

    def check(self, advice: str) -> None:
        """Raise UserError, with advice, when a server has been dead for the patience; may be called as often as one likes."""
        now = time.monotonic()
        if now < self._asked + self._pause:
            return
        self._asked = now
        addresses = {*read_object(self._file).get("addresses", ())}
        dead = {address for address in addresses if is_dead(address)}
        self._seen |= addresses - dead
        self._dead_since = {address: self._dead_since.get(address, now) for address in dead & self._seen}
        for address, since in self._dead_since.items():
            if now - since >= self._patience:
                raise UserError(
                    f"The rollout server (vLLM) at {address} has died, most likely for lack of memory; its last words stand in "
                    f"{self._log}; {advice}."
                )


def is_dead(address: str) -> bool:
    """Nobody listens there, or vLLM says that its engine is gone (503); a server too busy to answer lives."""
    try:
        return httpx.get(f"http://{address}/health", timeout=2.0, trust_env=False).status_code == 503
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        return False
