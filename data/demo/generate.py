"""Draws questions for one demo domain until the wanted number and mix of difficulties is reached.

A draft is kept only when its gold has one clear, non-trivial answer on the real rows: it is not empty, every condition
changes it, and no tie decides what an ORDER BY or LIMIT shows. Golds and question texts are unique over all domains.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from data.demo.build import Rows, insert
from data.demo.compose import Draft, Draw, Form
from data.demo.conditions import NoFit
from data.demo.joined import JOINED_FORMS
from data.demo.query import Query
from data.demo.ranking import RANKING_FORMS
from data.demo.single_table import SINGLE_TABLE_FORMS
from data.demo.spec import Domain
from data.sql_form import Difficulty, gold_key, question_key, rate
from shared.errors import UserError
from shared.records import Question

FORMS: tuple[Form, ...] = SINGLE_TABLE_FORMS + RANKING_FORMS + JOINED_FORMS
SHARES: dict[Difficulty, float] = {"easy": 0.60, "medium": 0.28, "hard": 0.12}
_MAX_ROWS = 60  # of an answer
_IDLE_DRAWS = 3000  # without a new question; then the domain has no more to give


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


def generate(domain: Domain, rows: Rows, count: int, seed: int, taken: Taken) -> list[Question]:
    """`count` questions about the domain, without database path. Raises UserError when it cannot yield that many."""
    draw = Draw(random.Random(f"{seed}.{domain.db_id}"), domain, rows)
    with closing(sqlite3.connect(":memory:")) as connection:
        insert(connection, domain, rows)
        questions = list(islice(_accepted(draw, connection, count, taken), count))
    if len(questions) < count:
        raise UserError(f"The demo database {domain.db_id} yields only {len(questions)} of {count} different questions; "
                        f"lower data.questions_per_database to {len(questions)} or less.")  # fmt: skip
    return questions


def _accepted(draw: Draw, connection: sqlite3.Connection, count: int, taken: Taken) -> Iterator[Question]:
    """Questions worth asking, until the quotas of `count` are full or nothing new comes up any more."""
    room = _quotas(count)
    shapes: Counter[str] = Counter()
    per_shape = max(2, count // 50)
    number = idle = 0
    while any(room.values()) and idle < _IDLE_DRAWS:
        idle += 1
        form = draw.rng.choices(FORMS, [form.weight for form in FORMS])[0]
        try:
            draft = form.compose(draw)
        except NoFit:
            continue
        sql = draft.query.sql
        shape = _shape(sql)
        if shapes[shape] >= per_shape:
            continue
        difficulty = rate(sql)
        if not room[difficulty] or not answerable(connection, draft.query):
            continue
        question = ask(draft, form, draw.rng)
        if not taken.claim(question, sql):
            continue
        idle = 0
        number += 1
        room[difficulty] -= 1
        shapes[shape] += 1
        kind = "/".join((form.name, *draft.sorts))
        yield Question(f"{draw.domain.db_id}-{number:04d}", draw.domain.db_id, question, sql, "", difficulty, kind)


def ask(draft: Draft, form: Form, rng: random.Random) -> str:
    """The draft in one of the form's wordings."""
    text = rng.choice(draft.templates or form.templates).format(**draft.slots)
    return text[0].upper() + text[1:]


def answerable(connection: sqlite3.Connection, query: Query) -> bool:
    """Whether the gold has one clear, non-trivial answer of a readable size."""
    result = _rows(connection, query)
    if not 0 < len(result) <= _MAX_ROWS or all(cell in (None, 0) for row in result for cell in row):
        return False
    if query.group and not query.limit and not query.having and len(result) < 2:
        return False
    if query.order and not _clear_order(connection, query):
        return False
    return all(sorted(map(repr, _rows(connection, fewer))) != sorted(map(repr, result)) for fewer in query.reductions())


def _clear_order(connection: sqlite3.Connection, query: Query) -> bool:
    """No two of the shown rows, nor the last shown and the first cut, have the same place in the order."""
    keys = [row[-1] for row in _rows(connection, replace(query, select=(*query.select, query.order), limit=0))]
    keys = keys[: query.limit + 1] if query.limit else keys
    return len(set(keys)) == len(keys) and None not in keys and len(keys) > query.limit


def _rows(connection: sqlite3.Connection, query: Query) -> list[tuple[Any, ...]]:
    return connection.execute(query.sql).fetchall()


def _quotas(count: int) -> dict[Difficulty, int]:
    quotas = {difficulty: round(share * count) for difficulty, share in SHARES.items()}
    quotas["easy"] += count - sum(quotas.values())
    return quotas


def _shape(sql: str) -> str:
    """The SQL without its values: questions that differ in nothing else are near-duplicates."""
    return re.sub(r"'[^']*'|\b\d+(\.\d+)?\b", "?", sql)
