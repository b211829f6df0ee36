"""What stands in finished evaluations, judged by every rule: `python -m shared.analyse WHO [OTHER] --run-name RUN`.

For the evaluation WHO: accuracy by the house rule, by Spider's and by BIRD's, and soft F1, with 95 % intervals; accuracy
for each database and difficulty; the questions on which the rules disagree, with gold and submission. With OTHER: both
compared question by question. Nothing is played again; evaluations/<who>/rules.jsonl keeps each question's verdicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared.cli import common_parser, resolve, run_main
from shared.errors import UserError
from shared.judges import bird_ex, soft_f1, spider_ex
from shared.metrics import bootstrap_interval
from shared.paired import compare_pairs
from shared.records import JsonlTail, Question, read_questions, write_jsonl
from shared.runs import RunDirectory, question_file
from shared.settings import Config

RULES = ("house", "spider", "bird", "soft_f1")
_LISTED = 20

Verdicts = dict[str, Any]  # question_id, database, difficulty, gold_sql, submitted_sql, and one value for each rule


def verdicts(folder: Path, questions: Iterable[Question], seconds: float) -> list[Verdicts]:
    """Each judged question of an evaluation with its verdict by every rule; `seconds` is the limit of a query.

    Raises UserError when the folder holds no judged episode of these questions.
    """
    rewards = {row["question_id"]: row for row in JsonlTail(folder / "rewards.jsonl").new_rows()}
    episodes = {row["question_id"]: row for row in JsonlTail(folder / "episodes.jsonl").new_rows()}
    judged = [question for question in questions if question.id in rewards and question.id in episodes]
    if not judged:
        raise UserError(f"There is no finished evaluation of the run's test questions in {folder}; evaluate first.")
    return [
        _verdict(question, episodes[question.id]["submitted_sql"], rewards[question.id]["correct"], seconds)
        for question in tqdm(judged, "judging", unit=" questions", leave=False, disable=None)
    ]


def _verdict(question: Question, submitted: str | None, house: bool, seconds: float) -> Verdicts:
    sql = submitted or ""
    pair = question.gold_sql, sql, question.database
    return {
        "question_id": question.id,
        "database": question.db_id,
        "difficulty": question.difficulty,
        "gold_sql": question.gold_sql,
        "submitted_sql": submitted,
        "house": bool(house),
        "spider": submitted is not None and _spider(*pair, seconds=seconds),
        "bird": submitted is not None and bird_ex(*pair, seconds=seconds),
        "soft_f1": 0.0 if submitted is None else soft_f1(*pair, seconds=seconds),
    }


def _spider(gold: str, submitted: str, database: str, *, seconds: float) -> bool:
    """Spider's verdict; a gold that only its reading of the query breaks makes every answer wrong there."""
    try:
        return spider_ex(gold, submitted, database, seconds=seconds)
    except UserError:
        return False


def report(who: str, rows: Sequence[Verdicts], config: Config) -> str:
    """The figures of one evaluation and where its rules disagree, as text."""
    lines = [f"{who}, {len(rows)} questions"]
    lines += [f"  {rule:16}{_with_interval([float(row[rule]) for row in rows], config)}" for rule in RULES]
    for kind in ("difficulty", "database"):
        groups: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            groups[row[kind]].append(float(row["house"]))
        lines.append(f"  by {kind} (house rule)")
        lines += [f"    {name:30}{_with_interval(values, config)}" for name, values in sorted(groups.items())]
    split = [row for row in rows if len({row["house"], row["spider"], row["bird"]}) > 1]
    lines.append(f"  {len(split)} questions on which the rules disagree")
    for row in split[:_LISTED]:
        said = " ".join(f"{rule} {'yes' if row[rule] else 'no'}" for rule in RULES[:3])
        lines += [f"    {row['question_id']}: {said}", f"      gold {_line(row['gold_sql'])}", f"      said {_line(row['submitted_sql'])}"]  # fmt: skip
    return "\n".join(lines)


def paired_report(who: str, other: str, first: Sequence[Verdicts], second: Sequence[Verdicts], config: Config) -> str:
    """Two evaluations compared question by question, as text; raises UserError when they share no question."""
    lines = [f"{other} against {who}, by question"]
    for rule in RULES[:3]:
        mine, theirs = ({row["question_id"]: row[rule] for row in rows} for rows in (first, second))
        try:
            found = compare_pairs(mine, theirs, samples=config.evaluate.bootstrap_samples, seed=config.seed)
        except ValueError:
            raise UserError(
                f"The evaluations {who} and {other} share no question; evaluate both on one split."
            ) from None
        low, high = found.interval
        lines.append(
            f"  {rule:8}{100 * found.difference:+6.1f} points (95 % {100 * low:+.1f} to {100 * high:+.1f}), won {found.only_second}, "
            f"lost {found.only_first}, both right {found.both}, neither {found.neither}, sign test p = {found.p_value:.3f}"
        )
    return "\n".join(lines)


def _with_interval(values: Sequence[float], config: Config) -> str:
    low, high = bootstrap_interval(values, config.evaluate.bootstrap_samples, config.seed)
    return f"{sum(values) / len(values):6.1%}  ({low:.1%} to {high:.1%}, n = {len(values)})"


def _line(sql: str | None) -> str:
    return " ".join((sql or "nothing").split())[:200]


def _analysed(who: str, config: Config, run: RunDirectory) -> list[Verdicts]:
    folder = run.evaluation(who)
    rows = verdicts(folder, read_questions(question_file(run, "test")), config.sandbox.timeout_seconds)
    write_jsonl(folder / "rules.jsonl", rows)
    print(report(who, rows, config))
    return rows


def main() -> None:
    """Print the figures of one or two evaluations of a run."""
    parser = common_parser(
        "python -m shared.analyse", "Judge finished evaluations by every rule and compare two of them."
    )
    parser.add_argument("who", help="evaluation of the run: base, sft, grpo or a --name of python -m shared.evaluate")
    parser.add_argument("other", nargs="?", help="a second one, compared with the first question by question")
    args = parser.parse_args()
    config, run = resolve(args)
    names = [name for name in (args.who, args.other) if name]
    if args.dry_run:
        print("\n".join(f"writes {run.evaluation(name) / 'rules.jsonl'}" for name in names))
        return
    analysed = [_analysed(name, config, run) for name in names]
    if args.other:
        print(paired_report(args.who, args.other, analysed[0], analysed[1], config))


if __name__ == "__main__":
    run_main(main)
