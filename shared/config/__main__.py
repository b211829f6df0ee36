"""Writes docs/settings.md and the comments of pipeline.yaml from the models in shared/config/schema.py."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from shared.config.device import PROFILES
from shared.config.load import SHIPPED, load_config
from shared.config.schema import Config, PartOf, Section
from shared.errors import UserError

REFERENCE = SHIPPED.parent / "docs" / "settings.md"
_HEAD = """# Settings

<!-- Written by `python -m shared.config` from shared/config/schema.py and pipeline.yaml; edit those. -->

Values are resolved in this order: the top level of `pipeline.yaml`, the chosen profile (`--profile gpu`, `gpu24`, `cpu`
or `evening`), then `--set section.key=value`. Profile `evening` is like `cpu` with a longer stage 2. A dash means that
a profile does not change the value of the top level.
**Redoes** names the stages that run again when the setting changes; a setting without any affects how a stage works,
not its result.
"""
_TABLE = f"| Setting | {' | '.join(PROFILES)} | Allowed | Meaning | Redoes |\n|{'---|' * (len(PROFILES) + 4)}"


def main() -> None:
    """Write both files."""
    _, unknown = argparse.ArgumentParser(prog="python -m shared.config", description=__doc__).parse_known_args()
    if unknown:
        raise UserError(f"`python -m shared.config` takes no arguments such as {unknown[0]!r}.")
    SHIPPED.write_text(with_comments(SHIPPED.read_text(encoding="utf-8")), encoding="utf-8")
    REFERENCE.parent.mkdir(exist_ok=True)
    REFERENCE.write_text(reference(), encoding="utf-8")
    print(f"wrote {REFERENCE} and the comments of {SHIPPED}")


def with_comments(text: str) -> str:
    """A settings file with the meaning of each setting as its comment; comments under `profiles` stay."""
    shared, profiles, rest = text.partition("\nprofiles:")
    meanings = {name: field.description for name, field in Config.settings()}
    meanings |= {name: field.annotation.__doc__.rstrip(".") for name, field in _sections().items()}
    lines, section = [], ""
    for line in shared.split("\n"):
        if match := re.fullmatch(r"( *)(\w+):( (?:[^ #]| (?! *#))+)? *(#.*)?", line):
            indent, key, value, _ = match.groups(default="")
            section = section if indent else f"{key}."
            line = f"{indent}{key}:{value}".ljust(29) + f" # {meanings[f'{section}{key}' if indent else key]}"
        lines.append(line)
    return "\n".join(lines) + profiles + rest


def reference() -> str:
    """docs/settings.md as it should read."""
    values = [
        load_config(SHIPPED, profile).model_dump(exclude_defaults=True) for profile in PROFILES
    ]  # the first is the top level
    own = {name: field for name, field in Config.model_fields.items() if name not in _sections() and name != "profile"}
    parts = [_HEAD, _TABLE, *_rows(own, values, "", PartOf())]
    for name, field in _sections().items():
        inherited = next((mark for mark in field.metadata if isinstance(mark, PartOf)), PartOf())
        parts += ["", f"## {name}", "", field.annotation.__doc__, "", _TABLE]
        parts += _rows(field.annotation.model_fields, [each[name] for each in values], f"{name}.", inherited)
    return "\n".join(parts) + "\n"


def _sections() -> dict[str, Any]:
    fields = Config.model_fields.items()
    return {
        name: field
        for name, field in fields
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def _rows(
    fields: Mapping[str, FieldInfo], values: Sequence[Mapping[str, Any]], prefix: str, inherited: PartOf
) -> Iterator[str]:
    for name, field in fields.items():
        stages = next((mark for mark in field.metadata if isinstance(mark, PartOf)), inherited).stages
        top, *others = [each[name] for each in values]
        shown = [f"`{_yaml(top)}`", *("–" if other == top else f"`{_yaml(other)}`" for other in others)]
        meaning = (field.description or "").replace("|", "\\|")
        yield f"| `{prefix}{name}` | {' | '.join(shown)} | {_allowed(field)} | {meaning} | {', '.join(stages)} |"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _allowed(field: FieldInfo) -> str:
    """The type and the bounds of a setting."""
    kinds = [kind for kind in (get_args(field.annotation) or [field.annotation]) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{kind}`" for kind in kinds)
    names: dict[Any, str] = {int: "integer", float: "number", bool: "`true`, `false`", str: "text"}
    bounds = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {:,}"}
    limits = [form.format(getattr(m, key)) for key, form in bounds.items() for m in field.metadata if hasattr(m, key)]
    null = [] if field.annotation in kinds else ["or `null`"]
    if kinds[0] not in names:
        return str((field.examples or [""])[0])
    return " ".join([names[kinds[0]], *([", ".join(limits)] if limits else []), *null])


if __name__ == "__main__":
    main()
