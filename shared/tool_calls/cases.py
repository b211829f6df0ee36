"""Run files of parser cases: one JSON object a line with `id`, `output`, `tools`, `expect_calls`, `expect_content`.

Calls are compared in order, arguments as JSON values; content with white space collapsed, null meaning that nothing has to
survive. With streaming each text is also cut in many ways, and every cut must give exactly what the whole text gives.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.agent.prompts import TOOLS
from shared.errors import UserError
from shared.records import json_lines
from shared.tool_calls.stream import Parsed, Stream, parse

_RANDOM_CUTS = 8
_KNOWN = {tool["function"]["name"]: tool for tool in TOOLS}
_FIELDS = {
    "id": "a text",
    "output": "a text",
    "tools": "a list of tool names or schemas",
    "expect_calls": 'a list of {"name": ..., "arguments": {...}}',
    "expect_content": "a text or null",
}


def run_cases(path: Path, *, stream: bool) -> tuple[list[str], str]:
    """What went wrong, one text for each failing case, and a closing line `calls X/Y negatives Z/W`.

    Raises UserError naming the line that is no case, or when there is none.
    """
    cases = list(read_cases(path))
    if not cases:
        raise UserError(f"{path} holds no parser case; write a JSON object a line with {', '.join(_FIELDS)}.")
    faults = {number: fault(case, stream=stream) for number, case in enumerate(cases)}
    positive = [not faults[number] for number, case in enumerate(cases) if case["expect_calls"]]
    negative = [not faults[number] for number, case in enumerate(cases) if not case["expect_calls"]]
    totals = f"calls {sum(positive)}/{len(positive)} negatives {sum(negative)}/{len(negative)}"
    return [text for text in faults.values() if text], totals


def read_cases(path: Path) -> Iterator[dict[str, Any]]:
    """The cases of a JSONL file; without `expect_content` nothing has to survive. Raises UserError naming a bad line."""
    for number, case in json_lines(path):
        if not isinstance(case, dict):
            raise UserError(f"{path}, line {number} is not a JSON object; write a case with {', '.join(_FIELDS)}.")
        case = {"expect_content": None, **case}
        for key, form in _FIELDS.items():
            if key not in case or not _has_form(key, case[key]):
                what = "is not" if key in case else "is missing; it must be"
                raise UserError(f'{path}, line {number} is no parser case: "{key}" {what} {form}; correct the line.')
        yield case


def _has_form(key: str, value: Any) -> bool:
    if key == "tools":
        return isinstance(value, list) and all(isinstance(tool, str) or _is_schema(tool) for tool in value)
    if key == "expect_calls":
        return isinstance(value, list) and all(
            isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)
            for call in value
        )
    return isinstance(value, str) or (key == "expect_content" and value is None)


def _is_schema(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def fault(case: Mapping[str, Any], *, stream: bool) -> str:
    """What is wrong with the reading of one case; "" if nothing is."""
    tools = [tool if isinstance(tool, dict) else _schema(tool) for tool in case["tools"]]
    parsed = parse(case["output"], tools)
    expected, got = case["expect_calls"], [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
    content = case["expect_content"]
    if _text(got) != _text(expected):
        return _report(case, "calls", _text(expected), _text(got))
    if content is not None and content.split() != parsed.content.split():
        return _report(case, "content", repr(content), repr(parsed.content))
    for pieces in cuts(case["output"]) if stream else ():
        streamed = streamed_result(pieces, tools)
        if streamed != parsed:
            return _report(case, f"stream in {len(pieces)} pieces", str(parsed), str(streamed))
    return ""


def cuts(text: str) -> Iterator[list[str]]:
    """Ways to cut a text: whole, each character alone, at some random places."""
    yield [text]
    yield [*text]
    for seed in range(_RANDOM_CUTS):
        places = sorted(random.Random(seed).sample(range(len(text) + 1), k=min(seed + 1, len(text))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def streamed_result(pieces: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """What the updates of a stream add up to."""
    stream = Stream(tools)
    updates = [*(stream.feed(piece) for piece in pieces), stream.finish()]
    known = stream.parsed()
    calls = tuple(call for update in updates for call in update.calls)
    return Parsed("".join(update.content for update in updates), calls, known.malformed, known.family)


def _schema(name: str) -> Mapping[str, Any]:
    anything = {"type": "object", "properties": {}, "additionalProperties": True}
    return _KNOWN.get(name, {"type": "function", "function": {"name": name, "parameters": anything}})


def _text(calls: Any) -> str:
    return json.dumps(calls, ensure_ascii=False, sort_keys=True)


def _report(case: Mapping[str, Any], what: str, expected: str, got: str) -> str:
    return f"{case['id']}: {what}\n  expected {expected}\n  got      {got}"
