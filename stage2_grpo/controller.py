"""The pooled controller: serves the rollouts of an Agent Lightning gateway from one asyncio process.

Agent Lightning's own local controller starts a Python process per rollout. This one speaks the same HTTP contract (list
QUEUING, PATCH to RUNNING, post the reward event, PATCH to SUCCEEDED or FAILED) and runs each episode as a task, so an
episode costs its requests and nothing else. The trainer waits for every rollout it queued and has no timeout of its
own; hence the rule here: whatever is claimed is ended, also when an episode hangs, the gateway goes away for a while,
the controller is told to stop, or an earlier controller was killed.

Limits: one controller per gateway, because a RUNNING rollout that is not in this process counts as left behind; the
handler must yield to the event loop (blocking work goes through `asyncio.to_thread`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TextIO

import httpx

from shared.cli import run_main
from shared.errors import UserError
from stage2_grpo.rollout_agent import AgentSettings, RolloutTask, make_handler

log = logging.getLogger(__name__)

Handler = Callable[[RolloutTask], Coroutine[Any, Any, float | None]]

_ATTEMPT = "0"  # the only attempt id that Agent Lightning's trainer reads
_LONGEST_BACK_OFF = 5.0  # seconds between tries while the gateway does not answer
_STOP_GRACE = 5.0  # seconds for the last reports after a stop
_ALL = 1_000_000  # the gateway lists at most `limit` rollouts, oldest first


class PooledController:
    """Claims queued rollouts first in, first out, and runs at most `concurrency` episodes at a time.

    The handler returns the reward of a finished episode. None, an exception or a timeout is an infrastructure failure:
    the rollout is FAILED and gets no reward event, so that it can never be taken for a wrong answer.
    """

    def __init__(
        self,
        gateway_url: str,
        key: str,
        handler: Handler,
        *,
        concurrency: int,
        poll_seconds: float = 0.2,
        episode_timeout_seconds: float = 3600.0,
    ) -> None:
        self._url = gateway_url.rstrip("/")
        self._key = key
        self._handler = handler
        self._concurrency = concurrency
        self._poll_seconds = poll_seconds
        self._episode_timeout = episode_timeout_seconds
        self._episodes: dict[str, asyncio.Task[None]] = {}  # by rollout id, until the gateway knows the ending
        self._handlers: dict[str, asyncio.Task[float | None]] = {}  # the part of an episode that a stop cancels
        self._stopping = False
        self._backlog = False  # more may be queued than there were free places
        self._wake = asyncio.Event()

    def stop(self) -> None:
        """Ask `run` to cancel what runs, report it as FAILED and return."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Serve until `stop`. Raises UserError when the gateway refuses the key; an absent gateway is waited for."""
        headers = {"Authorization": f"Bearer {self._key}"}
        # trust_env=False: the gateway is never behind a proxy of the environment
        async with httpx.AsyncClient(base_url=self._url, headers=headers, timeout=30, trust_env=False) as self._http:
            try:
                await self._poll_until_stopped()
            finally:
                await self._shut_down()

    async def _poll_until_stopped(self) -> None:
        delay, connected = self._poll_seconds, False
        while not self._stopping:
            try:
                if not connected:
                    await self._fail_orphans()
                    log.info("controller ready: %s, up to %d episodes at a time", self._url, self._concurrency)
                await self._claim_queued()
                delay, connected = self._poll_seconds, True
            except httpx.HTTPError as error:
                delay, connected, self._backlog = min(2 * delay, _LONGEST_BACK_OFF), False, False
                log.warning("gateway does not answer (%r); next try in %.1f s", error, delay)
            await self._sleep(delay)

    async def _sleep(self, seconds: float) -> None:
        """Until the next poll is due, a place frees up for waiting rollouts, or the controller must stop."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
        if not self._stopping:
            self._wake.clear()

    async def _list(self, state: str, limit: int) -> list[dict[str, Any]]:
        response = await self._http.get("/api/rollouts", params={"state_in": state, "limit": limit})
        if response.status_code in (401, 403):
            raise UserError(
                f"The gateway {self._url} refuses the key; give AGL_KEY the value the gateway started with."
            )
        return response.raise_for_status().json()

    async def _fail_orphans(self) -> None:
        """End what nobody runs any more: left by a killed controller, or claimed in a request whose answer was lost."""
        for rollout in await self._list("running", _ALL):
            if rollout["rollout_id"] not in self._episodes:
                await self._patch(rollout["rollout_id"], "failed", error_message="left behind by an earlier controller")

    async def _claim_queued(self) -> None:
        free = self._concurrency - len(self._episodes)
        queued = await self._list("queuing", free) if free else []
        self._backlog = len(queued) == free
        for rollout in queued:
            if self._stopping:
                return
            claim = await self._patch(rollout["rollout_id"], "running", last_attempt_id=_ATTEMPT)
            if claim.is_success:  # else it was deleted or ended meanwhile
                self._start(rollout)

    def _start(self, rollout: dict[str, Any]) -> None:
        task = self._task(rollout)
        handling = asyncio.create_task(self._handler(task))
        self._handlers[task.rollout_id] = handling
        self._episodes[task.rollout_id] = asyncio.create_task(self._conclude(task, handling))

    def _task(self, rollout: dict[str, Any]) -> RolloutTask:
        rollout_id, mode = rollout["rollout_id"], "train" if rollout["is_train"] else "val"
        return RolloutTask(
            rollout_id=rollout_id,
            input=rollout["input"],
            is_train=rollout["is_train"],
            openai_base_url=f"{self._url}/proxy/rollout/{rollout_id}/attempt/{_ATTEMPT}/mode/{mode}/openai/v1",
            key=self._key,
            timeout_seconds=min(rollout["config"]["timeout_seconds"] or math.inf, self._episode_timeout),
        )

    async def _conclude(self, task: RolloutTask, handling: asyncio.Task[float | None]) -> None:
        """Wait for one episode, whatever its ending, and tell the gateway."""
        try:
            outcome = await _outcome(task, handling)
            if isinstance(outcome, str):
                log.warning("rollout %s failed: %s", task.rollout_id, outcome)
                await self._patch_until_heard(task.rollout_id, "failed", error_message=outcome)
            else:
                event = {"event_type": "reward", "data": {"value": outcome}}
                events_path = f"/api/rollouts/{task.rollout_id}/attempt/{_ATTEMPT}/events"
                await self._until_heard(lambda: self._http.post(events_path, json=event))
                await self._patch_until_heard(task.rollout_id, "succeeded", last_attempt_id=_ATTEMPT)
        finally:
            del self._episodes[task.rollout_id], self._handlers[task.rollout_id]
            if self._backlog:
                self._wake.set()

    async def _patch(self, rollout_id: str, state: str, **status: str) -> httpx.Response:
        """Move a rollout to `state`. Refusals (deleted, already ended) are answers; raises HTTPError without one."""
        response = await self._http.patch(f"/api/rollouts/{rollout_id}", json={"status": {"state": state, **status}})
        return response.raise_for_status() if response.is_server_error else response

    async def _patch_until_heard(self, rollout_id: str, state: str, **status: str) -> None:
        response = await self._until_heard(lambda: self._patch(rollout_id, state, **status))
        if response.is_error:
            log.warning("rollout %s could not become %s: %s", rollout_id, state, response.text)

    async def _until_heard(self, request: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        """Repeat a request until the gateway answers it; safe for ours (the trainer reads the last reward event)."""
        delay = self._poll_seconds
        while True:
            try:
                response = await request()
                if not response.is_server_error:
                    return response
            except httpx.HTTPError as error:
                log.warning("gateway does not answer (%r); next try in %.1f s", error, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_BACK_OFF)

    async def _shut_down(self) -> None:
        for handling in self._handlers.values():
            handling.cancel()
        episodes = list(self._episodes.values())
        if episodes:
            _, unheard = await asyncio.wait(episodes, timeout=_STOP_GRACE)
            for episode in unheard:  # the gateway is gone too
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)


async def _outcome(task: RolloutTask, handling: asyncio.Task[float | None]) -> float | str:
    """The reward, or one sentence on why there is none. Never raises for a handler: one episode must not hurt another."""
    finished, _ = await asyncio.wait({handling}, timeout=task.timeout_seconds)
    if not finished:
        handling.cancel()
        await asyncio.wait({handling}, timeout=_STOP_GRACE)
        return f"timed out after {task.timeout_seconds:g} s"
    if handling.cancelled():
        return "the controller was stopped"
    if error := handling.exception():
        log.error("rollout %s raised", task.rollout_id, exc_info=error)
        return f"{type(error).__name__}: {error}"
    reward = handling.result()
    if reward is None:
        return "infrastructure failure; see the log of the controller"
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        return f"the reward {reward!r} is not a finite number"
    return float(reward)


async def serve(gateway_url: str, key: str, handler: Handler, *, concurrency: int, **options: float) -> None:
    """Run a PooledController until SIGTERM or SIGINT; `options` are its other keyword arguments."""
    controller = PooledController(gateway_url, key, handler, concurrency=concurrency, **options)
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, controller.stop)
    await controller.run()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m stage2_grpo.controller", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--settings", type=Path, required=True, help="JSON file written by AgentSettings.save")
    settings = AgentSettings.load(parser.parse_args().settings)
    if "AGL_KEY" not in os.environ:
        raise UserError("AGL_KEY is not set; the controller needs the key that the gateway was started with.")
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else one line per request
    grpo = settings.config.grpo
    with settings.episodes.open("a", encoding="utf-8") as stream:
        handler = make_handler(settings.config, settings.model_folder, lambda row: _append(stream, row))
        asyncio.run(
            serve(
                settings.gateway_url,
                os.environ["AGL_KEY"],
                handler,
                concurrency=grpo.concurrency,
                episode_timeout_seconds=grpo.episode_timeout_seconds,
            )
        )


def _append(stream: TextIO, row: dict[str, Any]) -> None:
    """One line in one write, so that a killed controller leaves no half line."""
    stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    stream.flush()


if __name__ == "__main__":
    run_main(main)
