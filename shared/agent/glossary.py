"""An example of an own tool, `--set agent.tools=shared.agent.glossary:lookup_term`: what a term means in SQL.

docs/use.md says what a tool must be. Replace the terms by those of your business, or read them from a file.
"""

from __future__ import annotations

GLOSSARY = {
    "average": "avg(x); rows where x is NULL do not count.",
    "how many": "count(*), or count(DISTINCT x) for different ones.",
    "latest": "ORDER BY the date DESC LIMIT 1.",
    "maximum": "max(x).",
    "number of": "count(*) with GROUP BY what it is counted for.",
    "share": "100.0 * count of the part / count of all, in percent.",
    "total": "sum(x); 0 rows give NULL.",
}


def lookup_term(term: str) -> str:
    """Meaning of a term in SQL.

    Term of the question.
    """
    return GLOSSARY[term.lower()]
