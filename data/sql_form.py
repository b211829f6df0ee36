"""Normal forms of questions and golds, and what the form of a gold tells: its difficulty and whether it is repeatable.

Normal forms are keys for comparing, not text to show or run.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from sqlglot import exp

from shared.reward.queries import parse

Difficulty = Literal["easy", "medium", "hard"]
_CHANGING = frozenset("rand randomblob currentdate currenttime currenttimestamp".split())
_CLOCKS = frozenset("date time datetime julianday unixepoch strftime timediff tsordstotimestamp".split())
_EXPLAIN = re.compile(r"(?:\s|--[^\n]*\n|(?>/\*.*?\*/))*+explain\b", re.IGNORECASE | re.DOTALL)
DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard")


def question_key(question: str) -> str:
    """The question without case, punctuation and repeated whitespace."""
    return " ".join(re.sub(r"[^\w]+", " ", question.casefold()).split())


@lru_cache(maxsize=100_000)  # the generator, the grouping and the leakage check ask for the same golds
def gold_key(sql: str) -> str:
    """The SQL in one spelling of keywords, identifiers, quotes and whitespace; plain text when it cannot be parsed."""
    tree = parse(sql)
    return (
        question_key(sql) if tree is None else tree.transform(_plain, copy=False).sql(dialect="sqlite", comments=False)
    )


def rate(sql: str) -> Difficulty:
    """Difficulty by what the SQL needs: one plain condition or aggregate is easy, a nested query or two joins hard."""
    tree = parse(sql)
    if tree is None:
        return "hard"
    nested = len(list(tree.find_all(exp.Select))) - 1
    score = 3 * nested + 2 * len(list(tree.find_all(exp.Join)))
    score += len(list(tree.find_all(exp.Group, exp.Having, exp.Order, exp.And, exp.Or)))
    return "easy" if score == 0 else "medium" if score <= 2 else "hard"


def is_repeatable(sql: str) -> bool:
    """False when the SQL calls a random function or reads the clock; unreadable SQL counts as repeatable.

    SQLite's date functions read the clock without an argument or with 'now': https://sqlite.org/lang_datefunc.html.
    """
    tree = parse(sql)
    for node in tree.transform(_plain, copy=False).walk() if tree else ():
        name = node.name.lower() if isinstance(node, exp.Anonymous) else node.key
        given = [*node.iter_expressions()]
        reads_clock = not given or any(value.is_string and value.name.lower() == "now" for value in given)
        if name in _CHANGING or (name in _CLOCKS and reads_clock):
            return False
    return True


def is_explain(sql: str) -> bool:
    """True when the SQL is an EXPLAIN statement."""
    return _EXPLAIN.match(sql) is not None


def _plain(node: exp.Expression) -> exp.Expression:
    """Identifiers in lower case; a lone name in double quotes is a text in many golds."""
    if isinstance(node, exp.Column) and isinstance(node.this, exp.Identifier) and node.this.quoted and not node.table:
        return exp.Literal.string(node.name)
    if isinstance(node, exp.Identifier):
        return exp.to_identifier(node.this.lower(), quoted=False)
    return node
