"""Reading pipeline.yaml into the settings tree, and the checks of its values.

What a setting means stands beside its value in pipeline.yaml, its type in settings.py. Values are resolved in this
order: top level of the file, then the chosen profile, then `--set section.key=value`. Unknown keys and values of a wrong
type are errors that name the key and the nearest valid one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from shared.cli.environment import default_profile
from shared.config.schema import PROFILES, Config
from shared.config.settings_file import WRONG_YAML, read_settings
from shared.errors import UserError


def load_config(path: Path, profile: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply the profile (None: gpu if CUDA is there, else cpu) and the `key=value` overrides.

    Raises UserError for an unreadable file, unknown keys, wrong types and values that contradict each other.
    """
    document = read_settings(path)
    profiles = document.pop("profiles", None) or {}
    if not isinstance(profiles, Mapping):
        raise UserError(
            f"Under `profiles` {path} must hold {' and '.join(PROFILES)}, each with sections as at the top."
        )
    profile = profile or default_profile()
    for name in (profile, *profiles):
        if name not in PROFILES:
            raise UserError(f"Profile {name!r} does not exist; choose one of {', '.join(PROFILES)}.")
    if not all(isinstance(changes, Mapping) for changes in profiles.values() if changes):
        raise UserError(f"The profiles of {path} must hold sections with keys, like the top level.")
    values = _merge(document, profiles.get(profile) or {})
    _build(Config, {**values, "profile": profile}, "")  # the file by itself, so that overrides meet complete sections
    for override in overrides:
        _apply_override(values, override)
    config = _build(Config, {**values, "profile": profile}, "")
    _check(config)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """The config (or one section) as plain JSON-able values."""
    return dataclasses.asdict(config)


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """Inverse of `to_dict` for a whole config, with the same checks as for a file."""
    config: Config = _build(Config, values, "")
    _check(config)
    return config


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
    known = setting_types()
    if key not in known:
        raise UserError(f"--set {key}: there is no such setting{_nearest(key, list(known))}")
    try:
        value = yaml.safe_load(text)
    except WRONG_YAML:
        value = text
    *sections, leaf = key.split(".")
    for section in sections:
        values = values[section]
    values[leaf] = text if known[key] in (str, str | None) and value is not None else value


def setting_types() -> dict[str, Any]:
    """Every settable key in dotted form with its type."""
    return {key: kind for key, kind in _leaves(Config, "") if key != "profile"}


