"""A user's own tool from one setting: traces, training text, evaluation, a GRPO rollout, `ask` and MCP all have it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.config.load import load_config
from shared.config.schema import Config
from shared.evaluation.run import Endpoint, evaluate
from shared.models.chat_template import ChatTemplate
from shared.models.folder import tool_template
from shared.records import Episode, Question, ToolCall, read_episodes
from shared.serving.answering import Agent
from shared.serving.mcp_server import mcp_server
from shared.sql.database import Database
from shared.tool_calls import render_turn
from stage1_sft.synthesize import synthesize
from stage1_sft.traces import with_argument_objects
from stage2_grpo.rollouts.agent import EpisodeRunner
from tests.scripted_server import ScriptedModel, scripted_server
from tests.shared.examples import insurance_file, tiny_tokenizer, tokenizer_folder

PIPELINE = Path(__file__).resolve().parents[1] / "pipeline.yaml"
SQL = "SELECT count(*) FROM claims"
MEANING = "Open means not paid yet."
SAYS = [
    render_turn("", [ToolCall("house_rule", {"word": "open"})]),
    render_turn("", [ToolCall("execute_sql", {"sql": SQL})]),
    "There are 3 claims.",
]


def house_rule(word: str) -> str:
    """What a word means in this house.

    Word of the question.
    """
    return {"open": MEANING}[word.lower()]


@pytest.fixture
def config() -> Config:
    settings = [f"agent.tools={__name__}:house_rule", "agent.context_tokens=20000", "agent.max_turn_tokens=400"]
    settings += ["agent.observation_tokens=400", "evaluate.bootstrap_samples=10"]
    return load_config(PIPELINE, "cpu", settings)


@pytest.fixture
def question(tmp_path: Path) -> Question:
    return Question("q1", "insurance", "How many open claims are there?", SQL, str(insurance_file(tmp_path)))


@pytest.fixture
def model(tmp_path: Path) -> ScriptedModel:
    tokenizer_folder(tmp_path)
    return ScriptedModel(tiny_tokenizer(), *SAYS)


def has_used_it(episode: Episode, model: ScriptedModel) -> bool:
    """Whether the tool was offered to the model in words and as a schema, called, and answered."""
    asked = model.requests[0]
    assert "house_rule: What a word means in this house." in asked["messages"][0]["content"]
    assert [tool["function"]["name"] for tool in asked["tools"]][3:] == ["house_rule"]
    first = episode.turns[0]
    return [call.name for call in first.calls] == ["house_rule"] and first.observations == (MEANING,) and first.ok[0]


def test_a_synthesized_trace_calls_it_and_its_training_text_declares_it(config: Config, question: Question) -> None:
    (trace,), _, _ = synthesize([question], limit=1, config=config, tokenizer=tiny_tokenizer(), label="test")
    messages = [with_argument_objects(message) for message in trace["messages"]]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "house_rule", "arguments": {"word": "open"}}
    text = ChatTemplate(tool_template(), {}).render(trace["messages"], json.loads(trace["tools"]))
    assert '{"name": "house_rule", "description": "What a word means in this house."' in text
    assert render_turn("", [ToolCall("house_rule", {"word": "open"})]) in text
    assert f"<tool_response>\n{MEANING}\n</tool_response>" in text


def test_an_evaluation_plays_with_it(config: Config, question: Question, model: ScriptedModel, tmp_path: Path) -> None:
    with scripted_server(model) as url:
        summary = asyncio.run(evaluate([question], Endpoint(url, tmp_path), config, tmp_path / "evaluation"))
    (episode,) = read_episodes(tmp_path / "evaluation" / "episodes.jsonl")
    assert has_used_it(episode, model)
    assert summary.accuracy
    assert summary.accuracy.mean == 1.0


def test_a_rollout_of_stage_2_plays_with_it_and_earns_its_reward(
    config: Config, question: Question, model: ScriptedModel, tmp_path: Path
) -> None:
    with scripted_server(model) as url:
        episode = asyncio.run(EpisodeRunner(config, tmp_path).run(question, url, "key"))
    assert has_used_it(episode, model)
    assert episode.reward
    assert episode.reward.correct


def test_ask_plays_with_it(config: Config, question: Question, model: ScriptedModel, tmp_path: Path) -> None:
    seen: list[Any] = []
    with scripted_server(model) as url:
        agent = Agent(config, Endpoint(url, tmp_path), Database(question.database, config.sandbox))
        answer = asyncio.run(agent.answer(question.question, seen.append))
    assert (answer.text, answer.rows) == ("There are 3 claims.", [[3]])
    assert next(message["content"] for message in seen if message["role"] == "tool") == MEANING


def test_mcp_clients_get_it(config: Config, question: Question, tmp_path: Path) -> None:
    from mcp.client.client import Client

    tokenizer_folder(tmp_path)
    agent = Agent(config, Endpoint("", tmp_path), Database(question.database, config.sandbox))

    async def use() -> tuple[list[str], str]:
        async with Client(mcp_server(config.agent, agent.toolbox)) as client:
            listed = await client.list_tools()
            content: Any = (await client.call_tool("house_rule", {"word": "open"})).content[0]
            return [tool.name for tool in listed.tools], content.text

    names, text = asyncio.run(use())
    assert names == ["search_schema", "get_columns", "execute_sql", "house_rule"]
    assert text == MEANING
