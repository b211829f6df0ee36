"""What stands in finished evaluations, judged by every rule: `python -m shared.evaluation.analyse WHO [OTHER] --run-name RUN`.

For the evaluation WHO: accuracy by the house rule, by Spider's and by BIRD's, and soft F1, with 95 % intervals; accuracy
for each database and difficulty; the questions on which the rules disagree, with gold and submission. With `--testsuite
FOLDER` also Spider's rule on all variants, where the folder holds those of a question's database. With OTHER: both compared
question by question. Nothing is played again; evaluations/<who>/rules.jsonl keeps each question's verdicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared.cli.command_line import common_parser, resolve, run_main
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.judges import bird_ex, soft_f1, spider_test_suite
from shared.evaluation.judges.verdicts import suites
from shared.evaluation.metrics import bootstrap_interval
from shared.evaluation.paired_test import compare_pairs
from shared.evaluation.run import QUESTION_FILE
from shared.records import JsonlTail, Question, read_questions, write_jsonl
from shared.runs.manifest import RunDirectory, question_file

RULES = ("house", "spider", "testsuite", "bird", "soft_f1")  # testsuite only where variants are given
_LISTED = 20

Verdicts = dict[str, Any]  # question_id, database, difficulty, gold_sql, submitted_sql, and one value for each rule
Variants = Callable[[str], Sequence[Path]]
"""From a db_id to the variants of that database; may be none."""


def verdicts(
    folder: Path, questions: Iterable[Question], seconds: float, variants: Variants = lambda _: ()
) -> list[Verdicts]:
    """Each judged question of an evaluation with its verdict by every rule; `seconds` is the limit of a query.

    Raises UserError when the folder holds no judged episode of these questions.
    """
    rewards = {row["question_id"]: row for row in JsonlTail(folder / "rewards.jsonl").new_rows()}
    episodes = {row["question_id"]: row for row in JsonlTail(folder / "episodes.jsonl").new_rows()}
    judged = [question for question in questions if question.id in rewards and question.id in episodes]
    if not judged:
        raise UserError(f"There is no finished evaluation of the run's test questions in {folder}; evaluate first.")
    return [
        _verdict(question, episodes[question.id]["submitted_sql"], seconds, variants(question.db_id))
        | {"house": bool(rewards[question.id]["correct"])}
        for question in tqdm(judged, "judging", unit=" questions", leave=False, disable=None)
    ]


def _verdict(question: Question, submitted: str | None, seconds: float, variants: Sequence[Path]) -> Verdicts:
    pair = question.gold_sql, submitted or ""
    database, said = question.database, submitted is not None
    verdict: Verdicts = {
        "question_id": question.id,
        "database": question.db_id,
        "difficulty": question.difficulty,
        "gold_sql": question.gold_sql,
        "submitted_sql": submitted,
        "spider": said and _spider(*pair, [Path(database)], seconds),
        "bird": said and bird_ex(*pair, database, seconds=seconds),
        "soft_f1": soft_f1(*pair, database, seconds=seconds) if said else 0.0,
    }
    if variants:
        verdict["testsuite"] = said and _spider(*pair, variants, seconds)
    return verdict


def _spider(gold: str, submitted: str, databases: Sequence[Path], seconds: float) -> bool:
    """Spider's verdict; a gold that only its reading of the query breaks makes every answer wrong there."""
    try:
        return spider_test_suite(gold, submitted, databases, seconds=seconds)
    except UserError:
        return False


def report(who: str, rows: Sequence[Verdicts], config: Config) -> str:
    """The figures of one evaluation and where its rules disagree, as text."""
    lines = [f"{who}, {len(rows)} questions"]
    for rule in RULES:
        values = [float(row[rule]) for row in rows if rule in row]
        lines += [f"  {rule:16}{_with_interval(values, config)}"] if values else []
    for kind in ("difficulty", "database"):
        groups: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            groups[row[kind]].append(float(row["house"]))
        lines.append(f"  by {kind} (house rule)")
        lines += [f"    {name:30}{_with_interval(values, config)}" for name, values in sorted(groups.items())]
    split = [row for row in rows if len({row[rule] for rule in RULES[:-1] if rule in row}) > 1]
    lines.append(f"  {len(split)} questions on which the rules disagree")
    for row in split[:_LISTED]:
        said = " ".join(f"{rule} {'yes' if row[rule] else 'no'}" for rule in RULES[:-1] if rule in row)
        lines += [f"    {row['question_id']}: {said}", f"      gold {_line(row['gold_sql'])}", f"      said {_line(row['submitted_sql'])}"]  # fmt: skip
    return "\n".join(lines)


def paired_report(who: str, other: str, first: Sequence[Verdicts], second: Sequence[Verdicts], config: Config) -> str:
    """Two evaluations compared question by question, as text; raises UserError when they share no question."""
    lines = [f"{other} against {who}, by question"]
    if not {row["question_id"] for row in first} & {row["question_id"] for row in second}:
        raise UserError(f"The evaluations {who} and {other} share no question; evaluate both on one split.")
    for rule in RULES[:-1]:
        mine, theirs = ({row["question_id"]: row[rule] for row in rows if rule in row} for rows in (first, second))
        if not mine.keys() & theirs.keys():
            continue
        found = compare_pairs(mine, theirs, samples=config.evaluate.bootstrap_samples, seed=config.seed)
        low, high = found.interval
        lines.append(
            f"  {rule:10}{100 * found.difference:+6.1f} points (95 % {100 * low:+.1f} to {100 * high:+.1f}), won {found.only_second}, "
            f"lost {found.only_first}, both right {found.both}, neither {found.neither}, sign test p = {found.p_value:.3f}"
        )
    return "\n".join(lines)


def _with_interval(values: Sequence[float], config: Config) -> str:
    low, high = bootstrap_interval(values, config.evaluate.bootstrap_samples, config.seed)
    return f"{sum(values) / len(values):6.1%}  ({low:.1%} to {high:.1%}, n = {len(values)})"


def _line(sql: str | None) -> str:
    return " ".join((sql or "nothing").split())[:200]


def _analysed(who: str, config: Config, run: RunDirectory, variants: Variants) -> list[Verdicts]:
    folder = run.evaluation(who)
    asked = folder / QUESTION_FILE
    questions = read_questions(asked if asked.exists() else question_file(run, "test"))
    rows = verdicts(folder, questions, config.sandbox.timeout_seconds, variants)
    write_jsonl(folder / "rules.jsonl", rows)
    print(report(who, rows, config))
    return rows


def main() -> None:
    """Print the figures of one or two evaluations of a run."""
    parser = common_parser(
        "python -m shared.evaluation.analyse", "Judge finished evaluations by every rule and compare two of them."
    )
    parser.add_argument("who", help="evaluation of the run: base, sft, grpo or a --name of python -m shared.evaluation")
    parser.add_argument("other", nargs="?", help="a second one, compared with the first question by question")
    parser.add_argument(
        "--testsuite", type=Path, help="folder of <db_id>/*.sqlite or <db_id>.tar.gz: Spider's test suite, too"
    )
    args = parser.parse_args()
    config, run = resolve(args)
    names = [name for name in (args.who, args.other) if name]
    if args.dry_run:
        print("\n".join(f"writes {run.evaluation(name) / 'rules.jsonl'}" for name in names))
        return
    with suites(args.testsuite) as variants:
        analysed = [_analysed(name, config, run, variants) for name in names]
    if args.other:
        print(paired_report(args.who, args.other, analysed[0], analysed[1], config))


if __name__ == "__main__":
    run_main(main)
