"""Evaluation: play the test questions with one model and record the outcome.

    evaluations/<name>/{questions.jsonl,vllm.log,episodes.jsonl,episodes.calls.md,summary.json,manifest.json}
    evaluations/<name>/sample_2/…, samples.json     with evaluate.samples > 1

Each episode is judged and appended to episodes.jsonl as it ends, so an interrupted evaluation continues where it
stopped. Episodes lost to the infrastructure are played once more, then left out and counted; too many of them and there
is no result. Greedy decoding in a batch is not bit-for-bit repeatable: the batch that a request lands in changes the
rounding.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from tqdm import tqdm

from shared.agent.chat_client import API_KEY, LOOPBACK, ChatClient
from shared.agent.episode import run_episode
from shared.agent.prompts import prompts_of
from shared.agent.tools import Toolbox
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.metrics import Summary, estimate, majority, mean, pass_at_k, percent, summarise
from shared.models.folder import adapter_base, check_model_folder, is_adapter
from shared.models.tokenizer import Tokenizer
from shared.processes.owned_process import OwnedProcess
from shared.processes.vllm_server import vllm_server
from shared.records import (
    Episode,
    Question,
    StopReason,
    append_jsonl,
    portable,
    read_episodes,
    read_questions,
    write_jsonl,
)
from shared.reward.reward import judge
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
from shared.sql.database import Database, SqlError
from shared.tool_calls.report import write_table

QUESTION_FILE = "questions.jsonl"  # in an evaluation's folder: what was asked
EPISODE_FILE = "episodes.jsonl"
SAMPLE_FILE = "samples.json"  # with evaluate.samples > 1
_REACH_SECONDS = 10.0
_MAX_LOST_SHARE = 0.1  # of the episodes; beyond that the rest may no longer stand for all


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint: `url` ends in /v1, `tokenizer` is a folder with the model's tokenizer.json."""

    url: str
    tokenizer: Path
    served_name: str = "auto"  # the model to ask for; auto for the only one


def check_subject(subject: Path | Endpoint) -> None:
    """Raise UserError unless it is a whole model folder, a finished LoRA adapter, or an endpoint that answers."""
    if isinstance(subject, Path):
        adapter_base(subject) if is_adapter(subject) else check_model_folder(subject, "the evaluated model")
        return
    Tokenizer.from_folder(subject.tokenizer)
    is_local = urlsplit(subject.url).hostname in LOOPBACK
    try:
        httpx.get(f"{subject.url}/models", timeout=_REACH_SECONDS, trust_env=not is_local)  # any answer will do
    except httpx.RequestError as error:
        raise UserError(
            f"The endpoint {subject.url} cannot be reached ({type(error).__name__}: {error}); start it or correct the "
            "address."
        ) from error


def evaluate_subject(
    subject: Path | Endpoint,
    config: Config,
    run: RunDirectory,
    name: str,
    questions: Sequence[Question] | None = None,
) -> dict[str, Any]:
    """Evaluate a model folder, a LoRA adapter or an endpoint, unless that is done; returns the summary as plain values.

    `questions` are by default the run's test questions. Another subject under the same name starts afresh.
    """
    parts = {"model": subject} if isinstance(subject, Path) else vars(subject)
    if isinstance(subject, Path):
        check_subject(subject)
    questions = questions or chosen_questions(config, run)
    folder, data = run.evaluation(name), (read_manifest(run.data) or {}).get("fingerprint")
    expected = evaluation_fingerprint(questions, config, data=data, **parts)
    if finished(folder, expected):
        print(f"{name} evaluation: finished before, {folder}")
    else:
        begin_stage(folder, expected)
        started, outputs = time.monotonic(), {"summary": str(folder / "summary.json")}
        file = folder / QUESTION_FILE
        write_jsonl(file, [portable(question, file, run.path) for question in questions])
        if isinstance(subject, Path):
            model = str(subject)
            summary = play_model(whole_model(subject, folder, model_cache(config)), questions, config, folder)
            shutil.rmtree(folder / "merged", ignore_errors=True)
        else:
            model = subject.url
            check_subject(subject)
            summary = play_samples(questions, subject, config, folder)
        seconds = time.monotonic() - started
        finish_stage(folder, expected, seconds=seconds, outputs=outputs, model=model, questions=summary.n)
    values = read_summary(folder)
    print(summary_line(name, values))
    return values


