"""Evaluation: play the test questions with one model and write down what became of them.

    evaluations/<who>/{questions.jsonl,vllm.log,episodes.jsonl,rewards.jsonl,episodes.calls.md,summary.json,manifest.json}

Each episode is appended to episodes.jsonl as it ends, so an interrupted evaluation goes on where it stopped. Episodes
lost to the infrastructure are played once more, then left out and counted; too many of them and there is no result.
Greedy decoding in a batch is not bit-for-bit repeatable: the batch a request lands in changes the rounding.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shared.agent.chat_client import API_KEY, ChatClient, InfrastructureError
from shared.agent.prompts import SYSTEM_PROMPT, TOOLS
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.metrics import Summary, percent, summarise
from shared.evaluation.pass_at_k import in_samples
from shared.evaluation.player import Player
from shared.models.folder import adapter_base, check_model_folder, is_adapter
from shared.models.tokenizer import Tokenizer
from shared.processes.owned_process import OwnedProcess
from shared.processes.vllm_server import vllm_server
from shared.records import Episode, Question, StopReason, read_questions, write_jsonl
from shared.reward.reward import judge_all
from shared.runs.manifest import (
    RunDirectory,
    begin_stage,
    fingerprint,
    finish_stage,
    finished,
    model_cache,
    question_file,
    read_manifest,
    write_json,
)
from shared.sql.database import Database
from shared.tool_calls.report import write_table

QUESTION_FILE = "questions.jsonl"  # in an evaluation's folder: what was asked
_MAX_LOST_SHARE = 0.1  # of the episodes; beyond that the rest may no longer stand for all


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint: `url` ends in /v1, `tokenizer` is a folder with the model's tokenizer.json."""

    url: str
    tokenizer: Path
    served_name: str = "auto"  # the model to ask for


def check_model(model: Path) -> None:
    """Raise UserError unless `model` is a whole model folder or a finished LoRA adapter."""
    if is_adapter(model):
        adapter_base(model)
    else:
        check_model_folder(model, "the evaluated model")


def check_endpoint(endpoint: Endpoint) -> Tokenizer:
    """Its tokenizer; raises UserError when that is missing or nobody answers at its address."""
    tokenizer = Tokenizer.from_folder(endpoint.tokenizer)
    try:
        asyncio.run(_reach(endpoint.url))
    except InfrastructureError as error:
        raise UserError(f"The endpoint {error}; start it or correct the address.") from error
    return tokenizer


async def _reach(url: str) -> None:
    async with ChatClient(url, api_key=os.environ.get(API_KEY, "")) as chat:
        await chat.reach()


def evaluate_model(
    model: Path, config: Config, run: RunDirectory, who: str, questions: Sequence[Question] | None = None
) -> dict[str, Any]:
    """Evaluate a model folder or a LoRA adapter, unless that is done; returns the summary as plain values.

    `questions` are by default the run's test questions.
    """
    check_model(model)

    def play(asked: Sequence[Question], folder: Path) -> Summary:
        return play_model(_whole_model(model, folder, model_cache(config)), asked, config, folder)

    return _recorded(play, questions or chosen_questions(config, run), config, run, who, model=model)


def play_model(model: Path, questions: Sequence[Question], config: Config, folder: Path) -> Summary:
    """Serve a model folder and play the questions with it, `evaluate.samples` times each; `folder` gets all files."""
    tokenizer = Tokenizer.from_folder(model)
    with vllm_server(model, config, folder) as base_url:
        return _played(questions, base_url, tokenizer, config, folder)


def evaluate_endpoint(
    endpoint: Endpoint, config: Config, run: RunDirectory, who: str, questions: Sequence[Question]
) -> dict[str, Any]:
    """The same for any OpenAI-compatible endpoint; another endpoint under the same name starts afresh."""

    def play(asked: Sequence[Question], folder: Path) -> Summary:
        tokenizer = check_endpoint(endpoint)
        return _played(asked, endpoint.url, tokenizer, config, folder, endpoint.served_name)

    subject = {"model": endpoint.url, "tokenizer": endpoint.tokenizer, "served_name": endpoint.served_name}
    return _recorded(play, questions, config, run, who, **subject)


def _whole_model(model: Path, folder: Path, cache: Path) -> Path:
    """The model itself, or an adapter merged into its base, which stays in `folder` until the evaluation is done.

    What has to be made of the base first goes to `cache`.
    """
    if not is_adapter(model):
        return model
    merged = folder / "merged"
    if not merged.exists():
        command = [sys.executable, "-m", "stage1_sft", "merge", model, "--out", merged, "--cache", cache]
        with OwnedProcess([str(part) for part in command], name="merge") as process:
            if process.wait() != 0:
                raise UserError(f"Adapter {model} could not be merged into its base model; the reason stands above.")
    return merged


def _played(
    questions: Sequence[Question], base_url: str, tokenizer: Tokenizer, config: Config, folder: Path, name: str = "auto"
) -> Summary:
    once = partial(evaluate, questions, base_url, tokenizer, config, served_name=name)
    return asyncio.run(in_samples(once, questions, config, folder))


