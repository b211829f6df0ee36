"""The report of a run: its models side by side, what changed beyond noise, why episodes fail, and what it cost.

    report/{report.json,report.md,report.html,traces.html}

Everything is read from what the stages left on disk, so a report can be made again at any time and of an unfinished
run. Every finished evaluation of the run is a model of the report. `--rules` judges them by Spider's and BIRD's rules
too, and `--readme FILE` puts the results between the markers in that file. `--runs FOLDER …` prints several runs in
one table instead.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.markdown import Markdown

from shared.agent.prompts import prompts_of
from shared.cli.command_line import common_parser, resolve, run_main
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.failures import WAYS
from shared.evaluation.metrics import compare_pairs, interval, percent
from shared.evaluation.run import EPISODE_FILE, SAMPLE_FILE, correctness, read_summary
from shared.records import STOP_MEANING, JsonlTail
from shared.report.page import Table, page, points
from shared.report.rules import rules_table
from shared.report.runs_table import runs_table
from shared.report.traces import STEPS, Played, read_played, write_traces
from shared.runs.manifest import RunDirectory, installed_versions, read_manifest, read_object, write_json
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
_PAIR_HEADER = ("models", "gain (95\u00a0%)", "won", "lost", "both right", "neither", "sign test p")
_PAIR_NOTES = ("Gain: difference of execution accuracy in percentage points, resampled by question.",)
_WAY_NOTES = ("Each wrong episode counts once, in the first way that applies; all samples of an evaluation count.",)
_LISTED = 20  # questions that GRPO mended, and as many that it broke
_NOTES = (
    "Execution accuracy: share of held-out questions whose submitted query returns the gold's result.",
    "Tool calls: share of episodes with at least one call that vLLM's stock Hermes grammar reads.",
    "Parser fallback: share of calls that it does not read.",
    "Repeated calls: share of calls that the same episode made before.",
    "Merged turns: share of later turns whose prompt continues the previous tokens exactly.",
    "Seconds: wall time of the evaluation.",
)


def write_report(config: Config, run: RunDirectory, rules: Table | None = None) -> dict[str, Any]:
    """Write the four files, print the first table, and return the facts behind them; `rules` is one more table."""
    names = evaluations(run)
    played = read_played(config, run, names)
    facts = collect(config, run, names, played)
    shown = [*tables(facts), *filter(None, [rules])]
    parts = [f"# Run {facts['run']}", outcome(facts), "\n".join(f"- {note}" for note in _NOTES)]
    for table in shown[1:]:
        parts += [f"## {table.title}", table.markdown(), "\n".join(f"- {note}" for note in table.notes)]
    run.report.mkdir(parents=True, exist_ok=True)
    write_json(run.report / "report.json", facts)
    (run.report / "report.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    html = page(facts, shown, verdict=verdict(facts), cost=cost(facts))
    (run.report / "report.html").write_text(html, encoding="utf-8")
    write_traces(played, facts["run"], run.report / "traces.html")
    Console(width=None if Console().is_terminal else 140).print(Markdown(outcome(facts)))
    print(f"report: {run.report / 'report.html'}")
    return facts


def evaluations(run: RunDirectory) -> list[str]:
    """Names of the finished evaluations, base, sft and grpo first; raises UserError when there is none."""
    finished = {folder.name for folder in run.evaluation("base").parent.glob("*") if read_manifest(folder)}
    if not finished:
        raise UserError(f"{run.path} holds no finished evaluation to report; run the pipeline first.")
    return [*(name for name in MODELS if name in finished), *sorted(finished - MODELS.keys())]


def collect(config: Config, run: RunDirectory, names: Sequence[str], played: Sequence[Played]) -> dict[str, Any]:
    """All facts of the report about these evaluations as JSON-able values."""
    failures: dict[str, Counter[str]] = {name: Counter() for name in (*names, STEPS)}
    for one in played:
        failures[one.model].update([one.way] if one.way else [])
    models = [
        {
            "name": name,
            "label": MODELS.get(name, name),
            "summary": read_summary(run.evaluation(name)),
            "sampled": read_object(run.evaluation(name) / SAMPLE_FILE),
            "failures": dict(failures[name]),
        }
        for name in names
    ]
    right = {name: correctness(run.evaluation(name)) for name in names}
    pairs = []
    for first, second in pairwise(names):
        if right[first].keys() & right[second].keys():
            samples, seed = config.evaluate.bootstrap_samples, config.seed
            found = compare_pairs(right[first], right[second], samples=samples, seed=seed)
            pairs.append({"first": first, "second": second, **dataclasses.asdict(found)})
    files = {name: run.evaluation(name) / EPISODE_FILE for name in names}
    tools = prompts_of(config.agent).tools
    calls = {MODELS.get(name, name): conformance(texts_of(file), tools) for name, file in files.items()}
    header, rows = call_forms(calls)
    malformed = [
        f"{label}: {n} × {reason}" for label, each in calls.items() for reason, n in each.reasons.most_common(3)
    ]
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
        "models": models,
        "pairs": pairs,
        "changed": changed(played),
        "calls": {"header": header, "rows": rows, "malformed": malformed},
        "steps": [steps[step] for step in sorted(steps)],  # a repeated one counts once, as last seen
        "usage": usage,
        "seconds": sum(stage["seconds"] for stage in usage.values()),
        "peak_bytes": max((stage["peak_bytes"] for stage in usage.values()), default=0),
        "examples": examples(played),
    }


def changed(played: Sequence[Played]) -> list[dict[str, str]]:
    """The questions that GRPO mended, then those that it broke, each with the way of failing."""
    before, after = (
        {one.question.id: one for one in reversed(played) if one.model == name} for name in ("sft", "grpo")
    )
    rows = []
    for question in [name for name in before if name in after][::-1]:
        old, new = before[question], after[question]
        if old.right != new.right:
            what, failing = ("mended", old) if new.right else ("broken", new)
            link = traces_link("grpo", question)
            row = {"what": what, "question": new.question.question, "database": new.question.db_id, "link": link}
            rows.append({**row, "way": failing.way})
    return sorted(rows, key=lambda row: row["what"], reverse=True)


def traces_link(*parts: str) -> str:
    """Address of an episode in traces.html, from model and question id."""
    return f"traces.html#{'/'.join(quote(part, safe='') for part in parts)}"


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


def examples(played: Sequence[Played]) -> list[dict[str, Any]]:
    """A right answer, one after an error, and one example of each way of failing, of the newest model that has any."""
    found: dict[str, dict[str, Any]] = {}
    for one in reversed(played):
        recovers = not all(ok for turn in one.episode.turns for ok in turn.ok)
        kind = one.way or ("recovers from an error" if recovers else "right answer")
        if one.model == STEPS or one.episode.reward is None:
            continue
        asked = {"question": one.question.question, "database": one.question.db_id, "gold_sql": one.question.gold_sql}
        said = {"submitted_sql": one.episode.submitted_sql, "messages": one.episode.messages}
        link = traces_link(one.model, one.question.id)
        found.setdefault(kind, {"kind": kind, "right": one.right, "link": link, **asked, **said})
    return [found[kind] for kind in ("right answer", "recovers from an error", *WAYS) if kind in found]


def tables(facts: dict[str, Any]) -> list[Table]:
    """Every table of the report, the result first; those without rows are left out."""
    models = facts["models"]
    labels = [model["label"] for model in models]
    summaries = [model["summary"] for model in models]
    kinds = []
    for kind, title in (("difficulty", "difficulty"), ("form", "form"), ("db_id", "database")):
        groups = [summary["accuracy_by"].get(kind, {}) for summary in summaries]
        for name in sorted({name for group in groups for name in group}):
            n = max(group[name]["n"] for group in groups if name in group)
            cells = [interval(group[name]) if name in group else "–" for group in groups]
            kinds.append([f"{title} {name}", str(n), *cells])
    endings = [
        [f"{stop.value}: {meaning}", *(str(summary["stops"].get(stop.value, 0)) for summary in summaries)]
        for stop, meaning in STOP_MEANING.items()
        if any(stop.value in summary["stops"] for summary in summaries)
    ]
    steps = [
        [str(row["step"]), *("–" if row.get(k) is None else format(row[k], form) for k, form in _STEP_COLUMNS.items())]
        for row in facts["steps"]
    ]
    pairs = [
        [
            f"{MODELS.get(pair['second'], pair['second'])} against {MODELS.get(pair['first'], pair['first'])}",
            points(pair["difference"]),
            *(str(pair[key]) for key in ("only_second", "only_first", "both", "neither")),
            f"{pair['p_value']:.3f}",
        ]
        for pair in facts["pairs"]
    ]
    usage = [
        [stage, f"{used['seconds']:.0f}", f"{used['peak_bytes'] / 2**30:.1f}", "" if used["complete"] else "unfinished"]
        for stage, used in facts["usage"].items()
    ]
    calls = facts["calls"]
    found = [
        Table("Result", _HEADER, result_rows(models), _NOTES),
        Table("Compared by question", _PAIR_HEADER, pairs, _PAIR_NOTES),
        failure_table(models),
        changed_table(facts["changed"]),
        Table("Accuracy by kind of question", ["questions", "number", *labels], kinds),
        Table("How episodes ended", ["ending", *labels], endings),
        Table("How calls were written", calls["header"], calls["rows"], calls["malformed"]),
        Table("GRPO steps", ["step", *(name.replace("_", " ") for name in _STEP_COLUMNS)], steps),
        Table("Cost by stage", ["stage", "seconds", "peak memory, GiB", ""], usage),
    ]
    return [table for table in found if table.rows]


def result_rows(models: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row per model, and below it one per kind of database and per figure over several samples."""
    rows = []
    for model in models:
        summary, sampled = model["summary"], model["sampled"]
        keys = ("tool_call_rate", "fallback_share", "repeated_share", "merged_share")
        shares = [percent(summary[key]) for key in keys]
        turns_seconds = [f"{summary['mean_turns']:.1f}", f"{summary['seconds']:.0f}"]
        rows.append([model["label"], interval(summary["accuracy"]), str(summary["n"]), *shares, *turns_seconds])
        for kind, found in summary["accuracy_by"]["split_kind"].items():
            rows.append([f"  {kind.replace('_', ' ')}s", interval(found), str(found["n"]), *[""] * 6])
        if "mean@k" in sampled:
            k, questions = sampled["samples"], str(sampled["questions"])
            rows.append([f"  mean@{k}", interval(sampled["mean@k"]), questions, *[""] * 6])
            best = max((key for key in sampled if key.startswith("pass@")), key=lambda key: int(key[5:]))
            rows.append([f"  {best}", percent(sampled[best]), questions, *[""] * 6])
    return rows


