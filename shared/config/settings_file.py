"""Reading a settings file as YAML, in which every key stands once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shared.errors import UserError

WRONG_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError)
"""What PyYAML raises for text that is no YAML, and for values that are not what their form says: 2026-02-30, `!!bool x`."""
_SHIPPED = Path(__file__).resolve().parents[2] / "pipeline.yaml"


class _EachKeyOnce(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the C one where PyYAML has it
    """Refuses a mapping that holds a key twice, of which PyYAML keeps the last without a word."""

    def get_single_node(self) -> yaml.Node | None:
        root: yaml.Node | None = super().get_single_node()
        _refuse_repeated_keys(root)
        return root


def _refuse_repeated_keys(root: yaml.Node | None) -> None:
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:  # an alias may hold what holds it
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_key(node)
            waiting += [part for pair in node.value for part in pair]
        else:
            waiting += node.value


def _refuse_repeated_key(mapping: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key in (key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)):
        if key.value in lines:
            problem = f"the key {key.value!r} of line {lines[key.value]} stands there again"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        lines[key.value] = key.start_mark.line + 1


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
    except WRONG_YAML as error:
        raise UserError(f"Config file {path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(document, dict):
        raise UserError(f"Config file {path} must hold a mapping of settings; start from the shipped pipeline.yaml.")
    return document
