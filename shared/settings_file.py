"""Reading a settings file as YAML, in which every key stands once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shared.errors import UserError

_SHIPPED = Path(__file__).resolve().parents[1] / "pipeline.yaml"


class _EachKeyOnce(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the C one where PyYAML has it
    """Refuses a mapping that holds a key twice, of which PyYAML keeps the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in lines:
                problem = f"the key {key.value!r} of line {lines[key.value]} stands there again"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_settings(path: Path) -> dict[str, Any]:
    """The top level of a settings file; raises UserError for one that cannot be read or holds a key twice."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _EachKeyOnce)
    except OSError as error:
        raise UserError(
            f"Config file {path} cannot be read ({error.strerror}); give its path with --config, e.g. {_SHIPPED}, or start in "
            "that folder."
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"Config file {path} is no readable YAML text (UTF-8); start from the shipped one.") from error
    except (yaml.YAMLError, ValueError) as error:  # 2026-02-30 has the form of a date and is none
        raise UserError(f"Config file {path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(document, dict):
        raise UserError(f"Config file {path} must hold a mapping of settings; start from the shipped pipeline.yaml.")
    return document
