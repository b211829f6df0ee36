"""Texts as models write them, by family: what is a call in them and what stays text."""

from __future__ import annotations

import json

from shared.prompts import TOOLS
from shared.records import ToolCall
from shared.tool_calls import render_call

COLUMNS = ToolCall("get_columns", {"table": "claims"})
QUERY = ToolCall("execute_sql", {"sql": "SELECT 1"})
SEARCH = ToolCall("search_schema", {"query": "claims"})
COLUMNS_JSON = '{"name": "get_columns", "arguments": {"table": "claims"}}'
QUERY_JSON = '{"name": "execute_sql", "arguments": {"sql": "SELECT 1"}}'
TAGGED = render_call(COLUMNS)


def sql(text: str) -> ToolCall:
    return ToolCall("execute_sql", {"sql": text})


Positive = tuple[str, list[ToolCall], str]  # text, calls, content

POSITIVES: dict[str, list[Positive]] = {
    "hermes": [
        (f"<tool_call>{COLUMNS_JSON}</tool_call><tool_call>{QUERY_JSON}</tool_call>", [COLUMNS, QUERY], ""),
        (f"<tool_call>\n{COLUMNS_JSON}}}\n</tool_call>", [COLUMNS], ""),
        (f"<tool_call>\n{COLUMNS_JSON};\n</tool_call>", [COLUMNS], ""),
        (f'<tool_call id="1">\n{COLUMNS_JSON}\n</tool_call>', [COLUMNS], ""),
        (f"<tool_call>\n```json\n{COLUMNS_JSON}\n```\n</tool_call>", [COLUMNS], ""),
        (f"<tool_call>\n{COLUMNS_JSON}\nI wait.\n</tool_call>\nSo.", [COLUMNS], "I wait.\n\nSo."),
        (f"<tool_call>\nI look.\n{TAGGED}", [COLUMNS], "I look."),
        ('<tool_call>\n{"name": "execute_sql", "sql": "SELECT 1"}\n</tool_call>', [QUERY], ""),
        (f'I search for "claims"{TAGGED}', [COLUMNS], 'I search for "claims"'),
        (f"Look.{TAGGED}\n\nThen\n{render_call(QUERY)}", [COLUMNS, QUERY], "Look.\nThen"),
    ],
    "wrappers": [
        (f"<tool_calls>[{COLUMNS_JSON}, {QUERY_JSON}]</tool_calls>", [COLUMNS, QUERY], ""),
        (f"<tool_use>{COLUMNS_JSON}</tool_use>", [COLUMNS], ""),
        (f"<json>\n{COLUMNS_JSON}\n</json>", [COLUMNS], ""),
        (f"<|python_tag|>{COLUMNS_JSON}", [COLUMNS], ""),
        (f"<|tool_call|>[{COLUMNS_JSON}]", [COLUMNS], ""),
        ('[TOOL_CALLS]get_columns[ARGS]{"table": "claims"}', [COLUMNS], ""),
        ('<tool_call>get_columns\n{"table": "claims"}</tool_call>', [COLUMNS], ""),
    ],
    "fenced": [
        (f"Here is the call: ```json\n{COLUMNS_JSON}\n```\nSo.", [COLUMNS], "Here is the call: \nSo."),
        (f"```json\n{COLUMNS_JSON}\n```json\n{QUERY_JSON}\n```", [COLUMNS, QUERY], ""),
        (f"```json\n[{COLUMNS_JSON},\n {QUERY_JSON}]\n```", [COLUMNS, QUERY], ""),
        (f"```json\n{COLUMNS_JSON[:-1]}\n```", [COLUMNS], ""),
        (f"```sql\nSELECT 2;\n\n```json\n{COLUMNS_JSON}\n```", [COLUMNS], "```sql\nSELECT 2;\n"),
        (f"```sql\nSELECT 2;\n{TAGGED}", [COLUMNS], "```sql\nSELECT 2;"),
    ],
    "bare": [
        (f"{COLUMNS_JSON}}}", [COLUMNS], ""),
        (COLUMNS_JSON[:-1], [COLUMNS], ""),
        (f"The ` is odd.\n\n{COLUMNS_JSON}", [COLUMNS], "The ` is odd.\n"),
        (f"Tool call: {COLUMNS_JSON}", [COLUMNS], "Tool call: "),
        (f"I will look at the columns. {COLUMNS_JSON}", [COLUMNS], "I will look at the columns. "),
        ('{"action": "get_columns", "action_input": {"table": "claims"}}', [COLUMNS], ""),
        ('{"type": "tool_use", "id": "t1", "name": "get_columns", "input": {"table": "claims"}}', [COLUMNS], ""),
        ('{"name": "get_columns", "arguments": "{\'table\': \'claims\'}"}', [COLUMNS], ""),
        ('{"name": "search_schema", "arguments": {"query": 2024}}', [ToolCall("search_schema", {"query": "2024"})], ""),
    ],
    "repairs": [
        ("{'name': 'search_schema', 'arguments': {'query': 'customer's claims'}}", [ToolCall("search_schema", {"query": "customer's claims"})], ""),
        ("{'name': 'execute_sql', 'arguments': {'sql': 'SELECT a WHERE b = 'c''}}", [sql("SELECT a WHERE b = 'c'")], ""),
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT \'{"a": "b"}}\' FROM t"}}', [sql("SELECT '{\"a\": \"b\"}}' FROM t")], ""),
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT "a",\n "b" FROM "t""}}', [sql('SELECT "a",\n "b" FROM "t"')], ""),
        ('<tools>{"name": "execute_sql", "arguments": {"sql": "SELECT \\\\"a\\\\" FROM t"}}</tools>', [sql('SELECT "a" FROM t')], ""),
    ],
    "python": [
        ("I look.\n\nget_columns(table='claims')", [COLUMNS], "I look.\n"),
        ('get_columns("claims")\nexecute_sql("SELECT 1")', [COLUMNS, QUERY], ""),
        ('get_columns("claims"); execute_sql("SELECT 1")', [COLUMNS, QUERY], ""),
        ('`get_columns("claims")`', [COLUMNS], ""),
        ('[get_columns("claims"), execute_sql(sql="SELECT 1")]', [COLUMNS, QUERY], ""),
        ('functions.execute_sql({"sql": "SELECT 1"})', [QUERY], ""),
        ('execute_sql("SELECT "\n            "1")', [QUERY], ""),
        ('<tool_call>\nexecute_sql(sql="SELECT 1")\n</tool_call>', [QUERY], ""),
        ("```tool_code\n# first\nget_columns(table=\"claims\")\nexecute_sql(sql='''SELECT 1''')\n```\nSo.", [COLUMNS, QUERY], "So."),
        ('execute_sql(sql=r"SELECT \'\\d\'")', [sql("SELECT '\\d'")], ""),
    ],
    "xml": [
        ("<function=execute_sql>\n<parameter=sql>\nSELECT a\nFROM t\nWHERE b < 3\n</parameter>\n</function>", [sql("SELECT a\nFROM t\nWHERE b < 3")], ""),
        ("<function=execute_sql><parameter=sql>SELECT '</parameter>x'</parameter></function>", [sql("SELECT '</parameter>x'")], ""),
        ("<function=get_columns>\n<parameter=table>\nclaims\n</function>", [COLUMNS], ""),
        ("<function=get_columns>\n<parameter=table>\nclaims\n</parameter>", [COLUMNS], ""),
        ('<tool name="get_columns"><arguments>{"table": "claims"}</arguments></tool>', [COLUMNS], ""),
        ("<get_columns><table>claims</table></get_columns>", [COLUMNS], ""),
        ('<get_columns table="claims"/>', [COLUMNS], ""),
        ("<execute_sql>SELECT 1</execute_sql>", [QUERY], ""),
        ("<tool_call>\n<function=drop>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>", [ToolCall("drop", {"x": "1"})], ""),
    ],
    "react": [
        ("**Action:** get_columns\n**Action Input:** {\"table\": \"claims\"}", [COLUMNS], ""),
        ("Action: execute_sql\nAction Input: SELECT a\nFROM t\nObservation: 1", [sql("SELECT a\nFROM t")], "Observation: 1"),
        ("Action: execute_sql\nAction Input:\n```sql\nSELECT 1\n```", [QUERY], ""),
        ('Thought: so\nAction: get_columns("claims")', [COLUMNS], "Thought: so"),
        (f"Action: {COLUMNS_JSON}", [COLUMNS], "Action: "),
        ('Tool: get_columns\nArguments: {"table": "claims"}', [COLUMNS], ""),
    ],
    "thinking": [
        (f"<think>\n{COLUMNS_JSON}", [COLUMNS], "<think>"),
        (f"<think>or {TAGGED}?</think>{render_call(QUERY)}", [QUERY], f"<think>or {TAGGED}?</think>"),
    ],
}  # fmt: skip

