"""The pooled controller against a real Agent Lightning gateway."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.processes.owned_process import free_port, random_key
from shared.records import Reward
from stage2_grpo.rollouts.agent import RolloutTask
from stage2_grpo.rollouts.controller import PooledController
from tests.stage2_grpo.gateway import Gateway, running_gateway, until
from tests.stage2_grpo.serving import serving, worth

pytestmark = pytest.mark.slow  # importing the gateway takes seconds


async def by_input(task: RolloutTask) -> Reward | None:
    """What the rollout's input says: a reward, "crash", "lost" or "hang"."""
    if task.input == "crash":
        raise ValueError("the agent has a bug")
    if task.input == "hang":
        await asyncio.sleep(3600)
    return None if task.input == "lost" else worth(task.input)


def test_the_reward_arrives_before_the_rollout_succeeds(gateway: Gateway) -> None:
    async def scenario() -> None:
        (rollout,) = gateway.queue(0.25)
        async with serving(gateway.url, gateway.key, by_input):
            assert await gateway.ended(rollout) == ["succeeded"]
        assert gateway.rewards(rollout) == [0.25]
        (event,) = gateway.http.get(f"/api/rollouts/{rollout}/events", params={"event_type": "reward"}).json()
        assert event["data"]["correct"] is False
        assert gateway.status(rollout)["last_attempt_id"] == "0"

    asyncio.run(scenario())


def test_a_reward_of_zero_is_a_reward(gateway: Gateway) -> None:
    async def scenario() -> None:
        (rollout,) = gateway.queue(0.0)
        async with serving(gateway.url, gateway.key, by_input):
            assert await gateway.ended(rollout) == ["succeeded"]
        assert gateway.rewards(rollout) == [0.0]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("failing", "sentence"),
    [
        ("crash", "ValueError: the agent has a bug"),
        ("lost", "infrastructure failure"),
    ],
)
def test_a_failed_episode_gets_no_reward_and_hurts_no_other(gateway: Gateway, failing: str, sentence: str) -> None:
    async def scenario() -> None:
        rollouts = gateway.queue(1.0, failing, 0.5)
        async with serving(gateway.url, gateway.key, by_input):
            assert await gateway.ended(*rollouts) == ["succeeded", "failed", "succeeded"]
        assert [gateway.rewards(rollout) for rollout in rollouts] == [[1.0], [], [0.5]]
        assert sentence in gateway.status(rollouts[1])["error_message"]

    asyncio.run(scenario())


def test_the_shorter_of_both_timeouts_ends_an_episode(gateway: Gateway) -> None:
    async def scenario() -> None:
        patient, hasty = gateway.queue("hang")[0], gateway.queue("hang", timeout_seconds=1)[0]
        async with serving(gateway.url, gateway.key, by_input, episode_timeout_seconds=1.5):
            assert await gateway.ended(patient, hasty) == ["failed", "failed"]
        assert gateway.status(patient)["error_message"] == "timed out after 1.5 s"
        assert gateway.status(hasty)["error_message"] == "timed out after 1 s"
        assert gateway.rewards(patient) == gateway.rewards(hasty) == []

    asyncio.run(scenario())


def test_rollouts_are_served_in_the_order_of_the_queue_and_never_too_many_at_once(gateway: Gateway) -> None:
    served: list[int] = []
    at_once, most = 0, 0
    crowded = asyncio.Event()

    async def count(task: RolloutTask) -> Reward:
        nonlocal at_once, most
        served.append(task.input)
        at_once += 1
        most = max(most, at_once)
        if at_once == 7:
            crowded.set()
        await crowded.wait()
        await asyncio.sleep(0.01)
        at_once -= 1
        return worth(1.0)

    async def scenario() -> None:
        rollouts = gateway.queue(*range(120))
        async with serving(gateway.url, gateway.key, count, concurrency=7):
            assert await gateway.ended(*rollouts) == ["succeeded"] * 120
        assert served == list(range(120))
        assert most == 7

    asyncio.run(scenario())


