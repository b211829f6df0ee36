"""The report as one HTML file: no script, no external file, readable in light and dark.

Charts are small inline SVGs; everything a model wrote is escaped by the template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
_WIDTH, _HEIGHT, _LEFT, _MARGIN = 300, 110, 58, 14


def page(facts: dict[str, Any], header: Sequence[str], rows: Sequence[Sequence[str]], **sentences: str) -> str:
    """The whole page; `sentences` are `verdict` and `cost`."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(
        "report.html.jinja"
    )
    charts = [(title, line_chart(facts["steps"], key)) for key, title in _CHARTS.items()]
    return template.render(
        facts=facts, header=header, rows=rows, **sentences,
        accuracy=interval_chart(facts["models"]), charts=[chart for chart in charts if chart[1]],
        examples=[{**example, "messages": readable(example["messages"])} for example in facts["examples"]],
    )  # fmt: skip


def readable(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(role, text) of each message after the system prompt; calls shown as `name(argument)`."""
    shown = []
    for message in messages:
        if message["role"] != "system":
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            lines = [
                message.get("content") or "",
                *(f"→ {call['name']}({_values(call['arguments'])})" for call in calls),
            ]
            shown.append((message["role"], "\n".join(line for line in lines if line)))
    return shown


def _values(arguments: str) -> str:
    try:
        decoded = json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
    return ", ".join(map(str, decoded.values())) if isinstance(decoded, dict) else arguments


def line_chart(steps: Sequence[dict[str, Any]], key: str) -> Markup | None:
    """One figure over the GRPO steps; None when no step has it."""
    points = [(row["step"], row[key]) for row in steps if row.get(key) is not None]
    if not points:
        return None
    low, high = min(y for _, y in points), max(y for _, y in points)
    pad = (high - low) * 0.1 or max(abs(high) * 0.1, 0.05)
    first, last = points[0][0], points[-1][0]

    def place(step: float, value: float) -> tuple[float, float]:
        across = (step - first) / (last - first) if last > first else 0.5
        up = (value - low + pad) / (high - low + 2 * pad)
        return _LEFT + across * (_WIDTH - _LEFT - _MARGIN), _HEIGHT - _MARGIN - 4 - up * (_HEIGHT - 2 * _MARGIN - 4)

    placed = [(place(step, value), step, value) for step, value in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for (x, y), _, _ in placed)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>step {step}: {value:.4g}</title></circle>'
        for (x, y), step, value in placed
    )
    labels = "".join(
        f'<text x="{_LEFT - 6}" y="{place(first, value)[1] + 4:.1f}" text-anchor="end">{value:.2g}</text>'
        for value in dict.fromkeys((low, high))
    )
    ticks = f'<text x="{_LEFT}" y="{_HEIGHT - 4}">step {first}</text>' + (
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 4}" text-anchor="end">{last}</text>' if last > first else ""
    )
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><polyline points="{path}"/>{dots}{labels}{ticks}</svg>'
    )


def interval_chart(models: Sequence[dict[str, Any]]) -> Markup:
    """Execution accuracy of each model as a dot with its interval, on a scale from 0 to 100 %."""
    left, width, row = 110, 930, 30

    def x(share: float) -> float:
        return left + share * (width - left - 60)

    parts = [
        f'<line class="grid" x1="{x(share):.0f}" x2="{x(share):.0f}" y1="4" y2="{row * len(models) + 4}"/>'
        f'<text x="{x(share):.0f}" y="{row * len(models) + 20}" text-anchor="middle">{share:.0%}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for index, model in enumerate(models):
        y, result = index * row + row / 2 + 4, model["all"]
        parts.append(
            f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{model["label"]}</text>'
            f'<line class="interval" x1="{x(result["low"]):.1f}" x2="{x(result["high"]):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle cx="{x(result["accuracy"]):.1f}" cy="{y}" r="5"/>'
            f'<text x="{x(result["high"]) + 12:.1f}" y="{y + 4}">{result["accuracy"]:.1%}</text>'
        )
    return Markup(f'<svg viewBox="0 0 {width} {row * len(models) + 26}" role="img">{"".join(parts)}</svg>')
