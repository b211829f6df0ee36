"""Judge finished evaluations by every rule: `python -m shared.evaluation.analyse NAME [OTHER] --run-name RUN`.

For the evaluation NAME: accuracy by the house rule, by Spider's and by BIRD's, and soft F1, with 95 % intervals;
accuracy for each difficulty, form and database; the questions on which the rules disagree, with gold and submission.
With `--testsuite FOLDER` also Spider's rule on all variants, where the folder holds those of a question's database.
With OTHER: both compared question by question. Nothing is played again; evaluations/<name>/rules.jsonl keeps each
question's verdicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from shared.cli.command_line import common_parser, resolve, run_main
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.judges import bird_ex, soft_f1, spider_test_suite
from shared.evaluation.judges.verdicts import suites
from shared.evaluation.metrics import compare_pairs, estimate
from shared.evaluation.run import EPISODE_FILE, QUESTION_FILE
from shared.records import Question, read_episodes, read_questions, write_jsonl
from shared.runs.manifest import question_file

RULES = ("house", "spider", "testsuite", "bird")
_LISTED = 20

Variants = Callable[[str], Sequence[Path]]
"""From a db_id to the variants of that database; may be none."""


@dataclass(frozen=True)
class Verdict:
    """One judged question of an evaluation. `rules` has a verdict by each of RULES that applies, and the soft F1."""

    question: Question
    submitted_sql: str | None
    rules: dict[str, float]


def verdicts(
    folder: Path, questions: Iterable[Question], seconds: float, variants: Variants = lambda _: ()
) -> list[Verdict]:
    """The verdict on each judged question of an evaluation; `seconds` is the limit of a query.

    Raises UserError when the folder holds no judged episode of these questions.
    """
    episodes = {episode.question_id: episode for episode in read_episodes(folder / EPISODE_FILE)}
    found = []
    for question in tqdm(list(questions), "judging", unit=" questions", leave=False, disable=None):
        episode = episodes.get(question.id)
        if episode is None or episode.reward is None:
            continue
        sql, rules = episode.submitted_sql, {"house": float(episode.reward.correct)}
        for rule, databases in (("spider", [Path(question.database)]), ("testsuite", variants(question.db_id))):
            try:
                is_right = sql is not None and spider_test_suite(question.gold_sql, sql, databases, seconds=seconds)
            except UserError:  # a gold that only Spider's reading of the query breaks makes every answer wrong there
                is_right = False
            rules |= {rule: float(is_right)} if databases else {}
        for rule, judge in (("bird", bird_ex), ("soft_f1", soft_f1)):
            rules[rule] = 0.0 if sql is None else judge(question.gold_sql, sql, question.database, seconds=seconds)
        found.append(Verdict(question, sql, rules))
    if not found:
        raise UserError(f"There is no finished evaluation of the run's test questions in {folder}; evaluate first.")
    return found


def report(name: str, found: Sequence[Verdict], config: Config) -> str:
    """The figures of one evaluation and where its rules disagree, as text."""

    def figure(label: str, values: Sequence[float]) -> str:
        one = estimate(values, config.evaluate.bootstrap_samples, config.seed)
        return f"{label}{one.mean:6.1%}  ({one.low:.1%} to {one.high:.1%}, n = {one.n})"

    lines = [f"{name}, {len(found)} questions"]
    for rule in (*RULES, "soft_f1"):
        if values := [verdict.rules[rule] for verdict in found if rule in verdict.rules]:
            lines.append(figure(f"  {rule:16}", values))
    for kind, label in (("difficulty", "difficulty"), ("form", "form"), ("db_id", "database")):
        groups: dict[str, list[float]] = defaultdict(list)
        for verdict in found:
            groups[getattr(verdict.question, kind) or "unknown"].append(verdict.rules["house"])
        lines.append(f"  by {label} (house rule)")
        lines += [figure(f"    {group:30}", groups[group]) for group in sorted(groups)]
    split = [v for v in found if len({v.rules[rule] for rule in RULES if rule in v.rules}) > 1]
    lines.append(f"  {len(split)} questions on which the rules disagree")
    for verdict in split[:_LISTED]:
        said = " ".join(f"{rule} {'yes' if verdict.rules[rule] else 'no'}" for rule in RULES if rule in verdict.rules)
        lines.append(f"    {verdict.question.id}: {said}")
        for label, sql in (("gold", verdict.question.gold_sql), ("said", verdict.submitted_sql or "nothing")):
            lines.append(f"      {label} {' '.join(sql.split())[:200]}")
    return "\n".join(lines)


def paired_report(name: str, other: str, first: Sequence[Verdict], second: Sequence[Verdict], config: Config) -> str:
    """Two evaluations compared question by question, as text; raises UserError when they share no question."""
    lines = [f"{other} against {name}, by question"]
    if not {verdict.question.id for verdict in first} & {verdict.question.id for verdict in second}:
        raise UserError(f"The evaluations {name} and {other} share no question; evaluate both on one split.")
    for rule in RULES:
        mine, theirs = (
            {verdict.question.id: bool(verdict.rules[rule]) for verdict in found if rule in verdict.rules}
            for found in (first, second)
        )
        if not mine.keys() & theirs.keys():
            continue
        pairs = compare_pairs(mine, theirs, samples=config.evaluate.bootstrap_samples, seed=config.seed)
        gain = pairs.difference
        lines.append(
            f"  {rule:10}{100 * gain.mean:+6.1f} points (95 % {100 * gain.low:+.1f} to {100 * gain.high:+.1f}), "
            f"won {pairs.only_second}, lost {pairs.only_first}, both right {pairs.both}, neither {pairs.neither}, "
            f"sign test p = {pairs.p_value:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the figures of one or two evaluations of a run."""
    parser = common_parser(
        "python -m shared.evaluation.analyse", "Judge finished evaluations by every rule and compare two of them."
    )
    parser.add_argument(
        "name", help="evaluation of the run: base, sft, grpo or a --name of python -m shared.evaluation"
    )
    parser.add_argument("other", nargs="?", help="a second one, compared with the first question by question")
    parser.add_argument(
        "--testsuite", type=Path, help="folder of <db_id>/*.sqlite or <db_id>.tar.gz: Spider's test suite, too"
    )
    args = parser.parse_args()
    config, run = resolve(args)
    folders = {name: run.evaluation(name) for name in (args.name, args.other) if name}
    if args.dry_run:
        print("\n".join(f"writes {folder / 'rules.jsonl'}" for folder in folders.values()))
        return
    analysed = {}
    with suites(args.testsuite) as variants:
        for name, folder in folders.items():
            asked = folder / QUESTION_FILE
            questions = read_questions(asked if asked.exists() else question_file(run, "test"))
            analysed[name] = verdicts(folder, questions, config.sandbox.timeout_seconds, variants)
            write_jsonl(folder / "rules.jsonl", analysed[name])
            print(report(name, analysed[name], config))
    if args.other:
        print(paired_report(args.name, args.other, analysed[args.name], analysed[args.other], config))


if __name__ == "__main__":
    run_main(main)
