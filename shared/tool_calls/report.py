"""In which forms a model writes its calls, and who can read them.

Input is JSONL: each line a text, an object with `text`, `output` or `content`, or an episode as the pipeline records it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.tool_calls.hermes import parse_hermes
from shared.tool_calls.stream import parse

_NO_CALL, _MALFORMED = "no call", "malformed"


@dataclass(frozen=True)
class Conformance:
    """Counts over the texts of a file."""

    families: Counter[str]  # texts by the form of their first call
    stock_calls: int
    our_calls: int
    reasons: Counter[str]  # of malformed calls

    def table(self) -> str:
        """The counts as Markdown."""
        total = sum(self.families.values())
        rows = ["| form of the output | texts | share |", "| --- | ---: | ---: |"]
        rows += [f"| {name} | {n} | {n / total:.1%} |" for name, n in self.families.most_common()]
        rows += ["", "| calls | found |", "| --- | ---: |"]
        rows += [f"| stock Hermes grammar | {self.stock_calls} |", f"| qwen25_coder | {self.our_calls} |"]
        rows += [f"| malformed: {reason} | {n} |" for reason, n in self.reasons.most_common()]
        return "\n".join(rows) + "\n"


def conformance(texts: Iterator[str], tools: Sequence[Mapping[str, Any]]) -> Conformance:
    """Read every text with both grammars."""
    families, reasons = Counter[str](), Counter[str]()
    stock = ours = 0
    for text in texts:
        parsed = parse(text, tools)
        families[parsed.family or (_MALFORMED if parsed.malformed else _NO_CALL)] += 1
        reasons.update(parsed.malformed)
        stock += len(parse_hermes(text).calls)
        ours += len(parsed.calls)
    return Conformance(families, stock, ours, reasons)


def texts_of(path: Path) -> Iterator[str]:
    """The model's texts in a JSONL file."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            yield from _texts(json.loads(line))


def _texts(row: Any) -> Iterator[str]:
    if isinstance(row, str):
        yield row
    elif isinstance(row, dict) and isinstance(row.get("turns"), list):
        yield from (turn["text"] if turn.get("text") is not None else turn["content"] for turn in row["turns"])
    elif isinstance(row, dict):
        yield from [row[key] for key in ("text", "output", "content") if isinstance(row.get(key), str)][:1]
