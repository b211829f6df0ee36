"""Makers of believable values; every one takes the random source and the row so far, so a database is reproducible."""

from __future__ import annotations

import datetime
import random
from collections.abc import Mapping

from data.demo.spec import Maker, Row

_FIRST_NAMES = (
    "Maria Daniel Amina Lukas Elena Omar Grace Henrik Priya Tomas Leila Victor Hannah Kenji Sofia Marcus Ingrid Pablo "
    "Naomi Stefan Yara Felix Clara Andre Mei Jonas Fatima Oscar Ruth Dmitri Camila Peter Aisha Hugo Nora Samuel Irene "
    "Walter Zoe Rafael"
).split()
_LAST_NAMES = (
    "Lopez Weber Okafor Novak Silva Haddad Kowalski Berg Sharma Moreau Tanaka Rossi Jensen Fischer Castillo Nguyen Brown "
    "Petrov Ahmed Larsen Costa Walsh Kimura Schmidt Adams Molina Dubois Eriksen Farah Greco Holm Iqbal Keller Lindgren "
    "Mendes Norris Pereira Quinn Santos Turner"
).split()
CITIES = ("Berlin", "Madrid", "Lisbon", "Oslo", "Vienna", "Dublin", "Prague", "Turin")
COUNTRIES = ("Germany", "Spain", "Portugal", "Norway", "Austria", "Ireland", "Japan", "Brazil")


def person() -> Maker:
    return lambda rng, row: f"{rng.choice(_FIRST_NAMES)} {rng.choice(_LAST_NAMES)}"


def pick(*options: str) -> Maker:
    """One of a few values; earlier ones are more frequent, so counts of groups differ."""
    weights = range(2 * len(options), 0, -2)
    return lambda rng, row: rng.choices(options, weights)[0]


def listed(*options: str) -> Maker:
    """Each equally likely; meant for labels out of a fixed list."""
    return lambda rng, row: rng.choice(options)


def title(first: str, second: str) -> Maker:
    """Two words, one from each space-separated list: "Silent Harbor"."""
    return lambda rng, row: f"{rng.choice(first.split())} {rng.choice(second.split())}"


def code(prefix: str, digits: int) -> Maker:
    """ "FC4821"."""
    return lambda rng, row: f"{prefix}{rng.randrange(10 ** (digits - 1), 10**digits)}"


def integer(low: int, high: int) -> Maker:
    """Whole number, both ends included."""
    return lambda rng, row: rng.randint(low, high)


def amount(low: float, high: float, digits: int = 2) -> Maker:
    """Number with decimals; small values are more frequent, as with money."""
    return lambda rng, row: round(low + (high - low) * rng.random() ** 1.5, digits)


def depending(column: str, ranges: Mapping[str, tuple[int, int]]) -> Maker:
    """Amount whose range depends on an earlier column of the same row."""

    def make(rng: random.Random, row: Row) -> float:
        low, high = ranges[row[column]]
        return round(rng.uniform(low, high), 2)

    return make


def day(first_year: int, last_year: int) -> Maker:
    """ISO date."""
    start = datetime.date(first_year, 1, 1)
    days = (datetime.date(last_year, 12, 31) - start).days
    return lambda rng, row: (start + datetime.timedelta(days=rng.randint(0, days))).isoformat()


def later(column: str, low: int, high: int) -> Maker:
    """ISO date `low` to `high` days after the date in an earlier column of the same row."""

    def make(rng: random.Random, row: Row) -> str:
        start = datetime.date.fromisoformat(row[column])
        return (start + datetime.timedelta(days=rng.randint(low, high))).isoformat()

    return make