def play_model(model: Path, questions: Sequence[Question], config: Config, folder: Path) -> Summary:
    """Serve a model folder and play the questions with it, `evaluate.samples` times each; `folder` gets all files."""
    with vllm_server(model, config, folder) as base_url:
        return play_samples(questions, Endpoint(base_url, model), config, folder)


def whole_model(model: Path, folder: Path, cache: Path) -> Path:
    """The model itself, or an adapter merged into its base, which stays in `folder` until the evaluation is done.

    A base model that must be adapted first goes to `cache`.
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


def evaluation_fingerprint(questions: Sequence[Question], config: Config, **subject: Any) -> str:
    """Fingerprint of everything that an evaluation of `subject` depends on; speed and patience are left out."""
    # Where a database lies does not matter; the fingerprint of the data covers what it holds.
    asked = [dataclasses.asdict(one) | {"database": Path(one.database).name, "copies": ""} for one in questions]
    settings = config.part_of("evaluation")
    return fingerprint(questions=asked, prompts=prompts_of(config.agent).mark, settings=settings, **subject)


def play_samples(questions: Sequence[Question], endpoint: Endpoint, config: Config, folder: Path) -> Summary:
    """Play `evaluate.samples` evaluations and write their common figures; returns the summary of the first one."""
    count = config.evaluate.samples
    if count > 1 and config.evaluate.temperature <= 0:
        raise UserError(
            f"Setting evaluate.samples is {count}, but greedy decoding gives one answer; "
            "set evaluate.temperature above 0."
        )
    folders = sample_folders(folder, count)
    summaries = [asyncio.run(evaluate(questions, endpoint, config, each)) for each in folders]
    if count > 1:
        figures = sample_figures(questions, folders, config)
        write_json(folder / SAMPLE_FILE, figures)
        print(", ".join(f"{name} {value:.1%}" for name, value in figures.items() if isinstance(value, float)))
    return summaries[0]


async def evaluate(questions: Sequence[Question], endpoint: Endpoint, config: Config, folder: Path) -> Summary:
    """Play and judge all `questions` against an endpoint; continues what `folder` already holds.

    Raises UserError when more than a tenth of the episodes are lost to the infrastructure.
    """
    started, tokenizer, file = time.monotonic(), Tokenizer.from_folder(endpoint.tokenizer), folder / EPISODE_FILE
    databases = {path: Database(path, config.sandbox) for path in sorted({question.database for question in questions})}
    judged = {episode.question_id: episode for episode in read_episodes(file) if episode.reward}
    lost: dict[str, Episode] = {}
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(file, judged.values())  # completes a half line and drops lost episodes

    async def play(question: Question) -> None:
        database = databases[question.database]
        episode = await run_episode(
            question,
            toolbox=Toolbox(database, tokenizer, config.agent, question.question),
            chat=chat,
            tokenizer=tokenizer,
            limits=config.agent,
            temperature=config.evaluate.temperature,
        )
        if episode.stop is StopReason.INFRASTRUCTURE:
            lost[question.id] = episode
            return
        reward = await asyncio.to_thread(judge, question, episode, database, config.grpo)
        judged[question.id] = dataclasses.replace(episode, reward=reward)
        append_jsonl(file, judged[question.id])

    async with ChatClient(endpoint.url, os.environ.get(API_KEY, ""), endpoint.served_name) as chat:
        for _ in range(2):  # those lost to the infrastructure once more
            lost.clear()
            waiting = [question for question in questions if question.id not in judged]
            await play_all(waiting, play, config.evaluate.concurrency, "episodes")
    if len(lost) > _MAX_LOST_SHARE * len(questions):
        raise UserError(
            f"{len(lost)} of {len(questions)} episodes were lost to the infrastructure, too many for a result; the "
            f"last one to {[*lost.values()][-1].error}. See to {endpoint.url}, then run the same command again; it "
            "continues."
        )
    played = [judged.get(question.id) or lost[question.id] for question in questions]
    write_jsonl(file, played)
    write_table(file, prompts_of(config.agent).tools)
    summary = summarise(played, questions, samples=config.evaluate.bootstrap_samples, seed=config.seed)
    seconds = {"seconds": round(time.monotonic() - started, 1)}
    write_json(folder / "summary.json", dataclasses.asdict(summary) | seconds)
    return summary


async def play_all(
    questions: Sequence[Question], play: Callable[[Question], Awaitable[None]], concurrency: int, label: str
) -> None:
    """`play` each question, at most `concurrency` at a time, under a bar called `label`; the first error ends all."""
    slots = asyncio.Semaphore(concurrency)

    async def in_turn(question: Question) -> None:
        async with slots:
            await play(question)

    tasks = [asyncio.create_task(in_turn(question)) for question in questions]
    try:
        for ending in tqdm(asyncio.as_completed(tasks), label, len(tasks), unit=" questions", disable=not tasks):
            await ending
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def chosen_questions(config: Config, run: RunDirectory, file: Path | None = None) -> list[Question]:
    """The questions that every model of a run is asked: the first `evaluate.questions` of `file`.

    `file` is by default the test split. The data stage orders a split so that each beginning of it is balanced. Raises
    UserError when there is none.
    """
    file = file or question_file(run, "test")
    try:
        questions = list(read_questions(file))[: config.evaluate.questions]
    except ValueError as error:
        raise UserError(
            f"{file} holds no questions as this pipeline writes them ({error}); bring them in with "
            f"`python -m data import` and give the {QUESTION_FILE} that it writes."
        ) from error
    if not questions:
        raise UserError(f"{file} holds no question; raise data.test_share or bring more questions.")
    return questions


def questions_of(run: RunDirectory, name: str) -> list[Question]:
    """The questions that a finished evaluation asked."""
    asked = run.evaluation(name) / QUESTION_FILE
    return list(read_questions(asked if asked.exists() else question_file(run, "test")))


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished evaluation as plain values; raises UserError when there is none."""
    try:
        return dict(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"There is no finished evaluation in {folder}; run that stage first.") from None


