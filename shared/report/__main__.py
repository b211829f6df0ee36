"""The report of a run: base, SFT and GRPO side by side, what changed beyond noise, and what it cost.

    report/{report.json,report.md,report.html}

Everything is read from what the stages left on disk, so a report can be made again at any time and of an unfinished
run. `python -m shared.report` makes it; with `--readme FILE` it also puts the results between the markers in that file.
`--runs FOLDER …` prints several runs in one table instead.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from shared.agent.prompts import prompts_of
from shared.cli.command_line import common_parser, resolve, run_main
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.metrics import compare_pairs, interval, percent
from shared.evaluation.run import EPISODE_FILE, chosen_questions, read_summary
from shared.records import STOP_MEANING, Episode, JsonlTail, Question, read_episodes
from shared.report.page import Table, page
from shared.report.runs_table import runs_table
from shared.runs.manifest import RunDirectory, installed_versions, read_manifest, write_json
from shared.runs.usage import commit, machine, read_usage
from shared.tool_calls.report import Conformance, conformance, texts_of

MODELS = {"base": "base", "sft": "after SFT", "grpo": "after GRPO"}
_STEP_COLUMNS = {
    "reward": ".3f",
    "execution_accuracy": ".0%",
    "tool_call_rate": ".0%",
    "fallback_share": ".0%",
    "merged_share": ".0%",
    "turns": ".1f",
    "tokens": ".0f",
    "seconds": ".0f",
}
_START, _END = "<!-- results -->", "<!-- /results -->"
_HEADER = (
    "model",
    "execution accuracy (95\u00a0%)",
    "questions",
    "tool calls, Hermes grammar",
    "parser fallback",
    "repeated calls",
    "merged turns",
    "turns",
    "seconds",
)
_NOTES = (
    "Execution accuracy: share of held-out questions whose submitted query returns the gold's result.",
    "Tool calls: share of episodes with at least one call that vLLM's stock Hermes grammar reads.",
    "Parser fallback: share of calls that it does not read.",
    "Repeated calls: share of calls that the same episode made before.",
    "Merged turns: share of later turns whose prompt continues the previous tokens exactly.",
    "Seconds: wall time of the evaluation.",
)


def write_report(config: Config, run: RunDirectory) -> dict[str, Any]:
    """Write the three files, print the first table, and return the facts behind them."""
    facts = collect(config, run)
    shown = tables(facts)
    parts = [f"# Run {facts['run']}", outcome(facts), "\n".join(f"- {note}" for note in _NOTES)]
    for table in shown[1:]:
        parts += [f"## {table.title}", table.markdown(), "\n".join(f"- {note}" for note in table.notes)]
    run.report.mkdir(parents=True, exist_ok=True)
    write_json(run.report / "report.json", facts)
    (run.report / "report.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    html = page(facts, shown, verdict=verdict(facts), cost=cost(facts))
    (run.report / "report.html").write_text(html, encoding="utf-8")
    Console(width=None if Console().is_terminal else 140).print(Markdown(outcome(facts)))
    print(f"report: {run.report / 'report.html'}")
    return facts


def collect(config: Config, run: RunDirectory) -> dict[str, Any]:
    """All facts of the report as JSON-able values; raises UserError when no model has been evaluated yet."""
    names = [name for name in MODELS if read_manifest(run.evaluation(name))]
    if not names:
        raise UserError(f"{run.path} holds no finished evaluation to report; run the pipeline first.")
    files = {name: run.evaluation(name) / EPISODE_FILE for name in names}
    episodes = {name: read_episodes(file) for name, file in files.items()}
    change = None
    if {"sft", "grpo"} <= {*names}:
        before, after = (
            {one.question_id: one.reward.correct for one in episodes[name] if one.reward} for name in ("sft", "grpo")
        )
        found = compare_pairs(before, after, samples=config.evaluate.bootstrap_samples, seed=config.seed)
        change = dataclasses.asdict(found)
    calls = {MODELS[name]: conformance(texts_of(file), prompts_of(config.agent).tools) for name, file in files.items()}
    header, rows = call_forms(calls)
    steps = {row["step"]: row for row in JsonlTail(run.grpo / "metrics.jsonl").new_rows() if "reward" in row}
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
        "models": [
            {"name": name, "label": MODELS[name], "summary": read_summary(run.evaluation(name))} for name in names
        ],
        "change": change,
        "calls": {
            "header": header,
            "rows": rows,
            "malformed": [
                f"{label}: {n} × {reason}" for label, each in calls.items() for reason, n in each.reasons.most_common(3)
            ],
        },
        "steps": [steps[step] for step in sorted(steps)],  # a repeated one counts once, as last seen
        "usage": usage,
        "seconds": sum(stage["seconds"] for stage in usage.values()),
        "peak_bytes": max((stage["peak_bytes"] for stage in usage.values()), default=0),
        "examples": examples(
            episodes[names[-1]], {question.id: question for question in chosen_questions(config, run)}
        ),
    }


def call_forms(models: Mapping[str, Conformance]) -> tuple[list[str], list[list[str]]]:
    """Header and one row per model that wrote anything: its texts by call format, and the calls of each parser."""
    written = {label: found for label, found in models.items() if found.families}
    order = ("hermes", "tools_tag", "fenced", "bare", "xml", "python", "react", "malformed", "no call")
    forms = [form for form in order if any(found.families[form] for found in written.values())]
    rows = []
    for label, found in written.items():
        total = found.families.total()
        shares = [f"{found.families[form] / total:.1%}" for form in forms]
        rows.append([label, str(total), *shares, str(found.stock_calls), str(found.our_calls)])
    return ["model", "texts", *forms, "calls, stock Hermes grammar", "calls, qwen25_coder"], rows


def examples(episodes: list[Episode], questions: Mapping[str, Question]) -> list[dict[str, Any]]:
    """A few episodes to read: a clean success, a success after an error, a failure."""
    found: dict[str, dict[str, Any]] = {}
    for episode in episodes:
        question = questions.get(episode.question_id)
        if question is None or episode.reward is None:
            continue
        recovers = not all(ok for turn in episode.turns for ok in turn.ok)
        right = "recovers from an error" if recovers else "right answer"
        kind = right if episode.reward.correct else "wrong answer"
        example = {"kind": kind, "question": question.question, "database": question.db_id}
        queries = {"gold_sql": question.gold_sql, "submitted_sql": episode.submitted_sql}
        found.setdefault(kind, example | queries | {"messages": episode.messages})
    return [found[kind] for kind in ("right answer", "recovers from an error", "wrong answer") if kind in found]


def tables(facts: dict[str, Any]) -> list[Table]:
    """Every table of the report, the result first; those without rows are left out."""
    labels = [model["label"] for model in facts["models"]]
    summaries = [model["summary"] for model in facts["models"]]

    result = []
    for label, summary in zip(labels, summaries, strict=True):
        shares = [
            percent(summary[key]) for key in ("tool_call_rate", "fallback_share", "repeated_share", "merged_share")
        ]
        turns_seconds = [f"{summary['mean_turns']:.1f}", f"{summary['seconds']:.0f}"]
        result.append([label, interval(summary["accuracy"]), str(summary["n"]), *shares, *turns_seconds])
        for kind, found in summary["accuracy_by"]["split_kind"].items():
            result.append([f"  {kind.replace('_', ' ')}s", interval(found), str(found["n"]), *[""] * 6])
    kinds = []
    for kind in ("difficulty", "form"):
        groups = [summary["accuracy_by"][kind] for summary in summaries]
        for name in sorted({name for group in groups for name in group}):
            n = max(group[name]["n"] for group in groups if name in group)
            cells = [interval(group[name]) if name in group else "–" for group in groups]
            kinds.append([f"{kind} {name}", str(n), *cells])
    endings = [
        [f"{stop.value}: {meaning}", *(str(summary["stops"].get(stop.value, 0)) for summary in summaries)]
        for stop, meaning in STOP_MEANING.items()
        if any(stop.value in summary["stops"] for summary in summaries)
    ]
    steps = [
        [str(row["step"]), *("–" if row.get(k) is None else format(row[k], form) for k, form in _STEP_COLUMNS.items())]
        for row in facts["steps"]
    ]
    calls = facts["calls"]
    found = [
        Table("Result", _HEADER, result, _NOTES),
        Table("Accuracy by kind of question", ["questions", "number", *labels], kinds),
        Table("How episodes ended", ["ending", *labels], endings),
        Table("How calls were written", calls["header"], calls["rows"], calls["malformed"]),
        Table("GRPO steps", ["step", *(name.replace("_", " ") for name in _STEP_COLUMNS)], steps),
    ]
    return [table for table in found if table.rows]


def outcome(facts: dict[str, Any]) -> str:
    """The result table, what GRPO changed and what it cost, as Markdown."""
    return "\n\n".join([tables(facts)[0].markdown(), verdict(facts), cost(facts)])


def verdict(facts: dict[str, Any]) -> str:
    """What GRPO changed, in a sentence; says so when it is within noise."""
    if facts["change"] is None:
        return "SFT and GRPO are not both evaluated yet, so nothing can be said about what GRPO changed."
    gain = facts["change"]["difference"]
    return (
        f"GRPO changed execution accuracy by {100 * gain['mean']:+.1f} points against SFT (95 % interval "
        f"{100 * gain['low']:+.1f} to {100 * gain['high']:+.1f}, paired by question): "
        f"{'within' if gain['low'] <= 0 <= gain['high'] else 'beyond'} noise."
    )


def cost(facts: dict[str, Any]) -> str:
    """Machine, time, memory and provenance in two sentences."""
    here = facts["machine"]
    stages = ", ".join(f"{name} {stage['seconds']:.0f} s" for name, stage in facts["usage"].items())
    device = f"{here['gpu']}, " if here["gpu"] else ""
    return (
        f"{facts['model']}, profile {facts['profile']}, seed {facts['seed']}, commit {facts['commit']}, on {device}"
        f"{here['processor']} ({here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB). Wall time "
        f"{facts['seconds'] / 60:.1f} minutes ({stages}), peak memory of all processes "
        f"{facts['peak_bytes'] / 2**30:.1f} GiB."
    )


def update_readme(file: Path, facts: dict[str, Any]) -> None:
    """Replace what stands between the result markers of `file`; raises UserError when they are missing."""
    text = file.read_text(encoding="utf-8")
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise UserError(f"{file} lacks the markers {_START} and {_END}; put them where the results belong.")
    file.write_text(f"{before}{_START}\n{outcome(facts)}\n{_END}{after}", encoding="utf-8")


def main() -> None:
    """`python -m shared.report`."""
    parser = common_parser("python -m shared.report", "Write the report of a run from what its stages left on disk.")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="also put the results between the markers of FILE")
    parser.add_argument("--runs", type=Path, nargs="+", metavar="FOLDER", help="print these runs in one table instead")
    args = parser.parse_args()
    if args.runs:
        table = runs_table(args.runs)
        print(table.markdown(), *table.notes, sep="\n")
        return
    config, run = resolve(args)
    if args.dry_run:
        print(f"writes {run.report}: report.json, report.md, report.html")
        return
    facts = write_report(config, run)
    if args.readme:
        update_readme(args.readme, facts)


if __name__ == "__main__":
    run_main(main)