NEGATIVES: dict[str, list[str]] = {
    "quoted": [
        f"> {COLUMNS_JSON}",
        f"> {TAGGED}".replace("\n", "\n> "),
        f"| call | <tool_call>{COLUMNS_JSON}</tool_call> |",
        f'Write "<tool_call>{COLUMNS_JSON}</tool_call>" there.',
        f"`{TAGGED}`",
        f"````md\n```json\n{COLUMNS_JSON}\n```\n````",
        f"```markdown\nUse:\n```json\n{COLUMNS_JSON}\n```\n```\nSo.",
        f"<tool_response>\n{COLUMNS_JSON}\n</tool_response>",
        f"- {COLUMNS_JSON}\n1. {QUERY_JSON}",
    ],
    "examples": [
        f"The format is:\n{TAGGED}",
        f"For example:\n```json\n{COLUMNS_JSON}\n```\nThat is all.",
        f"A call looks like this:\n\n{COLUMNS_JSON}",
        'Usage:\n\nget_columns("claims")',
        '{"name": "execute_sql", "arguments": {"sql": "SELECT ... FROM t"}}',
        '<tools>\n{"name": "get_columns", "arguments": {"table": "<table>"}}\n</tools>',
        '<tool_call>\n{"name": "<function-name>", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
        "<function=get_columns>\n<parameter=table>\n...\n</parameter>\n</function>",
    ],
    "data": [
        '{"name": "execute_sql", "arguments": {"sql": "SELECT 1"}, "result": [[1]]}',
        f"The log shows: {COLUMNS_JSON}",
        f"{COLUMNS_JSON}, as you see",
        '{"get_columns": 3, "execute_sql": 4}',
        f'{{"calls": [{COLUMNS_JSON}], "errors": 0}}',
        'Action: search_schema\nAction Input: query="claims"',
        "`get_columns` and `x` first.",
        "Tool: search_schema\nInput: query\nOutput: tables",
        "[get_columns] reads the columns.",
    ],
    "definitions": [
        json.dumps([tool["function"] for tool in TOOLS]),
        "<tool_call>\n" + json.dumps(TOOLS[0]["function"]) + "\n</tool_call>",
        '{"name": "execute_sql", "description": "Runs SQL.", "parameters": {"sql": "string"}}',
        '<tools>\n{"name": "execute_sql", "parameters": {"sql": {"type": "string"}}}\n</tools>',
    ],
    "programs": [
        'import db\nget_columns("claims")',
        'rows = []\n\nget_columns("claims")\nprint(rows)',
        'get_columns("claims") lists the columns.',
        "search_schema(query)\nget_columns(table)",
        '```python\nrows = execute_sql("SELECT 1")\n```',
        '```python\nexecute_sql("SELECT 1")\nprint(1)\n```',
        'execute_sql(f"SELECT {x}")',
        '    execute_sql("SELECT 1")',
        "if x:\n    execute_sql('SELECT 1')",
        "Use <execute_sql> or <function=execute_sql> then.",
    ],
    "cut": [
        '{"name": "execute_sql", "arguments": {"sql": "SELECT json(\'{"a": {"b": "c"}}',
        '<tool_call>\n{"name": "execute_sql", "arguments": {"sql": "SELECT a FROM t WHERE b = "',
        '<tool_call>\n{"name": "execute_sql", "arguments": {"sql": "SELECT \'{"a": "b"}',
        '{"name": "execute_sql", "arguments": {"sql": "SELECT a"',
        'execute_sql("SELECT a',
        "execute_sql('''SELECT a''",
        "<function=execute_sql>\n<parameter=sql>\nSELECT a FROM",
        "<execute_sql>SELECT a FROM",
        '<function name="execute_sql" arguments=\'{"sql": "SELECT a',
        'Action: execute_sql\nAction Input: {"sql": "SELECT a',
        "Action: execute_sql\nAction Input: ```sql\nSELECT a",
        'Action: execute_sql("SELECT a',
        '```json\n{"name": "execute_sql", "arguments": {"sql": "SELECT a',
    ],
}