def _recorded(
    play: Callable[[Sequence[Question], Path], Summary],
    questions: Sequence[Question],
    config: Config,
    run: RunDirectory,
    who: str,
    **subject: Any,
) -> dict[str, Any]:
    """Play the questions unless the same was done before; `subject` is what is evaluated, `model` its name."""
    folder = run.evaluation(who)
    mark = evaluation_mark(questions, config, data=(read_manifest(run.data) or {}).get("fingerprint"), **subject)
    if finished(folder, mark):
        print(f"{who} evaluation: finished before, {folder}")
    else:
        begin_stage(folder, mark)
        started = time.monotonic()
        write_jsonl(folder / QUESTION_FILE, questions)
        summary = play(questions, folder)
        shutil.rmtree(folder / "merged", ignore_errors=True)
        finish_stage(
            folder, mark, seconds=time.monotonic() - started, outputs={"summary": str(folder / "summary.json")},
            model=str(subject["model"]), questions=summary.n,
        )  # fmt: skip
    values = read_summary(folder)
    print(summary_line(who, values))
    return values


def evaluation_mark(questions: Sequence[Question], config: Config, **subject: Any) -> str:
    """Fingerprint of all that an evaluation of `subject` depends on; how fast or how patiently it runs is left out."""
    asked, settings = [dataclasses.asdict(question) for question in questions], config.part_of("evaluation")
    return fingerprint(questions=asked, prompts=[SYSTEM_PROMPT, TOOLS], settings=settings, **subject)


async def evaluate(
    questions: Sequence[Question],
    base_url: str,
    tokenizer: Tokenizer,
    config: Config,
    folder: Path,
    *,
    served_name: str = "auto",
) -> Summary:
    """Play and judge all `questions` against an endpoint; continues what `folder` already holds.

    `served_name` is the model to ask the endpoint for, auto for the only one. Raises UserError when more than a tenth of the
    episodes are lost to the infrastructure.
    """
    started = time.monotonic()
    databases = _databases(questions, config)
    async with ChatClient(base_url, api_key=os.environ.get(API_KEY, ""), model=served_name) as chat:
        player = Player(chat, tokenizer, config, databases, folder / "episodes.jsonl")
        await player.play(questions)
        await player.play(questions)  # those lost to the infrastructure once more
    episodes = [player.episodes[question.id] for question in questions]
    _refuse_too_many_lost(episodes, base_url)
    rewards = judge_all(questions, episodes, databases, config.grpo)
    write_jsonl(folder / "rewards.jsonl", [
        {"question_id": episode.question_id, **dataclasses.asdict(reward)}
        for episode, reward in zip(episodes, rewards, strict=True) if reward
    ])  # fmt: skip
    write_table(folder / "episodes.jsonl", TOOLS)
    summary = summarise(episodes, rewards, questions, samples=config.evaluate.bootstrap_samples, seed=config.seed)
    calls = sum(len(turn.calls) for episode in episodes for turn in episode.turns)
    more = {"seconds": round(time.monotonic() - started, 1), "tool_calls": calls}
    write_json(folder / "summary.json", dataclasses.asdict(summary) | more)
    return summary


def chosen_questions(config: Config, run: RunDirectory, file: Path | None = None) -> list[Question]:
    """The questions that every model of a run is asked: the first `evaluate.questions` of `file`, by default the test split.

    The data stage orders a split so that each beginning of it is balanced. Raises UserError when there is none.
    """
    file = file or question_file(run, "test")
    try:
        questions = list(read_questions(file))[: config.evaluate.questions]
    except ValueError as error:
        raise UserError(
            f"{file} holds no questions as this pipeline writes them ({error}); bring them in with `python -m data import` "
            f"and give the {QUESTION_FILE} that it writes."
        ) from error
    if not questions:
        raise UserError(f"{file} holds no question; raise data.test_share or bring more questions.")
    return questions


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished evaluation as plain values; raises UserError when there is none."""
    try:
        return dict(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"There is no finished evaluation in {folder}; run that stage first.") from None


def summary_line(who: str, summary: dict[str, Any]) -> str:
    """The result of one evaluation in a line."""
    low, high = summary["interval"]
    lost = f", {lost} lost to the infrastructure" if (lost := summary["infrastructure_failures"]) else ""
    return (
        f"{who}: execution accuracy {summary['execution_accuracy']:.1%} (95 % interval {low:.1%} to {high:.1%}), "
        f"tool-call rate {percent(summary['tool_call_rate'])}, {summary['n']} questions{lost}"
    )


def _databases(questions: Sequence[Question], config: Config) -> dict[str, Database]:
    return {path: Database(path, config.sandbox) for path in sorted({question.database for question in questions})}


def _refuse_too_many_lost(episodes: Sequence[Episode], base_url: str) -> None:
    lost = [episode for episode in episodes if episode.stop is StopReason.INFRASTRUCTURE]
    if len(lost) > _MAX_LOST_SHARE * len(episodes):
        raise UserError(
            f"{len(lost)} of {len(episodes)} episodes were lost to the infrastructure, too many for a result; the last "
            f"one to {lost[-1].error}. See to {base_url} and run the same command again, it continues."
        )