def summary_line(name: str, summary: dict[str, Any]) -> str:
    """The result of one evaluation in a line."""
    found, lost = summary["accuracy"], summary["infrastructure_failures"]
    return (
        f"{name}: execution accuracy {found['mean']:.1%} (95 % interval {found['low']:.1%} to {found['high']:.1%}), "
        f"tool-call rate {percent(summary['tool_call_rate'])}, {summary['n']} questions"
        + (f", {lost} lost to the infrastructure" if lost else "")
    )


def sample_folders(folder: Path, count: int) -> list[Path]:
    """The evaluations of the 1st, 2nd, … sample."""
    return [folder, *(folder / f"sample_{number}" for number in range(2, count + 1))]


def correctness(folder: Path) -> dict[str, bool]:
    """Whether each judged episode of an evaluation is right, by question id."""
    return {one.question_id: one.reward.correct for one in read_episodes(folder / EPISODE_FILE) if one.reward}


def outcomes(questions: Sequence[Question], folders: Sequence[Path]) -> dict[str, list[bool]]:
    """Which samples of a question are right, by question id; only questions that have all their samples."""
    samples = list(map(correctness, folders))
    whole = [question.id for question in questions if all(question.id in sample for sample in samples)]
    return {name: [sample[name] for sample in samples] for name in whole}


def sample_figures(questions: Sequence[Question], folders: Sequence[Path], config: Config) -> dict[str, Any]:
    """mean@k with its interval, pass@1, 2, 4, … and the accuracy of a majority vote; k is the number of samples.

    All of them are over questions that have all their samples; the interval resamples questions.

    The vote takes the result that most samples agree on, whatever the order of its rows; the earliest one among equals.
    """
    right, count = outcomes(questions, folders), len(folders)
    databases = {path: Database(path, config.sandbox) for path in {question.database for question in questions}}
    submitted = [{one.question_id: one.submitted_sql for one in read_episodes(each / EPISODE_FILE)} for each in folders]
    votes = []
    for question in questions:
        if question.id in right:
            database = databases[question.database]
            chosen = majority([_result(sample[question.id], database) for sample in submitted])
            votes.append(chosen is not None and right[question.id][chosen])
    powers = [2**power for power in range(count.bit_length())]
    passes = {f"pass@{k}": mean(pass_at_k(count, sum(found), k) for found in right.values()) for k in powers}
    shares = [sum(found) / count for found in right.values()]
    spread = estimate(shares, config.evaluate.bootstrap_samples, config.seed) if shares else None
    sampled = {"mean@k": dataclasses.asdict(spread)} if spread else {}
    figures = {"questions": len(votes), "samples": count}
    return figures | sampled | passes | {"majority vote": mean(map(float, votes))}


def _result(sql: str | None, database: Database) -> Hashable | None:
    """The rows that a submission returns, as a multiset; None where it returns no comparable result."""
    try:
        result = None if sql is None else database.execute(sql, database.limits.max_compare_rows)
    except SqlError:
        return None
    return None if result is None or result.truncated else frozenset(Counter(result.rows).items())
