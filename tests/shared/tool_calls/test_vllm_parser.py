"""The vLLM adapter inside the installed vLLM: registration, whole answers, streaming cut in every way."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from shared.agent.prompts import TOOLS
from shared.records import ToolCall
from shared.tool_calls import parse, render_turn
from tests.beside import PARSER_CASES, needs_parser_cases
from tests.shared.examples import tiny_tokenizer

pytestmark = pytest.mark.slow

SEARCH = ToolCall("search_schema", {"query": "Schäden"})
QUERY = ToolCall("execute_sql", {"sql": "SELECT a\nFROM t WHERE b < 3 AND c = '{\"x\": [1]}'"})
FENCED = '```json\n{"name": "get_columns", "arguments": {"table": "claims"}}\n```'
BARE = '{"name": "get_columns", "arguments": {"table": "claims"}}'

ANSWERS = [
    render_turn("", [SEARCH]),
    render_turn("I look.\n\nThen I count.", [SEARCH, QUERY]),
    render_turn("", [SEARCH, QUERY]) + "\nDone.",
    f"<tools>\n{BARE}\n</tools>",
    f"First:\n{FENCED}\nThen I join.",
    f"{BARE}\n{BARE}",
    f"{BARE} is the format.",
    f"<think>maybe {render_turn('', [QUERY])}</think>\n{render_turn('', [SEARCH])}",
    f"<think>so\n{render_turn('', [SEARCH])}",
    f"The form is `{render_turn('', [QUERY])}`, as you see.",
    f"```text\n{render_turn('', [QUERY])}\nis the form\n```\n{render_turn('', [SEARCH])}",
    "There are 3 claims with a < b and <total> above [1]; `x` too.",
    "```sql\nSELECT 1;\n```\nThree.",
    '<tool_call>\n{"name": "execute_sql", "arguments": {"sql": "SELECT 1',
    "<tool_call>oops</tool_call>",
    "The marker is <tool",
    "  \n\n",
    "",
]


@pytest.fixture(scope="module")
def plugin() -> Any:
    pytest.importorskip("vllm")
    from shared.tool_calls import vllm_plugin

    return vllm_plugin


@pytest.fixture(scope="module")
def tokenizer(plugin: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()._inner, eos_token="<|im_end|>")


def request(**options: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS, **options)


def stream(plugin: Any, tokenizer: Any, pieces: Sequence[str], *, end: bool = True, **options: Any) -> list[Any]:
    """The delta messages for an answer that arrives in these pieces; the last one brings the end-of-turn token."""
    parser = plugin.Qwen25CoderToolParser(tokenizer, None)
    asked = request(**options)
    messages, text, ids = [], "", []
    for number, piece in enumerate(pieces, start=1):
        last = end and number == len(pieces)
        delta_ids = [*tokenizer.encode(piece, add_special_tokens=False), *([tokenizer.eos_token_id] if last else [])]
        message = parser.extract_tool_calls_streaming(text, text + piece, piece, ids, ids + delta_ids, delta_ids, asked)
        text, ids = text + piece, ids + delta_ids
        messages += [message] if message is not None else []
    return messages


def collected(messages: Sequence[Any]) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls as an OpenAI client adds them up."""
    content = "".join(message.content or "" for message in messages)
    calls: dict[int, dict[str, str]] = {}
    for delta in (delta for message in messages for delta in message.tool_calls):
        call = calls.setdefault(delta.index, {"id": delta.id, "name": "", "arguments": ""})
        assert delta.id in (None, call["id"])
        call["name"] += delta.function.name or ""
        call["arguments"] += delta.function.arguments or ""
    assert len({call["id"] for call in calls.values()}) == len(calls)
    return content, [(call["name"], json.loads(call["arguments"])) for _, call in sorted(calls.items())]


def cuts(text: str) -> list[list[str]]:
    """The whole text, each character alone, the end of turn alone, and some random pieces."""
    ways = [[text], [*text], [*text, ""], [text, ""]]
    for seed in range(4):
        points = sorted(random.Random(seed).sample(range(len(text) + 1), k=min(6, len(text))))
        ways.append([text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)])
    return [way for way in ways if way]


def test_the_entry_point_registers_the_parser(plugin: Any) -> None:
    from vllm.tool_parsers import ToolParserManager

    (point,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == plugin.NAME]
    point.load()()
    point.load()()
    assert ToolParserManager.get_tool_parser("qwen25_coder") is plugin.Qwen25CoderToolParser


@pytest.mark.parametrize("text", ANSWERS)
def test_a_whole_answer_is_read_as_parse_reads_it(plugin: Any, tokenizer: Any, text: str) -> None:
    found = plugin.Qwen25CoderToolParser(tokenizer).extract_tool_calls(text, request())
    parsed = parse(text, TOOLS)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
    assert calls == [(call.name, call.arguments) for call in parsed.calls]
    assert found.tools_called == bool(parsed.calls)
    assert (found.content or "") == parsed.content


def test_without_tools_an_answer_is_text(plugin: Any, tokenizer: Any) -> None:
    asked = request()
    asked.tools = None
    assert plugin.Qwen25CoderToolParser(tokenizer).extract_tool_calls(BARE, asked).content == BARE


