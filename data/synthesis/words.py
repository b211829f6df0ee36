"""From identifiers to English: names of tables and columns, plurals, lists, dates and values as people write them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

LEXICON: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("lexicon.yaml").read_text(encoding="utf-8"))
LISTS = {name: frozenset(text.split()) for name, text in LEXICON.items() if isinstance(text, str)}
_SHORT, _IRREGULAR = LEXICON["abbreviations"], LEXICON["irregular"]
_SINGULARS = {plural: singular for singular, plural in _IRREGULAR.items()}
_MONTHS = ("January February March April May June July August September October November December").split()


def tokens(identifier: str) -> list[str]:
    """The words of an identifier in lower case: snake_case, camelCase and spaces part them."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z])(?=\d)", " ", identifier)
    return [part.lower() for part in re.split(r"[\W_]+", parted) if part] or [identifier]


def spoken(parts: Sequence[str]) -> str:
    """Tokens as words: abbreviations written out, acronyms and proper names in capitals."""
    if len(parts) > 1 and parts[-1] in LISTS["column_types"]:
        parts = parts[:-1]
    words = [_SHORT.get(part, part.upper() if part in LISTS["acronyms"] and part != "zip" else part) for part in parts]
    words = [word.capitalize() if word in LISTS["proper"] else word for word in words]
    if (called := LEXICON["phrases"].get(" ".join(words))) is not None:
        return str(called)
    if words[:1] == ["number"] and len(words) > 1 and is_plural(words[-1]):
        words.insert(1, "of")
    elif words[:1] == ["date"] and words[-1] in ("from", "to"):
        words = [f"{' '.join(words[1:-1])}-{words[-1]}", "date"]
    return " ".join(words)


def is_plural(words: str) -> bool:
    return singular(words) != words


def is_participle(words: str) -> bool:
    """Whether it is one word like "injured", which counts as if "people" followed."""
    return re.fullmatch(r"\w+ed", words) is not None


def table_words(name: str, prefix: Sequence[str]) -> tuple[str, str]:
    """Singular and plural of what a row of the table is; `prefix` are tokens that all tables begin with."""
    parts = tokens(name)
    parts = parts[len(prefix) :] or parts
    while len(parts) > 1 and parts[0] in LISTS["table_prefixes"]:
        parts = parts[1:]
    while len(parts) > 1 and parts[-1] in LISTS["table_suffixes"]:
        parts = parts[:-1]
    words = spoken(parts) or name
    one = singular(words)
    return one, plural(one)


def common_prefix(names: Sequence[str]) -> list[str]:
    """The tokens that at least three names all begin with, as long as every name has more."""
    split = [tokens(name) for name in names]
    count = 0
    while len(split) >= 3 and all(len(parts) > count + 1 for parts in split):
        if len({parts[count] for parts in split}) > 1:
            break
        count += 1
    return split[0][:count] if count else []


def _headed(words: str) -> tuple[str, str]:
    """A noun phrase parted before what follows its noun: "date" and " of birth"."""
    found = re.search(r" (of|in|per|to|from|for|by|made|paid|sent|\w{3,}ed$)( |$)", words)
    return (words[: found.start()], words[found.start() :]) if found else (words, "")


def plural(words: str) -> str:
    """The plural of a noun phrase: of its last word, or of the word before "of" or "in"."""
    head, rest = _headed(words)
    before, _, last = head.rpartition(" ")
    if last in _IRREGULAR:
        last = _IRREGULAR[last]
    elif last in LISTS["unchanging"] or last in _SINGULARS or (last.endswith("s") and singular(last) != last):
        pass
    elif re.search(r"(s|x|z|ch|sh)$", last):
        last += "es"
    elif re.search(r"[^aeiou]y$", last):
        last = last[:-1] + "ies"
    else:
        last += "s"
    return " ".join(part for part in (before, last) if part) + rest


def singular(words: str) -> str:
    """The singular of a noun phrase that may be plural."""
    head, rest = _headed(words)
    before, _, last = head.rpartition(" ")
    if last in _SINGULARS:
        last = _SINGULARS[last]
    elif last in LISTS["unchanging"] or last in _IRREGULAR or re.search(r"(ss|us|is)$", last):
        pass
    elif last.endswith("ies") and len(last) > 4:
        last = last[:-3] + "y"
    elif re.search(r"(x|ch|sh|ss)es$", last):
        last = last[:-2]
    elif last.endswith("s") and len(last) > 3:
        last = last[:-1]
    return " ".join(part for part in (before, last) if part) + rest


def listed(words: Sequence[str], last: str = "and") -> str:
    """ "name, age and city"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def a(words: str) -> str:
    """ "a premium", "an age", "earnings"; "ID" counts as a vowel."""
    if words.rpartition(" ")[2] in LISTS["uncountable"]:
        return words
    return f"{'an' if re.match(r'[aeiouAEIO](?!ni|ne|se)', words) else 'a'} {words}"


def be(words: str) -> str:
    """ "price is", "earnings are"."""
    return f"{words} {'are' if words.endswith('s') and words.split()[-1] in LISTS['uncountable'] else 'is'}"


def date_said(day: str) -> str:
    """An ISO day as a person writes it: "March 4, 2015"."""
    parsed = datetime.date.fromisoformat(day)
    return f"{_MONTHS[parsed.month - 1]} {parsed.day}, {parsed.year}"


def value_said(value: Any, quoted: bool) -> str:
    """A value inside a sentence; a text that would not read as one word or name is always quoted."""
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 1e6 else f"{value:.10g}"
    text = str(value)
    plain = re.fullmatch(r"[^\W_][\w\-&/]*( [\w\-&/]+){0,4}", text) and not text.isdigit()
    return f"'{text}'" if isinstance(value, str) and (quoted or not plain) else text
