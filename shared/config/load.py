"""Reading pipeline.yaml: top level, the profile that the chosen one is `like`, that one, `--set section.key=value`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shared.config.device import PROFILES, default_profile
from shared.config.schema import Config
from shared.errors import UserError

SHIPPED = Path(__file__).resolve().parents[2] / "pipeline.yaml"
# What PyYAML raises for text that is not YAML and for values that contradict their form: 2026-02-30, `!!bool x`.
_WRONG_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError)
_DERIVED = {
    "sft.max_length": "agent.context_tokens",
    "grpo.max_prompt_length": "agent.context_tokens",
    "grpo.max_response_length": "agent.max_turn_tokens",
    "grpo.trajectory_response_length": "agent.context_tokens",
    "vllm.max_model_len": "agent.context_tokens",
}
"""Settings of earlier versions, and what each follows from now."""
_MOVED = {
    "data.spider_dir": "data.sources=PATH",
    "data.avoid": "a source: data.sources=[demo, {path: PATH, use: avoid}]",
}
"""Settings of earlier versions, and what is written instead of each."""
_BOUNDS = {
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must lie between 0 and {lt}",
    "less_than_equal": "it may be at most {le:,}",
    "finite_number": "it must be finite",
}


class _Loader(yaml.CSafeLoader):
    """Refuses a mapping that holds a key twice, of which PyYAML silently keeps the last; reads 1e-5 as a number."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        lines: dict[str, int] = {}
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in lines:
                problem = f"the key {key.value!r} of line {lines[key.value]} appears again"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        super().flatten_mapping(node)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def load_config(path: Path, profile: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply the profile (None: gpu if CUDA is there, else cpu) and the `key=value` overrides.

    Raises UserError for an unreadable file, unknown keys, wrong types and values that contradict each other.
    """
    document = read_settings(path)
    profiles = document.pop("profiles", None) or {}
    if not isinstance(profiles, Mapping) or not all(
        isinstance(changes, Mapping | None) for changes in profiles.values()
    ):
        raise UserError(f"Under `profiles` {path} must hold {', '.join(PROFILES)}, each with sections as at the top.")
    profile = profile or default_profile()
    for name in (profile, *profiles):
        if name not in PROFILES:
            raise UserError(f"Profile {name!r} does not exist; choose one of {', '.join(PROFILES)}.")
    changes = dict(profiles.get(profile) or {})
    like = changes.pop("like", None)
    if like is not None and like not in PROFILES:
        known = ", ".join(PROFILES)
        raise UserError(f"Profile {profile} is like {like!r}, which is no profile; choose one of {known}.")
    base = profiles.get(like) or {}
    values = {**_merge(_merge(document, base), changes), "profile": profile}
    for override in overrides:
        _apply_override(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(_sentence(error.errors()[0])) from error


def read_settings(path: Path) -> dict[str, Any]:
    """The top level of a settings file; raises UserError for one that cannot be read or holds a key twice."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(
            f"Config file {path} cannot be read ({error.strerror}); give its path with --config, e.g. {SHIPPED}, or "
            "start in that folder."
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"Config file {path} is no readable YAML text (UTF-8); start from the shipped one.") from error
    except _WRONG_YAML as error:
        raise UserError(f"Config file {path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(document, dict):
        raise UserError(f"Config file {path} must hold a mapping of settings; start from the shipped pipeline.yaml.")
    return document


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise UserError(f"--set {override!r} has no '='; write --set section.key=value.")
    known = dict(Config.settings())
    if key in _DERIVED:
        raise UserError(f"--set {key}: it follows from {_DERIVED[key]}; set that.")
    if key in _MOVED:
        raise UserError(f"--set {key}: it is now {_MOVED[key]}.")
    if key not in known or key == "profile":
        raise UserError(f"--set {key}: there is no such setting{_nearest(key, known)}")
    try:
        value = yaml.load(text, _Loader)
    except _WRONG_YAML:
        value = text
    if key == "data.sources" and not text.startswith("["):
        value = text  # a path, whatever it looks like
    section, _, leaf = key.rpartition(".")
    target = values.get(section) if section else values
    if isinstance(target, dict):  # what else stands there is refused with the file
        target[leaf] = text if known[key].annotation in (str, str | None) and value is not None else value


def _nearest(key: str, known: Iterable[str]) -> str:
    known = list(known)
    same_leaf = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    close = same_leaf or difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else "."


def _sentence(error: ErrorDetails) -> str:
    """One error of pydantic as a sentence that names the setting, its value and the fix."""
    key, kind, value = ".".join(map(str, error["loc"])), error["type"], error["input"]
    known = dict(Config.settings())
    if owner := next((name for name in known if key.startswith(f"{name}.")), None):
        entry = str(error["loc"][-1])
        entry = f"{entry}: {value!r}" if entry.isidentifier() and kind != "missing" else f"{value!r}"
        return f"Setting {owner} cannot hold {entry}; write {(known[owner].examples or [''])[0]}."
    if kind == "missing":
        return f"The config lacks {key}; copy it from the shipped pipeline.yaml."
    if key in _DERIVED:
        return f"Setting {key} follows from {_DERIVED[key]}; remove it from the config."
    if key in _MOVED:
        return f"Setting {key} is now {_MOVED[key]}; change the config."
    if kind == "extra_forbidden":
        section = key.rpartition(".")[0]
        return (
            f"Unknown setting {key} in the config{_nearest(key, [name for name in known if name.startswith(section)])}"
        )
    if key not in known:
        return f"Setting {key} must be a section with keys, not {value!r}."
    if value is None or (isinstance(value, str) and not value.strip()):
        return f"Setting {key} is empty; it needs a value."
    if examples := known[key].examples:
        return f"Setting {key} is {value!r}; write {examples[0]}."
    if kind == "literal_error":
        return f"Setting {key} is {value!r}; choose one of {', '.join(get_args(known[key].annotation))}."
    if kind in _BOUNDS:
        return f"Setting {key} is {value!r}; {_BOUNDS[kind].format(**error.get('ctx', {}))}."
    return f"Setting {key} is {value!r}, which is not of type {kind.removesuffix('_type').removesuffix('_from_float')}."