def test_a_place_that_frees_up_is_filled_without_waiting_for_the_next_poll(gateway: Gateway) -> None:
    async def scenario() -> None:
        rollouts = gateway.queue(*[1.0] * 6)
        async with serving(gateway.url, gateway.key, by_input, concurrency=1, poll_seconds=30):
            assert await gateway.ended(*rollouts, seconds=10) == ["succeeded"] * 6

    asyncio.run(scenario())


def test_train_and_validation_rollouts_get_their_own_proxy(gateway: Gateway) -> None:
    seen: dict[str, RolloutTask] = {}

    async def keep(task: RolloutTask) -> Reward:
        seen[task.rollout_id] = task
        return worth(1.0)

    async def scenario() -> None:
        train, val = gateway.queue("x")[0], gateway.queue("x", is_train=False)[0]
        async with serving(gateway.url, gateway.key, keep):
            await gateway.ended(train, val)
        assert seen[train].openai_base_url == f"{gateway.url}/proxy/rollout/{train}/attempt/0/mode/train/openai/v1"
        assert seen[val].openai_base_url == f"{gateway.url}/proxy/rollout/{val}/attempt/0/mode/val/openai/v1"
        assert gateway.key not in repr(seen[train])

    asyncio.run(scenario())


def test_a_stop_ends_running_rollouts_and_leaves_queued_ones(gateway: Gateway) -> None:
    async def scenario() -> None:
        running, queued = gateway.queue("hang", "hang")
        async with serving(gateway.url, gateway.key, by_input, concurrency=1):
            await until(lambda: gateway.state(running), lambda state: state == "running")
        assert gateway.state(running) == "failed"
        assert gateway.status(running)["error_message"] == "the controller was stopped"
        assert gateway.state(queued) == "queuing"
        assert gateway.rewards(running) == []

    asyncio.run(scenario())


def test_a_rollout_deleted_while_it_runs_is_forgotten(gateway: Gateway) -> None:
    async def slow(task: RolloutTask) -> Reward:
        await asyncio.sleep(task.input)
        return worth(1.0)

    async def scenario() -> None:
        deleted, other = gateway.queue(0.5, 1.0)
        async with serving(gateway.url, gateway.key, slow):
            await until(lambda: gateway.state(deleted), lambda state: state == "running")
            gateway.http.delete(f"/api/rollouts/{deleted}")
            assert await gateway.ended(other) == ["succeeded"]

    asyncio.run(scenario())


def test_a_wrong_key_is_the_users_problem(gateway: Gateway) -> None:
    controller = PooledController(gateway.url, "wrong", by_input, concurrency=1)
    with pytest.raises(UserError, match="refuses the key"):
        asyncio.run(controller.run())


def test_an_absent_gateway_is_waited_for_and_a_lost_one_found_again(tmp_path: Path) -> None:
    port, key = free_port(), random_key()
    go_on = asyncio.Event()

    async def wait_for_it(task: RolloutTask) -> Reward:
        await go_on.wait()
        return worth(1.0)

    async def scenario() -> None:
        absent = Gateway(f"http://127.0.0.1:{port}", key)
        async with serving(absent.url, absent.key, wait_for_it):
            with contextlib.ExitStack() as stack:
                first = await asyncio.to_thread(stack.enter_context, running_gateway(tmp_path, port, key))
                (lost,) = first.queue("x")
                await until(lambda: first.state(lost), lambda state: state == "running")
                await asyncio.to_thread(stack.close)
            go_on.set()  # ends while nobody listens
            with contextlib.ExitStack() as stack:
                second = await asyncio.to_thread(stack.enter_context, running_gateway(tmp_path, port, key))
                (rollout,) = second.queue("x")
                assert await second.ended(rollout) == ["succeeded"]

    asyncio.run(scenario())


def test_a_stop_returns_although_the_gateway_is_gone() -> None:
    async def scenario() -> None:
        controller = PooledController(f"http://127.0.0.1:{free_port()}", "key", by_input, concurrency=1)
        running = asyncio.create_task(controller.run())
        await asyncio.sleep(0.3)
        controller.stop()
        await asyncio.wait_for(running, 5)

    asyncio.run(scenario())
