"""Kinds of faults that people reported about tool-call parsers: each is a rule of the grammar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.agent.prompts import TOOLS
from shared.records import ToolCall
from shared.tool_calls import parse, render_call
from shared.tool_calls.report import cuts, streamed_result
from tests.shared.tool_calls.tool_call_examples import COLUMNS, COLUMNS_JSON, QUERY, QUERY_JSON, sql

COUNT = sql("SELECT count(*) FROM orders")


def assert_read(text: str, calls: list[ToolCall], tools: list[dict[str, Any]] = TOOLS) -> None:
    parsed = parse(text, tools)
    assert list(parsed.calls) == calls
    for pieces in cuts(text):
        assert streamed_result(pieces, tools) == parsed


@pytest.mark.parametrize("form", ["{words}\n{call}", "{words}\n```json\n{call}\n```"])
@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("Under no circumstances should this be sent:", 0),
        ("Hypothetically, one could write:", 0),
        ("Please do not treat this as a request:", 0),
        ("We discarded this query:", 0),
        ("This is what got rejected:", 0),
        ("Someone might issue:", 0),
        ("Rather than sending this:", 0),
        ("For illustration only:", 0),
        ("I need the columns:", 1),
        ("Let me check if the table exists:", 1),
        ("Let me find the schools that do not have a charter:", 1),
        ("I would like to look at the schema:", 1),
        ("Let me try this instead:", 1),
        ("Here is the query I created:", 1),
    ],
)
def test_without_tags_a_doubtful_main_clause_makes_the_call_text(words: str, runs: int, form: str) -> None:
    call = '{"name": "execute_sql", "arguments": {"sql": "DELETE FROM claims"}}'
    assert len(parse(form.format(words=words, call=call), TOOLS).calls) == runs


@pytest.mark.parametrize(
    "form", ["{words}\n{call}", "{words}\n```json\n{call}\n```\n", "{words}\n\n```\n{call}\n```\nSo."]
)
@pytest.mark.parametrize(
    "words",
    [
        "I will not run this:",
        "I won’t execute this query:",
        "I already ran this query:",
        "I refuse to make this call:",
        "I'm not going to run:",
        "You asked me to send it, but I cannot:",
        "This query was executed before:",
        "Earlier I called:",
        "Do not run this:",
        "I have already run:",
        "Rejected:",
        "I did not run this query.",
    ],
)
def test_a_refused_or_past_call_is_not_run(words: str, form: str) -> None:
    text = form.format(words=words, call=QUERY_JSON)
    assert parse(text, TOOLS).content == text
    assert_read(text, [])


LEAD_INS = yaml.safe_load((Path(__file__).parent / "lead_ins.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("form", ["{words}\n{call}", "{words}\n\n```json\n{call}\n```"])
def test_unseen_words_before_a_call_decide_whether_it_is_made(form: str) -> None:
    """`missed` names those that are wrongly run."""
    runs = {words for group in LEAD_INS.values() for words in group
            if parse(form.format(words=words, call=QUERY_JSON), TOOLS).calls}  # fmt: skip
    assert {*LEAD_INS["made"]} <= runs
    assert runs.isdisjoint(LEAD_INS["not_made"])


@pytest.mark.parametrize(
    "words",
    [
        "I don't know the columns yet, so I look at them:",
        "I could not find the table. Let me look again:",
        "The last query was wrong, now:",
        "I ran the search and now call:",
        "I will not guess, but look at the columns:",
    ],
)
def test_a_call_is_run_where_the_last_clause_acts(words: str) -> None:
    assert_read(f"{words}\n```json\n{COLUMNS_JSON}\n```", [COLUMNS])


@pytest.mark.parametrize(
    "body",
    [
        "<function=execute_sql>\nSELECT id FROM t WHERE a<b\n",
        "<function=execute_sql>\n<parameter=sql>\nSELECT id",
        "<function=execute_sql>\n<query>SELECT 1</query>\n</function>",
        "{sql: SELECT 1}",
        "execute_sql(sql=query)",
        "<invoke>SELECT 1</invoke>",
        "SELECT 1",
        "",
        "<function=>\n</function>",
    ],
)
@pytest.mark.parametrize("close", ["\n</tool_call>", ""])
def test_nothing_explicit_ends_without_a_call_or_a_sentence(body: str, close: str) -> None:
    text = f"<tool_call>\n{body}{close}"
    parsed = parse(text, TOOLS)
    assert parsed.calls or parsed.malformed
    assert streamed_result([*text], TOOLS) == parsed


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("execute_sql\nSELECT count(*) FROM orders", COUNT),
        ('execute_sql\n{"sql": "SELECT 1"}', QUERY),
        ('execute_sql {"sql": "SELECT 1"}', QUERY),
        ("execute_sql\n```sql\nSELECT 1\n```", QUERY),
        ("I look.\n\nget_columns\nclaims", COLUMNS),
        ("<tool_call>\n<function=execute_sql>SELECT count(*) FROM orders\n</parameter></function></tool_call>", COUNT),
        (
            "<tool_call>\n<parameter=execute_sql>\n<parameter=sql>\nSELECT 1\n</parameter>\n</function>\n</tool_call>",
            QUERY,
        ),
        ("<function=execute_sql>\n<parameter=sql>\nSELECT 1\n</parameter>}\n</function>", QUERY),
        ("<function=execute_sql>\n<parameter=sql>\nSELECT 1\n</parameter> done\n</function>", QUERY),
        ('<tool_call>\n{"name": "execute_sql", "arguments": "<sql>SELECT 1</sql>"}\n</tool_call>', QUERY),
        (f"[tool_call]\n{QUERY_JSON}\n[/tool_call]", QUERY),
        (f"I count.\n[TOOL_CALL]{QUERY_JSON}[/TOOL_CALL]", QUERY),
        (f"<|tool_call|>\n{QUERY_JSON}\n<|/tool_call|>", QUERY),
        ('get_columns(table: "claims")', COLUMNS),
        ('I look.\n\nget_columns("claims");', COLUMNS),
        ('get_columns("claims") I have looked at the columns.', COLUMNS),
        ('```python\nprint(default_api.get_columns(table="claims"))\n```', COLUMNS),
    ],
)
def test_a_call_in_a_reported_form_is_read(text: str, call: ToolCall) -> None:
    assert_read(text, [call])


@pytest.mark.parametrize(
    "text",
    [
        "execute_sql\nThis tool runs a query.",
        "search_schema\nget_columns\nexecute_sql",
        "The tools are:\n- execute_sql\n- get_columns",
        "[tool_call] is the marker that they use.",
    ],
)
def test_a_name_or_a_marker_alone_is_no_call(text: str) -> None:
    assert_read(text, [])


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (INTEGER, "4", 4),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "4", 4),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "true", True),
        ({"$ref": "#/$defs/limit"}, "4", 4),
        ({"type": ["number", "null"]}, "1.5", 1.5),
        ({"type": "array"}, '["id", "total",]', ["id", "total"]),
        ({"type": "array"}, "['id', 'total']", ["id", "total"]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        (INTEGER, "None", None),
        ({"type": "string"}, "None", "None"),
        ({"type": "string"}, "2024", "2024"),
        ({"type": "string"}, "    return x", "    return x"),
        ({"type": "string"}, "\nSELECT 1\n", "\nSELECT 1\n"),
        ({"anyOf": [{"type": "string"}, INTEGER]}, "4", "4"),
    ],
)
def test_values_in_xml_get_the_types_of_the_schema_and_keep_their_text(schema: Any, written: str, value: Any) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"limit": INTEGER}}
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert_read(text, [ToolCall("f", {"x": value})], [{"name": "f", "parameters": parameters}])


def test_an_indented_layout_is_not_part_of_a_value() -> None:
    text = "<function=execute_sql>\n  <parameter=sql>\n    SELECT 1\n      FROM t\n  </parameter>\n</function>"
    assert_read(text, [sql("SELECT 1\n  FROM t")])


def test_a_slip_in_one_of_several_escaped_quotes_is_mended() -> None:
    written = '{"name": "execute_sql", "arguments": {"sql": "SELECT \\"id\\", \\"total" FROM \\"orders\\""}}'
    assert_read(f"<tool_call>\n{written}\n</tool_call>", [sql('SELECT "id", "total" FROM "orders"')])
    assert_read(render_call(QUERY), [QUERY])
