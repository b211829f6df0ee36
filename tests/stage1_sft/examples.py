"""Questions on the small insurance database that the tests of stage 1 synthesise traces from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from shared.config.load import load_config
from shared.config.schema import Config
from shared.records import Question
from tests.shared.examples import insurance_file

ROOT = Path(__file__).resolve().parents[2]

JOIN = (
    "SELECT customers.full_name FROM policies JOIN customers ON policies.customer_id = customers.customer_id "
    "WHERE policies.kind = 'home'"
)
GOLDS = [
    ("How many claims are there?", "SELECT COUNT(*) FROM claims"),
    ("What is the highest amount of claims?", "SELECT MAX(amount) FROM claims"),
    ("List the city of all customers.", "SELECT city FROM customers"),
    ("Show the full name of customers with policies of kind 'home'.", JOIN),
    (
        "Show the number of policies for each city of the customers.",
        "SELECT customers.city, COUNT(*) FROM policies JOIN customers ON policies.customer_id = customers.customer_id "
        "GROUP BY customers.city",
    ),
    ("How many policies have kind 'car'?", "SELECT COUNT(*) FROM policies WHERE kind = 'car'"),
    ("Which claims have an amount above 1000?", "SELECT claim_id FROM claims WHERE amount > 1000"),
    ("List premium and kind of policies by premium.", "SELECT premium, kind FROM policies ORDER BY premium"),
    (
        "Which customers have no policies?",
        "SELECT full_name FROM customers WHERE customer_id NOT IN (SELECT customer_id FROM policies)",
    ),
]


def questions(folder: Path) -> list[Question]:
    """One question for each of GOLDS, on a database made in `folder`."""
    path = str(insurance_file(folder))
    return [Question(f"q{i}", "insurance", text, sql, path) for i, (text, sql) in enumerate(GOLDS)]


def settings(*overrides: str) -> Config:
    """The CPU profile of the shipped pipeline.yaml with changes, and room for the tests' coarse tokenizer."""
    room = ["agent.observation_tokens=400", "agent.max_turn_tokens=400", "agent.max_turns=8"]
    return load_config(ROOT / "pipeline.yaml", "cpu", [*room, *overrides])


def with_gold(question: Question, sql: str) -> Question:
    return dataclasses.replace(question, gold_sql=sql)


def calls(trace: dict[str, Any]) -> list[tuple[str, bool]]:
    """(tool name, trained) of each call of a trace, in order."""
    return [
        (call["function"]["name"], trained)
        for message, trained in zip(trace["messages"], trace["trained"], strict=True)
        for call in message.get("tool_calls", ())
    ]
