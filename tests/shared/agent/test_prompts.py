"""The opening of every episode."""

from __future__ import annotations

import json

from shared.agent.prompts import SYSTEM_PROMPT, TOOLS, opening_messages


def test_an_episode_opens_with_the_system_prompt_and_the_question() -> None:
    assert opening_messages("How many claims?") == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "How many claims?"},
    ]


def test_each_tool_takes_one_required_text() -> None:
    taken = {
        tool["function"]["name"]: [
            (name, spec["type"]) for name, spec in tool["function"]["parameters"]["properties"].items()
        ]
        for tool in TOOLS
    }
    assert taken == {
        "search_schema": [("query", "string")],
        "get_columns": [("table", "string")],
        "execute_sql": [("sql", "string")],
    }
    for tool in TOOLS:
        parameters = tool["function"]["parameters"]
        assert parameters["required"] == list(parameters["properties"])


def test_the_prompt_names_every_tool_and_stays_short() -> None:
    assert all(tool["function"]["name"] in SYSTEM_PROMPT for tool in TOOLS)
    assert len(SYSTEM_PROMPT) < 450  # about 95 tokens of SmolLM2 or Qwen2.5
    assert len(json.dumps(TOOLS)) < 900
