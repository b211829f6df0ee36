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
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from data.sql_form import Difficulty, gold_key, is_repeatable, question_key, rate
from data.synthesis import words
from data.synthesis.compose import Draft, Draw
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

_FOLDER = Path(__file__).parent
WORDINGS: dict[str, list[str]] = yaml.safe_load(_FOLDER.joinpath("wordings.yaml").read_text("utf-8"))
ALL_FORMS = {form.__name__.removeprefix("_"): form for form in (*FORMS, *RELATIONS)}
SHARES: dict[Difficulty, float] = {"easy": 0.40, "medium": 0.35, "hard": 0.25}
FAMILIES: dict[Difficulty, dict[str, int]] = yaml.safe_load(_FOLDER.joinpath("families.yaml").read_text("utf-8"))
_FEWEST = 4  # questions of a family about one database: too few to learn from are not worth asking
_TRIES = 150  # drafts for one question of a family
_MAX_ROWS = 60  # of an answer
_COPIES = 2
_MOST_FAILURES = 20  # golds that fail, as by a time limit
_MOST_SECONDS = 300.0  # of audits; a database so large that each gold takes seconds gives fewer questions


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
    """Questions worth asking, until there are `count` or nothing new comes up any more."""
    made: Counter[tuple[Difficulty, str]] = Counter()
    shapes: Counter[str] = Counter()
    name = audit.database.path.stem
    for most in (max(2, count // 50), max(4, count // 25)):  # questions of one shape
        spent: set[tuple[Difficulty, str]] = set()
        while made.total() < count and not audit.is_spent and (due := _due(made, spent, count, shares)):
            spent.add(due)
            for draft in drafts_of(draw, *due):
                if audit.is_spent:
                    break
                sql = draft.query.sql
                shape = re.sub(r"'[^']*'|\b\d+(\.\d+)?\b", "?", sql)
                if shapes[shape] >= most or gold_key(sql) in taken.golds:
                    continue
                question = ask(draft, draw.rng)
                if audit.objection(draft) or not taken.claim(question, sql):
                    continue
                spent.remove(due)
                shapes[shape] += 1
                made[due] += 1
                identity = f"{name}-{made.total():04d}"
                yield Question(identity, name, question, sql, str(audit.database.path), due[0], due[1])
                break


def _due(
    made: Counter[tuple[Difficulty, str]],
    spent: set[tuple[Difficulty, str]],
    count: int,
    shares: Mapping[Difficulty, float],
) -> tuple[Difficulty, str] | None:
    """Level and family that lack most of their part; None when all are spent.

    Of a level's families only the first few have a part, so that each gets _FEWEST questions; the next one takes the
    place of one that is spent.
    """
    lack: dict[Difficulty, float] = {level: share * count for level, share in shares.items()}
    few = {level: max(1, round(room / _FEWEST)) for level, room in lack.items()}
    for (level, _), number in made.items():
        lack[level] -= number
    for level in sorted(lack, key=lack.__getitem__, reverse=True):
        families = [family for family in FAMILIES[level] if (level, family) not in spent][: few[level]]
        if families:
            return level, min(families, key=lambda family: made[level, family] / FAMILIES[level][family])
    return None


def drafts_of(draw: Draw, level: Difficulty, family: str) -> Iterator[Draft]:
    """Drafts of one level and family."""
    names = ("list", "count", "aggregate", "joined_list") if family == "average" else (family.removesuffix(" joined"),)
    for _ in range(_TRIES):
        name = draw.one(names)
        try:
            draft = ALL_FORMS[name](draw)
        except NoFit:
            continue
        joined = " joined" if draft.query.joins and ALL_FORMS[name] in FORMS else ""
        found = "average" if "average" in draft.sorts else name + joined
        if found == family and rate(draft.query.sql) == level:
            yield replace(draft, wording=draft.wording or name)


def ask(draft: Draft, rng: random.Random) -> str:
    """The draft in one of its wordings."""
    wording, slots = rng.choice(WORDINGS[draft.wording]), dict(draft.slots)
    first = "columns" if "{columns}" in wording else "theirs"
    if " and " in slots.get(first, "") + slots.get("tail", ""):
        wording = wording.replace(f"What is the {{{first}}}", f"What are the {{{first}}}")
    for name in re.findall(r"\{(columns|mine)\}(?= and the )", wording) + ["columns"] * bool(slots.get("tail")):
        slots[name] = slots[name].replace(" and ", ", ")  # "the name, the age and the number of songs"
    text = wording.format(**slots, a_measure=words.a(slots.get("measure", "")))
    return text[0].upper() + text[1:]


@dataclass
class Audit:
    """Judges drafts by what they return."""

    database: Database
    copies: Sequence[Database]
    failures: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def is_spent(self) -> bool:
        """Whether the database is too slow to audit more drafts."""
        return self.failures >= _MOST_FAILURES or self.seconds >= _MOST_SECONDS

    def objection(self, draft: Draft) -> str:
        """Why the gold is not worth asking for, or ""."""
        started = time.monotonic()
        try:
            reason = self._objection(draft)
        except SqlError as error:
            self.failures += error.kind in ("timeout", "too_large") if hasattr(error, "kind") else 1
            reason = f"fails: {error}"
        self.seconds += time.monotonic() - started
        self.reasons[reason.split(":")[0]] += 1
        return reason

    def _objection(self, draft: Draft) -> str:
        query, sql = draft.query, draft.query.sql
        result = self._run(sql)
        if not 0 < len(result.rows) <= _MAX_ROWS:
            return "empty or too long"
        if all(cell in (None, 0) for row in result.rows for cell in row):
            return "nothing but zero and NULL"
        if draft.wording == "lookup" and len(result.rows) > 1:
            return "several rows of one name"
        if draft.wording == "joined_list_where" and len(result.rows) < 2:
            return "one row of many"
        if draft.wording == "difference" and result.rows[0][0] < 0:
            return "fewer rows, not more"
        if query.group and not query.limit and not query.having and len(result.rows) < 2:
            return "one group"
        if not query.distinct and not query.group and len(set(result.rows)) < len(result.rows):
            return "repeated rows"
        if order_of(sql, self.database) is not (Order.GIVEN if query.order else Order.FREE):
            return "ties"
        if query.order and query.limit and len(result.rows) < query.limit:
            return "fewer rows than asked for"
        if query.order:
            keys = self._run(replace(query, select=(query.order,), limit=0).sql).rows
            keys = keys[: query.limit + 1] if query.limit else keys
            if len(keys) < 2:
                return "one row in order"
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
