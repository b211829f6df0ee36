"""The agent's tools as an MCP server, for any assistant: the same registry, sandbox and limits, without our model.

A call stands alone: it gets the answer of a fresh toolbox, so nothing is remembered between calls or between clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mcp_types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server

from shared.agent.prompts import prompts_of
from shared.agent.tools import Observation, Toolbox
from shared.config.schema import AgentConfig
from shared.errors import UserError
from shared.records import ToolCall
from shared.serving.answering import Busy
from shared.sql.database import SandboxError

Place = Callable[[], AbstractContextManager[None]]
"""Holds a place among the calls that may run at once; raises when there is none."""


def mcp_server(agent: AgentConfig, toolbox: Callable[[], Toolbox], place: Place = nullcontext) -> Server[Any]:
    """The MCP server; `toolbox` gives a fresh one for each call."""
    tools = [
        types.Tool(name=each["name"], description=each["description"], input_schema=each["parameters"])
        for each in (schema["function"] for schema in prompts_of(agent).tools)
    ]

    async def list_tools(context: Any, request: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    async def call_tool(context: Any, request: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            with place():
                answer = await asyncio.to_thread(toolbox().run, ToolCall(request.name, request.arguments or {}))
        except (UserError, SandboxError, OSError, Busy) as error:
            answer = Observation(f"Error: {error}", ok=False)
        return types.CallToolResult(content=[types.TextContent(text=answer.text)], is_error=not answer.ok)

    return Server("firstcall", on_list_tools=list_tools, on_call_tool=call_tool)


async def serve_stdio(server: Server[Any]) -> None:
    """Serve on stdin and stdout until the client closes them."""
    async with stdio_server() as (requests, answers):
        await server.run(requests, answers, server.create_initialization_options())
