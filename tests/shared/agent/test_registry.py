"""Own tools beside the built-in ones, from one setting to every place that shows or runs them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.agent.prompts import SYSTEM_PROMPT, TOOLS, prompts_of
from shared.agent.tools import REVISIONS, Toolbox
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, ToolCall
from shared.sql.database import Database
from tests.shared.episodes import LIMITS, says
from tests.shared.examples import insurance

GLOSSARY = LIMITS.model_copy(update={"tools": "shared.agent.glossary:lookup_term"})
HERE = __name__


def count_rows(table: str, database: Database) -> str:
    """Number of rows."""
    return str(database.execute(f'SELECT count(*) FROM "{table}"').rows[0][0])


def fail(text: str) -> str:
    """Raise."""
    raise ZeroDivisionError


def give_a_number(text: str) -> int:
    """No text."""
    return 7


def silent(text: str) -> str:
    return text


def search_schema(text: str) -> str:
    """Takes a built-in name."""
    return text


def own(name: str) -> str:
    return f"{HERE}:{name}"


def box(tmp_path: Path, tokenizer: Tokenizer, *names: str) -> Toolbox:
    agent = LIMITS.model_copy(update={"tools": ", ".join(map(own, names))})
    return Toolbox(insurance(tmp_path), tokenizer, agent)


def test_an_own_tool_stands_in_prompt_and_schemas_after_the_built_in_ones() -> None:
    prompts = prompts_of(GLOSSARY)
    assert "4. lookup_term: Meaning of a term in SQL.\nThen answer" in prompts.system
    assert prompts.tools[:3] == TOOLS
    assert prompts.tools[3]["function"] == {
        "name": "lookup_term",
        "description": "Meaning of a term in SQL.",
        "parameters": {
            "type": "object",
            "properties": {"term": {"type": "string", "description": "Term of the question."}},
            "required": ["term"],
        },
    }


def test_without_own_tools_everything_is_as_before() -> None:
    assert prompts_of(LIMITS).mark == [SYSTEM_PROMPT, TOOLS, *REVISIONS]


def test_the_mark_changes_with_the_source_of_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    marks = []
    for number in (1, 2):
        (tmp_path / f"tool_{number}.py").write_text(f'def f(x):\n    """Same."""\n    return "{number}"\n')
        marks.append(prompts_of(LIMITS.model_copy(update={"tools": f"tool_{number}:f"})).mark)
    assert marks[0] != marks[1]
    assert marks[0][:2] == marks[1][:2]


def test_a_model_calls_an_own_tool_in_an_episode(
    play: Callable[..., Episode], toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolbox, "_tools", Toolbox(toolbox.database, toolbox._tokenizer, GLOSSARY)._tools)
    known, unknown = (ToolCall("lookup_term", {"term": term}) for term in ("Average", "churn"))
    played = play(says(known, unknown), "Done.", limits=GLOSSARY)
    assert played.turns[0].ok == (True, False)
    assert played.turns[0].observations[0] == "avg(x); rows where x is NULL do not count."
    assert played.turns[0].observations[1] == "Error: lookup_term has no answer for 'churn'."
    assert "lookup_term" in played.messages[0]["content"]


def test_an_own_tool_may_query_the_database_in_its_sandbox(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tools = box(tmp_path, tokenizer, "count_rows")
    assert tools.run(ToolCall("count_rows", {"table": "claims"})).text == "3"
    assert tools.run(ToolCall("count_rows", {"table": "clams"})).text == "Error: no such table: clams"


@pytest.mark.parametrize(
    ("name", "problem"), [("fail", "failed with ZeroDivisionError"), ("give_a_number", "returned 7")]
)
def test_a_faulty_tool_is_not_the_models_mistake(tmp_path: Path, tokenizer: Tokenizer, name: str, problem: str) -> None:
    with pytest.raises(UserError, match=rf"The tool \S+:{name} of agent.tools {problem}"):
        box(tmp_path, tokenizer, name).run(ToolCall(name, {"text": "x"}))


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("no_such_module:f", "cannot be loaded"),
        ("json:nothing", "cannot be loaded"),
        ("json:__doc__", "not a function"),
        (own("silent"), "needs a docstring"),
        (own("search_schema"), "stands twice"),
        (f"{own('fail')},{own('fail')}", "stands twice"),
    ],
)
def test_a_setting_that_gives_no_tool_is_named(tools: str, problem: str) -> None:
    with pytest.raises(UserError, match=rf"agent\.tools .*{problem}"):
        prompts_of(LIMITS.model_copy(update={"tools": tools}))


def test_a_changed_answer_of_a_built_in_tool_is_noted(toolbox: Toolbox) -> None:
    """When this fails, a tool answers differently: add a phrase to REVISIONS, so that stages run again, and a hash."""
    calls = [
        *(("search_schema", "query", text) for text in ("claim amounts by city", "zebra", "policies")),
        *(("get_columns", "table", text) for text in ("claims", "customers", "clams")),
        *(
            ("execute_sql", "sql", text)
            for text in (
                "SELECT * FROM policies",
                "SELECT nothing FROM claims",
                "SELECT year(1)",
                "PRAGMA x",
                "DROP TABLE claims",
            )
        ),
        ("execute_sql", "sql", "SELECT * FROM policies"),
        ("unknown", "x", "y"),
    ]  # fmt: skip
    answers = [toolbox.run(ToolCall(name, {argument: text})).text for name, argument, text in calls]
    digest = hashlib.sha256(json.dumps([*REVISIONS, *answers]).encode()).hexdigest()[:12]
    assert digest == "4fc55693133f", answers
