"""Properties of the tool-call grammar over arbitrary text: round trips, streaming, conservation, linear time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shared.agent.prompts import TOOLS
from shared.records import ToolCall
from shared.tool_calls import Parsed, Stream, is_encodable, parse, parse_hermes, render_call, render_turn
from shared.tool_calls.report import streamed_result
from tests.shared.chatml import render
from tests.shared.examples import tiny_tokenizer
from tests.shared.tool_calls.tool_call_examples import COLUMNS_JSON, NEGATIVES, POSITIVES, QUERY_JSON, TAGGED

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines can be busy

words = st.text(st.characters(exclude_characters="<`{[", exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(ToolCall, st.sampled_from(["execute_sql", "unknown"]), st.dictionaries(words, values, max_size=2))
turns = st.tuples(words, st.lists(calls, min_size=1, max_size=3))

BROKEN = '{"name": "get_columns", "arz?</think>'
markup = [
    "<tool_call>", "</tool_call>", "<tools>", "</tools>", "<think>", "</think>", "```", "```json\n", "```python\n", "\n", "\n\n",
    " ", ",", "{", "}", "[", "]", "(", ")", '"', "'", ":", "=", "\\", "`", "<|im_end|>", "<|endoftext|>", "| ", "> ", "#", "/*", "*/",
    '"name": "execute_sql"', '"arguments": {"sql": "SELECT 1"}', QUERY_JSON, COLUMNS_JSON, TAGGED, "get_columns(", '"claims"',
    "Action: get_columns\n", "Action Input: ", "<function=get_columns>", "<parameter=table>", "</parameter>", "</function>",
    "<get_columns>", "</get_columns>", "[TOOL_CALLS]", "[ARGS]", "'''", '"""', "For example:\n", "I will look: ", "````md\n",
    "<function name=\"get_columns\" arguments='", "/>", "<|tool_call_start|>", "\\ud83c", "1e999", "//", "text", "é", "\ufeff",
]  # fmt: skip
texts = st.lists(st.sampled_from(markup) | st.text(max_size=3), max_size=14).map("".join)


@patient
@given(turns)
def test_a_rendered_turn_is_read_back_exactly(turn: tuple[str, list[ToolCall]]) -> None:
    content, turn_calls = turn
    parsed = parse(render_turn(content, turn_calls), TOOLS)
    assert parsed == Parsed(content, tuple(turn_calls), (), "hermes")
    assert render_turn(parsed.content, parsed.calls) == render_turn(content, turn_calls)


@patient
@given(turns)
def test_a_turn_that_was_read_gives_the_template_the_same_tokens_again(turn: tuple[str, list[ToolCall]]) -> None:
    tokenizer, prompt = tiny_tokenizer(), [{"role": "user", "content": "How many?"}]
    answer = render_turn(*turn)
    parsed = parse(answer, TOOLS)
    message = {"role": "assistant", "content": parsed.content, "tool_calls": [_encoded(call) for call in parsed.calls]}
    again = render([*prompt, message], TOOLS)
    generated = render(prompt, TOOLS, prompt=True) + answer + "<|im_end|>"
    assert again.startswith(generated)
    assert tokenizer.encode(again)[: len(tokenizer.encode(generated))] == tokenizer.encode(generated)


