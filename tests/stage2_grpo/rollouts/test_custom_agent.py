"""Other people's agents: the episode read from the gateway's record is the one the built-in loop would have made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.agent.prompts import TOOLS, opening_messages
from shared.agent.tools import load_function
from shared.config.load import load_config
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, Question, Reward, StopReason, ToolCall
from shared.tool_calls import render_turn
from stage2_grpo.rollouts.agent import RolloutTask, make_handler
from stage2_grpo.rollouts.custom_agent import Assignment
from tests.scripted_server import Reply, ScriptedModel
from tests.shared.examples import insurance_file, tokenizer_folder
from tests.stage2_grpo.rollouts.scripted_gateway import KEY, scripted_gateway

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
SQL = "SELECT count(*) FROM claims"
SPEECH = [
    render_turn("", [ToolCall("search_schema", {"query": "claims"})]),
    render_turn("", [ToolCall("execute_sql", {"sql": "SELECT nothing"})]),
    render_turn("", [ToolCall("execute_sql", {"sql": SQL})]),
    "There are 3 claims.",
]


async def plain_agent(task: Assignment) -> None:
    """The shortest loop that can be written with an HTTP client."""
    messages = opening_messages(task.question.question)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {task.api_key}"}) as http:
        for _ in range(task.limits.max_turns):
            body = {"messages": messages, "tools": TOOLS, "max_tokens": task.limits.max_turn_tokens}
            answer = await http.post(f"{task.base_url}/chat/completions", json=body)
            message = answer.raise_for_status().json()["choices"][0]["message"]
            messages.append(message)
            if not message["tool_calls"]:
                return
            for call in message["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                text = await asyncio.to_thread(task.tools.run, call["function"]["name"], arguments)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


async def faulty_agent(task: Assignment) -> None:
    """Plays well and then has a bug."""
    await plain_agent(task)
    raise KeyError("a bug")


async def idle_agent(task: Assignment) -> None:
    """Asks the model nothing."""


def played(
    folder: Path, agent: str | None, *says: str, model: Callable[[Any], Any] | None = None
) -> tuple[Reward | None, Episode]:
    """Reward of one episode on the insurance database, and its record without times and what only some agents run."""
    settings = ["agent.context_tokens=8000", "agent.max_turn_tokens=400"]
    settings += [f"grpo.agent={agent}"] if agent else []
    tokenizer, rows = Tokenizer.from_folder(tokenizer_folder(folder)), []
    handler = make_handler(load_config(PIPELINE, "cpu", settings), folder, rows.append)
    question = Question("q1", "insurance", "How many claims are there?", SQL, str(insurance_file(folder)))
    with scripted_gateway() as gateway:
        gateway.model = model or ScriptedModel(tokenizer, *says)
        (name,) = gateway.queue(vars(question))
        url = f"{gateway.url}/proxy/rollout/{name}/attempt/0/mode/train/openai/v1"
        reward = asyncio.run(handler(RolloutTask(name, vars(question), True, url, KEY, 60)))
    turns = tuple(replace(turn, observations=(), ok=()) for turn in rows[0].turns)
    return reward, replace(rows[0], turns=turns, messages=[], rollout_id="", seconds=0.0, reward_seconds=0.0)


@pytest.mark.parametrize("speech", [SPEECH, SPEECH[:1], ["I do not know."], [*SPEECH[:2], "```sql\nSELECT 3\n```"]])
def test_reward_and_record_are_those_of_the_built_in_agent(tmp_path: Path, speech: list[str]) -> None:
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    theirs = played(tmp_path / "theirs", f"{__name__}:plain_agent", *speech)
    assert theirs == played(tmp_path / "ours", None, *speech)


def test_a_good_episode_earns_the_full_reward(tmp_path: Path) -> None:
    reward, record = played(tmp_path, f"{__name__}:plain_agent", *SPEECH)
    assert reward is not None
    assert reward.total == 1.0
    assert (record.stop, [turn.merged for turn in record.turns]) == (StopReason.ANSWERED, [None, True, True, True])
    assert [len(turn.calls) for turn in record.turns] == [1, 1, 1, 0]


def test_a_prompt_that_outgrows_the_server_is_an_ending_whatever_the_agent_raises(tmp_path: Path) -> None:
    script = ScriptedModel(Tokenizer.from_folder(tokenizer_folder(tmp_path)), *SPEECH)

    def model(request: dict[str, Any]) -> Any:
        refusal = Reply(400, {"error": {"message": "This model's maximum context length is 10 tokens."}})
        return refusal if len(script.requests) == 2 else script(request)

    reward, record = played(tmp_path, f"{__name__}:plain_agent", model=model)
    assert (record.stop, len(record.turns), record.error) == (StopReason.CONTEXT_LIMIT, 2, "")
    assert reward is not None
    assert 0 < reward.total < 1


@pytest.mark.parametrize(
    ("agent", "says", "error"),
    [
        ("faulty_agent", SPEECH, "KeyError: 'a bug'"),
        ("idle_agent", SPEECH, "the agent asked the model nothing"),
    ],
)
def test_an_agent_that_fails_is_lost_not_wrong(tmp_path: Path, agent: str, says: list[str], error: str) -> None:
    reward, record = played(tmp_path, f"{__name__}:{agent}", *says)
    assert (reward, record.stop, record.error, record.reward) == (None, StopReason.INFRASTRUCTURE, error, None)


def test_an_endpoint_that_fails_is_lost_not_wrong(tmp_path: Path) -> None:
    reward, record = played(tmp_path, f"{__name__}:plain_agent", model=lambda request: Reply(500))
    assert (reward, record.stop) == (None, StopReason.INFRASTRUCTURE)
    assert "500" in record.error


@pytest.mark.parametrize(
    "name", ["no_such_module:play", "json:play", "json", "", "stage2_grpo.rollouts.custom_agent:_ROLLOUT"]
)
def test_an_agent_that_cannot_be_loaded_is_named(name: str) -> None:
    with pytest.raises(UserError, match=r"grpo\.agent is "):
        load_function("grpo.agent", name)


def test_an_agent_that_is_no_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent_of_today.py").write_text("async def play(task)\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError, match=r"grpo\.agent is 'agent_of_today:play', .*\(expected ':' \(agent_of_today\.py, line 1\)\)"
    ):
        load_function("grpo.agent", "agent_of_today:play")
