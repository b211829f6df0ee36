"""The pooled controller: serves the rollouts of an Agent Lightning gateway from one asyncio process.

Agent Lightning's own local controller starts a Python process per rollout. This one speaks the same HTTP contract (list
QUEUING, PATCH to RUNNING, post the reward event, PATCH to SUCCEEDED or FAILED) and runs each episode as a task, so an
episode costs only its requests. The trainer waits for every rollout it queued and has no timeout of its own. So
whatever this controller claims, it also ends: when an episode hangs, the gateway is away for a while, the controller is
stopped, or an earlier controller was killed.

    deadlines     of a model call (in the handler), an episode and a step; later results are ignored
    retries       only after an infrastructure failure, as a new attempt; the trainer reads the last attempt alone
    isolation     an episode's exception or runaway SQL ends that episode and blocks no other's thread
    pressure      at most `concurrency` episodes are claimed, the rest stays queued at the gateway
    end           a stop claims nothing more, lets episodes finish for `drain_seconds`, and reports the rest as FAILED

Limits: one controller per gateway, because a RUNNING rollout that is not in this process counts as left behind; the
handler must yield to the event loop (blocking work goes through `asyncio.to_thread`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from shared.cli.command_line import Parser, run_main
from shared.errors import UserError
from shared.records import Reward, append_jsonl
from stage2_grpo.rollouts.agent import AgentSettings, RolloutTask, make_handler, reward_event
from stage2_grpo.rollouts.gateway_client import LONGEST_BACK_OFF, GatewayClient, Rollout

log = logging.getLogger(__name__)

Handler = Callable[[RolloutTask], Coroutine[Any, Any, Reward | None]]

_TRIES = 2  # of an episode with an infrastructure failure
_STOP_GRACE = 5.0  # seconds for the last reports after a stop
_ALL = 1_000_000  # the gateway lists at most `limit` rollouts, oldest first
_STOPPED = "the controller was stopped"
_LEFT_BEHIND = "left behind by an earlier controller"
_INFRASTRUCTURE = "infrastructure failure; see the log of the controller"


class PooledController:
    """Claims queued rollouts first in, first out, and runs at most `concurrency` episodes at a time.

    The handler returns the reward of a finished episode, or None after an infrastructure failure, which is tried again.
    After the last try, an exception or a timeout the rollout is FAILED and gets no reward event, so that it can never
    be taken for a wrong answer.
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
        step_timeout_seconds: float = math.inf,
        drain_seconds: float = 0.0,
    ) -> None:
        self._gateway = GatewayClient(gateway_url, key, poll_seconds)
        self._key = key
        self._handler = handler
        self._concurrency = concurrency
        self._poll_seconds = poll_seconds
        self._episode_timeout = episode_timeout_seconds
        self._step_timeout = step_timeout_seconds  # since the trainer queued it; all of a step are queued together
        self._drain_seconds = drain_seconds
        self._episodes: dict[str, asyncio.Task[None]] = {}  # by rollout id, until the gateway knows the ending
        self._handlers: dict[str, asyncio.Task[Reward | None]] = {}  # the part of an episode that can be cut off
        self._backlog = False  # more may be queued than there were free places
        self._wake = asyncio.Event()
        self._stopping = False
        self._hurry = asyncio.Event()  # `stop` was called twice
        self._cutting = False  # running episodes are cancelled, and none is started

    def stop(self) -> None:
        """Make `run` drain, cancel what still runs after that, report it as FAILED and return.

        A second call skips the drain.
        """
        if self._stopping:
            self._hurry.set()
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Serve until `stop`. Raises UserError when the gateway refuses the key; waits for an absent gateway."""
        async with self._gateway:
            try:
                delay, connected = self._poll_seconds, False
                while not self._stopping:
                    try:
                        if not connected:
                            # Rollouts that nobody runs: left by a killed controller, or claimed in a lost answer.
                            for rollout in await self._gateway.list("running", _ALL):
                                if (lost := rollout["rollout_id"]) not in self._episodes:
                                    await self._gateway.move(lost, state="failed", error_message=_LEFT_BEHIND)
                            places = self._concurrency
                            log.info("controller ready: %s, up to %d episodes at a time", self._gateway.address, places)
                        await self._claim_queued()
                        delay, connected = self._poll_seconds, True
                    except httpx.HTTPError as error:
                        delay, connected, self._backlog = min(2 * delay, LONGEST_BACK_OFF), False, False
                        log.warning("gateway does not answer (%r); next try in %.1f s", error, delay)
                    # Until the next poll is due, a place frees up for waiting rollouts, or the controller must stop.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(delay):
                            await self._wake.wait()
                    if not self._stopping:
                        self._wake.clear()
            finally:
                await self._shut_down()

    async def _claim_queued(self) -> None:
        free = self._concurrency - len(self._episodes)
        queued = await self._gateway.list("queuing", free) if free else []
        self._backlog = len(queued) == free
        for rollout in queued:
            if self._stopping:
                return
            claim = await self._gateway.move(rollout["rollout_id"], state="running", last_attempt_id="0")
            if claim.is_success:  # else it was deleted or has ended
                self._episodes[rollout["rollout_id"]] = asyncio.create_task(self._serve_rollout(claim.json()))

    async def _serve_rollout(self, rollout: Rollout) -> None:
        """Play a claimed rollout and report its ending to the gateway."""
        rollout_id = rollout["rollout_id"]
        try:
            attempt, outcome = await self._play(rollout)
            if isinstance(outcome, str):
                log.warning("rollout %s failed: %s", rollout_id, outcome)
                status = {"state": "failed", "error_message": outcome}
            else:
                await self._gateway.report("POST", f"{rollout_id}/attempt/{attempt}/events", reward_event(outcome))
                status = {"state": "succeeded", "last_attempt_id": attempt}
            await self._gateway.report("PATCH", rollout_id, {"status": status})
        finally:
            del self._episodes[rollout_id]
            if self._backlog:
                self._wake.set()

    async def _play(self, rollout: Rollout) -> tuple[str, Reward | str]:
        """(attempt, reward or one sentence on why there is none)."""
        rollout_id, mode, status = rollout["rollout_id"], "train" if rollout["is_train"] else "val", rollout["status"]
        left_of_step = self._step_timeout - (status["updated_at"] - status["created_at"])  # by the gateway's clock
        seconds = min(rollout["config"]["timeout_seconds"] or math.inf, self._episode_timeout, left_of_step)
        if seconds <= 0:
            return "0", f"its step was over before it could start, after {self._step_timeout:g} s"
        deadline = time.monotonic() + seconds
        for number in range(_TRIES):
            if self._cutting:
                return str(number), _STOPPED
            task = RolloutTask(
                rollout_id=rollout_id,
                input=rollout["input"],
                is_train=rollout["is_train"],
                openai_base_url=f"{self._gateway.address}/proxy/rollout/{rollout_id}/attempt/{number}/mode/{mode}/openai/v1",
                key=self._key,
                timeout_seconds=deadline - time.monotonic(),
                last_try=number == _TRIES - 1,
            )
            handling = self._handlers[rollout_id] = asyncio.create_task(self._handler(task))
            outcome = await _outcome(task, handling, seconds)
            del self._handlers[rollout_id]
            if outcome != _INFRASTRUCTURE:
                break
            log.warning("rollout %s, try %d of %d: %s", rollout_id, number + 1, _TRIES, outcome)
            if not task.last_try:  # the trainer reads the events of the last attempt
                await self._gateway.report("PATCH", rollout_id, {"status": {"last_attempt_id": str(number + 1)}})
        return str(number), outcome

    async def _shut_down(self) -> None:
        if self._drain_seconds and self._episodes:
            log.info("draining: %d episodes have %.0f s to end", len(self._episodes), self._drain_seconds)
            await self._wait_for_episodes(self._drain_seconds)
        self._cutting = True
        for handling in self._handlers.values():
            handling.cancel()
        self._hurry.clear()
        for episode in await self._wait_for_episodes(_STOP_GRACE):
            episode.cancel()
        await asyncio.gather(*self._episodes.values(), return_exceptions=True)

    async def _wait_for_episodes(self, seconds: float) -> set[asyncio.Task[None]]:
        """The episodes that have not ended after `seconds`, or at a second `stop`."""
        hurry: asyncio.Future[Any] = asyncio.create_task(self._hurry.wait())
        ended: asyncio.Future[Any] = asyncio.gather(*self._episodes.values(), return_exceptions=True)
        await asyncio.wait({hurry, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        return {episode for episode in self._episodes.values() if not episode.done()}


async def _outcome(task: RolloutTask, handling: asyncio.Task[Reward | None], seconds: float) -> Reward | str:
    """The reward, or one sentence on why there is none.

    Never raises for a handler: one episode must not hurt another.
    """
    finished, _ = await asyncio.wait({handling}, timeout=task.timeout_seconds)
    if not finished:
        handling.cancel()
        await asyncio.wait({handling}, timeout=_STOP_GRACE)
        return f"timed out after {seconds:g} s"
    if handling.cancelled():
        return _STOPPED
    if error := handling.exception():
        log.error("rollout %s raised", task.rollout_id, exc_info=error)
        return f"{type(error).__name__}: {error}"
    return handling.result() or _INFRASTRUCTURE


async def serve(gateway_url: str, key: str, handler: Handler, *, concurrency: int, **options: float) -> None:
    """Run a PooledController until SIGTERM or SIGINT; `options` are its other keyword arguments."""
    controller = PooledController(gateway_url, key, handler, concurrency=concurrency, **options)
    loop = asyncio.get_running_loop()
    # A thread for the query of each episode, and as many for queries that outlive theirs. The default is cores + 4.
    loop.set_default_executor(ThreadPoolExecutor(2 * concurrency))
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, controller.stop)
    await controller.run()


def main() -> None:
    parser = Parser("python -m stage2_grpo.rollouts.controller", (__doc__ or "").split("\n")[0])
    parser.add_argument("--settings", type=Path, required=True, help="JSON file written by AgentSettings.save")
    parser.add_argument("--drain", type=float, default=0.0, help="seconds that running episodes get after SIGTERM")
    args = parser.parse_args()
    settings = AgentSettings.load(args.settings)
    if "AGL_KEY" not in os.environ:
        raise UserError("AGL_KEY is not set; the controller needs the key that the gateway was started with.")
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else one line per request
    grpo = settings.config.grpo
    handler = make_handler(settings.config, settings.model_folder, functools.partial(append_jsonl, settings.episodes))
    asyncio.run(
        serve(
            settings.gateway_url,
            os.environ["AGL_KEY"],
            handler,
            concurrency=grpo.concurrency,
            episode_timeout_seconds=grpo.episode_timeout_seconds,
            step_timeout_seconds=grpo.step_timeout_seconds,
            drain_seconds=args.drain,
        )
    )


if __name__ == "__main__":
    run_main(main)
