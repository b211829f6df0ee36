"""The words of a trace that no tool returns: search queries and final answers.

All derived by fixed rules from the question or the real result, so that a model can learn the rule. Short, because
every token of them is paid in every episode. An answer is in the language of its question; in a language that
languages.yaml does not hold it is the bare values.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shared.sql.database import QueryResult

_QUERY_WORDS = 6
_CELL_WIDTH = 40  # characters of one value in an answer
_FIRST = 3  # values named of a result that is too long to be listed


@dataclass(frozen=True)
class Language:
    """The wording of answers in one language; languages.yaml says what each slot takes."""

    words: str
    one: str
    several: str
    none: str
    range: str
    first: str
    more: str
    last_and: str
    unknown: str


_FILE = Path(__file__).with_name("languages.yaml")
LANGUAGES = {name: Language(**texts) for name, texts in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()}
NEUTRAL = Language("", "{}", "{}", "0", "{}: {} – {}", "{}: {}, …", "> {}", ", ", "NULL")


def language_of(question: str) -> str:
    """The key of LANGUAGES with most words in the question, "" when it has none of any."""
    words = re.findall(r"[^\W\d_]+", question.lower())
    hits = {name: sum(word in language.words.split() for word in words) for name, language in LANGUAGES.items()}
    best = max(hits, key=lambda name: hits[name])
    return best if hits[best] else ""


def search_query(question: str) -> str:
    """The question's content words without values (quoted texts, numbers, dates) and the language of asking."""
    asking = LANGUAGES.get(language_of(question), NEUTRAL).words.split()
    words = re.findall(r"[^\W\d_][\w]*", re.sub(r"(['\"])(?=\S).*?(?<=\S)\1(?!\w)", " ", question))
    content: dict[str, str] = {}
    for word in (word.lower() for word in words):
        if word not in asking and len(word) > 1:
            content.setdefault(f"{word[:-3]}y" if word.endswith("ies") else word.rstrip("s"), word)
    return " ".join(list(content.values())[:_QUERY_WORDS]) or " ".join(question.split()[:_QUERY_WORDS])


def by_name(*names: str) -> str:
    """A search for tables or columns by the words of their names: "singer_in_concert" gives "singer concert"."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", " ".join(names))
    words = dict.fromkeys(word.lower() for word in re.findall(r"[^\W_]+", spaced))
    return " ".join([word for word in words if word not in LANGUAGES["English"].words.split()] or words)


def poor_query(question: str, rng: random.Random) -> str:
    """A search that a careless model tries: a value of the question, or a word about databases."""
    quoted = re.findall(r"'([^']+)'|\"([^\"]+)\"", question)
    values = [first or second for first, second in quoted] or re.findall(r"(?<=\w )[A-Z]\w+", question)
    return str(rng.choice(values or ["details", "information", "database", "overview"]))


def answer(
    result: QueryResult, language: str, *, shown: int, ordered: bool, fits: Callable[[str], bool] = lambda text: True
) -> str:
    """One sentence that answers with the rows that the model has read, the first `shown` ones of the result.

    All of them where that `fits`, else their number and range; the range only where it can be read off: of a result
    that was shown whole and is `ordered` or one column of numbers or dates. Otherwise their number and the first
    ones."""
    words = LANGUAGES.get(language, NEUTRAL)
    rows, count = result.rows, words.more.format(len(result.rows)) if result.truncated else len(result.rows)
    is_text = [all(isinstance(value, str) for value in column) for column in zip(*rows, strict=True)]
    label = is_text.index(True) if True in is_text else 0

    def named(row: Sequence[Any]) -> str:
        """The row's name, and in brackets what belongs to it; a row of figures alone has no name."""
        cells = [_cell(value, words) for value in row]
        if len(rows) == 1 and not any(is_text):
            return _joined(cells, words)
        name = cells.pop(label)
        return f"{name} ({', '.join(cells)})" if cells else name

    if not rows:
        return _sentence(words.none)
    whole = _sentence((words.one if len(rows) == 1 else words.several).format(_joined([*map(named, rows)], words)))
    complete = shown == len(rows) and not result.truncated
    if complete and (len(rows) == 1 or fits(whole)):
        return whole
    alone = [row[0] for row in rows if len(row) == 1 and re.fullmatch(r"-?\d[\d.:-]*", str(row[0]))]
    if complete and (ordered or len(alone) == len(rows)):
        first, last = (rows[0], rows[-1]) if ordered else ((min(alone),), (max(alone),))
        return _sentence(words.range.format(count, named(first), named(last)))
    return _sentence(words.first.format(count, _joined([named(row) for row in rows[: min(_FIRST, shown)]], words)))


def _cell(value: Any, words: Language) -> str:
    if value is None:
        return words.unknown
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, float):
        text = f"{value:.2f}" if abs(value) >= 1 else f"{value:.2g}"
        return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
    text = " ".join(str(value).split()) or '""'
    return text if len(text) <= _CELL_WIDTH else f"{text[:_CELL_WIDTH].rstrip()}…"


def _joined(parts: Sequence[str], words: Language) -> str:
    comma = "; " if any("," in part for part in parts) else ", "
    *most, last = parts
    return f"{comma.join(most)}{words.last_and}{last}" if most else last


def _sentence(text: str) -> str:
    return text if text.endswith((".", "…", "!", "?")) else f"{text}."
