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
    """One judged question of an evaluation, with its verdict by every rule."""

    question_id: str
    database: str
    difficulty: str
    form: str
    gold_sql: str
    submitted_sql: str | None
    house: bool
    spider: bool
    bird: bool
    soft_f1: float
    testsuite: bool | None  # None where no variants of the database are given

    def by_rule(self) -> dict[str, bool]:
        """The verdicts that there are, in the order of RULES."""
        return {rule: getattr(self, rule) for rule in RULES if getattr(self, rule) is not None}


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
        gold, submitted = question.gold_sql, episode.submitted_sql or ""
        said, suite = episode.submitted_sql is not None, variants(question.db_id)
        spider = []
        for databases in ([Path(question.database)], suite):
            try:
                spider.append(said and spider_test_suite(gold, submitted, databases, seconds=seconds))
            except UserError:  # a gold that only Spider's reading of the query breaks makes every answer wrong there
                spider.append(False)
        found.append(
            Verdict(
                question_id=question.id,
                database=question.db_id,
                difficulty=question.difficulty,
                form=question.form,
                gold_sql=gold,
                submitted_sql=episode.submitted_sql,
                house=episode.reward.correct,
                spider=spider[0],
                bird=said and bird_ex(gold, submitted, question.database, seconds=seconds),
                soft_f1=soft_f1(gold, submitted, question.database, seconds=seconds) if said else 0.0,
                testsuite=spider[1] if suite else None,
            )
        )
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
        values = [float(getattr(verdict, rule)) for verdict in found if getattr(verdict, rule) is not None]
        lines += [figure(f"  {rule:16}", values)] if values else []
    for kind in ("difficulty", "form", "database"):
        groups: dict[str, list[float]] = defaultdict(list)
        for verdict in found:
            groups[getattr(verdict, kind) or "unknown"].append(float(verdict.house))
        lines.append(f"  by {kind} (house rule)")
        lines += [figure(f"    {group:30}", values) for group, values in sorted(groups.items())]
    split = [verdict for verdict in found if len(set(verdict.by_rule().values())) > 1]
    lines.append(f"  {len(split)} questions on which the rules disagree")
    for verdict in split[:_LISTED]:
        said = " ".join(f"{rule} {'yes' if right else 'no'}" for rule, right in verdict.by_rule().items())
        lines.append(f"    {verdict.question_id}: {said}")
        for label, sql in (("gold", verdict.gold_sql), ("said", verdict.submitted_sql or "nothing")):
            lines.append(f"      {label} {' '.join(sql.split())[:200]}")
    return "\n".join(lines)


def paired_report(name: str, other: str, first: Sequence[Verdict], second: Sequence[Verdict], config: Config) -> str:
    """Two evaluations compared question by question, as text; raises UserError when they share no question."""
    lines = [f"{other} against {name}, by question"]
    if not {verdict.question_id for verdict in first} & {verdict.question_id for verdict in second}:
        raise UserError(f"The evaluations {name} and {other} share no question; evaluate both on one split.")
    for rule in RULES:
        mine, theirs = (
            {verdict.question_id: verdict.by_rule()[rule] for verdict in found if rule in verdict.by_rule()}
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
