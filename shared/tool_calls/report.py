"""In which forms a model writes its calls, and who can read them.

Input is JSONL: each line a text, an object with `text`, `output` or `content`, or an episode as the pipeline records it.
Turns of an episode whose own text is not known (the server gave no token ids) are left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.tool_calls.hermes import parse_hermes
from shared.tool_calls.stream import parse

_NO_CALL, _MALFORMED = "no call", "malformed"
_FORMS = ("hermes", "tools_tag", "fenced", "bare", "xml", "python", "react", _MALFORMED, _NO_CALL)


@dataclass(frozen=True)
class Conformance:
    """Counts over the texts of one model."""

    families: Counter[str]  # texts by the form of their first call
    stock_calls: int
    our_calls: int
    reasons: Counter[str]  # of malformed calls

    def table(self) -> str:
        """The counts as Markdown."""
        rows = ["| form of the output | texts | share |", "| --- | ---: | ---: |"]
        rows += [f"| {name} | {n} | {self._share(name)} |" for name, n in self.families.most_common()]
        rows += ["", "| calls | found |", "| --- | ---: |"]
        rows += [f"| stock Hermes grammar | {self.stock_calls} |", f"| qwen25_coder | {self.our_calls} |"]
        rows += [f"| malformed: {reason} | {n} |" for reason, n in self.reasons.most_common()]
        return "\n".join(rows) + "\n"

    def _share(self, form: str) -> str:
        return f"{self.families[form] / self.families.total():.1%}"


def side_by_side(models: Mapping[str, Conformance]) -> tuple[list[str], list[list[str]]]:
    """Header and one row per model that wrote anything: shares of its texts by form, and the calls that each grammar finds."""
    written = {label: found for label, found in models.items() if found.families}
    forms = [form for form in _FORMS if any(found.families[form] for found in written.values())]
    rows = [
        [label, str(found.families.total()), *map(found._share, forms), str(found.stock_calls), str(found.our_calls)]
        for label, found in written.items()
    ]
    return ["model", "texts", *forms, "calls, stock Hermes grammar", "calls, qwen25_coder"], rows


def conformance(texts: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> Conformance:
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


def write_table(path: Path, tools: Sequence[Mapping[str, Any]], out: Path | None = None) -> tuple[str, Path]:
    """Write the table about a file of texts or episodes, by default beside it; returns the table and where it is."""
    table, out = conformance(texts_of(path), tools).table(), out or path.with_suffix(".calls.md")
    out.write_text(table, encoding="utf-8")
    return table, out


def texts_of(path: Path) -> Iterator[str]:
    """The model's texts in a JSONL file; those of episodes that the infrastructure ended do not count."""
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            yield from _texts(json.loads(line))


def _texts(row: Any) -> Iterator[str]:
    if isinstance(row, str):
        yield row
    elif isinstance(row, dict) and isinstance(row.get("turns"), list):
        lost = row.get("stop") == "infrastructure"
        yield from (turn["text"] for turn in row["turns"] if turn["text"] is not None and not lost)
    elif isinstance(row, dict):
        yield from [row[key] for key in ("text", "output", "content") if isinstance(row.get(key), str)][:1]
