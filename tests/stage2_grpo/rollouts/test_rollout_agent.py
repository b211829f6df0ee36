"""Whole episodes through a real gateway: controller process, agent, scripted model, reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.config.load import load_config
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.processes.owned_process import OwnedProcess
from shared.records import Episode, Question, StopReason, ToolCall, read_episodes
from shared.tool_calls import render_turn
from stage2_grpo.rollouts.agent import AgentSettings, SqlAgent, question_of
from tests.scripted_server import Reply, ScriptedModel, scripted_server
from tests.shared.examples import insurance_file, tokenizer_folder
from tests.stage2_grpo.gateway import Gateway, until

ROOT = Path(__file__).resolve().parents[3]
SQL = "SELECT count(*) FROM claims"
SPEECH = [
    render_turn("", [ToolCall("search_schema", {"query": "claims"})]),
    render_turn("", [ToolCall("get_columns", {"table": "claims"})]),
    render_turn("", [ToolCall("execute_sql", {"sql": SQL})]),
    "There are 3 claims.",
]


@pytest.fixture
def settings(gateway: Gateway, tmp_path: Path) -> Path:
    overrides = ["agent.context_tokens=8000", "agent.max_turn_tokens=400"]
    config = load_config(ROOT / "pipeline.yaml", "cpu", overrides)
    file = tmp_path / "agents.json"
    AgentSettings(gateway.url, tokenizer_folder(tmp_path), config, tmp_path / "episodes.jsonl").save(file)
    return file


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    """A training row as the trainer sends it."""
    question = Question("q1", "insurance", "How many claims are there?", SQL, str(insurance_file(tmp_path)))
    return vars(question) | {"index": 0, "data_id": "d1"}


@contextlib.contextmanager
def controller(settings: Path, key: str) -> Iterator[Path]:
    """The controller's own command; yields its log."""
    command = [sys.executable, "-m", "stage2_grpo.rollouts.controller", "--settings", str(settings)]
    log = settings.with_name("controller.log")
    ready = lambda: "controller ready" in log.read_text()  # noqa: E731
    with OwnedProcess(command, name="the controller", log=log, env={"AGL_KEY": key}, health=ready):
        yield log


def model(settings: Path, *says: str) -> ScriptedModel:
    return ScriptedModel(Tokenizer.from_folder(settings.parent), *says)


def episodes(settings: Path) -> list[Episode]:
    return read_episodes(settings.with_name("episodes.jsonl"))


@pytest.mark.slow
def test_an_episode_earns_its_reward_and_leaves_a_row(gateway: Gateway, settings: Path, row: dict[str, Any]) -> None:
    async def scenario() -> None:
        (rollout,) = gateway.queue(row)
        assert await gateway.ended(rollout) == ["succeeded"]
        assert gateway.rewards(rollout) == [1.0]
        (episode,) = episodes(settings)
        assert (episode.rollout_id, episode.step) == (rollout, None)
        assert (episode.question_id, episode.split, episode.stop) == ("q1", "train", StopReason.ANSWERED)
        assert episode.reward
        assert episode.reward.correct
        assert [(len(turn.calls), turn.hermes_calls, turn.merged) for turn in episode.turns] == [
            (1, 1, None),
            (1, 1, True),
            (1, 1, True),
            (0, 0, True),
        ]
        assert all(0 < turn.completion_tokens < turn.prompt_tokens for turn in episode.turns)
        assert min(episode.seconds, episode.reward_seconds) > 0

    with scripted_server(model(settings, *SPEECH)) as endpoint, controller(settings, gateway.key):
        gateway.serve_model(endpoint)
        asyncio.run(scenario())


