"""hints.yaml: what a person corrects in the report of `--check`, and that report, which has the same layout.

tables:
  sbDailyPrice:
    words: daily price         # one row; `plural` and `synonyms` may follow
    leave_out: true            # ask nothing about it; false takes a view in
    columns:
      sbDpDb2x: {words: exchange code, meaning: category, synonyms: [market], values: {NQ: Nasdaq}}
      sbDpTickerId: {references: sbTicker.sbTickerId, role: ticker}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from data.synthesis.schema import Column, Meaning, Understanding
from shared.errors import UserError
from shared.sql.database import Database

_TABLE = {"words": str, "plural": str, "synonyms": list, "leave_out": bool, "columns": dict}
_COLUMN = {"words": str, "synonyms": list, "meaning": str, "values": dict, "references": str, "role": str}


def read_hints(path: Path | None, database: Database) -> Mapping[str, Any]:
    """Hints by table. Raises UserError for a file that cannot be read or names what the database does not have."""
    if path is None:
        return {}
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"The hints in {path} cannot be read ({error}); correct the file.") from error
    if not isinstance(document, dict) or set(document) - {"tables"} or not isinstance(document.get("tables", {}), dict):
        raise UserError(
            f'The hints in {path} must be one mapping "tables" of table names; see data/synthesis/hints.py.'
        )
    tables: dict[str, Any] = document.get("tables", {})
    for name, hint in tables.items():
        table = database.schema.table(str(name))
        if table is None or table.name != name:
            raise UserError(f"{path}: {database.path.stem} has no table {name!r}; correct the name.")
        _check(hint, _TABLE, f"{path}: {name}")
        for column, inner in hint.get("columns", {}).items():
            found = table.column(str(column))
            if found is None or found.name != column:
                raise UserError(f"{path}: table {name} has no column {column!r}; correct the name.")
            _check(inner, _COLUMN, f"{path}: {name}.{column}")
            if inner.get("meaning", "key") not in list(Meaning):
                raise UserError(
                    f"{path}: {name}.{column} cannot mean {inner['meaning']!r}; write one of {', '.join(Meaning)}."
                )
    return tables


def _check(hint: Any, known: Mapping[str, type], place: str) -> None:
    if not isinstance(hint, dict):
        raise UserError(f"{place}: this must be a mapping; write {', '.join(known)} under it.")
    for key, value in hint.items():
        if key not in known:
            raise UserError(f"{place}: {key!r} is unknown; write one of {', '.join(known)}.")
        if not isinstance(value, known[key]):
            raise UserError(f"{place}: {key} must be a {known[key].__name__}; it is {value!r}.")


def report(about: Understanding) -> Iterator[str]:
    """What was understood, as lines of a hints file; what follows a # is explanation."""
    yield "tables:"
    for table in about.tables:
        rows = f"{table.rows} rows" if table.rows <= 100_000 else "more than 100,000 rows"
        title = ", ".join(column.name for column in table.title) or "nothing"
        yield f"  {_plain(table.name)}:  # {rows}; a row is named by {title}" + (
            "; connects two tables" if table.is_link else ""
        )
        yield f"    words: {_plain(table.singular)}"
        yield f"    plural: {_plain(table.plural)}"
        yield "    columns:"
        for column in table.columns:
            parts = [f"words: {_plain(column.words[0])}", f"meaning: {column.meaning}"]
            if column.references:
                parts += [f"references: {_plain('.'.join(column.references))}", f"role: {_plain(column.role)}"]
            yield f"      {_plain(column.name)}: {{{', '.join(parts)}}}  # {_seen(column)}"
    for name, why in about.left_out.items():
        yield f"  # {name} is left out: {why}"


def _plain(text: str) -> str:
    """A text as YAML writes it inside a line."""
    return (
        yaml.safe_dump(text, default_flow_style=True, allow_unicode=True, width=10_000).removesuffix("\n...\n").strip()
    )


def _seen(column: Column) -> str:
    values = list(dict.fromkeys(column.values))
    shown = ", ".join(repr(value)[:30] for value in values[:3]) or "no values"
    notes = [f"stored like {column.stored}"] if column.stored else []
    notes += ["NULL in some rows"] if column.has_null else []
    notes += [f"{value!r} is said {said}" for value, said in column.says.items()]
    return "; ".join([f"{len(values)} different values in the sample: {shown}", *notes]).replace("\n", " ")
