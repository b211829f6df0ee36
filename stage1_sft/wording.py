"""The words of a trace that no tool returns: search queries, thoughts, final answers.

All derived by fixed rules from the question or the real result, so that a model can learn the rule. Short, because
every token of them is paid in every episode.
"""

from __future__ import annotations

import random
import re
from typing import Any

from shared.sql.database import QueryResult

_QUERY_WORDS = 6
_CELL_WIDTH = 40  # characters of one value in an answer
_LISTED = 3  # values named in an answer
_ASKING = frozenset(
    "a about above after all also am among an and any are as at average be been before below between both but by can "
    "compute contain containing contains count did different distinct do does during each earliest either end ending "
    "ends equal every exactly fewest find for from get give greater had has have having highest how i id ids in is it its kind "
    "largest last latest least less list longest lowest many max maximum me mean min minimum more most much name names "
    "neither no nor not number of on one only or order ordered other out over per please return same show smallest some "
    "sort sorted start starting starts sum than that the their them there these they this those to top total under "
    "unique up value values was were what when where which who whose why with without year".split()
)
THOUGHTS = {
    "search_schema": (
        "First find the tables.",
        "Which tables matter?",
        "Search the schema.",
        "Find where this is stored.",
    ),
    "get_columns": ("Look at the columns.", "Check the columns.", "What does it hold?", "The exact names, please."),
    "execute_sql": ("Now the query.", "Run the query.", "This should answer it.", "Query the data."),
}


def search_query(question: str) -> str:
    """The question's content words without values (quoted texts, numbers, dates) and the language of asking."""
    words = re.findall(r"[^\W\d_][\w]*", re.sub(r"(['\"])(?=\S).*?(?<=\S)\1(?!\w)", " ", question))
    content: dict[str, str] = {}
    for word in (word.lower() for word in words):
        if word not in _ASKING and len(word) > 1:
            content.setdefault(_stem(word), word)
    return " ".join(list(content.values())[:_QUERY_WORDS]) or " ".join(question.split()[:_QUERY_WORDS])


def _stem(word: str) -> str:
    return f"{word[:-3]}y" if word.endswith("ies") else word.rstrip("s")


def by_name(*names: str) -> str:
    """A search for tables or columns by the words of their names: "singer_in_concert" gives "singer concert"."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", " ".join(names))
    words = dict.fromkeys(word.lower() for word in re.findall(r"[^\W_]+", spaced))
    return " ".join([word for word in words if word not in _ASKING] or words)


def poor_query(question: str, rng: random.Random) -> str:
    """A search that a careless model tries: a value of the question, or a word about databases."""
    quoted = re.findall(r"'([^']+)'|\"([^\"]+)\"", question)
    capitals = re.findall(r"(?<=\w )[A-Z]\w+", question)
    values = [first or second for first, second in quoted] or capitals
    return rng.choice(values or ["details", "information", "database", "overview"])


def answer(result: QueryResult) -> str:
    """One sentence about the rows that the model has just read."""
    rows = result.rows
    if not rows:
        return "No rows match."
    if len(rows) == 1:
        return f"The answer is {_listed(rows[0])}."
    if len(rows) <= _LISTED and len(result.columns) == 1:
        return f"The answers are {_listed(row[0] for row in rows)}."
    more = "more than " if result.truncated else ""
    return f"There are {more}{len(rows)} rows; the first is {_listed(rows[0])}."


def _listed(values: Any) -> str:
    return ", ".join(_cell(value) for value in values)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"a blob of {len(value)} bytes"
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    text = " ".join(str(value).split())
    return text if len(text) <= _CELL_WIDTH else f"{text[:_CELL_WIDTH].rstrip()}..."
