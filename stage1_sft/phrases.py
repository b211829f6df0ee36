"""What the traces say: search words, short thoughts, final answers. Pure; all randomness comes from the caller's rng."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from shared.database import QueryResult

_STOP_WORDS = frozenset(
    "a about all an and any are as at be by compute count describe did do does each every find first for from give has "
    "have having how i in is it its last least less list many me more most much name no not number of on or order please "
    "return s show tell than that the their them there these they those to total what when where which who whose with "
    "average maximum minimum mean highest lowest greater other than above below between containing starting ending "
    "different distinct sum year years".split()
)
_MISSES = ("overview", "main records", "lookup", "everything", "information needed", "main data")
_MAX_WORDS = 6

THOUGHTS = {
    "search": ("I look for the tables first.", "Which tables matter?", "Let me search the schema."),
    "search_again": ("That found nothing useful; other words may.", "I try the words of the question."),
    "columns": ("I need the exact column names.", "Let me read the columns.", "Now the columns."),
    "query": ("Now I can write the query.", "The columns are clear.", "This should answer it."),
    "fix": ("That was not right; I fix the query.", "I correct the query.", "Let me mend that."),
}


def search_words(question: str) -> str:
    """The content words of a question: no quoted values, numbers or filler, at most six."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"|\d[\d.,:-]*", " ", question)
    words = [word for word in re.findall(r"[A-Za-z_]+", bare.lower()) if word not in _STOP_WORDS and len(word) > 1]
    return " ".join(list(dict.fromkeys(words))[:_MAX_WORDS])


def missing_words(rng: random.Random) -> str:
    """A search that a hasty user would try; whether it really misses is decided by running it."""
    return rng.choice(_MISSES)


def thought(kind: str, rng: random.Random, share: float) -> str:
    """A short sentence before a call, in `share` of the cases, else nothing."""
    return rng.choice(THOUGHTS[kind]) if rng.random() < share else ""


def answer(result: QueryResult, rng: random.Random) -> str:
    """The final sentence, made of the real result; never SQL, so the last successful query stays the submission."""
    rows = result.rows
    if not rows:
        return rng.choice(("No row matches.", "There is none."))
    if len(rows) == 1:
        return f"The answer is {_joined(rows[0])}."
    if len(rows) <= 3 and len(result.columns) == 1:
        return f"The answer is {_joined([row[0] for row in rows])}."
    return f"There are {len(rows)} rows; the first is {_joined(rows[0])}."


def _joined(values: Sequence[object]) -> str:
    texts = ["NULL" if value is None else str(value) for value in values]
    return ", ".join(text if len(text) <= 60 else f"{text[:60]}..." for text in texts)
