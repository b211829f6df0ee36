"""A coverage-guided search for texts that the tool-call grammar reads wrongly.

    python -m tests.bench.fuzz_tool_calls [--seconds N] [--seed N]

Inputs that reach new lines of `shared/tool_calls` are kept and mutated further. Findings: an exception, a stream that
differs from the whole text, content that was not in the text, text lost although there is no call, a rendered call that
is read in another way. Prints a finding and exits with status 1, else says how many texts were read in how much
processor time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from types import CodeType

from shared.agent.prompts import TOOLS
from shared.tool_calls import Stream, parse, render_turn
from tests.shared.tool_calls.test_tool_call_properties import markup
from tests.shared.tool_calls.tool_call_examples import NEGATIVES, POSITIVES

_TOOL = sys.monitoring.COVERAGE_ID
_MAX_LENGTH = 400


class Coverage:
    """Lines of the grammar that have run; each is reported once."""

    def __init__(self) -> None:
        self.lines = 0
        sys.monitoring.use_tool_id(_TOOL, "fuzz")
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, self._line)
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.BRANCH, self._branch)
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.LINE | sys.monitoring.events.BRANCH)
        self._branches: set[tuple[int, int, int]] = set()

    def _line(self, code: CodeType, line: int) -> object:
        self.lines += "tool_calls" in code.co_filename
        return sys.monitoring.DISABLE

    def _branch(self, code: CodeType, start: int, end: int) -> object:
        if "tool_calls" not in code.co_filename:
            return sys.monitoring.DISABLE
        self._branches.add((id(code), start, end))
        return None

    def size(self) -> int:
        return self.lines + len(self._branches)


def finding(text: str, chance: random.Random) -> str:
    """What is wrong with the reading of a text; "" if nothing is."""
    whole, stream, content, calls, at = parse(text, TOOLS), Stream(TOOLS), "", [], 0
    while at < len(text):
        step = chance.choice((1, 1, 1, 2, 5, 40))
        update = stream.feed(text[at : at + step])
        content, at = content + update.content, at + step
        calls += update.calls
    rest = stream.finish()
    if (content + rest.content, (*calls, *rest.calls)) != (whole.content, whole.calls) or stream.parsed() != whole:
        return f"streamed {stream.parsed()}, whole {whole}"
    if not whole.calls and whole.content not in (
        text,
        text.removesuffix("<|im_end|>"),
        text.removesuffix("<|endoftext|>"),
    ):
        return f"lost text: {whole.content!r}"
    remaining = iter(text)
    if not all(character in remaining for character in whole.content if not character.isspace()):
        return f"invented text: {whole.content!r}"
    again = parse(render_turn("", whole.calls), TOOLS)
    return f"rendered and read again: {again.calls}" if again.calls != whole.calls else ""


def mutated(text: str, corpus: list[str], chance: random.Random) -> str:
    """A text with a piece of it dropped, doubled, or replaced by markup or a piece of another one."""
    for _ in range(chance.randint(1, 3)):
        a, b = sorted(chance.randint(0, len(text)) for _ in range(2))
        b = min(b, a + 12) if chance.random() < 0.7 else b
        other = chance.choice(corpus)
        cut = chance.randint(0, len(other))
        piece = chance.choice(
            ("", text[a:b] * 2, chance.choice(markup), other[cut : cut + 20], chr(chance.randint(32, 300)))
        )
        text = text[:a] + piece + text[b if chance.random() < 0.5 else a :]
    return text[:_MAX_LENGTH]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of processor time (default 600)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, coverage, texts = random.Random(args.seed), Coverage(), 0
    corpus = [example[0] for group in POSITIVES.values() for example in group]
    corpus += [text for group in NEGATIVES.values() for text in group]
    while time.process_time() < args.seconds:
        text, seen = mutated(chance.choice(corpus), corpus, chance), coverage.size()
        try:
            problem = finding(text, chance)
        except Exception as error:
            problem = f"raised {error!r}"
        if problem:
            print(f"seed {args.seed}, text {texts}: {text!r}\n{problem}")
            return 1
        if coverage.size() > seen:
            corpus.append(text)
        texts += 1
    print(
        f"seed {args.seed}, {time.process_time():.0f} s: {texts} texts, {len(corpus)} kept, "
        f"{coverage.size()} lines and branches reached, no finding"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
