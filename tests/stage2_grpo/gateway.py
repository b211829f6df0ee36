"""A real Agent Lightning gateway for tests, and the trainer's view of it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shared.processes.owned_process import OwnedProcess

MODEL = "scripted"


@dataclass
class Gateway:
    """A running gateway and the trainer's view of it."""

    url: str
    key: str

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=10)

    def queue(self, *inputs: Any, is_train: bool = True, timeout_seconds: int = 60) -> list[str]:
        config = {"timeout_seconds": timeout_seconds}
        body = [{"input": value, "is_train": is_train, "config": config} for value in inputs]
        return [rollout["rollout_id"] for rollout in self.http.post("/api/rollouts", json=body).json()]

    def status(self, rollout_id: str) -> dict[str, Any]:
        return self.http.get(f"/api/rollouts/{rollout_id}").json()["rollout"]["status"]

    def state(self, rollout_id: str) -> str:
        return self.status(rollout_id)["state"]

    def rewards(self, rollout_id: str) -> list[float]:
        events = self.http.get(f"/api/rollouts/{rollout_id}/events", params={"event_type": "reward"}).json()
        return [event["data"]["value"] for event in events]

    def unfinished(self) -> set[str]:
        listed = self.http.get("/api/rollouts", params={"state_in": ["queuing", "running"], "limit": 10_000}).json()
        return {rollout["rollout_id"] for rollout in listed}

    async def ended(self, *rollout_ids: str, seconds: float = 20) -> list[str]:
        """The final states of the rollouts, in order."""
        await until(self.unfinished, lambda unfinished: unfinished.isdisjoint(rollout_ids), seconds)
        return [self.state(rollout_id) for rollout_id in rollout_ids]

    def serve_model(self, endpoint: str) -> None:
        """Forward the proxied calls to this endpoint only."""
        self.http.delete("/api/models").raise_for_status()
        self.http.post("/api/models", json=[{"model": MODEL, "endpoint": endpoint}]).raise_for_status()

    def clear(self) -> None:
        states = ["queuing", "running", "succeeded", "failed"]
        for rollout in self.http.get("/api/rollouts", params={"state_in": states, "limit": 10_000}).json():
            self.http.delete(f"/api/rollouts/{rollout['rollout_id']}")


async def until(look: Callable[[], Any], satisfied: Callable[[Any], bool], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not satisfied(seen := look()):
        assert time.monotonic() < deadline, f"waited {seconds} s, still {seen}"
        await asyncio.sleep(0.05)
    return seen


@contextlib.contextmanager
def running_gateway(folder: Path, port: int, key: str) -> Iterator[Gateway]:
    """The gateway as its own process on the loopback address."""
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "agentlightning.server", "host=127.0.0.1", f"port={port}", f"key={key}"]
    command += [f"default_proxy.model_name={MODEL}", f"hydra.run.dir={folder}", "hydra.output_subdir=null"]
    with OwnedProcess(command, name="the gateway", log=folder / "gateway.log", health=f"{url}/healthz"):
        yield Gateway(url, key)
