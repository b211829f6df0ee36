"""Every form in which models write calls, and what only looks like one: whole and however it is cut."""

from __future__ import annotations

import pytest

from shared.agent.prompts import TOOLS
from shared.records import ToolCall
from shared.tool_calls import Parsed, Stream, parse, render_call
from shared.tool_calls.report import cuts, streamed_result
from tests.shared.tool_calls.tool_call_examples import (
    COLUMNS,
    COLUMNS_JSON,
    NEGATIVES,
    POSITIVES,
    QUERY,
    QUERY_JSON,
    TAGGED,
)

positives = [
    pytest.param(*example, id=f"{name}-{n}") for name, group in POSITIVES.items() for n, example in enumerate(group)
]
negatives = [pytest.param(text, id=f"{name}-{n}") for name, group in NEGATIVES.items() for n, text in enumerate(group)]
texts = [example[0] for group in POSITIVES.values() for example in group] + [
    text for group in NEGATIVES.values() for text in group
]


@pytest.mark.parametrize(("text", "calls", "content"), positives)
def test_a_call_is_read_and_the_text_around_it_survives(text: str, calls: list[ToolCall], content: str) -> None:
    parsed = parse(text, TOOLS)
    assert (list(parsed.calls), parsed.content) == (calls, content)


@pytest.mark.parametrize("text", negatives)
def test_what_is_no_call_stays_text(text: str) -> None:
    parsed = parse(text, TOOLS)
    assert (parsed.calls, parsed.content) == ((), text)


@pytest.mark.parametrize("text", texts)
def test_a_stream_adds_up_to_the_whole_text_however_it_is_cut(text: str) -> None:
    for pieces in cuts(text):
        assert streamed_result(pieces, TOOLS) == parse(text, TOOLS)


@pytest.mark.parametrize("text", [example[0] for group in POSITIVES.values() for example in group])
def test_each_beginning_of_a_text_gives_no_call_that_the_text_does_not_give(text: str) -> None:
    """Running text and a bare string can be cut anywhere; a cut JSON string, XML value or Python literal is no call."""
    whole = list(parse(text, TOOLS).calls)
    for end in range(len(text)):
        stream = Stream(TOOLS)
        stream.feed(text[:end])
        assert list(stream.parsed().calls) == whole[: len(stream.parsed().calls)]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>\n{COLUMNS_JSON}", 1),
        (f"<tools>{COLUMNS_JSON}", 1),
        (f"{COLUMNS_JSON}\n", 1),
        (f"```json\n{COLUMNS_JSON}\n", 1),
        ("<function=get_columns>\n<parameter=table>\nclaims\n</parameter>\n</function>", 1),
        (f"{TAGGED}\n{render_call(QUERY)[:-12]}", 2),
        (f"<think>{TAGGED}", 0),
        (COLUMNS_JSON, 0),
        ('get_columns("claims")\n', 0),
    ],
)
def test_a_call_is_given_out_as_soon_as_nothing_can_change_it(text: str, calls: int) -> None:
    stream = Stream(TOOLS)
    assert sum(len(stream.feed(character).calls) for character in text) == calls


def test_running_text_flows_at_once() -> None:
    stream = Stream(TOOLS)
    deltas = ["I ", "look", ". a < b ", "`x`", "\nNow", " [1]"]
    assert [stream.feed(delta).content for delta in deltas] == ["I", " look", ". a < b", " `x", "`\nNow", " [1]"]


def test_without_offered_tools_all_is_text() -> None:
    for text in (TAGGED, COLUMNS_JSON, f"```json\n{QUERY_JSON}\n```"):
        assert parse(text, []) == Parsed(text, (), (), "")


def test_arguments_get_the_types_of_the_schema_where_nothing_is_lost() -> None:
    properties = {
        "n": {"type": "integer"},
        "on": {"type": "boolean"},
        "x": {"type": ["number", "null"]},
        "of": {"type": "array"},
    }
    tools = [{"name": "f", "parameters": {"properties": properties}}]
    values = {"n": "3", "on": "true", "x": "1.5", "of": "[1]"}
    xml = "".join(f"<parameter={name}>{value}</parameter>" for name, value in values.items())
    xml = f"<function=f>{xml}</function>"
    assert parse(xml, tools).calls == (ToolCall("f", {"n": 3, "on": True, "x": 1.5, "of": [1]}),)
    assert parse('{"name": "f", "arguments": {"n": "3", "x": null, "of": "[1]"}}', tools).calls[0].arguments == {
        "n": 3,
        "x": None,
        "of": [1],
    }
    assert parse('{"name": "f", "arguments": {"n": "3.5"}}', tools).calls == ()
    explicit = '<tool_call>\n{"name": "f", "arguments": {"n": %s}}\n</tool_call>'
    for written, value in (
        ('"3"', 3),
        ("3.0", 3),
        ('"3.5"', "3.5"),
        ('"soon"', "soon"),
    ):  # what does not fit is passed on
        assert parse(explicit % written, tools).calls == (ToolCall("f", {"n": value}),)
    assert parse('<tool_call>\n{"name": "g", "arguments": {"n": "3"}}\n</tool_call>', tools).calls[0].arguments == {
        "n": "3"
    }


def test_positional_arguments_get_the_names_of_the_schema_in_their_order() -> None:
    tools = [{"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}}]
    assert parse("f(1, b=[2, {'c': None}])", tools).calls == (ToolCall("f", {"a": 1, "b": [2, {"c": None}]}),)
    assert parse("f(1, a=2)", tools).calls == parse("f(1, 2, 3)", tools).calls == ()


def test_an_opener_behind_a_call_at_the_end_is_a_closer() -> None:
    assert parse(f"{TAGGED}\n<tool_call>\n", TOOLS) == Parsed("", (COLUMNS,), (), "hermes")
    assert parse(f"{TAGGED}\nThe tag is <tool_call>", TOOLS).content == "The tag is <tool_call>"
