"""The words of a trace that no tool returns: search queries, thoughts, final answers.

All derived by fixed rules from the question or the real result, so that a model can learn the rule. Short, because
every token of them is paid in every episode. An answer is in the language of its question; in a language that LANGUAGES
does not hold it is the bare values.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.sql.database import QueryResult

_QUERY_WORDS = 6
_CELL_WIDTH = 40  # characters of one value in an answer
_FIRST = 3  # values named of a result that is too long to be listed
THOUGHTS = {
    "search_schema": (
        "First find the tables.",
        "Which tables matter?",
        "Search the schema.",
        "Find where it is stored.",
    ),
    "get_columns": ("Look at the columns.", "Check the columns.", "What does it hold?", "The exact names, please."),
    "execute_sql": ("Now the query.", "Run the query.", "This should answer it.", "Query the data."),
}


@dataclass(frozen=True)
class Language:
    """How answers are worded; a slot takes a value, a list of values or a number."""

    words: frozenset[str]  # that questions are asked with: they tell the language and are not searched for
    one: str
    several: str
    none: str
    range: str
    first: str
    more: str  # a number that the result exceeds
    last_and: str = ", "
    unknown: str = "NULL"


NEUTRAL = Language(frozenset(), "{}", "{}", "0", "{}: {} – {}", "{}: {}, …", "> {}")
LANGUAGES = {
    "English": Language(
        frozenset(
            "a about above after all also am among an and any are as at average be been before below between both but by "
            "can compute contain containing contains count did different distinct do does during each earliest either end "
            "ending ends equal every exactly fewest find for from get give greater had has have having highest how i id "
            "ids in is it its kind largest last latest least less list longest lowest many max maximum me mean min minimum "
            "more most much name names neither no nor not number of on one only or order ordered other out over per please "
            "return same show smallest some sort sorted start starting starts sum than that the their them there these "
            "they this those to top total under unique up value values was were what when where which who whose why with "
            "without year".split()
        ),
        "The answer is {}", "The answers are {}", "There are none", "There are {}, from {} to {}",
        "There are {}; the first are {}", "more than {}", " and ", "unknown",
    ),
    "German": Language(
        frozenset(
            "alle aller am anzahl auf aus bei das dem den der des die durchschnittliche ein eine einem einen einer es für "
            "gib gibt haben hat im in ist jede jeden jeder jedes liste mit mehr meisten nach nenne oder pro sind und viele "
            "vom von war was welche welchen welcher welches wer wie wurden zeige zu zum zur über".split()
        ),
        "Die Antwort ist {}", "Die Antworten sind {}", "Es gibt keine", "Es gibt {}, von {} bis {}",
        "Es gibt {}; die ersten sind {}", "mehr als {}", " und ", "unbekannt",
    ),
    "French": Language(
        frozenset(
            "a au aux avec chaque combien dans de des donne du en est et il la le les liste montre moyen moyenne nombre ont "
            "ou par plus pour qu que quel quelle quelles quels qui son sont sur tous toutes un une".split()
        ),
        "La réponse est {}", "Les réponses sont {}", "Il n'y en a aucun", "Il y en a {}, de {} à {}",
        "Il y en a {} ; les premiers sont {}", "plus de {}", " et ", "inconnu",
    ),
    "Spanish": Language(
        frozenset(
            "cada con cuál cuáles cuántas cuántos de del el en es hay la las lista los más muestra número o para por promedio "
            "que quién qué se son su tiene tienen todas todos un una y".split()
        ),
        "La respuesta es {}", "Las respuestas son {}", "No hay ninguno", "Hay {}, de {} a {}",
        "Hay {}; los primeros son {}", "más de {}", " y ", "desconocido",
    ),
    "Italian": Language(
        frozenset(
            "che chi ci con dei del della delle di e elenca gli ha hanno i il in la le lo media mostra nel numero o ogni per "
            "più quale quali quante quanti sono tutte tutti un una è".split()
        ),
        "La risposta è {}", "Le risposte sono {}", "Non ce ne sono", "Ce ne sono {}, da {} a {}",
        "Ce ne sono {}; i primi sono {}", "più di {}", " e ", "sconosciuto",
    ),
    "Portuguese": Language(
        frozenset(
            "a as cada com da das de do dos e em há liste mais mostre média no na número o os ou para por quais qual quantas "
            "quantos que quem são tem têm todas todos um uma é".split()
        ),
        "A resposta é {}", "As respostas são {}", "Não há nenhum", "Há {}, de {} a {}",
        "Há {}; os primeiros são {}", "mais de {}", " e ", "desconhecido",
    ),
    "Dutch": Language(
        frozenset(
            "aantal alle bij dat de die een elk elke en er geef gemiddelde heeft hebben het hoe hoeveel in is met meer meeste "
            "met naar of op per toon van veel voor wat welk welke wie zijn".split()
        ),
        "Het antwoord is {}", "De antwoorden zijn {}", "Er zijn er geen", "Er zijn er {}, van {} tot {}",
        "Er zijn er {}; de eerste zijn {}", "meer dan {}", " en ", "onbekend",
    ),
}  # fmt: skip


def language_of(question: str) -> str:
    """The key of LANGUAGES with most words in the question, "" when it has none of any."""
    words = re.findall(r"[^\W\d_]+", question.lower())
    hits = {name: sum(word in language.words for word in words) for name, language in LANGUAGES.items()}
    best = max(hits, key=lambda name: hits[name])
    return best if hits[best] else ""


def search_query(question: str) -> str:
    """The question's content words without values (quoted texts, numbers, dates) and the language of asking."""
    asking = LANGUAGES.get(language_of(question), NEUTRAL).words
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
    return " ".join([word for word in words if word not in LANGUAGES["English"].words] or words)


def poor_query(question: str, rng: random.Random) -> str:
    """A search that a careless model tries: a value of the question, or a word about databases."""
    quoted = re.findall(r"'([^']+)'|\"([^\"]+)\"", question)
    values = [first or second for first, second in quoted] or re.findall(r"(?<=\w )[A-Z]\w+", question)
    return str(rng.choice(values or ["details", "information", "database", "overview"]))


def answer(
    result: QueryResult, language: str, *, shown: int, ordered: bool, fits: Callable[[str], bool] = lambda text: True
) -> str:
    """One sentence that answers with the rows that the model has read, the first `shown` ones of the result.

    All of them where that `fits`, else their number and range; the range only where it can be read off: of a result that
    was shown whole and is `ordered` or one column of numbers or dates. Otherwise their number and the first ones.
    """
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
