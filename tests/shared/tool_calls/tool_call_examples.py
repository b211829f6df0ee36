"""Texts as models write them, by family: what is a call in them and what stays text."""

from __future__ import annotations

import json
import re

from shared.agent.prompts import TOOLS
from shared.records import ToolCall
from shared.tool_calls import render_call

COLUMNS = ToolCall("get_columns", {"table": "claims"})
QUERY = ToolCall("execute_sql", {"sql": "SELECT 1"})
SEARCH = ToolCall("search_schema", {"query": "claims"})
COLUMNS_JSON = '{"name": "get_columns", "arguments": {"table": "claims"}}'
QUERY_JSON = '{"name": "execute_sql", "arguments": {"sql": "SELECT 1"}}'
TAGGED = render_call(COLUMNS)


ARGUMENTS_JSON = '{"table": "claims"}'
ESCAPED_ARGUMENTS = ARGUMENTS_JSON.replace('"', '\\"')
ESCAPED_JSON = COLUMNS_JSON.replace('"', '\\"')
DOUBLED_JSON = COLUMNS_JSON.replace("{", "{{").replace("}", "}}")
TYPOGRAPHIC_JSON = re.sub('"([^"]*)"', r"“\1”", COLUMNS_JSON)


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
        (f"<|tool_call|>[{COLUMNS_JSON}]<|/tool_call|>", [COLUMNS], ""),
        (f"<|action_start|><|plugin|>{COLUMNS_JSON}<|action_end|>", [COLUMNS], ""),
        (f"[TOOL_REQUEST]{COLUMNS_JSON}[END_TOOL_REQUEST]", [COLUMNS], ""),
        ('<seed:tool_call>\n<function=get_columns>\n<parameter=table>claims</parameter>\n</function>\n</seed:tool_call>', [COLUMNS], ""),
        (f"<answer>\n{TAGGED}\n</answer>", [COLUMNS], "<answer>\n</answer>"),
        (f"<tool_call>\u200b\n{COLUMNS_JSON}\n</tool_call>", [COLUMNS], ""),
        (f"<tool_calls>[{COLUMNS_JSON}, {QUERY_JSON}]</tool_calls>", [COLUMNS, QUERY], ""),
        (f"<tool_use>{COLUMNS_JSON}</tool_use>", [COLUMNS], ""),
        (f"<json>\n{COLUMNS_JSON}\n</json>", [COLUMNS], ""),
        (f"<|python_tag|>{COLUMNS_JSON}", [COLUMNS], ""),
        (f"<|tool_call|>[{COLUMNS_JSON}]", [COLUMNS], ""),
        ('[TOOL_CALLS]get_columns[ARGS]{"table": "claims"}', [COLUMNS], ""),
        ('<tool_call>get_columns\n{"table": "claims"}</tool_call>', [COLUMNS], ""),
    ],
    "fenced": [
        (f"````json\n{COLUMNS_JSON}\n````", [COLUMNS], ""),
        (f"Here is the call: ```json\n{COLUMNS_JSON}\n```\nSo.", [COLUMNS], "Here is the call: \nSo."),
        (f"```json\n{COLUMNS_JSON}\n```json\n{QUERY_JSON}\n```", [COLUMNS, QUERY], ""),
        (f"```json\n[{COLUMNS_JSON},\n {QUERY_JSON}]\n```", [COLUMNS, QUERY], ""),
        (f"```json\n{COLUMNS_JSON[:-1]}\n```", [COLUMNS], ""),
        (f"```sql\nSELECT 2;\n\n```json\n{COLUMNS_JSON}\n```", [COLUMNS], "```sql\nSELECT 2;\n"),
        (f"```sql\nSELECT 2;\n{TAGGED}", [COLUMNS], "```sql\nSELECT 2;"),
    ],
    "bare": [
        (f"{TAGGED}{QUERY_JSON}", [COLUMNS, QUERY], ""),
        (f"**Tool call:** {COLUMNS_JSON}", [COLUMNS], "**Tool call:** "),
        (f"Here is the function call: {COLUMNS_JSON}\r\n", [COLUMNS], "Here is the function call: "),
        (f"{COLUMNS_JSON} I wait for the result.", [COLUMNS], "I wait for the result."),
        ('{"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_columns", "arguments": "{\\"table\\": \\"claims\\"}"}}]}', [COLUMNS], ""),
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
        ("Action: execute_sql\nAction Input: ```SELECT 1```", [QUERY], ""),
        ("Action: execute_sql\nAction Input: ```sql SELECT 1```", [QUERY], ""),
        ("Action: execute_sql\nAction Input: ```EXPLAIN SELECT 1```", [sql("EXPLAIN SELECT 1")], ""),
        ("Action: search_schema\nAction Input: ```claims```", [SEARCH], ""),
        ('Thought: so\nAction: get_columns("claims")', [COLUMNS], "Thought: so"),
        (f"Action: {COLUMNS_JSON}", [COLUMNS], "Action: "),
        ('Tool: get_columns\nArguments: {"table": "claims"}', [COLUMNS], ""),
    ],
    "bracketed": [
        ("Thought: I look.\nAction: get_columns[claims]\nObservation: id", [COLUMNS], "Thought: I look.\nObservation: id"),
        ("Action 2: execute_sql[SELECT a FROM t WHERE b = '[x]']", [sql("SELECT a FROM t WHERE b = '[x]'")], ""),
        ('**Action:** get_columns["claims"]', [COLUMNS], ""),
        ('Action: get_columns[{"table": "claims"}]', [COLUMNS], ""),
        (f"Action 1: get_columns\nAction Input 1: {ARGUMENTS_JSON}", [COLUMNS], ""),
    ],
    "escaped": [
        (ESCAPED_JSON, [COLUMNS], ""),
        (f"So.\n<tool_call>\n{ESCAPED_JSON}\n</tool_call>\n{QUERY_JSON}", [COLUMNS, QUERY], "So."),
        (f"```json\n[{ESCAPED_JSON}, {ESCAPED_JSON}]\n```", [COLUMNS, COLUMNS], ""),
        (f"<tools>{{{ESCAPED_JSON}}}</tools>", [COLUMNS], ""),
        (r'{\"name\": \"execute_sql\", \"arguments\": {\"sql\": \"SELECT \\\"a\\\"\\nFROM ' + "{t}[1]" + r'\"}}', [sql('SELECT "a"\nFROM {t}[1]')], ""),
        (f'Action: get_columns\nAction Input: "{ESCAPED_ARGUMENTS}"', [COLUMNS], ""),
        (f'<function=get_columns>"{ESCAPED_ARGUMENTS}"</function>', [COLUMNS], ""),
    ],
    "doubled_braces": [
        (DOUBLED_JSON, [COLUMNS], ""),
        (f"<tool_call>\n{DOUBLED_JSON}\n</tool_call>", [COLUMNS], ""),
        (f"<tool_call>\n{{{COLUMNS_JSON}}}\n</tool_call>", [COLUMNS], ""),
        (f"<tool_call>\n{{{COLUMNS_JSON}\n</tool_call>", [COLUMNS], ""),
        ('{{"name": "execute_sql", "arguments": {{"sql": "SELECT "a" FROM {{t}}"}}}}', [sql('SELECT "a" FROM {{t}}')], ""),
    ],
    "typographic": [
        (TYPOGRAPHIC_JSON, [COLUMNS], ""),
        (f"```json\n{TYPOGRAPHIC_JSON}\n```", [COLUMNS], ""),
        (TYPOGRAPHIC_JSON.replace("“", "”"), [COLUMNS], ""),
        (TYPOGRAPHIC_JSON.replace("“", "‘").replace("”", "’"), [COLUMNS], ""),
        ('<tool_call>\n{“name”: “execute_sql”, “arguments”: {“sql”: “SELECT “a”, "b" FROM t”}}\n</tool_call>', [sql('SELECT “a”, "b" FROM t')], ""),
        ('{"name": "search_schema", "arguments": {"query": "the “top” ones",}}', [ToolCall("search_schema", {"query": "the “top” ones"})], ""),
    ],
    "joined": [
        ('{"name": "execute_sql", "arguments": {"sql": "SELECT "a" + "b" FROM t"}}', [sql('SELECT "a" + "b" FROM t')], ""),
        ('{"arguments": {"sql": "SELECT 1"}\n "name": "execute_sql"}', [QUERY], ""),
    ],
    "comments": [
        (f"```json\n// the columns first\n{COLUMNS_JSON}\n```", [COLUMNS], ""),
        (f"```\n# the columns first\n// then the rows\n{COLUMNS_JSON}\n```\nSo.", [COLUMNS], "So."),
        (f"<tool_call>\n// look\n{COLUMNS_JSON}\n</tool_call>", [COLUMNS], ""),
        (f"{COLUMNS_JSON[:-1]} # the columns\n}}", [COLUMNS], ""),
        (f"<tool_call>\n{COLUMNS_JSON[:-1]} // the columns\n}}\n</tool_call>", [COLUMNS], ""),
    ],
    "named": [
        ('<tool_call>\n{"get_columns": {"table": "claims"}}\n</tool_call>', [COLUMNS], ""),
        ('```json\n[{"get_columns": {"table": "claims"}}, {"execute_sql": {"sql": "SELECT 1"}}]\n```', [COLUMNS, QUERY], ""),
        ('{"name": "functions.get_columns", "arguments": {"table": "claims"}}', [COLUMNS], ""),
        ('<tool_call>\n<name>get_columns</name>\n<arguments>{"table": "claims"}</arguments>\n</tool_call>', [COLUMNS], ""),
        ("<function_call>\n<name>get_columns</name>\n<parameters>\n<table>claims</table>\n</parameters>\n</function_call>\nSo.", [COLUMNS], "So."),
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.get_columns:0<|tool_call_argument_begin|>{"table": "claims"}<|tool_call_end|><|tool_calls_section_end|>', [COLUMNS], ""),
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_columns\n```json\n{"table": "claims"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [COLUMNS], ""),
    ],
    "announced": [
        (f"{words}\n{TAGGED}", [COLUMNS], words)
        for words in (
            "I should call the tool in the following format:",
            "The previous call was wrong, so:",
            "Please wait while I look at this table:",
            "For example, I can look at the columns first:",
            "Let me see how to join the tables:",
            "Here is what the table looks like:",
            "It looks like the column is called total:",
            "My answer has this form:",
            "To see some examples of late claims:",
            "The query would be:",
            "To see how to get the response times:",
            "The number of calls would be:",
            "To find, for example, the latest claim:",
            "Check what the output looks like:",
            "计算比例：",
            "Zum Beispiel sehe ich mir die Spalten an:",
        )
    ]
    + [
        (f"Let me see what the table looks like:\n```json\n{COLUMNS_JSON}\n```", [COLUMNS], "Let me see what the table looks like:"),
        (f"That looks like a join is needed:\n```json\n{COLUMNS_JSON}\n```", [COLUMNS], "That looks like a join is needed:"),
    ],
    "in_a_sentence": [
        (f"The count is unknown, so I run {TAGGED} and wait.", [COLUMNS], "The count is unknown, so I run \nand wait."),
        (f"First {TAGGED} then {render_call(QUERY)}", [COLUMNS, QUERY], "First \nthen"),
        (f"Let me run {TAGGED} and {render_call(QUERY)}, please.", [COLUMNS, QUERY], "Let me run \nand\nplease."),
        (f"Next, calling get_columns {TAGGED} to see it.", [COLUMNS], "Next, calling get_columns \nto see it."),
        (f"The columns of claims {TAGGED}", [COLUMNS], "The columns of claims "),
        (f"Claims\n{TAGGED}\nthat is all", [COLUMNS], "Claims\nthat is all"),
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
        f'The format is:\n<tool_call>\n{COLUMNS_JSON}\naims"}}}}\n</tool_call>',
        f"The format is:\n{TAGGED}",
        f"For example:\n```json\n{COLUMNS_JSON}\n```\nThat is all.",
        f"A call looks like this:\n\n{COLUMNS_JSON}",
        f"In this format:\n{TAGGED}",
        f"Each call should be returned in the following format:\n{TAGGED}",
        f"The previous call was:\n{TAGGED}\nIt failed.",
        f"例如：\n```json\n{COLUMNS_JSON}\n```",
        'Usage:\n\nget_columns("claims")',
        '{"name": "execute_sql", "arguments": {"sql": "SELECT ... FROM t"}}',
        '<tools>\n{"name": "get_columns", "arguments": {"table": "<table>"}}\n</tools>',
        '<tool_call>\n{"name": "<function-name>", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
        "<function=get_columns>\n<parameter=table>\n...\n</parameter>\n</function>",
    ],
    "announced": [
        f"{words}\n```json\n{COLUMNS_JSON}\n```"
        for words in (
            "Zum Beispiel sähe ein Aufruf so aus:",
            "Ein Beispiel für einen Aufruf:",
            "Par exemple, un appel ressemble à ceci :",
            "Por ejemplo, una llamada sería así:",
            "Ad esempio, una chiamata si scrive così:",
            "Por exemplo, uma chamada seria assim:",
            "Например, вызов выглядит так:",
            "例如，工具调用的格式如下：",
            "例えば、次のようになります：",
            "例：",
            "**Example**",
            "### Beispiel 2",
            "#### Example request",
            "The body has this shape:",
            "Right:",
        )
    ]
    + [
        f"{words}\n{TAGGED}"
        for words in (
            "For instance, I would send:",
            "Sample output:",
            "Here is the general template:",
            "How to call the tool:",
            "This is how a call looks:",
            "Format of a call:",
            "The tool-call syntax is:",
            "An invalid request, for example:",
            "Tool calls have the following structure:",
            "A call to list the columns would look like this:",
            "Wrong:",
        )
    ],
    "mentioned": [
        f"Instead of {TAGGED} you should have searched first.",
        f"Statt {TAGGED} hätten Sie zuerst suchen sollen.",
        f"不要写 {TAGGED}，应该先搜索。",
        f"Both {TAGGED} and {render_call(QUERY)} are accepted.",
        f"I would send {TAGGED}, but nobody asked.",
        f"The server got {TAGGED}.",
        f"Compare {TAGGED} with {render_call(QUERY)}: the second runs SQL.",
        f"ERROR 2026-04-01 09:00:00 could not parse {TAGGED}",
        "Do not write <function=get_columns><parameter=table>claims</parameter></function>; search first.",
        "<execute_sql>SELECT 1</execute_sql> is no valid tag.",
        f"[10:00:01] DEBUG parser: {TAGGED}",
        f"2026-01-05T10:00:01 calling {TAGGED}",
        f"INFO calling. {COLUMNS_JSON}",
    ],
    "data": [
        f'{{"tool_call": {COLUMNS_JSON}, "status": "ok", "rows": 3}}',
        f'{{"model": "m", "tool_calls": [{COLUMNS_JSON}], "usage": {{"total": 12}}}}',
        f"{COLUMNS_JSON} OK 12 ms",
        f"<pre>\n{COLUMNS_JSON}\n</pre>\nis what was sent.",
        f"<code>{TAGGED}</code>",
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
        'def get_columns(table):\n    return db.columns(table)\n\nget_columns("claims")',
        'db.open("claims.db")\nget_columns("claims")',
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
    "templates": [
        f"The escaped form is {ESCAPED_JSON} here.",
        f"{ESCAPED_JSON} is the form.",
        f"`{ESCAPED_JSON}`, escaped",
        '{\\"name\\": \\"Alice\\", \\"arguments\\": {}}',
        '{\\"name\\": \\"get_columns\\", \\"parameters\\": {\\"type\\": \\"object\\", \\"properties\\": {}}}',
        r"{\alpha} and {\"beta\"} are {\gamma}.",
        '"get_columns": {"table": "claims"}',
        '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>',
        '{{"name": "get_columns", "arguments": {{"table": "{table}"}}}}',
        "{{ customer.name }} has {{ total }} claims.",
        '{{"a": 1}, {"b": 2}}',
        "{“name”: “Alice”, “total”: 3}",
        f"“{COLUMNS_JSON}”",
        f"He wrote: “{TYPOGRAPHIC_JSON}”",
        "“get_columns” lists the columns of “claims”.",
        f"```json\n// example of a call\n{COLUMNS_JSON}\n```",
        f"```\n# The format:\n{COLUMNS_JSON}\n```",
        f"```js\n// the client\nsend({COLUMNS_JSON});\n```",
        '{"get_columns": {"calls": 3, "mean_ms": 12}}',
        '{"get_columns": "lists the columns of a table"}',
        '{"get_columns": {"table": "claims"}, "execute_sql": {"calls": 2}}',
        "<name>get_columns</name> is the name of a tool, its <arguments> follow.",
        "<tool>\n<name>send_mail</name>\n<arguments>{}</arguments>\n</tool>",
    ],
    "actions": [
        "Action: Finish[42]",
        "Action: get_columns[claims] reads the columns.",
        "Thought: get_columns[claims] would help.\nFinal Answer: 3",
        "get_columns[claims]",
        "- Action: get_columns[claims]\n- Action: execute_sql[SELECT 1]",
        "> Action: get_columns[claims]",
        "Tool: get_columns[table]",
        'Action: get_columns[table="claims"]',
        "Action: get_columns[<table>]",
        "Action: get_columns[]",
    ],
    "cut": [
        r"{\"name\": \"execute_sql\", \"arguments\": {\"sql\": \"SELECT a",
        r"<tool_call>" + "\n" + r"{\"name\": \"execute_sql\", \"arguments\": {\"sql\": \"SELECT a\"",
        '{{"name": "execute_sql", "arguments": {{"sql": "SELECT a"',
        "{“name”: “execute_sql”, “arguments”: {“sql”: “SELECT a FROM t WHERE b = ‘",
        '{"name": "execute_sql", "arguments": {"sql": "SELECT a " +',
        '{"name": "execute_sql", "arguments": {"sql": "SELECT a "\n  "FROM t WHERE',
        "Action: execute_sql[SELECT a FROM t WHERE b = '[x]",
        '<tool_call>\n"{\\"name\\": \\"execute_sql\\", \\"arguments\\": {\\"sql\\": \\"SELECT a',
        '{"name": "execute_sql", "arguments": {"sql": "SELECT json(\'{"a": {"b": "c"}}',
        '<tool_call>\n{"name": "execute_sql", "arguments": {"sql": "SELECT a FROM t WHERE b = "',
        '<tool_call>\n{"name": "execute_sql", "arguments": {"sql": "SELECT \'{"a": "b"}',
        '{"name": "execute_sql", "arguments": {"sql": "SELECT a"',
        'execute_sql("SELECT a',
        "execute_sql('''SELECT a''",
        '<tool_call>\n"name": "execute_sql", "arguments": {"sql": "SELECT a',
        "<function=execute_sql>\n<parameter=sql>\nSELECT a FROM",
        "<execute_sql>SELECT a FROM",
        '<function name="execute_sql" arguments=\'{"sql": "SELECT a',
        'Action: execute_sql\nAction Input: {"sql": "SELECT a',
        "Action: execute_sql\nAction Input: ```sql\nSELECT a",
        'Action: execute_sql("SELECT a',
        '```json\n{"name": "execute_sql", "arguments": {"sql": "SELECT a',
    ],
}