@pytest.mark.slow
def test_a_failing_endpoint_and_a_broken_row_get_no_reward(
    gateway: Gateway, settings: Path, row: dict[str, Any]
) -> None:
    async def scenario() -> None:
        refused, broken = gateway.queue(row, {"question": "no database"})
        assert await gateway.ended(refused, broken) == ["failed", "failed"]
        assert gateway.rewards(refused) == gateway.rewards(broken) == []
        assert "TypeError" in gateway.status(broken)["error_message"]
        (episode,) = episodes(settings)
        assert (episode.stop, episode.reward) == (StopReason.INFRASTRUCTURE, None)
        assert "status 400" in episode.error

    with scripted_server(lambda _: Reply(400, {"error": "no"})) as endpoint, controller(settings, gateway.key):
        gateway.serve_model(endpoint)
        asyncio.run(scenario())


@pytest.mark.slow
def test_a_killed_controller_is_replaced_and_a_stopped_one_reports_what_it_cut_off(
    gateway: Gateway, settings: Path, row: dict[str, Any]
) -> None:
    answered = threading.Event()

    def hang(_: dict[str, Any]) -> Reply:
        answered.wait(60)
        return Reply(400)

    async def cut_off(end: Callable[[], Any]) -> str:
        (rollout,) = gateway.queue(row)
        await until(lambda: gateway.state(rollout), lambda state: state == "running")
        end()
        return rollout

    with scripted_server(hang) as endpoint:
        gateway.serve_model(endpoint)
        with controller(settings, gateway.key):
            killed = asyncio.run(cut_off(lambda: kill_child("stage2_grpo.rollouts.controller")))
        assert gateway.state(killed) == "running"
        assert episodes(settings) == []
        with controller(settings, gateway.key):
            assert asyncio.run(gateway.ended(killed)) == ["failed"]
            assert "earlier controller" in gateway.status(killed)["error_message"]
            stopped = asyncio.run(cut_off(lambda: None))
        assert gateway.status(stopped)["error_message"] == "the controller was stopped"
        assert [episode.reward for episode in episodes(settings)] == [None]
        answered.set()


def kill_child(module: str) -> None:
    for process in psutil.Process().children(recursive=True):
        if module in process.cmdline() and "supervise.py" not in " ".join(process.cmdline()):
            os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_stock_agent_class_posts_the_same_reward(
    gateway: Gateway, settings: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (rollout,) = gateway.queue(row)
    monkeypatch.setenv("FIRSTCALL_QUESTION", json.dumps(row))
    monkeypatch.setenv("FIRSTCALL_SETTINGS", str(settings))
    monkeypatch.setenv("AGL_KEY", gateway.key)
    monkeypatch.setenv("AGL_OPENAI_BASE_URL", f"{gateway.url}/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1")
    monkeypatch.setenv("AGL_EVENT_URL", f"{gateway.url}/api/rollouts/{rollout}/attempt/0/events")
    with scripted_server(model(settings, *SPEECH)) as endpoint:
        gateway.serve_model(endpoint)
        asyncio.run(SqlAgent().run())
    assert gateway.rewards(rollout) == [1.0]
    with scripted_server(lambda _: Reply(400)) as endpoint:
        gateway.serve_model(endpoint)
        with pytest.raises(RuntimeError, match="infrastructure failure"):
            asyncio.run(SqlAgent().run())
    assert gateway.rewards(rollout) == [1.0]


def test_the_stock_agent_class_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIRSTCALL_SETTINGS", raising=False)
    with pytest.raises(UserError, match="FIRSTCALL_SETTINGS is not set"):
        asyncio.run(SqlAgent().run())


def test_settings_survive_the_file(tmp_path: Path) -> None:
    saved = AgentSettings("http://127.0.0.1:1", tmp_path, load_config(ROOT / "pipeline.yaml", "cpu"), tmp_path / "e")
    saved.save(tmp_path / "agents.json")
    assert AgentSettings.load(tmp_path / "agents.json") == saved


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"gateway_url": 1}'])
def test_an_unusable_settings_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "agents.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"agents\.json"):
        AgentSettings.load(file)


def test_fields_added_by_the_trainer_are_left_out(row: dict[str, Any]) -> None:
    assert question_of(row).gold_sql == SQL
    with pytest.raises(TypeError, match="gold_sql"):
        question_of({key: value for key, value in row.items() if key != "gold_sql"})