def failure_table(models: Sequence[dict[str, Any]]) -> Table:
    """How often each model failed in each way, the commonest first; the ways lead into traces.html."""
    ways = [way for way in WAYS if any(way in model["failures"] for model in models)]
    ways.sort(key=lambda way: -models[-1]["failures"].get(way, 0))
    rows = [[way, *(str(model["failures"].get(way, 0)) for model in models), " ".join(WAYS[way])] for way in ways]
    links = {(place, 0): f"traces.html#?way={quote(way)}" for place, way in enumerate(ways)}
    header = ["way of failing", *(model["label"] for model in models), "meaning, and what usually helps"]
    return Table("Ways of failing", header, rows, _WAY_NOTES, links)


def changed_table(changed: Sequence[dict[str, str]]) -> Table:
    """The first questions that GRPO mended and broke."""
    rows: list[list[str]] = []
    links, notes = {}, []
    for what in ("mended", "broken"):
        found = [row for row in changed if row["what"] == what]
        notes += [f"{what}: {len(found)} questions" + (f", {_LISTED} of them here" if len(found) > _LISTED else "")]
        for row in found[:_LISTED]:
            links[len(rows), 1] = row["link"]
            rows.append([what, row["question"], row["database"], row["way"]])
    return Table("What GRPO mended and broke", ["change", "question", "database", "way of failing"], rows, notes, links)


