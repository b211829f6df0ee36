"""Which call formats a model produced, which parsers accept them, and whether given cases are read as expected.

Texts come as JSONL: each line a text, an object with `text`, `output` or `content`, or an episode as the pipeline
records it. Turns whose own text is not known (the server gave no token ids) and episodes that the infrastructure ended
do not count.

A case is one JSON object a line with `id`, `output`, `tools` (names or schemas), `expect_calls` and `expect_content`.
Calls are compared in order, content with white space collapsed; null means that nothing has to survive.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .grammar import Parsed, Stream, parse
from .render import parse_hermes

HEADING = "| form of the output | texts | share |"
SQL_AGENT = {  # parameters of the tools that cases name
    tool: {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    for tool, argument in (("search_schema", "query"), ("get_columns", "table"), ("execute_sql", "sql"))
}
_CASE = "id, output, tools (names or schemas), expect_calls (name and arguments) and expect_content (a text or null)"


@dataclass(frozen=True)
class Conformance:
    """Counts over the texts of one model."""

    families: Counter[str]  # texts by the form of their first call
    stock_calls: int
    our_calls: int
    reasons: Counter[str]  # of malformed calls


def conformance(texts: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> Conformance:
    """Read every text with both grammars."""
    families, reasons = Counter[str](), Counter[str]()
    stock = ours = 0
    for text in texts:
        parsed = parse(text, tools)
        families[parsed.family or ("malformed" if parsed.malformed else "no call")] += 1
        reasons.update(parsed.malformed)
        stock += len(parse_hermes(text).calls)
        ours += len(parsed.calls)
    return Conformance(families, stock, ours, reasons)


def write_table(path: Path, tools: Sequence[Mapping[str, Any]], out: Path | None = None) -> tuple[str, Path]:
    """Write the Markdown table about a file of texts, by default beside it; returns the table and where it is."""
    found, out = conformance(texts_of(path), tools), out or path.with_suffix(".calls.md")
    rows = [HEADING, "| --- | ---: | ---: |"]
    rows += [f"| {name} | {n} | {n / found.families.total():.1%} |" for name, n in found.families.most_common()]
    rows += ["", "| calls | found |", "| --- | ---: |", f"| stock Hermes grammar | {found.stock_calls} |"]
    rows += [f"| qwen25_coder | {found.our_calls} |"]
    rows += [f"| malformed: {reason} | {n} |" for reason, n in found.reasons.most_common()]
    table = "\n".join(rows) + "\n"
    out.write_text(table, encoding="utf-8")
    return table, out


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and JSON value of each line that is not blank; raises ValueError naming what is no JSON or no text."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); restore the file.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}); correct the line.") from error


def texts_of(path: Path) -> Iterator[str]:
    """The model's texts in a JSONL file. Raises ValueError naming the line that holds no text."""
    for number, row in json_lines(path):
        turns = row.get("turns") if isinstance(row, dict) else None
        if isinstance(turns, list):
            texts: list[Any] = [turn.get("text") if isinstance(turn, dict) else 0 for turn in turns]
        else:
            fields = row if isinstance(row, dict) else {"text": 0 if row is None else row}
            texts = [fields[key] for key in ("text", "output", "content") if key in fields][:1] or [0]
        if not all(text is None or isinstance(text, str) for text in texts):
            raise ValueError(
                f"{path}, line {number} holds no text of a model; write a text, an object with text, output or "
                "content, or an episode with its turns."
            )
        if not (isinstance(row, dict) and row.get("stop") == "infrastructure"):
            yield from (text for text in texts if text is not None)


def read_cases(path: Path) -> Iterator[dict[str, Any]]:
    """The cases of a JSONL file, their tools as schemas. Raises ValueError naming the line that is no case."""
    anything = {"type": "object", "properties": {}, "additionalProperties": True}
    for number, case in json_lines(path):
        try:
            tools: list[Any] = [
                {"name": tool, "parameters": SQL_AGENT.get(tool, anything)} if isinstance(tool, str) else tool
                for tool in case["tools"]
            ]
            texts = [case["id"], case["output"], case.get("expect_content") or ""]
            texts += [tool.get("function", tool)["name"] for tool in tools] + [c["name"] for c in case["expect_calls"]]
            fits = isinstance(case["tools"], list) and all(isinstance(text, str) for text in texts)
            fits = fits and all(isinstance(call["arguments"], dict) for call in case["expect_calls"])
        except (KeyError, TypeError, AttributeError):
            fits = False
        if not fits:
            raise ValueError(f"{path}, line {number} is no parser case; write an object with {_CASE}.")
        yield {"expect_content": None, **case, "tools": tools}


def fault(case: Mapping[str, Any], *, stream: bool) -> str:
    """What is wrong with the reading of one case; "" if nothing is."""
    parsed, content = parse(case["output"], case["tools"]), case["expect_content"]
    expected, got = (
        json.dumps([[call["name"], call["arguments"]] for call in calls], ensure_ascii=False, sort_keys=True)
        for calls in (case["expect_calls"], map(vars, parsed.calls))
    )
    what = "calls"
    if got == expected and content is not None and content.split() != parsed.content.split():
        what, expected, got = "content", repr(content), repr(parsed.content)
    for pieces in cuts(case["output"]) if stream and got == expected else ():
        streamed = streamed_result(pieces, case["tools"])
        if streamed != parsed:
            what, expected, got = f"stream in {len(pieces)} pieces", str(parsed), str(streamed)
    return "" if got == expected else f"{case['id']}: {what}\n  expected {expected}\n  got      {got}"


def cuts(text: str) -> Iterator[list[str]]:
    """Ways to cut a text: whole, each character alone, at some random places."""
    yield [text]
    yield [*text]
    for seed in range(8):
        places = sorted(random.Random(seed).sample(range(len(text) + 1), k=min(seed + 1, len(text))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def streamed_result(pieces: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """What the updates of a stream add up to."""
    stream = Stream(tools)
    updates = [*(stream.feed(piece) for piece in pieces), stream.finish()]
    calls = tuple(call for update in updates for call in update.calls)
    return stream.parsed()._replace(content="".join(update.content for update in updates), calls=calls)
