"""Draws questions about one database until the wanted number and mix of difficulties is reached, and audits each gold.

A draft is kept only when its gold has one clear, non-trivial answer: it runs within the limits, is not empty, repeats
itself, every condition changes it, no tie decides what an ORDER BY or LIMIT shows, no query without thought gives the
same, and another SQL with the same meaning agrees on the database and on perturbed copies of it. Golds and question
texts are unique.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from data.sql_form import Difficulty, gold_key, is_repeatable, question_key, rate
from data.synthesis.compose import Draft, Draw, Form
from data.synthesis.conditions import NoFit
from data.synthesis.forms import FORMS
from data.synthesis.relations import RELATIONS
from data.synthesis.schema import Understanding
from shared.errors import UserError
from shared.records import Question
from shared.reward.execution_match import execution_match
from shared.reward.perturbed_copies import make_copies
from shared.reward.queries import Order, order_of, trivial_query
from shared.reward.reward import agrees_on_copies
from shared.sql.database import Database, QueryResult, SqlError

WORDINGS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("wordings.yaml").read_text(encoding="utf-8"))
ALL_FORMS: tuple[Form, ...] = FORMS + RELATIONS
SHARES: dict[Difficulty, float] = {"easy": 0.60, "medium": 0.28, "hard": 0.12}
_MAX_ROWS = 60  # of an answer
_IDLE_DRAWS = 1500  # without a new question; then the database has no more to give
_COPIES = 2
_MOST_FAILURES = 20  # golds that fail, as by a time limit


@dataclass
class Taken:
    """Normal forms of the golds and questions that exist already."""

    questions: set[str] = field(default_factory=set)
    golds: set[str] = field(default_factory=set)

    def claim(self, question: str, gold: str) -> bool:
        """Reserve both; False when either exists."""
        keys = question_key(question), gold_key(gold)
        if keys[0] in self.questions or keys[1] in self.golds:
            return False
        self.questions.add(keys[0])
        self.golds.add(keys[1])
        return True


def generate(
    database: Database,
    about: Understanding,
    count: int,
    seed: int,
    taken: Taken,
    shares: Mapping[Difficulty, float] = SHARES,
) -> list[Question]:
    """At most `count` questions about the database; fewer where it yields no more."""
    draw = Draw(random.Random(f"{seed}.{database.path.stem}"), about)
    with tempfile.TemporaryDirectory(prefix="firstcall-") as folder:
        try:
            paths = make_copies(database.path, [], Path(folder), _COPIES, seed)
            copies = [Database(path, database.limits) for path in paths]
        except UserError:  # a file that only the sandbox can read
            copies = []
        return list(islice(_accepted(draw, Audit(database, copies), count, taken, shares), count))


def _accepted(
    draw: Draw, audit: Audit, count: int, taken: Taken, shares: Mapping[Difficulty, float]
) -> Iterator[Question]:
    """Questions worth asking, until the quotas of `count` are full or nothing new comes up any more.

    What one difficulty cannot give is made up for by the others.
    """
    room = {difficulty: round(share * count) for difficulty, share in shares.items()}
    room["easy"] += count - sum(room.values())
    shapes: Counter[str] = Counter()
    number = 0
    for per_shape, open_to_all in ((max(2, count // 50), False), (max(4, count // 25), True)):
        idle = 0
        while any(room.values()) and number < count and idle < _IDLE_DRAWS and audit.failures < _MOST_FAILURES:
            idle += 1
            form = draw.rng.choices(ALL_FORMS, [form.weight for form in ALL_FORMS])[0]
            try:
                draft = form.compose(draw)
            except NoFit:
                continue
            sql = draft.query.sql
            shape, difficulty = re.sub(r"'[^']*'|\b\d+(\.\d+)?\b", "?", sql), rate(sql)
            if shapes[shape] >= per_shape or not (room[difficulty] or open_to_all) or gold_key(sql) in taken.golds:
                continue
            question = ask(draft, form, draw.rng)
            if audit.objection(draft) or not taken.claim(question, sql):
                continue
            idle = 0
            number += 1
            room[difficulty] = max(0, room[difficulty] - 1)
            shapes[shape] += 1
            kind = "/".join((form.name, *draft.sorts))
            name = audit.database.path.stem
            yield Question(f"{name}-{number:04d}", name, question, sql, str(audit.database.path), difficulty, kind)


def ask(draft: Draft, form: Form, rng: random.Random) -> str:
    """The draft in one of the form's wordings."""
    wording = rng.choice(WORDINGS[draft.wording or form.name])
    several = " and " in draft.slots.get("columns", draft.slots.get("theirs", "")) + draft.slots.get("tail", "")
    if several and re.match(r"What is the \{(columns|theirs)", wording):
        wording = wording.replace("What is", "What are", 1)
    text = wording.format(**draft.slots)
    return text[0].upper() + text[1:]


@dataclass
class Audit:
    """Judges drafts by what they return."""

    database: Database
    copies: Sequence[Database]
    failures: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def objection(self, draft: Draft) -> str:
        """Why the gold is not worth asking for, or ""."""
        try:
            reason = self._objection(draft)
        except SqlError as error:
            self.failures += error.kind in ("timeout", "too_large") if hasattr(error, "kind") else 1
            reason = f"fails: {error}"
        self.reasons[reason.split(":")[0]] += 1
        return reason

    def _objection(self, draft: Draft) -> str:
        query, sql = draft.query, draft.query.sql
        result = self._run(sql)
        if not 0 < len(result.rows) <= _MAX_ROWS:
            return "empty or too long"
        if all(cell in (None, 0) for row in result.rows for cell in row):
            return "nothing but zero and NULL"
        if query.group and not query.limit and not query.having and len(result.rows) < 2:
            return "one group"
        if not query.distinct and not query.group and len(set(result.rows)) < len(result.rows):
            return "repeated rows"
        if order_of(sql, self.database) is not (Order.GIVEN if query.order else Order.FREE):
            return "ties"
        if query.order and query.limit and len(result.rows) < query.limit:
            return "fewer rows than asked for"
        if query.order:
            if not query.limit and len(result.rows) < 2:
                return "one row in order"
            keys = self._run(replace(query, select=(query.order,), limit=0).sql).rows
            keys = keys[: query.limit + 1] if query.limit else keys
            if (None,) in keys or (query.limit and len(set(keys)) < len(keys)):
                return "NULL or ties in the order"
        if not is_repeatable(sql) or self._run(sql) != result:
            return "not repeatable"
        for fewer in query.reductions():
            if execution_match(result, self._run(fewer.sql), ordered=False):
                return "a condition changes nothing"
        if len(self.database.schema.tables) <= 40 and trivial_query(sql, result, self.database):
            return "trivial"
        if draft.twin and not execution_match(result, self._run(draft.twin), ordered=False):
            return "another SQL disagrees"
        for copy in self.copies:
            copy.execute(sql, copy.limits.max_compare_rows)
        if draft.twin and not agrees_on_copies(sql, draft.twin, self.copies):
            return "another SQL disagrees on copies"
        return ""

    def _run(self, sql: str) -> Any:
        result: QueryResult = self.database.execute(sql, self.database.limits.max_compare_rows)
        return result
