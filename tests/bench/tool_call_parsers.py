"""How fast and how right: this parser beside vLLM's own, in one process.

    python -m tests.bench.tool_call_parsers [--cases FILE.jsonl] [--repeat N]

Whole: microseconds for one answer of plain Hermes calls, the median of several rounds that alternate between the
parsers. Streaming: a call with an 8,000-character SQL argument, one character a delta, the median of five rounds; and
the cost of a character early and late in one of 200,000. With case files: calls and negatives each parser reads as
expected, also those of the packages in tool_call_peers (their calls alone). Parsers that are not installed are said to
be absent. Exit status 1 when a target is missed: 1.5 times hermes for whole answers, ten times faster when streaming.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from shared.agent.prompts import TOOLS
from shared.records import ToolCall
from shared.tool_calls import Stream, render_call, render_turn, vllm_plugin
from shared.tool_calls.report import read_cases
from tests.bench.tool_call_peers import PEERS as PACKAGES
from tests.bench.tool_call_peers import Reader
from tests.shared.examples import tiny_tokenizer

OURS, STOCK = vllm_plugin.NAME, "hermes"
PEERS = ("qwen3_coder", "pythonic", "xlam")
WHOLE_TARGET, STREAM_TARGET = 1.5, 10.0
SQL = (
    "SELECT c.city, count(*) FROM claims c JOIN policies p ON p.id = c.policy WHERE p.kind = 'car' AND c.amount > 100 "
)
ANSWER = render_turn(
    "I look at the columns, then I count.",
    [ToolCall("get_columns", {"table": "claims"}), ToolCall("execute_sql", {"sql": SQL})],
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, help="also compare the parsers on this file of cases")
    parser.add_argument("--repeat", type=int, default=15, help="rounds (default 15)")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # hermes logs a traceback for each text it cannot read
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()._inner, eos_token="<|im_end|>")
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # some parsers ask for them
    met = [_whole(tokenizer, args.repeat), _streaming(tokenizer)]
    _growth()
    if args.cases:
        cases = list(read_cases(args.cases))
        _accuracy(tokenizer, cases)
        _packages(cases)
    return 0 if all(met) else 1


def _request(tools: Sequence[Any] = TOOLS) -> Any:
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=list(tools) or None)


def _microseconds(work: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begin) / times * 1e6


def _whole(tokenizer: Any, rounds: int) -> bool:
    request, results = _request(), {STOCK: list[float](), OURS: list[float]()}
    parsers = {name: ToolParserManager.get_tool_parser(name)(tokenizer) for name in results}
    for _ in range(rounds):
        for name, parser in parsers.items():
            results[name].append(_microseconds(lambda parser=parser: parser.extract_tool_calls(ANSWER, request), 300))  # type: ignore[misc]
    stock, ours = (statistics.median(results[name]) for name in (STOCK, OURS))
    print(
        f"whole answer of 2 calls, {len(ANSWER)} characters: {STOCK} {stock:.1f} us, {OURS} {ours:.1f} us, "
        f"ratio {ours / stock:.2f} (wanted <= {WHOLE_TARGET})"
    )
    return ours <= WHOLE_TARGET * stock


def _streaming(tokenizer: Any) -> bool:
    text = render_call(ToolCall("execute_sql", {"sql": (SQL * 80)[:8000]}))
    rounds = [(_stream_seconds(STOCK, tokenizer, text), _stream_seconds(OURS, tokenizer, text)) for _ in range(5)]
    stock, ours = map(statistics.median, zip(*rounds, strict=True))
    ratio = stock / ours
    print(
        f"streaming {len(text)} characters one by one: {STOCK} {stock:.3f} s, {OURS} {ours:.3f} s, "
        f"{ratio:.1f} times faster (wanted >= {STREAM_TARGET})"
    )
    return ratio >= STREAM_TARGET


def _stream_seconds(name: str, tokenizer: Any, text: str) -> float:
    parser, request = ToolParserManager.get_tool_parser(name)(tokenizer), _request()
    steps = [(text[:end], text[: end + 1], text[end]) for end in range(len(text))]
    begin = time.perf_counter()
    for before, after, delta in steps:
        parser.extract_tool_calls_streaming(before, after, delta, [], [1], [1], request)
    return time.perf_counter() - begin


def _growth() -> None:
    text, stream = render_call(ToolCall("execute_sql", {"sql": (SQL * 2000)[:200_000]})), Stream(TOOLS)
    costs = []
    for start in range(0, len(text), 25_000):
        piece = iter(text[start : start + 25_000])
        costs.append(_microseconds(lambda piece=piece: stream.feed(next(piece)), len(text[start : start + 25_000])))  # type: ignore[misc]
    print(f"a streamed character of {len(text)}: {costs[0]:.2f} us in the first 25,000, {costs[-2]:.2f} us in the last")


def _accuracy(tokenizer: Any, cases: Sequence[dict[str, Any]]) -> None:
    for name in (OURS, STOCK, *PEERS):
        try:
            parser_class = ToolParserManager.get_tool_parser(name)
        except (KeyError, ImportError):
            print(f"{name}: absent")
            continue
        good = [(bool(case["expect_calls"]), _as_expected(parser_class, tokenizer, case)) for case in cases]
        calls, negatives = ([right for positive, right in good if positive is kind] for kind in (True, False))
        print(f"{name}: calls {sum(calls)}/{len(calls)} negatives {sum(negatives)}/{len(negatives)}")


def _packages(cases: Sequence[dict[str, Any]]) -> None:
    for read in PACKAGES:
        failures: Counter[str] = Counter()
        try:
            good = [(bool(case["expect_calls"]), _calls_as_expected(read, case, failures)) for case in cases]
        except ImportError as error:
            print(f"{read.__name__}: absent ({error})")
            continue
        calls, negatives = ([right for positive, right in good if positive is kind] for kind in (True, False))
        raised = f"; raised {dict(failures)}" if failures else ""
        print(f"{read.__name__}: calls {sum(calls)}/{len(calls)} negatives {sum(negatives)}/{len(negatives)}{raised}")


def _calls_as_expected(read: Reader, case: dict[str, Any], failures: Counter[str]) -> bool:
    tools = [{"type": "function", "function": tool.get("function", tool)} for tool in case["tools"]]
    try:
        found = read(case["output"], tools)
    except ImportError:
        raise
    except Exception as error:
        failures[type(error).__name__] += 1
        return False
    return found == [(call["name"], call["arguments"]) for call in case["expect_calls"]]


def _as_expected(parser_class: Any, tokenizer: Any, case: dict[str, Any]) -> bool:
    tools = [{"type": "function", "function": tool.get("function", tool)} for tool in case["tools"]]
    try:
        parser = parser_class(tokenizer)
        found = parser.extract_tool_calls(case["output"], _request(tools))
        calls = [{"name": c.function.name, "arguments": json.loads(c.function.arguments)} for c in found.tool_calls]
    except Exception as error:  # a peer may need another tokenizer, or fail on a case
        print(f"  {parser_class.__name__} {case['id']}: {type(error).__name__}", file=sys.stderr)
        return False
    content = case.get("expect_content")
    return calls == case["expect_calls"] and (content is None or content.split() == (found.content or "").split())


if __name__ == "__main__":
    sys.exit(main())