def outcome(facts: dict[str, Any]) -> str:
    """The result table, what GRPO changed and what it cost, as Markdown."""
    return "\n\n".join([tables(facts)[0].markdown(), verdict(facts), cost(facts)])


def verdict(facts: dict[str, Any]) -> str:
    """What GRPO changed, in a sentence; says so when it is within noise."""
    pair = next((one for one in facts["pairs"] if (one["first"], one["second"]) == ("sft", "grpo")), None)
    if pair is None:
        return "SFT and GRPO are not both evaluated yet, so nothing can be said about what GRPO changed."
    gain = pair["difference"]
    return (
        f"GRPO changed execution accuracy by {100 * gain['mean']:+.1f} points against SFT (95 % interval "
        f"{100 * gain['low']:+.1f} to {100 * gain['high']:+.1f}, paired by question): "
        f"{'within' if gain['low'] <= 0 <= gain['high'] else 'beyond'} noise."
    )


def cost(facts: dict[str, Any]) -> str:
    """Machine, time, memory and provenance in two sentences."""
    here = facts["machine"]
    device = f"{here['gpu']}, " if here["gpu"] else ""
    return (
        f"{facts['model']}, profile {facts['profile']}, seed {facts['seed']}, commit {facts['commit']}, on {device}"
        f"{here['processor']} ({here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB). Wall time "
        f"{facts['seconds'] / 60:.1f} minutes, peak memory of all processes {facts['peak_bytes'] / 2**30:.1f} GiB."
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
    parser.add_argument("--rules", action="store_true", help="also judge by the official rules of Spider and BIRD")
    parser.add_argument(
        "--testsuite", type=Path, help="with --rules: folder of <db_id>/*.sqlite or <db_id>.tar.gz, Spider's test suite"
    )
    parser.add_argument("--runs", type=Path, nargs="+", metavar="FOLDER", help="print these runs in one table instead")
    args = parser.parse_args()
    if args.runs:
        table = runs_table(args.runs)
        print(table.markdown(), *table.notes, sep="\n")
        return
    config, run = resolve(args)
    if args.dry_run:
        print(f"writes {run.report}: report.json, report.md, report.html, traces.html")
        return
    rules = rules_table(config, run, evaluations(run), args.testsuite) if args.rules else None
    facts = write_report(config, run, rules)
    if args.readme:
        update_readme(args.readme, facts)


if __name__ == "__main__":
    run_main(main)
