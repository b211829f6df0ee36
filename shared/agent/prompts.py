"""What the model is told: one short system prompt and three tool schemas.

Every token here is paid in each turn of each episode, so the text says only what a model cannot find out by itself.
Changing it changes what stage 1 teaches: run both stages again.
"""

from __future__ import annotations

from typing import Any

from shared.records import Message

SYSTEM_PROMPT = """You answer questions about a SQLite database with tools.
1. search_schema finds the tables that matter.
2. get_columns shows a table's columns and sample values; copy names and values exactly.
3. execute_sql runs one SELECT; nothing else is allowed. Fix errors and try again.
Then answer in one short sentence without a tool call. Your last successful query is your submission, \
unless the answer holds a ```sql block."""


def _tool(name: str, description: str, argument: str, meaning: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string", "description": meaning}},
                "required": [argument],
            },
        },
    }


TOOLS: list[dict[str, Any]] = [
    _tool("search_schema", "Find tables and columns by keywords.", "query", "Words of the question."),
    _tool("get_columns", "Columns, keys and sample values of one table.", "table", "Table name."),
    _tool("execute_sql", "Run one SELECT on SQLite.", "sql", "The query."),
]


def opening_messages(question: str) -> list[Message]:
    """The conversation before the model's first turn: system prompt, then the question."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
