"""The LangGraph example: its episodes earn the rewards and leave the records of the built-in agent's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.agent.prompts import TOOLS
from shared.config.load import load_config
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, Question, StopReason, ToolCall
from shared.tool_calls import parse, render_turn
from stage2_grpo.rollouts.agent import make_handler
from stage2_grpo.rollouts.controller import PooledController
from tests.scripted_server import ScriptedModel, scripted_server
from tests.shared.examples import insurance_file, tokenizer_folder
from tests.stage2_grpo.gateway import Gateway

pytest.importorskip("langgraph")
pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.slow

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
EXAMPLE = "stage2_grpo.examples.langgraph_agent:play"
SQL = "SELECT count(*) FROM claims"
SEARCH = render_turn("", [ToolCall("search_schema", {"query": "claims, größer"})])
TWO_CALLS = render_turn(
    "Now.", [ToolCall("get_columns", {"table": "claims"}), ToolCall("get_columns", {"table": "policies"})]
)
WRONG = render_turn("", [ToolCall("execute_sql", {"sql": "SELECT nothing"})])
RIGHT = render_turn("", [ToolCall("execute_sql", {"sql": SQL})])
NO_TOOL = render_turn("", [ToolCall("drop_table", {"table": "claims"})])


def played(
    gateway: Gateway, folder: Path, agent: str | None, speech: list[str]
) -> tuple[list[float], Episode, list[Any]]:
    """Rewards, record and requests of one episode through controller and gateway."""
    settings = ["agent.context_tokens=8000", "agent.max_turn_tokens=400"]
    settings += [f"grpo.agent={agent}"] if agent else []
    tokenizer = Tokenizer.from_folder(tokenizer_folder(folder))
    # Our parser in vLLM keeps the text beside a call exact, which the stock one does not: then turns would not merge.
    model = ScriptedModel(tokenizer, *speech, parser=lambda text: parse(text, TOOLS))
    rows: list[Episode] = []
    handler = make_handler(load_config(PIPELINE, "cpu", settings), folder, rows.append)
    question = vars(Question("q1", "insurance", "How many claims are there?", SQL, str(insurance_file(folder))))

    async def scenario() -> list[float]:
        controller = PooledController(gateway.url, gateway.key, handler, concurrency=1, poll_seconds=0.05)
        running = asyncio.create_task(controller.run())
        (rollout,) = gateway.queue(question)
        await gateway.ended(rollout)
        controller.stop()
        await running
        return gateway.rewards(rollout)

    with scripted_server(model) as endpoint:
        gateway.serve_model(endpoint)
        rewards = asyncio.run(scenario())
    (row,) = rows
    turns = tuple(replace(turn, observations=(), ok=()) for turn in row.turns)  # not every agent runs the last calls
    row = replace(row, turns=turns, messages=[], rollout_id="", seconds=0.0, reward_seconds=0.0)
    return rewards, row, model.requests


@pytest.mark.parametrize(
    "speech",
    [
        [SEARCH, TWO_CALLS, WRONG, RIGHT, "There are 3 claims."],
        [SEARCH, "```sql\nSELECT 3\n```"],
        ["I do not know."],
        [SEARCH],  # never stops
    ],
    ids=["right", "wrong", "silent", "endless"],
)
def test_reward_and_record_are_those_of_the_built_in_agent(gateway: Gateway, tmp_path: Path, speech: list[str]) -> None:
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    rewards, record, requests = played(gateway, tmp_path / "theirs", EXAMPLE, speech)
    expected, expected_record, own_requests = played(gateway, tmp_path / "ours", None, speech)
    assert (rewards, record) == (expected, expected_record)
    assert requests[0]["tools"] == own_requests[0]["tools"]
    assert all(turn.merged for turn in record.turns[1:])


def test_a_tool_that_does_not_exist_is_a_failed_call(gateway: Gateway, tmp_path: Path) -> None:
    rewards, record, _ = played(gateway, tmp_path, EXAMPLE, [NO_TOOL, RIGHT, "There are 3 claims."])
    assert rewards == [1.0]
    assert (record.stop, [len(turn.calls) for turn in record.turns]) == (StopReason.ANSWERED, [1, 1, 0])
