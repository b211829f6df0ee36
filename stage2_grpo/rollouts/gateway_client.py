"""What a controller says to an Agent Lightning gateway: list rollouts, move them through their states, post rewards.

A refusal (the rollout was deleted, or has ended) is an answer like any other; only silence and 5xx are tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import httpx

from shared.errors import UserError

log = logging.getLogger(__name__)

LONGEST_BACK_OFF = 5.0  # seconds between tries while the gateway does not answer
Rollout = dict[str, Any]  # as the gateway writes it: rollout_id, input, is_train, config, status


class GatewayClient:
    """An async context manager around one gateway; `first_delay` in seconds, doubled from try to try."""

    def __init__(self, url: str, key: str, first_delay: float) -> None:
        self.url = url.rstrip("/")
        self._first_delay = first_delay
        # trust_env=False: the gateway is never behind a proxy of the environment
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30, trust_env=False)

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def list(self, state: str, limit: int) -> list[Rollout]:
        """The oldest rollouts in a state. Raises HTTPError without an answer, UserError when the key is refused."""
        response = await self._http.get("/api/rollouts", params={"state_in": state, "limit": limit})
        if response.status_code in (401, 403):
            raise UserError(f"The gateway {self.url} refuses the key; give AGL_KEY the value the gateway started with.")
        rollouts: list[Rollout] = response.raise_for_status().json()
        return rollouts

    async def move(self, rollout_id: str, state: str, **status: str) -> httpx.Response:
        """Ask once to move a rollout to `state`; raises HTTPError without an answer."""
        response = await self._http.patch(f"/api/rollouts/{rollout_id}", json={"status": {"state": state, **status}})
        return response.raise_for_status() if response.is_server_error else response

    async def begin_attempt(self, rollout_id: str, attempt: str) -> None:
        """Say which attempt a rollout's events are to be read from."""
        status = {"status": {"last_attempt_id": attempt}}
        await self._until_heard(lambda: self._http.patch(f"/api/rollouts/{rollout_id}", json=status))

    async def end(self, rollout_id: str, state: str, **status: str) -> None:
        """Move a rollout to its last state, however often that takes."""
        response = await self._until_heard(lambda: self.move(rollout_id, state, **status))
        if response.is_error:
            log.warning("rollout %s could not become %s: %s", rollout_id, state, response.text)

    async def reward(self, rollout_id: str, attempt: str, value: float) -> None:
        """Post a reward, however often that takes; the trainer reads the last one."""
        path = f"/api/rollouts/{rollout_id}/attempt/{attempt}/events"
        event = {"event_type": "reward", "data": {"value": value}}
        await self._until_heard(lambda: self._http.post(path, json=event))

    async def _until_heard(self, request: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        delay = self._first_delay
        while True:
            try:
                response = await request()
                if not response.is_server_error:
                    return response
            except httpx.HTTPError as error:
                log.warning("gateway does not answer (%r); next try in %.1f s", error, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_BACK_OFF)
