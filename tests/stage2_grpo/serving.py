"""A pooled controller that runs beside a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from shared.records import Reward
from stage2_grpo.rollouts.controller import Handler, PooledController


def worth(total: float) -> Reward:
    """A reward of that total."""
    return Reward(correct=total == 1.0, valid_call=1.0, executed=1.0, right_tables=1.0, total=total)


@contextlib.asynccontextmanager
async def serving(url: str, key: str, handler: Handler, **options: Any) -> AsyncIterator[PooledController]:
    """Serve a gateway for the block; `options` are the controller's."""
    controller = PooledController(url, key, handler, **{"concurrency": 8, "poll_seconds": 0.01} | options)
    running = asyncio.create_task(controller.run())
    try:
        yield controller
    finally:
        controller.stop()
        await running
