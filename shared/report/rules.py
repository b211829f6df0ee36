"""Finished evaluations judged by every rule: the house's, Spider's, its test suite's and BIRD's, and BIRD's soft F1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.judges import bird_ex, soft_f1, spider_test_suite
from shared.evaluation.judges.verdicts import suites
from shared.evaluation.metrics import estimate, interval
from shared.evaluation.run import EPISODE_FILE, questions_of
from shared.records import Question, read_episodes
from shared.report.page import Table
from shared.runs.manifest import RunDirectory

_RULES = {"house": "house", "spider": "Spider", "testsuite": "Spider, test suite", "bird": "BIRD", "soft_f1": "soft F1"}
_LISTED = 20  # questions on which the rules disagree


def rules_table(config: Config, run: RunDirectory, names: Sequence[str], testsuite: Path | None) -> Table:
    """One row per evaluation and rule; the notes name the questions on which the rules disagree."""
    rows, notes = [], []
    seconds = config.sandbox.timeout_seconds
    with suites(testsuite) as variants:
        for name in names:
            questions = {question.id: question for question in questions_of(run, name)}
            episodes = [one for one in read_episodes(run.evaluation(name) / EPISODE_FILE) if one.reward]
            found, disputed = defaultdict[str, list[float]](list), []
            for episode in tqdm(episodes, f"judging {name}", unit=" episodes", leave=False, disable=None):
                question = questions[episode.question_id]
                judged = verdicts(question, episode.submitted_sql, variants(question.db_id), seconds)
                judged["house"] = float(episode.reward is not None and episode.reward.correct)
                for rule, value in judged.items():
                    found[rule].append(value)
                if len({value for rule, value in judged.items() if rule != "soft_f1"}) > 1:
                    disputed.append(question.id)
            for rule, title in _RULES.items():
                if values := found[rule]:
                    one = estimate(values, config.evaluate.bootstrap_samples, config.seed)
                    rows.append([f"{name}, {title}", interval(vars(one)), str(one.n)])
            listed = ", ".join(disputed[:_LISTED]) + (", …" if len(disputed) > _LISTED else "")
            notes.append(f"{name}: the rules disagree on {len(disputed)} questions{': ' + listed if listed else ''}")
    return Table("Every rule", ["model, rule", "accuracy (95\u00a0%)", "questions"], rows, notes)


def verdicts(question: Question, sql: str | None, variants: Sequence[Path], seconds: float) -> dict[str, float]:
    """The official verdicts on a submission; the test suite's only where there are variants of the database."""
    rules = {}
    for rule, databases in (("spider", [Path(question.database)]), ("testsuite", variants)):
        if databases:
            try:
                is_right = sql is not None and spider_test_suite(question.gold_sql, sql, databases, seconds=seconds)
            except UserError:  # a gold that only Spider's reading of the query breaks makes every answer wrong there
                is_right = False
            rules[rule] = float(is_right)
    for rule, judge in (("bird", bird_ex), ("soft_f1", soft_f1)):
        rules[rule] = 0.0 if sql is None else float(judge(question.gold_sql, sql, question.database, seconds=seconds))
    return rules
