"""How Spider's evaluator reads SQL before it runs it: only the first statement, without the word DISTINCT.

It does so with the Python package sqlparse, whose habits are kept: a word is left alone in quotes and comments, a
semicolon inside parentheses or BEGIN … END ends nothing, the word GO ends a statement, a blank text holds none, and
texts beyond its limits are not read at all.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
    (?:--|\#\ )[^\r\n]*             # a comment
    | /\*.*?\*/
    | `(?:``|[^`])*`                # a quoted name
    | (?<![\w\])])\[[^\]\[]+\]
    | '(?:''|\\'|[^'])*'            # a text; a backslash hides the quote after it if another one follows
    | "(?:""|\\"|[^"])*"
    | (?<!\w)[@:$?]\w+ | \\\w+      # a parameter, a command
    | \w[\w$\#]*                    # a word or number
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
_MAX_TOKENS = 10_000
_MAX_NESTING = 100
_STEPS = {"(": 1, ")": -1, "BEGIN": 1, "END": -1}
_AFTER_BEGIN = frozenset("; TRANSACTION WORK TRAN DEFERRED IMMEDIATE EXCLUSIVE".split())  # then it opens no block


class Unreadable(ValueError):
    """The evaluator would fail on this text: it is blank, nested too deeply or far too long."""


def first_statement_without_distinct(sql: str) -> str:
    """What is run of `sql`; raises Unreadable when there is nothing that could be."""
    tokens = _first_statement(sql)
    if not sql.strip() or len(tokens) > _MAX_TOKENS:
        raise Unreadable("blank" if not sql.strip() else "too many words")
    return "".join(token for token in tokens if token.lower() != "distinct")


def _first_statement(sql: str) -> list[str]:
    tokens: list[str] = []
    level = nesting = 0
    previous = ""
    for found in _TOKEN.finditer(sql):
        token = found[0]
        is_name = sql[found.end() : found.end() + 1] in ("(", ".") or previous == "."
        word = "" if is_name else token.upper()
        tokens.append(token)
        if token.isspace():
            continue
        level += _STEPS.get(token if token in "()" else word, 0) - (previous == "BEGIN" and word in _AFTER_BEGIN)
        nesting += (token == "(") - (token == ")")
        if nesting > _MAX_NESTING:
            raise Unreadable("nested too deeply")
        if (token == "GO" and not is_name) or (token == ";" and level <= 0):
            break
        previous = token.upper()
    return tokens
