"""The tools for other assistants, through the official MCP client."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from tests.shared.examples import insurance_file, tokenizer_folder
from tests.shared.serving.running import KEY, ROOT, echo, serving

CALLS = [
    ("search_schema", {"query": "claim amount"}, False, 'claims (claim_id, amount): matches "claim", "amount"'),
    ("get_columns", {"table": "claims"}, False, "claims: 3 rows"),
    ("execute_sql", {"sql": "SELECT count(*) FROM claims"}, False, "count(*)\n3\n(1 row)"),
    ("execute_sql", {"sql": "SELECT count(*) FROM claims"}, False, "count(*)\n3\n(1 row)"),  # nothing is remembered
    ("execute_sql", {"sql": "DELETE FROM claims"}, True, "Error: "),
    ("execute_sql", {"sql": "SELECT readfile('/etc/passwd')"}, True, "Error: "),
    ("execute_sql", {}, True, 'Error: execute_sql needs the argument "sql"'),
    ("lookup_term", {"term": "average"}, False, "avg(x); rows"),
    ("no_such_tool", {}, True, "Error: there is no tool"),
]


async def use(client: Client) -> None:
    """List the tools and make every call, all at the same time."""
    listed = await client.list_tools()
    assert [tool.name for tool in listed.tools] == ["search_schema", "get_columns", "execute_sql", "lookup_term"]
    assert listed.tools[3].input_schema["required"] == ["term"]
    found = await asyncio.gather(*(client.call_tool(name, arguments) for name, arguments, _, _ in CALLS))
    for result, (_, _, is_error, text) in zip(found, CALLS, strict=True):
        content: Any = result.content[0]
        assert (result.is_error, content.text[: len(text)]) == (is_error, text)


def test_the_tools_over_http(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            httpx2.AsyncClient(headers=headers, trust_env=False) as http,
            Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
        ):
            await use(client)

    with serving(echo, tmp_path, "agent.tools=shared.agent.glossary:lookup_term") as url:
        asyncio.run(main(url))


@pytest.mark.slow
def test_the_tools_over_stdin_and_stdout(tmp_path: Path) -> None:
    arguments = ["serve", "--stdio", "--database", str(insurance_file(tmp_path)), "--profile", "cpu"]
    arguments += ["--model", str(tokenizer_folder(tmp_path)), "--set", "agent.tools=shared.agent.glossary:lookup_term"]
    arguments += ["--set", "agent.observation_tokens=400"]
    server = StdioServerParameters(
        command=sys.executable, args=[str(ROOT / "run_pipeline.py"), *arguments], cwd=str(ROOT)
    )

    async def main() -> None:
        async with Client(stdio_client(server)) as client:
            await use(client)

    asyncio.run(asyncio.wait_for(main(), 60))
