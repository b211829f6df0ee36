"""The chat template: its markup, and the property that lets turns merge token-exactly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.agent.prompts import TOOLS
from shared.records import Message, ToolCall
from shared.tool_calls import render_turn
from tests.shared.chatml import render

words = st.text(max_size=12)
arguments = st.dictionaries(
    words, words | st.integers() | st.booleans() | st.none() | st.lists(words, max_size=2), max_size=2
)
calls = st.builds(ToolCall, name=st.sampled_from(["search_schema", "x"]), arguments=arguments)
turns = st.tuples(words, st.lists(calls, max_size=2)).filter(lambda turn: turn[0] or turn[1])


def assistant(content: str, turn_calls: list[ToolCall]) -> Message:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for i, call in enumerate(turn_calls)
        ],
    }


def answers(turn_calls: list[ToolCall]) -> list[Message]:
    return [{"role": "tool", "tool_call_id": f"call_{i}", "content": "3 rows"} for i in range(max(1, len(turn_calls)))]


def test_a_conversation_has_the_markup_of_qwen() -> None:
    messages = [
        {"role": "user", "content": "How many claims?"},
        assistant("I look.", [ToolCall("get_columns", {"table": "Schäden"}), ToolCall("execute_sql", {"sql": "S"})]),
        {"role": "tool", "tool_call_id": "call_0", "content": "id"},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
        {"role": "assistant", "content": "Seven."},
    ]
    assert render(messages, prompt=True) == (
        "<|im_start|>user\nHow many claims?<|im_end|>\n"
        "<|im_start|>assistant\nI look.\n"
        '<tool_call>\n{"name": "get_columns", "arguments": {"table": "Schäden"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "execute_sql", "arguments": {"sql": "S"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nid\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nSeven.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_stand_behind_the_system_prompt_one_json_object_per_line() -> None:
    text = render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], TOOLS)
    system, user = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    listed = system.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == [tool["function"] for tool in TOOLS]
    assert user == "<|im_start|>user\nHi<|im_end|>\n"


def test_tools_need_no_system_prompt() -> None:
    assert render([{"role": "user", "content": "Hi"}], TOOLS).startswith("<|im_start|>system\n# Tools\n<tools>\n")


def test_without_tools_there_is_no_tool_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert render(messages) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_what_a_server_adds_to_a_tool_changes_nothing() -> None:
    question = [{"role": "user", "content": "Hi"}]
    function = TOOLS[0]["function"]
    served = {"function": {"strict": None, **dict(reversed(function.items()))}, "type": "function"}
    assert render(question, [served]) == render(question, [TOOLS[0]]) == render(question, [function])


@pytest.mark.parametrize("content", ["", None])
def test_a_call_without_content_follows_the_header_directly(content: str | None) -> None:
    message = {**assistant("", [ToolCall("search_schema", {"query": "x"})]), "content": content}
    assert render([message]).startswith("<|im_start|>assistant\n<tool_call>\n")


@given(turns)
def test_an_assistant_turn_is_rendered_as_render_turn_writes_it(turn: tuple[str, list[ToolCall]]) -> None:
    content, turn_calls = turn
    text = render([assistant(content, turn_calls)])
    assert text == f"<|im_start|>assistant\n{render_turn(content, turn_calls)}<|im_end|>\n"


@given(st.lists(turns, min_size=1, max_size=3))
def test_each_prompt_begins_with_the_previous_prompt_and_the_turn(played: list[tuple[str, list[ToolCall]]]) -> None:
    messages: list[Message] = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    for content, turn_calls in played:
        generated = render(messages, TOOLS, prompt=True) + render_turn(content, turn_calls) + "<|im_end|>"
        messages += [assistant(content, turn_calls), *answers(turn_calls)]
        assert render(messages, TOOLS, prompt=True).startswith(generated)
