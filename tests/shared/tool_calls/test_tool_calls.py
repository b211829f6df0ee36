"""The tool-call grammar: what is a call, what stays text, and that both survive a round trip."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from shared.agent.prompts import TOOLS
from shared.records import ToolCall
from shared.tool_calls import Parsed, parse, parse_hermes, render_call, render_turn
from shared.tool_calls.report import streamed_result

COLUMNS = ToolCall("get_columns", {"table": "claims"})
QUERY = ToolCall("execute_sql", {"sql": "SELECT 1"})
COLUMNS_JSON = '{"name": "get_columns", "arguments": {"table": "claims"}}'
QUERY_JSON = '{"name": "execute_sql", "arguments": {"sql": "SELECT 1"}}'


def read(text: str) -> tuple[str, Sequence[ToolCall]]:
    parsed = parse(text, TOOLS)
    return parsed.content, parsed.calls


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (render_call(COLUMNS), "hermes"),
        (f"<tool_call>{COLUMNS_JSON}", "hermes"),
        (f"```xml\n{render_call(COLUMNS)}\n```", "hermes"),
        (f"<tools>\n{COLUMNS_JSON}\n</tools>", "tools_tag"),
        (f"<function_call>{COLUMNS_JSON}</function_call>", "tools_tag"),
        (f"```json\n{COLUMNS_JSON}\n```", "fenced"),
        (f"```\n{COLUMNS_JSON}", "fenced"),
        (f"`{COLUMNS_JSON}`", "fenced"),
        (COLUMNS_JSON, "bare"),
        (f"[{COLUMNS_JSON}]", "bare"),
        (f"  {COLUMNS_JSON}<|im_end|>", "bare"),
    ],
)
def test_a_call_is_read_in_each_form_and_leaves_no_markup(text: str, family: str) -> None:
    assert parse(text, TOOLS) == Parsed("", (COLUMNS,), (), family)


@pytest.mark.parametrize(
    "text",
    [
        render_turn("", [COLUMNS, QUERY]),
        tagged(f"{COLUMNS_JSON}\n{QUERY_JSON}"),
        f"<tools>[{COLUMNS_JSON}, {QUERY_JSON}]</tools>",
        f"```json\n{COLUMNS_JSON}\n```\n\n```json\n{QUERY_JSON}\n```",
        f"{COLUMNS_JSON}{QUERY_JSON}",
        f"{COLUMNS_JSON},\n{QUERY_JSON}",
        f"{COLUMNS_JSON} {render_call(QUERY)}",
    ],
)
def test_several_calls_are_read_in_order(text: str) -> None:
    assert read(text) == ("", (COLUMNS, QUERY))


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "execute_sql", "parameters": {"sql": "SELECT 1"}}',
        '{"arguments": {"sql": "SELECT 1"}, "name": "execute_sql"}',
        '{"name": "execute_sql", "arguments": "{\\"sql\\": \\"SELECT 1\\"}"}',
        '{"name": "execute_sql", "arguments": "SELECT 1"}',
        '{"type": "function", "function": {"name": "execute_sql", "arguments": "{\\"sql\\": \\"SELECT 1\\"}"}}',
        '{"tool_calls": [{"function": {"name": "execute_sql", "arguments": {"sql": "SELECT 1"}}}]}',
    ],
)
def test_other_shapes_of_the_same_call_are_understood(body: str) -> None:
    assert read(body) == read(tagged(body)) == ("", (QUERY,))


@pytest.mark.parametrize(
    ("body", "sql"),
    [
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT 1\nFROM t"}}', "SELECT 1\nFROM t"),
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT 1",},}', "SELECT 1"),
        ("{'name': 'execute_sql', 'arguments': {'sql': 'SELECT \"a\" = \\'b\\''}}", "SELECT \"a\" = 'b'"),
        ('{"name": "execute_sql" "arguments": {"sql": "SELECT 1"}}', "SELECT 1"),
        ('{"name": "execute_sql", // now\n"arguments": {"sql": "SELECT \'//\'"}}', "SELECT '//'"),
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT \'5\\%\'"}}', "SELECT '5\\%'"),
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT \'\\ud83c\\udfb5\'",}}', "SELECT '🎵'"),
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT 1"', "SELECT 1"),
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT "a", "b" FROM t"}}', 'SELECT "a", "b" FROM t'),
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT x = "y""}}', 'SELECT x = "y"'),
        ('{"name": "execute_sql", "arguments": {"sql": """SELECT "a"\nFROM t"""}}', 'SELECT "a"\nFROM t'),
        ('{name: "execute_sql", // now\n arguments: {sql: `SELECT 1`}, # done\n}', "SELECT 1"),
    ],
)
def test_broken_json_is_repaired_where_its_meaning_is_certain(body: str, sql: str) -> None:
    assert read(tagged(body)) == ("", (ToolCall("execute_sql", {"sql": sql}),))


def test_python_values_are_read() -> None:
    (call,) = parse(tagged("{'name': 'x', 'arguments': {'a': True, 'b': None, 'c': [1, -2.5e3, {}]}}"), TOOLS).calls
    assert call.arguments == {"a": True, "b": None, "c": [1, -2500.0, {}]}


@pytest.mark.parametrize("end", range(1, len(render_call(QUERY)) - len("}\n</tool_call>")))
def test_a_cut_call_is_never_a_call(end: int) -> None:
    for text in (render_call(QUERY)[:end], QUERY_JSON[: min(end, len(QUERY_JSON) - len("}}"))]):
        assert parse(text, TOOLS).calls == ()
        assert parse(text, TOOLS).content == text


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Alice", "total": 3}',
        '[{"name": "execute_sql", "calls": 41}]',
        '{"name": "send_email", "arguments": {"to": "ops"}}',
        f"The call would be {QUERY_JSON} here.",
        f"{QUERY_JSON} is the format.",
        f"| 1 | {QUERY_JSON} |",
        f"The form is `{render_call(QUERY)}`.",
        f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>",
        json.dumps(TOOLS, indent=2),
        "<tools>\n" + json.dumps({"name": "list_tables", "arguments": {}}) + "\n</tools>",
        f"```python\nrows = run({QUERY_JSON})\n```",
        f"```text\nFor example:\n{render_call(QUERY)}\n```",
        f"<think>maybe {render_call(QUERY)}</think>Three claims.",
        "```sql\nSELECT 1;\n```\nThree claims.",
        "The log holds <tool_call> but no end.",
        "",
        "\n",
    ],
)
def test_what_is_no_call_stays_text_as_it_is(text: str) -> None:
    assert parse(text, TOOLS) == Parsed(text, (), (), "")


def test_without_offered_tools_json_is_text() -> None:
    assert parse(QUERY_JSON, []).calls == ()


def test_an_explicit_call_of_an_unknown_tool_or_with_wrong_arguments_is_passed_on() -> None:
    calls = [ToolCall("drop_table", {"table": "claims"}), ToolCall("execute_sql", {"query": 1}), ToolCall("x", {})]
    assert read(render_turn("", calls)) == ("", tuple(calls))
    assert read(tagged('{"name": "x"}')) == ("", (calls[2],))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (tagged("search the schema"), "not JSON"),
        (tagged('{"name": "execute_sql", "arguments": {"sql": SELECT 1}}'), "not valid JSON"),
        ('<tool_call>\n{"name": "execute_sql", "arguments": {"sql": "SELECT', "cut off"),
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT', "cut off"),
        (tagged('{"arguments": {"sql": "SELECT 1"}}'), "names no tool"),
        (tagged("[]"), "names no tool"),
        (tagged(json.dumps(TOOLS[0])), "repeats the definition"),
        (tagged('{"name": "execute_sql", "arguments": ["SELECT 1"]}'), "not a JSON object"),
        (tagged('{"name": "execute_sql", "arguments": {"sql": "\\ud83c"}}'), "surrogate"),
        ('{"name": "execute_sql", "arguments": {}}', 'needs the argument "sql"'),
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT 1", "limit": 3}}', 'no argument "limit"'),
        ('```json\n{"name": "execute_sql", "arguments": {"sql": [1]}}\n```', "must be of type string"),
    ],
)
def test_what_was_meant_as_a_call_is_explained_and_stays_in_the_content(text: str, reason: str) -> None:
    parsed = parse(text, TOOLS)
    assert (parsed.content, parsed.calls) == (text, ())
    assert len(parsed.malformed) == 1
    assert reason in parsed.malformed[0]


def test_a_broken_call_hides_no_good_one_and_is_explained_once() -> None:
    broken = tagged('{"name": "execute_sql", "arguments": {"sql": "SELECT}')
    assert read(f"{broken}\n{render_call(COLUMNS)}") == (broken, (COLUMNS,))
    parsed = parse(f"<tool_call>\n{COLUMNS_JSON}\n" + '{"name": "execute_sql", "arguments": }\n</tool_call>', TOOLS)
    assert (parsed.calls, len(parsed.malformed)) == ((COLUMNS,), 1)


@pytest.mark.parametrize("sql", ["'</tool_call>'", "'<tool_call>'", "'```'", '\'{"name": "x"}\'', "'</tools>'"])
def test_markup_inside_a_string_is_part_of_the_string(sql: str) -> None:
    call = ToolCall("execute_sql", {"sql": f"SELECT {sql}"})
    body = render_call(call).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    for text in (render_call(call), f"<tools>{body}</tools>", f"```json\n{body}\n```", body):
        assert read(text) == ("", (call,))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("I look.\n" + render_call(QUERY), "I look."),
        ("I look.\n\n" + render_call(QUERY), "I look.\n"),
        ("I look." + render_call(QUERY), "I look."),
        (f"First\n{render_call(QUERY)}\nthen\n", "First\nthen"),
        (f"{render_call(QUERY)}\nDone.", "Done."),
        (f"Plan:\n```sql\nSELECT 2\n```\n{render_call(QUERY)}", "Plan:\n```sql\nSELECT 2\n```"),
        (f'```json\n{{"a": 1}}\n```\nand\n```json\n{QUERY_JSON}\n```', '```json\n{"a": 1}\n```\nand'),
        (
            f"<think>no {render_call(COLUMNS)}</think>\n{render_call(QUERY)}",
            f"<think>no {render_call(COLUMNS)}</think>",
        ),
    ],
)
def test_text_around_a_call_survives(text: str, content: str) -> None:
    assert read(text) == (content, (QUERY,))


@pytest.mark.parametrize("written", ["1e999", '"1e999"', '"NaN"'])
def test_a_number_that_json_cannot_hold_is_explained_whole_and_streamed(written: str) -> None:
    tools = [{"name": "above", "parameters": {"type": "object", "properties": {"amount": {"type": "number"}}}}]
    text = tagged(f'{{"name": "above", "arguments": {{"amount": {written}}}}}')
    parsed = parse(text, tools)
    assert (parsed.calls, parsed.malformed) == ((), ("The arguments of above hold a number that is too large.",))
    assert streamed_result(text, tools) == parsed


def test_the_stock_grammar_reads_what_we_teach() -> None:
    parsed = parse_hermes(render_turn("I look.", [COLUMNS, QUERY]))
    assert parsed == Parsed("I look.\n", (COLUMNS, QUERY), (), "hermes")


@pytest.mark.parametrize(
    "text",
    [
        "Three claims.",
        f"<tools>{QUERY_JSON}</tools>",
        QUERY_JSON,
        tagged('{"name": "execute_sql", "parameters": {"sql": "SELECT 1"}}'),
        tagged('{"name": "execute_sql", "arguments": {"sql": "SELECT 1\nFROM t"}}'),
        render_call(QUERY) + tagged("oops"),
        tagged("[1]"),
        tagged("7"),
        tagged('{"name": 7, "arguments": {}}'),
    ],
)
def test_the_stock_grammar_finds_all_calls_or_none(text: str) -> None:
    assert parse_hermes(text) == Parsed(text, (), (), "")


def test_the_stock_grammar_reads_a_call_without_closing_tag_but_no_string_arguments() -> None:
    assert parse_hermes(f"<tool_call>{QUERY_JSON}").calls == (QUERY,)
    assert parse_hermes(tagged('{"name": "execute_sql", "arguments": "SELECT 1"}')).calls == ()


def test_a_turn_is_rendered_as_the_chat_template_does() -> None:
    call = ToolCall("execute_sql", {"sql": "SELECT 'Zürich\n\"x\"'"})
    assert render_call(call) == (
        '<tool_call>\n{"name": "execute_sql", "arguments": {"sql": "SELECT \'Zürich\\n\\"x\\"\'"}}\n</tool_call>'
    )
    assert render_turn("Hi", []) == "Hi"
    assert render_turn("", [call]) == render_call(call)
    assert render_turn("Hi", [call, call]) == f"Hi\n{render_call(call)}\n{render_call(call)}"
