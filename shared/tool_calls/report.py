"""In which forms a model writes its calls, and who can read them.

Input is JSONL: each line a text, an object with `text`, `output` or `content`, or an episode as the pipeline records it.
Turns of an episode whose own text is not known (the server gave no token ids) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.records import json_lines
from shared.tool_calls.hermes import parse_hermes
from shared.tool_calls.stream import parse

HEADING = "| form of the output | texts | share |"
_KEYS = ("text", "output", "content")
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
        rows = [HEADING, "| --- | ---: | ---: |"]
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


def table_beside(path: Path) -> Path:
    """Where the table about a file goes by default."""
    return path.with_suffix(".calls.md")


def write_table(path: Path, tools: Sequence[Mapping[str, Any]], out: Path | None = None) -> tuple[str, Path]:
    """Write the table about a file of texts or episodes, by default beside it; returns the table and where it is."""
    table, out = conformance(texts_of(path), tools).table(), out or table_beside(path)
    out.write_text(table, encoding="utf-8")
    return table, out


def texts_of(path: Path) -> Iterator[str]:
    """The model's texts in a JSONL file; those of episodes that the infrastructure ended do not count.

    Raises UserError naming the line that holds no text.
    """
    for number, row in json_lines(path):
        texts = _texts(row)
        if texts is None:
            raise UserError(
                f"{path}, line {number} holds no text of a model; write a text, an object with {', '.join(_KEYS)}, or an "
                "episode with its turns."
            )
        yield from texts


def _texts(row: Any) -> list[str] | None:
    """The texts of one line; None if it is in no form that holds any."""
    if isinstance(row, str):
        return [row]
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("turns"), list):
        texts: list[Any] = [turn.get("text") if isinstance(turn, dict) else 0 for turn in row["turns"]]
    else:
        texts = [row[key] for key in _KEYS if key in row][:1] or [0]
    if not all(text is None or isinstance(text, str) for text in texts):
        return None
    return [] if row.get("stop") == "infrastructure" else [text for text in texts if text is not None]
