"""What the model is told: one short system prompt and the tool schemas, made from the registry of tools.

Every token here is paid in each turn of each episode, so the text says only what a model cannot find out by itself.
Changing it changes what stage 1 teaches: run both stages again.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.agent.tools import REVISIONS, Tool, load_function, registry
from shared.config.schema import AgentConfig
from shared.records import Message

_PROMPT = """You answer questions about a SQLite database with tools.
{steps}
Then answer in one short sentence without a tool call. Your last successful query is your submission, \
unless the answer holds a ```sql block."""


@dataclass(frozen=True)
class Prompts:
    """What an agent with these tools is told."""

    system: str
    tools: list[dict[str, Any]]  # schemas
    mark: list[Any]  # everything about tools and prompts that shapes an episode, for fingerprints

    def opening(self, question: str) -> list[Message]:
        """The conversation before the model's first turn: system prompt, then the question."""
        return [{"role": "system", "content": self.system}, {"role": "user", "content": question}]


def prompts_of(agent: AgentConfig) -> Prompts:
    """The prompts of a run, with the tools that agent.tools adds."""
    return _prompts(agent.tools)


@cache
def _prompts(own: str | None) -> Prompts:
    tools = [*registry(own).values()]
    system = _PROMPT.format(steps="\n".join(f"{i}. {tool.step}" for i, tool in enumerate(tools, start=1)))
    schemas = [_schema(tool) for tool in tools]
    modules = {inspect.getfile(load_function("agent.tools", name)) for name in (own or "").replace(",", " ").split()}
    sources = [hashlib.sha256(Path(module).read_bytes()).hexdigest() for module in sorted(modules)]
    return Prompts(system, schemas, [system, schemas, *REVISIONS, *sources])


def _schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": {
                "type": "object",
                "properties": {tool.argument: {"type": "string", "description": tool.meaning}},
                "required": [tool.argument],
            },
        },
    }


BUILT_IN = _prompts(None)
SYSTEM_PROMPT, TOOLS, opening_messages = BUILT_IN.system, BUILT_IN.tools, BUILT_IN.opening
"""The prompts without own tools, as tests of chat templates and fixed probe texts use them."""
