"""One question for the agent loop, and how to play it against any server."""

from __future__ import annotations

from typing import Any

from shared.agent.chat_client import ChatClient
from shared.agent.episode import run_episode
from shared.agent.tools import Toolbox
from shared.config.schema import AgentConfig
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, Question, ToolCall
from shared.tool_calls import render_turn

QUESTION = Question("q1", "insurance", "How many claims are there?", "SELECT count(*) FROM claims", "insurance.sqlite")
LIMITS = AgentConfig(max_turns=8, max_turn_tokens=400, context_tokens=20_000, observation_tokens=200, tools=None)


def observing(tokens: int) -> AgentConfig:
    return LIMITS.model_copy(update={"observation_tokens": tokens})


COUNT = "SELECT count(*) FROM claims"


async def episode(
    base_url: str, toolbox: Toolbox, tokenizer: Tokenizer, limits: AgentConfig = LIMITS, **options: Any
) -> Episode:
    async with ChatClient(base_url, **options) as chat:
        return await run_episode(
            QUESTION, toolbox=toolbox, chat=chat, tokenizer=tokenizer, limits=limits, temperature=0.0
        )


def search(query: str = "claims") -> ToolCall:
    return ToolCall("search_schema", {"query": query})


def sql(statement: str = COUNT) -> ToolCall:
    return ToolCall("execute_sql", {"sql": statement})


def says(*calls: ToolCall, content: str = "") -> str:
    return render_turn(content, calls)
