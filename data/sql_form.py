"""What two wordings of the same thing have in common: normal forms of questions and golds, and a rating of golds.

Normal forms are keys for comparing, not text to show or run.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

Difficulty = Literal["easy", "medium", "hard"]
DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard")


def question_key(question: str) -> str:
    """The question without case, punctuation and repeated whitespace."""
    return " ".join(re.sub(r"[^\w]+", " ", question.casefold()).split())


@lru_cache(maxsize=100_000)  # asked for by the generator, the grouping and the leakage check
def gold_key(sql: str) -> str:
    """The SQL with one spelling of keywords, identifiers, quotes and whitespace; unreadable SQL is squeezed as text."""
    tree = _parse(sql)
    return question_key(sql) if tree is None else tree.transform(_plain).sql(dialect="sqlite", comments=False)


def rate(sql: str) -> Difficulty:
    """Difficulty by what the SQL needs: one plain condition or aggregate is easy, a nested query or two joins hard."""
    tree = _parse(sql)
    if tree is None:
        return "hard"
    nested = len(list(tree.find_all(exp.Select))) - 1
    score = 3 * nested + 2 * len(list(tree.find_all(exp.Join)))
    score += len(list(tree.find_all(exp.Group, exp.Having, exp.Order, exp.And, exp.Or)))
    return "easy" if score == 0 else "medium" if score <= 2 else "hard"


def _parse(sql: str) -> exp.Expression | None:
    try:
        return sqlglot.parse_one(sql, read="sqlite")
    except (SqlglotError, RecursionError):
        return None


def _plain(node: exp.Expression) -> exp.Expression:
    """Identifiers in lower case; a lone name in double quotes is how many golds write a text."""
    if isinstance(node, exp.Column) and isinstance(node.this, exp.Identifier) and node.this.quoted and not node.table:
        return exp.Literal.string(node.name)
    if isinstance(node, exp.Identifier):
        return exp.to_identifier(node.this.lower(), quoted=False)
    return node
