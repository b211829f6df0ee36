"""LangGraph's prebuilt tool-calling agent on our tools, trained like the built-in loop.

    uv pip install --python .venv/bin/python --no-deps --require-hashes -r requirements/optional.txt
    python run_pipeline.py --set grpo.agent=stage2_grpo.examples.langgraph_agent:play

Prompt and tool schemas are those that stage 1 taught (shared/agent/prompts.py), so that the model is at home from the
first step.
"""

from __future__ import annotations

import contextlib
from typing import Any

from langchain_core.tools import BaseTool, StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent
from pydantic import SecretStr

from shared.agent.prompts import prompts_of
from stage2_grpo.rollouts.custom_agent import Assignment, RecordingTools


async def play(task: Assignment) -> None:
    """Answer the question; the gateway keeps what was said."""
    model = ChatOpenAI(
        model="auto",
        base_url=task.base_url,
        api_key=SecretStr(task.api_key),
        timeout=task.call_timeout_seconds,
        max_retries=3,
        extra_body={"max_tokens": task.limits.max_turn_tokens},
    )
    prompts = prompts_of(task.limits)
    tools = [_tool(schema["function"], task.tools) for schema in prompts.tools]
    agent = create_react_agent(model.bind_tools(prompts.tools), tools, prompt=prompts.system)
    steps = 2 * task.limits.max_turns  # a turn is one step of the model and one of its tools
    with contextlib.suppress(GraphRecursionError):  # the last allowed turn still asked for a tool
        await agent.ainvoke({"messages": [("user", task.question.question)]}, {"recursion_limit": steps})


def _tool(function: dict[str, Any], tools: RecordingTools) -> BaseTool:
    def run(**arguments: Any) -> str:
        return tools.run(function["name"], arguments)

    return StructuredTool.from_function(
        run, name=function["name"], description=function["description"], args_schema=function["parameters"]
    )