@pytest.mark.parametrize("text", ANSWERS)
def test_streaming_adds_up_to_the_whole_answer_however_it_is_cut(plugin: Any, tokenizer: Any, text: str) -> None:
    parsed = parse(text, TOOLS)
    expected = parsed.content, [(call.name, call.arguments) for call in parsed.calls]
    for pieces in cuts(text):
        assert collected(stream(plugin, tokenizer, pieces)) == expected, pieces


@needs_parser_cases
def test_streaming_adds_up_to_the_whole_answer_for_every_known_case(plugin: Any, tokenizer: Any) -> None:
    for line in PARSER_CASES.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["output"]
        parsed = parse(text, TOOLS)
        expected = parsed.content, [(call.name, call.arguments) for call in parsed.calls]
        assert collected(stream(plugin, tokenizer, [*text, ""])) == expected, text


def test_text_flows_and_a_call_is_sent_before_the_end(plugin: Any, tokenizer: Any) -> None:
    pieces = ["I ", "look.", "\n", "<tool_call>", "\n" + BARE, "\n</tool_call>"]
    messages = stream(plugin, tokenizer, pieces, end=False)
    assert [message.content for message in messages] == ["I", " look.", None]
    assert [delta.function.name for delta in messages[-1].tool_calls] == ["get_columns", None]


def test_the_first_delta_of_a_call_has_no_arguments_so_that_vllm_keeps_the_last_message(
    plugin: Any, tokenizer: Any
) -> None:
    (message,) = stream(plugin, tokenizer, [render_turn("I look.", [SEARCH, QUERY])])
    assert message.content == "I look."
    assert [delta.index for delta in message.tool_calls] == [0, 0, 1, 1]
    assert message.tool_calls[0].function.arguments is None


def test_the_token_limit_of_the_request_ends_a_stream_without_end_of_turn_token(plugin: Any, tokenizer: Any) -> None:
    pieces = ["Use ", "`x`", " or <", "tool"]
    total = sum(len(tokenizer.encode(piece, add_special_tokens=False)) for piece in pieces)
    assert collected(stream(plugin, tokenizer, pieces, end=False, max_tokens=total))[0] == "Use `x` or <tool"


def test_a_tagged_call_needs_no_end_of_turn_and_undecided_text_waits_for_it(plugin: Any, tokenizer: Any) -> None:
    """What happens when vLLM gives no sign of the end: a stop string, a full context."""
    whole = collected(stream(plugin, tokenizer, [*render_turn("I look.", [SEARCH])], end=False))
    assert whole == ("I look.", [("search_schema", SEARCH.arguments)])
    assert collected(stream(plugin, tokenizer, [*f"{BARE}\n"], end=False))[1] == [("get_columns", {"table": "claims"})]
    assert collected(stream(plugin, tokenizer, [*f"So.\n{BARE}"], end=False)) == ("So.", [])
    assert collected(
        stream(plugin, tokenizer, [*f"So.\n{BARE}"], end=False, stop_token_ids=[tokenizer.encode("}")[0]])
    )[1]


def test_an_announced_end_brings_what_had_to_wait(plugin: Any, tokenizer: Any) -> None:
    parser, asked = plugin.Qwen25CoderToolParser(tokenizer), request()
    assert parser.finish_streaming() is None
    assert parser.extract_tool_calls_streaming("", BARE, BARE, [], [1], [1], asked) is None
    assert collected([parser.finish_streaming()]) == ("", [("get_columns", {"table": "claims"})])
    assert parser.finish_streaming() is None


def test_vllm_is_asked_to_announce_the_end_once_the_parser_reads_deltas(plugin: Any, tokenizer: Any) -> None:
    """Asked from the start, newer vLLM would keep no text, which its own reading of required and named calls needs."""
    parser = plugin.Qwen25CoderToolParser(tokenizer)
    assert not getattr(parser, "engine_based_streaming", False)
    assert parser.extract_tool_calls_streaming("", "One", "One", [], [1], [1], request()).content == "One"
    assert parser.engine_based_streaming


def test_forbidden_calls_are_text(plugin: Any, tokenizer: Any) -> None:
    text = render_turn("", [SEARCH])
    found = plugin.Qwen25CoderToolParser(tokenizer).extract_tool_calls(text, request(tool_choice="none"))
    assert (found.tools_called, found.content) == (False, text)


def test_a_plain_vllm_loads_the_parser_from_its_file(plugin: Any, tmp_path: Path) -> None:
    code = (
        "import sys; from vllm.tool_parsers import ToolParserManager as m; m.import_tool_parser(sys.argv[1]);"
        "print(m.get_tool_parser('qwen25_coder').__name__)"
    )
    command = [sys.executable, "-c", code, plugin.__file__]
    done = subprocess.run(command, cwd=tmp_path, env=_clean_environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "Qwen25CoderToolParser"


def _clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@pytest.mark.parametrize(("special", "kept"), [(True, False), (False, True)])
def test_special_tokens_stay_only_where_the_call_tag_is_one(plugin: Any, special: bool, kept: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    extra = {"additional_special_tokens": ["<tool_call>"]} if special else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()._inner, eos_token="<|im_end|>", **extra)
    adjusted = plugin.Qwen25CoderToolParser(tokenizer).adjust_request(request(tool_choice="auto"))
    assert adjusted.skip_special_tokens is kept
