"""The report of a run: base, SFT and GRPO side by side, what changed beyond noise, and what it cost.

    report/{report.json,report.md,report.html}

Everything is read from what the stages left on disk, so a report can be made again at any time and of an unfinished run.
`python -m shared.report` makes it; with `--readme FILE` it also puts the results between the markers in that file.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.agent.prompts import TOOLS
from shared.cli.command_line import common_parser, resolve, run_main
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.metrics import bootstrap_interval, percent
from shared.evaluation.run import chosen_questions, read_summary
from shared.records import JsonlTail, Question, read_episodes
from shared.report.page import page
from shared.runs.manifest import RunDirectory, installed_versions, read_manifest, write_json
from shared.runs.usage import commit, machine, read_usage
from shared.tool_calls.report import conformance, side_by_side, texts_of

MODELS = {"base": "base", "sft": "after SFT", "grpo": "after GRPO"}
HEADER = ("model", "execution accuracy (95\u00a0%)", "questions", "tool calls, Hermes grammar", "parser fallback",
          "merged turns", "turns", "seconds")  # fmt: skip
_STEP_COLUMNS = {
    "reward": ".3f", "execution_accuracy": ".0%", "tool_call_rate": ".0%", "fallback_share": ".0%", "merged_share": ".0%",
    "turns": ".1f", "tokens": ".0f", "seconds": ".0f",
}  # fmt: skip
_START, _END = "<!-- results -->", "<!-- /results -->"


def write_report(config: Config, run: RunDirectory) -> dict[str, Any]:
    """Write the three files, print the table, and return the facts behind them."""
    facts = collect(config, run)
    run.report.mkdir(parents=True, exist_ok=True)
    write_json(run.report / "report.json", facts)
    (run.report / "report.md").write_text(f"# Run {facts['run']}\n\n{markdown(facts)}", encoding="utf-8")
    html = page(facts, HEADER, table_rows(facts), verdict=verdict(facts), cost=cost(facts))
    (run.report / "report.html").write_text(html, encoding="utf-8")
    print_table(facts)
    print(f"report: {run.report / 'report.html'}")
    return facts


def collect(config: Config, run: RunDirectory) -> dict[str, Any]:
    """All facts of the report as JSON-able values; raises UserError when no model has been evaluated yet."""
    questions = chosen_questions(config, run)
    models = [_model(who, config, run, questions) for who in MODELS if read_manifest(run.evaluation(who))]
    if not models:
        raise UserError(f"{run.path} holds no finished evaluation to report; run the pipeline first.")
    usage = read_usage(run)
    return {
        "run": run.path.name,
        "written": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "profile": config.profile,
        "model": config.model,
        "seed": config.seed,
        "commit": commit(),
        "versions": installed_versions(),
        "machine": machine(),
        "models": models,
        "change": change(models, config),
        "calls": call_forms(models, run),
        "steps": steps(run.grpo / "metrics.jsonl"),
        "usage": usage,
        "seconds": sum(stage["seconds"] for stage in usage.values()),
        "peak_bytes": max((stage["peak_bytes"] for stage in usage.values()), default=0),
        "examples": examples(models[-1], run, questions),
    }


def change(models: Sequence[dict[str, Any]], config: Config) -> dict[str, Any] | None:
    """What GRPO did to the accuracy of the SFT model, paired by question; None unless both are evaluated."""
    by_name = {model["who"]: model["correct"] for model in models}
    if not {"sft", "grpo"} <= set(by_name):
        return None
    before, after = by_name["sft"], by_name["grpo"]
    differences = [float(after[key]) - float(before[key]) for key in before if key in after]
    low, high = bootstrap_interval(differences, config.evaluate.bootstrap_samples, config.seed)
    difference = sum(differences) / len(differences)
    return {"difference": difference, "low": low, "high": high, "within_noise": low <= 0 <= high}


def verdict(facts: dict[str, Any]) -> str:
    """What GRPO changed, in a sentence; says so when it is within noise."""
    found = facts["change"]
    if found is None:
        return "SFT and GRPO are not both evaluated yet, so nothing can be said about what GRPO changed."
    end = "within noise" if found["within_noise"] else "beyond noise"
    return (
        f"GRPO changed execution accuracy by {100 * found['difference']:+.1f} points against SFT (95 % interval "
        f"{100 * found['low']:+.1f} to {100 * found['high']:+.1f}, paired by question): {end}."
    )


def table_rows(facts: dict[str, Any]) -> list[list[str]]:
    """Cells of the result table, one row per model and one per kind of test database."""
    rows = []
    for model in facts["models"]:
        summary = model["summary"]
        shares = [percent(summary[key]) for key in ("tool_call_rate", "fallback_share", "merged_share")]
        rest = [f"{summary['mean_turns']:.1f}", f"{summary['seconds']:.0f}"]
        rows.append([model["label"], _accuracy(model["all"]), str(model["all"]["n"]), *shares, *rest])
        rows += [[f"  {kind}", _accuracy(part), str(part["n"]), *[""] * 5] for kind, part in model["splits"].items()]
    return rows


def markdown(facts: dict[str, Any]) -> str:
    """Result table, verdict, cost, forms of calls and steps as Markdown."""
    parts = [_markdown_table(HEADER, table_rows(facts)), verdict(facts), cost(facts)]
    if facts["calls"]["rows"]:
        table = _markdown_table(facts["calls"]["header"], facts["calls"]["rows"])
        malformed = "\n".join(f"- {line}" for line in facts["calls"]["malformed"])
        parts.append(f"How calls were written:\n\n{table}\n\n{malformed}".rstrip())
    if facts["steps"]:
        cells = [
            [str(row["step"]), *(_figure(row.get(k), form) for k, form in _STEP_COLUMNS.items())]
            for row in facts["steps"]
        ]
        parts.append(
            "GRPO steps:\n\n" + _markdown_table(["step", *(k.replace("_", " ") for k in _STEP_COLUMNS)], cells)
        )
    return "\n\n".join(parts) + "\n"


def cost(facts: dict[str, Any]) -> str:
    """Machine, time, memory and provenance in two sentences."""
    here = facts["machine"]
    stages = ", ".join(f"{name} {stage['seconds']:.0f} s" for name, stage in facts["usage"].items())
    device = f"{here['gpu']}, " if here["gpu"] else ""
    return (
        f"{facts['model']}, profile {facts['profile']}, seed {facts['seed']}, commit {facts['commit']}, on {device}"
        f"{here['processor']} ({here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB). Wall time "
        f"{facts['seconds'] / 60:.1f} minutes ({stages}), peak memory of all processes {facts['peak_bytes'] / 2**30:.1f} GiB."
    )


def print_table(facts: dict[str, Any]) -> None:
    """The result table on the terminal, with verdict and cost."""
    table = Table(title=f"run {facts['run']}", title_justify="left")
    for name in HEADER:
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in table_rows(facts):
        table.add_row(*row, style="dim" if row[0].startswith(" ") else None)
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    console.print(verdict(facts), cost(facts), sep="\n", highlight=False, soft_wrap=True)


def steps(file: Path) -> list[dict[str, Any]]:
    """Figures of each GRPO step, in order; a step that was repeated after an interruption counts once, as last seen."""
    rows = {row["step"]: row for row in JsonlTail(file).new_rows() if "reward" in row}
    return [rows[step] for step in sorted(rows)]


def call_forms(models: Sequence[dict[str, Any]], run: RunDirectory) -> dict[str, Any]:
    """How each model wrote its calls, as header and rows of a table, and why some could not be read."""
    found = {m["label"]: conformance(texts_of(run.evaluation(m["who"]) / "episodes.jsonl"), TOOLS) for m in models}
    header, rows = side_by_side(found)
    malformed = [
        f"{label}: {n} × {reason}" for label, each in found.items() for reason, n in each.reasons.most_common(3)
    ]
    return {"header": header, "rows": rows, "malformed": malformed}


def examples(model: dict[str, Any], run: RunDirectory, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """A few episodes of a model to read: a clean success, a success after an error, a failure."""
    texts = {question.id: question for question in questions}
    found: dict[str, dict[str, Any]] = {}
    for episode in JsonlTail(run.evaluation(model["who"]) / "episodes.jsonl").new_rows():
        question = texts.get(episode["question_id"])
        if question is None or question.id not in model["correct"]:
            continue
        failed_step = any(not ok for turn in episode["turns"] for ok in turn["ok"])
        kind = (
            "wrong answer"
            if not model["correct"][question.id]
            else "recovers from an error"
            if failed_step
            else "right answer"
        )
        found.setdefault(kind, {
            "kind": kind, "label": model["label"], "question": question.question, "database": question.db_id,
            "gold_sql": question.gold_sql, "messages": episode["messages"], "submitted_sql": episode["submitted_sql"],
        })  # fmt: skip
    return [found[kind] for kind in ("right answer", "recovers from an error", "wrong answer") if kind in found]


def update_readme(file: Path, facts: dict[str, Any]) -> None:
    """Replace what stands between the result markers of `file`; raises UserError when they are missing."""
    text = file.read_text(encoding="utf-8")
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise UserError(f"{file} lacks the markers {_START} and {_END}; put them where the results belong.")
    block = "\n\n".join([_markdown_table(HEADER, table_rows(facts)), verdict(facts), cost(facts)])
    file.write_text(f"{before}{_START}\n{block}\n{_END}{after}", encoding="utf-8")


def _model(who: str, config: Config, run: RunDirectory, questions: Sequence[Question]) -> dict[str, Any]:
    folder = run.evaluation(who)
    episodes = read_episodes(folder / "episodes.jsonl")
    correct = {episode.question_id: episode.reward.correct for episode in episodes if episode.reward}
    groups: dict[str, list[float]] = {}
    for question in questions:
        if question.id in correct and question.split_kind:
            groups.setdefault(f"{question.split_kind.replace('_', ' ')}s", []).append(float(correct[question.id]))
    return {
        "who": who,
        "label": MODELS[who],
        "model": (read_manifest(folder) or {}).get("model"),
        "summary": read_summary(folder),
        "correct": correct,
        "all": _interval([float(value) for value in correct.values()], config),
        "splits": {kind: _interval(values, config) for kind, values in sorted(groups.items())},
    }


def _interval(values: Sequence[float], config: Config) -> dict[str, float]:
    low, high = bootstrap_interval(values, config.evaluate.bootstrap_samples, config.seed)
    return {"accuracy": sum(values) / len(values), "low": low, "high": high, "n": len(values)}


def _accuracy(part: dict[str, float]) -> str:
    return f"{part['accuracy']:.1%} ({part['low']:.1%} to {part['high']:.1%})"


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("  ", "&nbsp;&nbsp;") for cell in line) + " |" for line in lines)


def main() -> None:
    """`python -m shared.report`."""
    parser = common_parser("python -m shared.report", "Write the report of a run from what its stages left on disk.")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="also put the results between the markers of FILE")
    args = parser.parse_args()
    config, run = resolve(args)
    if args.dry_run:
        print(f"writes {run.report}: report.json, report.md, report.html")
        return
    facts = write_report(config, run)
    if args.readme:
        update_readme(args.readme, facts)


if __name__ == "__main__":
    run_main(main)