def _encoded(call: ToolCall) -> dict[str, object]:
    return {"type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}


@pytest.mark.parametrize(
    "text",
    [
        '{"g": "x", "arguments": {"": 3, "mean_ms": 12}}',
        '{"": 3}',
        "Action: execute_sql\nAction Input::",
        f"total:\n'{TAGGED}",
        'sql": "<|im_end|>',
        f"<tool_call>calls>a{TAGGED}ns\nget</tool_call>",
        f"[TOOL_REQUEST]{COLUMNS_JSON}[END[ęTOOL_REQUEST]{COLUMNS_JSON}[END]",
        '<tool_call>\n{\\"name\\r": \\"</tools>claims\\"}}\n{"name": "x"}',
    ],
)
def test_texts_that_a_search_once_found_are_read_the_same_way_whole_and_streamed(text: str) -> None:
    parsed = parse(text, TOOLS)
    assert streamed_result(text, TOOLS) == parsed
    assert parsed.calls or parsed.content in (text, text.removesuffix("<|im_end|>"))


@patient
@given(texts, st.randoms(use_true_random=False))
def test_any_text_streams_to_what_it_is_as_a_whole(text: str, chance: random.Random) -> None:
    parsed = parse(text, TOOLS)
    places = sorted(chance.sample(range(len(text) + 1), k=min(4, len(text))))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert streamed_result(pieces, TOOLS) == streamed_result(text, TOOLS) == parsed


@patient
@given(texts)
@example(
    f'<think>or <tool_call>\n{BROKEN}<tool_ce": "get_columns", "all>\n{QUERY_JSON}\n</tool_ca_call>\n{BROKEN}<tool_call>\n{QUERY_JSON}\n</tool_call>'
)
def test_no_text_is_invented_and_none_is_lost_without_a_call(text: str) -> None:
    parsed = parse(text, TOOLS)
    if not parsed.calls:
        assert parsed.content in (text, text.removesuffix("<|im_end|>"), text.removesuffix("<|endoftext|>"))
    assert all(map(is_encodable, parsed.calls))
    remaining = iter(text)
    assert all(character in remaining for character in parsed.content if not character.isspace())
    parse_hermes(text)


@pytest.mark.parametrize(
    "text", [example[0] for group in POSITIVES.values() for example in group if not example[0].startswith("`get")]
)
@pytest.mark.parametrize("before", ["Zürich stays.", "```sql\nSELECT 2;\n```", "So `x` | y is < z:"])
def test_text_before_survives_whatever_the_form_of_the_call(before: str, text: str) -> None:
    """Only a call in single backticks has to be the whole answer: within text it is quoted."""
    alone, behind = parse(text, TOOLS), parse(f"{before}\n\n{text}", TOOLS)
    assert behind.calls == alone.calls
    assert behind.content.split() == before.split() + alone.content.split()


HOSTILE = ["<", "{", "[\n", "{\n", '{"a":\n', "<tool_call>", '<tool_call>["', "<tools>{'a':1}", "<think>", "```\n", '```json\n{"a":1}\n',
           " \n", "{'", '"\n{', "9", "<|im_end|>", "[1,\n", QUERY_JSON, "<function=execute_sql><parameter=sql>", "<execute_sql>x", "`a",
           "get_columns(", "get_columns('\n", "Action: execute_sql\nAction Input: {\"a\": \"\n", '["<tool_call>",\n', '{"""', "/*{\n", "\n", "|\n",
           "````\n", "```md\n", TAGGED, '"a", ', "\\", "<a b='", "[get_columns(", "Action: ", '{"a": "b" "c": ', "</tool_call>", "<tool_call>/*", "```\n/*\n", '<tool_call>{\\"a', '{\\"a', "{{", "“", '"a"\n+', "Action: get_columns[",
           f"x {TAGGED} is, ", f"For example:\n{TAGGED}\n", '<tool_call>"name": ', '{"a": "b"} # ', "Action: execute_sql\nAction Input: ``` "]  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE)
@pytest.mark.parametrize("start", ["", '<tool_call>{"sql": "'])
@pytest.mark.parametrize(("length", "limit"), [(30_000, 0.5), pytest.param(100_000, 1, marks=pytest.mark.slow)])
def test_long_and_hostile_text_is_read_in_linear_time(length: int, limit: float, start: str, unit: str) -> None:
    text = start + unit * (length // len(unit))
    assert _seconds(lambda: parse(text, TOOLS)) < limit


@pytest.mark.parametrize("unit", ['SELECT "a" FROM t\n', "<", "x", "\\\\", "{'"])
def test_a_streamed_character_costs_the_same_early_and_late(unit: str) -> None:
    call = f"Look.\n{render_call(ToolCall('execute_sql', {'sql': 'x' + unit * (60_000 // len(unit))}))}"
    stream, times = Stream(TOOLS), []
    for start in range(0, len(call), 15_000):
        piece = call[start : start + 15_000]
        times.append(_seconds(lambda piece=piece: [stream.feed(character) for character in piece]) / len(piece))  # type: ignore[misc]
    assert len(stream.parsed().calls) == 1
    assert times[-2] < 4 * times[0] + 2e-6


def _seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


@pytest.mark.parametrize("group", NEGATIVES)
def test_negatives_stay_text_beside_each_other(group: str) -> None:
    """Those whose end is open (a fence, an opening tag, a string) would go on in the next."""
    closed = [text for text in NEGATIVES[group] if not any(mark in text for mark in ("`", "<", "SELECT a"))]
    for order in (closed, closed[::-1]):
        text = "\n\n".join(order)
        assert (parse(text, TOOLS).calls, parse(text, TOOLS).content) == ((), text)
