"""The pooled controller against a scripted gateway: deadlines, retries, isolation, pressure, late results, drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.models.tokenizer import Tokenizer
from shared.records import Question, Reward, ToolCall
from shared.tool_calls import render_turn
from stage2_grpo.rollouts import controller
from stage2_grpo.rollouts.agent import RolloutTask, make_handler
from stage2_grpo.rollouts.controller import serve
from tests.scripted_server import Reply, ScriptedModel
from tests.shared.examples import insurance_file, tokenizer_folder
from tests.stage2_grpo.rollouts.scripted_gateway import KEY, ScriptedGateway, scripted_gateway
from tests.stage2_grpo.serving import serving, worth

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    with scripted_gateway() as running:
        yield running


async def reach(gateway: ScriptedGateway, *states: str) -> None:
    async with asyncio.timeout(10):
        while gateway.states() != list(states):
            await asyncio.sleep(0.01)


async def hang(task: RolloutTask) -> Reward:
    await asyncio.sleep(3600)
    return worth(1.0)


def test_the_end_of_a_step_ends_what_runs_and_what_still_waits(gateway: ScriptedGateway) -> None:
    async def scenario() -> None:
        gateway.clock = lambda: 0.2 if "failed" in gateway.states() else 0.0  # the first episode takes the whole step
        running, waiting = gateway.queue("x", "x")
        async with serving(gateway.url, KEY, hang, concurrency=1, step_timeout_seconds=0.2):
            await reach(gateway, "failed", "failed")
        assert gateway.error(running) == "timed out after 0.2 s"
        assert gateway.error(waiting) == "its step was over before it could start, after 0.2 s"

    asyncio.run(scenario())


def test_a_new_step_has_all_its_time(gateway: ScriptedGateway) -> None:
    async def scenario() -> None:
        gateway.clock = lambda: 0.0
        gateway.queue("old")
        gateway.clock = lambda: 1000.0
        gateway.queue("new")
        async with serving(gateway.url, KEY, lambda task: asyncio.sleep(0, worth(1.0)), step_timeout_seconds=600):
            await reach(gateway, "failed", "succeeded")

    asyncio.run(scenario())


def test_only_a_fault_of_the_infrastructure_is_tried_again(gateway: ScriptedGateway) -> None:
    tries: dict[str, list[str]] = {}

    async def play(task: RolloutTask) -> Reward | None:
        tries.setdefault(task.input, []).append(task.openai_base_url.split("/attempt/")[1])
        if task.input == "crash":
            raise ValueError("a bug")
        if task.input == "wrong":
            return worth(0.0)
        return None if task.input == "lost" or len(tries[task.input]) == 1 else worth(1.0)

    async def scenario() -> None:
        rollouts = gateway.queue("crash", "wrong", "lost", "once")
        async with serving(gateway.url, KEY, play):
            await reach(gateway, "failed", "succeeded", "failed", "succeeded")
        assert {name: len(made) for name, made in tries.items()} == {"crash": 1, "wrong": 1, "lost": 2, "once": 2}
        assert tries["once"] == ["0/mode/train/openai/v1", "1/mode/train/openai/v1"]
        assert [gateway.rewards(rollout) for rollout in rollouts] == [[], [0.0], [], [1.0]]
        assert sorted(gateway.events) == [(rollouts[1], "0"), (rollouts[3], "1")]

    asyncio.run(scenario())


def test_a_try_gets_only_the_time_that_the_one_before_left(gateway: ScriptedGateway) -> None:
    times: list[float] = []

    async def slow_and_lost(task: RolloutTask) -> None:
        times.append(task.timeout_seconds)
        await asyncio.sleep(0.2)

    async def scenario() -> None:
        gateway.queue("x")
        async with serving(gateway.url, KEY, slow_and_lost, episode_timeout_seconds=30):
            await reach(gateway, "failed")
        assert 30 >= times[0] >= times[1] + 0.2

    asyncio.run(scenario())


def test_a_late_result_is_ignored_and_its_place_given_to_the_next(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_STOP_GRACE", 0.05)
    go_on, late = asyncio.Event(), asyncio.Event()

    async def stubborn(task: RolloutTask) -> Reward:
        if task.input == "late":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            await go_on.wait()
            late.set()
        return worth(1.0)

    async def scenario() -> None:
        (rollout,) = gateway.queue("late", timeout_seconds=0.5)
        gateway.queue("next")
        async with serving(gateway.url, KEY, stubborn, concurrency=1):
            await reach(gateway, "failed", "succeeded")
            go_on.set()
            await asyncio.wait_for(late.wait(), 5)
        assert gateway.error(rollout) == "timed out after 0.5 s"
        assert gateway.rewards(rollout) == []

    asyncio.run(scenario())


def test_no_more_is_claimed_than_can_be_run(gateway: ScriptedGateway) -> None:
    async def scenario() -> None:
        gateway.queue(*range(5))
        async with serving(gateway.url, KEY, hang, concurrency=2):
            await reach(gateway, *["running"] * 2, *["queuing"] * 3)
            await asyncio.sleep(0.1)
            assert gateway.states() == ["running"] * 2 + ["queuing"] * 3
        assert gateway.states() == ["failed"] * 2 + ["queuing"] * 3

    asyncio.run(scenario())


def test_a_drain_lets_running_episodes_end_and_begins_no_other(gateway: ScriptedGateway) -> None:
    go_on = asyncio.Event()

    async def wait(task: RolloutTask) -> Reward:
        await go_on.wait()
        return worth(1.0)

    async def scenario() -> None:
        gateway.queue("x", "x")
        async with serving(gateway.url, KEY, wait, concurrency=1, drain_seconds=10) as draining:
            await reach(gateway, "running", "queuing")
            draining.stop()
            await asyncio.sleep(0.05)
            assert gateway.states() == ["running", "queuing"]
            go_on.set()
            await reach(gateway, "succeeded", "queuing")

    asyncio.run(scenario())


def test_a_second_stop_ends_the_drain(gateway: ScriptedGateway) -> None:
    async def scenario() -> None:
        gateway.queue("x")
        async with serving(gateway.url, KEY, hang, drain_seconds=3600) as draining:
            await reach(gateway, "running")
            draining.stop()
            await asyncio.sleep(0.05)
        assert gateway.error("r0") == "the controller was stopped"

    asyncio.run(scenario())


def test_a_reward_outlives_a_gateway_that_fails_for_a_while(gateway: ScriptedGateway) -> None:
    failures = iter([Reply(503), Reply(500)])

    async def scenario() -> None:
        gateway.queue("x")
        gateway.refuse = lambda method, path: next(failures, None) if path.endswith("/events") else None
        async with serving(gateway.url, KEY, lambda task: asyncio.sleep(0, worth(0.75))):
            await reach(gateway, "succeeded")
        assert gateway.rewards("r0") == [0.75]

    asyncio.run(scenario())


def test_every_episode_has_a_thread_for_its_query(gateway: ScriptedGateway) -> None:
    together = threading.Barrier(20, timeout=5)  # asyncio's own pool has six threads on two cores

    async def block(task: RolloutTask) -> Reward:
        await asyncio.to_thread(together.wait)
        return worth(1.0)

    async def scenario() -> None:
        gateway.queue(*range(20))
        running = asyncio.create_task(serve(gateway.url, KEY, block, concurrency=20, poll_seconds=0.01))
        await reach(gateway, *["succeeded"] * 20)
        os.kill(os.getpid(), signal.SIGTERM)
        await running

    asyncio.run(scenario())


def test_runaway_sql_costs_its_own_episode_alone(gateway: ScriptedGateway, tmp_path: Path) -> None:
    settings = ["sandbox.timeout_seconds=1.0", "agent.context_tokens=8000"]
    tokenizer = Tokenizer.from_folder(tokenizer_folder(tmp_path))
    models = {
        name: ScriptedModel(tokenizer, render_turn("", [ToolCall("execute_sql", {"sql": sql})]), "Done.")
        for name, sql in (("runaway", ENDLESS), ("quick", "SELECT count(*) FROM claims"))
    }
    gateway.model = lambda request: models[request["messages"][1]["content"]](request)
    database, ended = str(insurance_file(tmp_path)), []
    handler = make_handler(load_config(PIPELINE, "cpu", settings), tmp_path, ended.append)

    async def scenario() -> None:
        for name in models:
            gateway.queue(vars(Question(name, "insurance", name, "SELECT count(*) FROM claims", database)))
        async with serving(gateway.url, KEY, handler):
            await reach(gateway, "succeeded", "succeeded")

    asyncio.run(scenario())
    outcomes = {episode.question_id: episode for episode in ended}
    assert {name: episode.reward.correct for name, episode in outcomes.items()} == {"quick": True, "runaway": False}
    assert outcomes["runaway"].seconds > 1.0
