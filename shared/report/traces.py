"""traces.html: every episode of a run in one offline page, those of the GRPO steps included.

The episodes stand in the page as deflated JSON; the page builds only the rows in sight. Queries, answers and cells come
from models and databases, so the page's policy allows its own script and style and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.failures import WAYS, way_of_failing
from shared.evaluation.run import EPISODE_FILE, questions_of
from shared.records import Episode, Question, read_episodes, read_questions
from shared.runs.manifest import RunDirectory
from shared.sql.database import Database, SqlError

STEPS = "grpo steps"  # the model of the training episodes
_ROWS, _COLUMNS, _CELL = 10, 12, 80  # of a result that is shown; the last in characters


@dataclass(frozen=True)
class Played:
    """One episode of a run with the model that played it (an evaluation's name or STEPS) and its way of failing."""

    model: str
    episode: Episode
    question: Question
    way: str
    results: tuple[Any, Any]  # of gold and submission: columns, rows and more, or error; None where nothing can be run

    @property
    def right(self) -> bool:
        return bool(self.episode.reward and self.episode.reward.correct)


def read_played(config: Config, run: RunDirectory, evaluations: Iterable[str]) -> list[Played]:
    """The episodes of these evaluations, all samples included, and of the GRPO steps, as far as there are any."""
    sources: list[tuple[str, list[Question], list[Path]]] = []
    for name in evaluations:
        folder = run.evaluation(name)
        samples = sorted(folder.glob("sample_*"), key=lambda path: int(path.name.partition("_")[2]))
        sources.append((name, questions_of(run, name), [each / EPISODE_FILE for each in (folder, *samples)]))
    trained = [file for split in ("train", "val") if (file := run.data / f"{split}.jsonl").exists()]
    sources.append((STEPS, [one for file in trained for one in read_questions(file)], [run.grpo / EPISODE_FILE]))
    databases: dict[str, Database | None] = {}
    played = []
    for model, asked, files in sources:
        questions = {question.id: question for question in asked}
        for question in asked:
            if question.database not in databases:
                databases[question.database] = _open(question.database, config)
        for episode in (episode for file in files for episode in read_episodes(file)):
            if known := questions.get(episode.question_id):
                played.append(_played(model, episode, known, databases[known.database]))
    return played


def _open(path: str, config: Config) -> Database | None:
    try:
        return Database(path, config.sandbox)
    except UserError:  # the run was moved without its databases; its episodes can still be read
        return None


def _played(model: str, episode: Episode, question: Question, database: Database | None) -> Played:
    gold, submitted = (_result(sql, database) for sql in (question.gold_sql, episode.submitted_sql))
    schema = database.schema if database else None
    way = way_of_failing(episode, question, schema, (submitted or {}).get("error", ""))
    return Played(model, episode, question, way, (gold, submitted))


@lru_cache(maxsize=20_000)  # the episodes of a question often submit the same query
def _result(sql: str | None, database: Database | None) -> dict[str, Any] | None:
    if sql is None or database is None:
        return None
    try:
        found = database.execute(sql, _ROWS)
    except SqlError as error:
        return {"error": str(error)}
    rows = [[None if cell is None else str(cell)[:_CELL] for cell in row[:_COLUMNS]] for row in found.rows]
    return {"columns": found.columns[:_COLUMNS], "rows": rows, "more": found.truncated}


def write_traces(played: Sequence[Played], name: str, file: Path) -> None:
    """Write the page about the run `name`."""
    places: dict[Question, int] = {}
    questions, episodes = [], []
    for one in played:
        asked, episode = one.question, one.episode
        if asked not in places:
            places[asked] = len(places)
            names = {"id": asked.id, "text": asked.question, "database": asked.db_id, "difficulty": asked.difficulty}
            questions.append({**names, "form": asked.form, "gold": asked.gold_sql, "result": one.results[0]})
        played_by = {"model": one.model, "step": episode.step, "asked": places[asked], "stop": episode.stop.value}
        outcome = {"right": one.right, "way": one.way, "sql": episode.submitted_sql, "result": one.results[1]}
        episodes.append({**played_by, **outcome, "turns": _turns(episode)})
    data = {"run": name, "ways": WAYS, "questions": questions, "episodes": episodes}
    packed = base64.b64encode(zlib.compress(json.dumps(data, ensure_ascii=False).encode("utf-8"))).decode("ascii")
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    sources = []
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
        sources.append(f"{tag}-src 'sha256-{digest}'")
    page = page.replace("CSP_SOURCES", "; ".join(sources)).replace("EPISODE_DATA", packed)
    file.write_text(page, encoding="utf-8")


def _turns(episode: Episode) -> list[dict[str, Any]]:
    """What the page shows of each turn; a turn with an unreadable call as the model wrote it."""
    return [
        {
            "content": turn.text if turn.malformed and turn.text else turn.content,
            "calls": [[call.name, ", ".join(map(str, call.arguments.values()))] for call in turn.calls],
            "malformed": turn.malformed,
            "observations": [*zip(turn.ok, turn.observations, strict=False)],
        }
        for turn in episode.turns
    ]
