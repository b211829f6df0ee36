"""How a report looks: its tables as Markdown, everything as one HTML page.

The page has no script and no external file, and is readable in light and dark. The template escapes what a model wrote.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

_CHARTS = {
    "reward": "mean reward",
    "execution_accuracy": "execution accuracy (training episodes)",
    "tool_call_rate": "tool-call rate, Hermes grammar",
    "merged_share": "merged turns",
    "turns": "turns per episode",
    "weight_gap": "rollout to trainer log-prob gap",
}
_WIDTH, _HEIGHT, _LEFT, _MARGIN = 300, 110, 58, 18


@dataclass(frozen=True)
class Table:
    """One table of the report; a row whose first cell starts with a blank is a part of the row above it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)  # of cells, by row and column

    def markdown(self) -> str:
        """The table alone; `rich` shows the same text on a terminal."""
        lines = [self.header, ["---", *["---:"] * (len(self.header) - 1)]]
        for place, row in enumerate(self.rows):
            cells = [" ".join(cell.replace("|", "\\|").replace("  ", "&nbsp;&nbsp;").splitlines()) for cell in row]
            links = [self.links.get((place, column)) for column in range(len(row))]
            lines.append([f"[{cell}]({link})" if link else cell for cell, link in zip(cells, links, strict=True)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def points(gain: Mapping[str, Any]) -> str:
    """The fields of an Estimate of a difference as "mean (low to high)" in percentage points."""
    return f"{100 * gain['mean']:+.1f} ({100 * gain['low']:+.1f} to {100 * gain['high']:+.1f})"


def page(facts: Mapping[str, Any], tables: Sequence[Table], **sentences: str) -> str:
    """The whole page; `sentences` are `verdict` and `cost`."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    charts = [(title, line_chart(facts["steps"], key)) for key, title in _CHARTS.items()]
    return environment.get_template("report.html.jinja").render(
        facts=facts,
        tables=tables,
        charts=[(title, chart) for title, chart in charts if chart],
        examples=[{**example, "messages": readable(example["messages"])} for example in facts["examples"]],
        **sentences,
    )


def readable(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(role, text) of each message after the system prompt; calls shown as `name(argument)`."""
    shown = []
    for message in messages:
        if message["role"] == "system":
            continue
        lines = [message.get("content") or ""]
        for call in (call["function"] for call in message.get("tool_calls") or ()):
            arguments = call["arguments"]
            with contextlib.suppress(ValueError, AttributeError):  # what is broken or no object is shown as it is
                arguments = ", ".join(map(str, json.loads(arguments).values()))
            lines.append(f"→ {call['name']}({arguments})")
        shown.append((message["role"], "\n".join(filter(None, lines))))
    return shown


def line_chart(steps: Sequence[Mapping[str, Any]], key: str) -> Markup | None:
    """One figure over the GRPO steps as inline SVG; None when no step has it."""
    points = [(row["step"], row[key]) for row in steps if row.get(key) is not None]
    if not points:
        return None
    (first, last), values = (points[0][0], points[-1][0]), [value for _, value in points]
    low, high = min(values), max(values)
    across = (_WIDTH - _LEFT - _MARGIN) / max(1, last - first)
    up = (_HEIGHT - 2 * _MARGIN) / ((high - low) or 1)
    placed = [(_LEFT + (step - first) * across, _HEIGHT - _MARGIN - (value - low) * up) for step, value in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>step {step}: {value:.4g}</title></circle>'
        for (x, y), (step, value) in zip(placed, points, strict=True)
    )
    texts = [(_LEFT - 6, _HEIGHT - _MARGIN + 4, "end", f"{low:.2g}"), (_LEFT, _HEIGHT - 2, "start", f"step {first}")]
    texts += [(_LEFT - 6, _MARGIN + 4, "end", f"{high:.2g}")] if high > low else []
    texts += [(_WIDTH - _MARGIN, _HEIGHT - 2, "end", f"{last}")] if last > first else []
    labels = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in texts)
    view = f"0 0 {_WIDTH} {_HEIGHT}"
    return Markup(f'<svg viewBox="{view}" role="img"><polyline points="{path}"/>{dots}{labels}</svg>')
