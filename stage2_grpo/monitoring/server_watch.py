"""Health checks of the trainer's rollout servers from outside the trainer.

The trainer does not notice when vLLM dies, for example for lack of memory. It would wait minutes for a server that
takes no weights, or lose every episode of the next steps. So the trainer announces the addresses of its servers, and
stage.py checks their health while it waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from shared.errors import UserError
from shared.runs.manifest import read_object, write_json

_FILE = "servers.json"
_PAUSE_SECONDS = 2.0  # between two checks
_PATIENCE_SECONDS = 20.0  # a trainer that ends stops its servers, and its log names the cause


def announce(folder: Path, addresses: Sequence[str]) -> None:
    """Record the addresses (host:port) of the trainer's servers. The trainer calls this."""
    write_json(folder / _FILE, {"addresses": list(addresses)})


class ServerWatch:
    """Checks the servers that the trainer of stage folder `folder` announces. Create it before the trainer starts."""

    def __init__(self, folder: Path, *, pause: float = _PAUSE_SECONDS, patience: float = _PATIENCE_SECONDS) -> None:
        self._file, self._log = folder / _FILE, folder / "logs" / "trainer.log"
        self._file.unlink(missing_ok=True)  # of an earlier start
        self._pause, self._patience = pause, patience
        self._checked = 0.0
        self._seen: set[str] = set()  # once alive; a server that never answered may be out of reach from here
        self._dead_since: dict[str, float] = {}

    def check(self, advice: str) -> None:
        """Raise UserError, with advice, when a server has been dead for the patience. Cheap to call often."""
        now = time.monotonic()
        if now < self._checked + self._pause:
            return
        self._checked = now
        addresses = {*read_object(self._file).get("addresses", ())}
        dead = {address for address in addresses if is_dead(address)}
        self._seen |= addresses - dead
        self._dead_since = {address: self._dead_since.get(address, now) for address in dead & self._seen}
        for address, since in self._dead_since.items():
            if now - since >= self._patience:
                raise UserError(
                    f"The rollout server (vLLM) at {address} has died, most likely for lack of memory; see the end "
                    f"of {self._log}; {advice}."
                )


def is_dead(address: str) -> bool:
    """Nobody listens there, or vLLM reports that its engine is gone (503). A server too busy to answer is alive."""
    try:
        return httpx.get(f"http://{address}/health", timeout=2.0, trust_env=False).status_code == 503
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        return False
