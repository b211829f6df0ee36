"""A controller's requests to an Agent Lightning gateway: list rollouts, move them through their states, post rewards.

A refusal (the rollout was deleted, or has ended) is an answer like any other. Only silence and 5xx are tried again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx

from shared.errors import UserError

log = logging.getLogger(__name__)

LONGEST_BACK_OFF = 5.0  # seconds between tries while the gateway does not answer
Rollout = dict[str, Any]  # as the gateway writes it: rollout_id, input, is_train, config, status


class GatewayClient(httpx.AsyncClient):
    """An HTTP client of one gateway; `first_delay` in seconds, doubled from try to try."""

    def __init__(self, url: str, key: str, first_delay: float) -> None:
        # trust_env=False: the gateway is never behind a proxy of the environment
        headers = {"Authorization": f"Bearer {key}"}
        super().__init__(base_url=url.rstrip("/"), headers=headers, timeout=30, trust_env=False)
        self.address = url.rstrip("/")
        self._first_delay = first_delay

    async def list(self, state: str, limit: int) -> list[Rollout]:
        """The oldest rollouts in a state. Raises HTTPError without an answer, UserError when the key is refused."""
        response = await self.get("/api/rollouts", params={"state_in": state, "limit": limit})
        if response.status_code in (401, 403):
            raise UserError(
                f"The gateway {self.address} refuses the key; give AGL_KEY the value the gateway started with."
            )
        rollouts: list[Rollout] = response.raise_for_status().json()
        return rollouts

    async def move(self, rollout_id: str, **status: str) -> httpx.Response:
        """Change the status of a rollout, in one try. Raises HTTPError without an answer."""
        response = await self.patch(f"/api/rollouts/{rollout_id}", json={"status": status})
        return response.raise_for_status() if response.is_server_error else response

    async def report(self, method: str, path: str, body: dict[str, Any]) -> None:
        """Send a status (PATCH) or an event (POST) under /api/rollouts/, again and again until the gateway answers."""
        delay = self._first_delay
        while True:
            try:
                response = await self.request(method, f"/api/rollouts/{path}", json=body)
                if not response.is_server_error:
                    break
            except httpx.HTTPError as error:
                log.warning("gateway does not answer (%r); next try in %.1f s", error, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_BACK_OFF)
        if response.is_error:
            log.warning("the gateway refused %s %s %s: %s", method, path, body, response.text)