def _leaves(cls: type, prefix: str) -> typing.Iterator[tuple[str, Any]]:
    for name, kind in _hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from _leaves(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _nearest(key: str, known: Sequence[str]) -> str:
    leaf_matches = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    close = leaf_matches or difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else "."


def _build(cls: type, values: Any, prefix: str) -> Any:
    hints = _hints(cls)
    if not isinstance(values, Mapping):
        raise UserError(f"Setting {prefix.rstrip('.')} must be a section with keys, not {values!r}.")
    for key in values:
        if key not in hints:
            known = [f"{prefix}{name}" for name in hints]
            raise UserError(f"Unknown setting {prefix}{key} in the config{_nearest(f'{prefix}{key}', known)}")
    missing = [key for key in hints if key not in values]
    if missing:
        raise UserError(f"The config lacks {prefix}{missing[0]}; copy it from the shipped pipeline.yaml.")
    built = {}
    for key, kind in hints.items():
        name = f"{prefix}{key}"
        nested = dataclasses.is_dataclass(kind)
        built[key] = (
            _build(typing.cast(type, kind), values[key], f"{name}.") if nested else _typed(name, kind, values[key])
        )
    return cls(**built)


def _typed(name: str, kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if origin is Literal:
        if value in get_args(kind):
            return value
        raise UserError(f"Setting {name} is {value!r}; choose one of {', '.join(map(str, get_args(kind)))}.")
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _typed(name, next(arm for arm in get_args(kind) if arm is not type(None)), value)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UserError(f"Setting {name} is empty; it needs a value.")
    if kind is float and isinstance(value, str):  # YAML reads 1e-5 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise UserError(f"Setting {name} is {value!r}, which is not of type {kind.__name__}.")
    return value


_POSITIVE = (
    "sandbox.timeout_seconds sandbox.max_rows agent.max_turns agent.max_turn_tokens agent.context_tokens "
    "agent.observation_tokens sft.max_traces sft.lora_rank sft.epochs sft.batch_size sft.gradient_accumulation "
    "sft.max_length sft.eval_steps sft.learning_rate grpo.train_batch_size grpo.mini_batch_size grpo.micro_batch_size "
    "grpo.learning_rate grpo.epochs grpo.save_every grpo.concurrency vllm.max_model_len evaluate.questions evaluate.samples "
    "evaluate.concurrency evaluate.bootstrap_samples data.questions_per_database sandbox.max_compare_rows "
    "sandbox.max_result_bytes vllm.max_num_seqs grpo.max_prompt_length grpo.max_response_length grpo.temperature "
    "grpo.trajectory_response_length grpo.nodes grpo.gpus_per_node grpo.call_timeout_seconds grpo.episode_timeout_seconds "
    "grpo.step_timeout_seconds vllm.tensor_parallel grpo.keep_checkpoints grpo.weight_bucket_mb sft.keep_checkpoints "
    "safety.length_factor teacher.tries teacher.concurrency sft.lora_alpha grpo.lora_alpha grpo.max_token_len_per_gpu "
    "grpo.val_questions vllm.cpu_kv_cache_gib vllm.start_timeout_seconds"
).split()
_SECONDS = (
    "sandbox.timeout_seconds grpo.call_timeout_seconds grpo.episode_timeout_seconds grpo.step_timeout_seconds "
    "vllm.start_timeout_seconds"
).split()
_AT_MOST = dict.fromkeys(_SECONDS, 10**6) | {
    "seed": 2**32 - 1, "data.copies": 100, "sft.epochs": 1000, "grpo.epochs": 1000, "teacher.tries": 1000,
    "gate.samples": 1000, "evaluate.samples": 1000,
}  # fmt: skip
_NOT_NEGATIVE = (
    "seed data.copies data.unseen_databases grpo.lora_rank grpo.clip_low grpo.clip_high grpo.entropy_coeff grpo.sync_tolerance "
    "grpo.reward_valid_call grpo.reward_executed grpo.reward_right_tables evaluate.temperature "
    "gate.questions gate.min_turns safety.patience safety.window teacher.temperature teacher.prompt_price teacher.completion_price"
).split()
_SHARES = (
    "sft.lora_dropout sft.warmup_share data.test_share data.val_share sft.wrong_turn_share sft.search_miss_share "
    "sft.parallel_share gate.min_pass gate.min_mixed gate.min_tool_calls gate.flat_share safety.entropy_share "
    "safety.tool_call_share vllm.gpu_memory_utilization"
).split()
ADDRESS = re.compile(r"https?://([\w.-]+|\[[0-9a-f:]+\])(:\d{1,5})?(/\S*)?")
_FORMS = {
    "teacher.endpoint": (ADDRESS, "an address like http://127.0.0.1:8000/v1"),
    "grpo.gateway_url": (ADDRESS, "an address like http://gateway:8080"),
    "grpo.ray_address": (re.compile(r"\S+:\d{1,5}"), "host:port of the cluster's head node"),
    "grpo.agent": (re.compile(r"[\w.]+:\w+"), "module:function"),
}


def _check_each(config: Config) -> None:
    for key, (form, example) in _FORMS.items():
        if _get(config, key) is not None and not form.fullmatch(_get(config, key)):
            raise UserError(f"Setting {key} is {_get(config, key)!r}; write {example}.")
    for key in _POSITIVE:
        if not 0 < _get(config, key) < float("inf"):
            raise UserError(f"Setting {key} is {_get(config, key)}; it must be above 0 and finite.")
    for key, most in _AT_MOST.items():
        if _get(config, key) > most:
            raise UserError(f"Setting {key} is {_get(config, key)}; it may be at most {most:,}.")
    for key in _NOT_NEGATIVE:
        if not 0 <= _get(config, key) < float("inf"):
            raise UserError(f"Setting {key} is {_get(config, key)}; it must not be negative.")
    for key in _SHARES:
        if not 0 <= _get(config, key) < 1:
            raise UserError(f"Setting {key} is {_get(config, key)}; it must lie between 0 and 1.")


def _check(config: Config) -> None:
    _check_each(config)
    grpo = config.grpo
    if grpo.total_steps is not None and grpo.total_steps <= 0:
        raise UserError(f"Setting grpo.total_steps is {grpo.total_steps}; it must be above 0, or null for all steps.")
    if config.data.test_share + config.data.val_share >= 1:
        raise UserError("data.test_share and data.val_share leave no question to train on; their sum must be below 1.")
    if grpo.rollouts_per_question < 2:
        raise UserError(
            "Setting grpo.rollouts_per_question must be at least 2: GRPO compares episodes of one question."
        )
    if grpo.mini_batch_size * grpo.rollouts_per_question % grpo.micro_batch_size:
        raise UserError(
            f"Setting grpo.micro_batch_size ({grpo.micro_batch_size}) must divide the rows of a mini batch "
            f"(grpo.mini_batch_size x grpo.rollouts_per_question = {grpo.mini_batch_size * grpo.rollouts_per_question})."
        )
    _check_machines(config)
    if grpo.mini_batch_size > grpo.train_batch_size:
        raise UserError(
            f"Setting grpo.mini_batch_size ({grpo.mini_batch_size}) exceeds grpo.train_batch_size "
            f"({grpo.train_batch_size}), so every step would be skipped; lower it."
        )
    if grpo.test_every > 0 and grpo.test_every % grpo.save_every:
        raise UserError(
            f"Setting grpo.test_every ({grpo.test_every}) must be a multiple of grpo.save_every ({grpo.save_every}): only a "
            "saved step can be kept and exported as the best by validation."
        )
    if config.gate.questions and config.gate.samples < 2:
        raise UserError(
            f"Setting gate.samples is {config.gate.samples}; a mixed group needs at least 2 samples of a question, or set "
            "gate.questions to 0 to do without the gate."
        )
    if config.agent.context_tokens > config.vllm.max_model_len:
        raise UserError(
            f"Setting agent.context_tokens ({config.agent.context_tokens}) exceeds vllm.max_model_len "
            f"({config.vllm.max_model_len}); lower the first or raise the second."
        )
    if grpo.reward_valid_call + grpo.reward_executed + grpo.reward_right_tables >= 0.5:
        raise UserError(
            "The dense rewards grpo.reward_* add up to 0.5 or more; they must stay below half a correct answer."
        )


def _check_machines(config: Config) -> None:
    grpo = config.grpo
    gpus = grpo.nodes * grpo.gpus_per_node
    if grpo.nodes > 1 and not grpo.ray_address:
        raise UserError(
            f"Setting grpo.nodes is {grpo.nodes}, but Ray of the run's own has this machine alone; start a Ray cluster and "
            "give its address as grpo.ray_address."
        )
    if gpus % config.vllm.tensor_parallel:
        raise UserError(
            f"Setting vllm.tensor_parallel ({config.vllm.tensor_parallel}) must divide all GPUs (grpo.nodes x "
            f"grpo.gpus_per_node = {gpus}): that many rollout servers share them."
        )
    if grpo.job_template and not grpo.gateway_url:
        raise UserError(
            "Setting grpo.job_template needs grpo.gateway_url: the jobs of a cluster cannot reach a gateway on the loopback "
            "address."
        )


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
