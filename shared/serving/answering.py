"""One question on one database, answered by the trained agent with the loop, tools and sandbox of training.

`ask` and `serve` share the choice of the model (the newest trained one of all runs), of its settings (those of its run)
and of the model server: one that `serve` has started, else one of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.agent.chat_client import API_KEY, ChatClient
from shared.agent.episode import run_episode
from shared.agent.tools import Toolbox
from shared.config.load import load_config
from shared.config.schema import Config, check_address
from shared.errors import UserError
from shared.evaluation.run import Endpoint, check_subject
from shared.models.folder import check_model_folder
from shared.models.tokenizer import Tokenizer
from shared.processes.owned_process import answers
from shared.processes.vllm_server import vllm_server
from shared.records import STOP_MEANING, Message, Question, StopReason
from shared.runs.manifest import read_manifest, read_object, write_json
from shared.sql.database import Database, SandboxError, SqlError

STATE_FILE = "serve.json"  # in runs_dir: the model server of a running `serve`
_RECORDED = ("agent", "sandbox")  # sections of a run's settings that its model was trained with
_EXACT = 2**53  # larger integers are not exact in the JSON of a browser
MOST_AT_ONCE = 64  # questions and tool calls


class Busy(Exception):
    """More questions than MOST_AT_ONCE at the same time."""


@dataclass(frozen=True)
class Answer:
    """What an episode came to. `rows` are those of the submitted SQL as plain JSON values, at most max_compare_rows."""

    question: str
    text: str  # the model's final answer, "" if it gave none
    sql: str | None
    columns: tuple[str, ...]
    rows: list[list[Any]]
    truncated: bool
    stop: str  # a StopReason
    problem: str  # why there is no answer or no rows, one sentence; "" if there are both
    seconds: float
    prompt_tokens: int
    completion_tokens: int


class Agent:
    """A model server and a database, ready for questions; any number of them at once, up to MOST_AT_ONCE."""

    def __init__(self, config: Config, endpoint: Endpoint, database: Database) -> None:
        self.config, self.endpoint, self.database = config, endpoint, database
        self.tokenizer = Tokenizer.from_folder(endpoint.tokenizer)
        self._at_once = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """A place among MOST_AT_ONCE; raises Busy when all are taken."""
        if self._at_once >= MOST_AT_ONCE:
            raise Busy
        self._at_once += 1
        try:
            yield
        finally:
            self._at_once -= 1

    def toolbox(self, question: str = "") -> Toolbox:
        """The tools with a memory of their own."""
        return Toolbox(self.database, self.tokenizer, self.config.agent, question)

    async def answer(self, text: str, watch: Callable[[Message], None] = lambda message: None) -> Answer:
        """Play one episode. `watch` gets each message of the conversation as it comes about."""
        question = Question("asked", self.database.path.stem, text, "", str(self.database.path))
        async with ChatClient(self.endpoint.url, os.environ.get(API_KEY, ""), self.endpoint.served_name) as chat:
            episode = await run_episode(
                question,
                toolbox=self.toolbox(text),
                chat=chat,
                tokenizer=self.tokenizer,
                limits=self.config.agent,
                temperature=self.config.evaluate.temperature,
                watch=watch,
            )
        columns, rows, truncated = tuple[str, ...](), list[list[Any]](), False
        problem = "" if episode.stop is StopReason.ANSWERED else f"No answer: {STOP_MEANING[episode.stop]}."
        if episode.stop is StopReason.INFRASTRUCTURE:
            problem = f"No answer: {episode.error}"
        elif episode.submitted_sql:
            most = self.config.sandbox.max_compare_rows
            try:
                result = await asyncio.to_thread(self.database.execute, episode.submitted_sql, most)
                columns, truncated = result.columns, result.truncated
                rows = [[_plain(value) for value in row] for row in result.rows]
            except (SqlError, SandboxError, UserError) as error:
                problem = problem or f"The submitted SQL fails: {error}"
        last = episode.messages[-1]
        return Answer(
            question=text,
            text=str(last["content"]).strip() if episode.stop is StopReason.ANSWERED else "",
            sql=episode.submitted_sql,
            columns=columns,
            rows=rows,
            truncated=truncated,
            stop=episode.stop.value,
            problem=problem,
            seconds=round(episode.seconds, 3),
            prompt_tokens=sum(turn.prompt_tokens for turn in episode.turns),
            completion_tokens=sum(turn.completion_tokens for turn in episode.turns),
        )


def _plain(value: Any) -> Any:
    """A cell as JSON shows it exactly: other numbers and blobs as text."""
    if isinstance(value, bytes):
        return f"<blob of {len(value)} bytes>"
    exact = not (isinstance(value, float) and not math.isfinite(value)) and not (
        isinstance(value, int) and abs(value) > _EXACT
    )
    return value if exact else str(value)


def chosen(args: argparse.Namespace) -> tuple[Config, Path | Endpoint, Database]:
    """Settings, model folder or endpoint, and database of a command line.

    The agent's limits, its tools and the sandbox are those of the run that trained the model, unless --set says
    otherwise. Raises UserError for anything that is missing.
    """
    config = load_config(args.config, args.profile, args.overrides)
    model = args.model or args.tokenizer or newest_model(Path(config.runs_dir).resolve())
    if model is None:
        raise UserError(
            f"{config.runs_dir} holds no trained model; run the pipeline first, or give --model FOLDER, or --endpoint "
            "URL with --tokenizer FOLDER."
        )
    config = trained_with(model, args)
    subject: Path | Endpoint = model
    if args.endpoint:
        check_address("--endpoint", args.endpoint)
        subject = Endpoint(args.endpoint.rstrip("/"), model, args.served_name)
    database = Path(args.database)
    if not database.is_file():
        raise UserError(f"There is no database {database}; give a SQLite file or an address as --database.")
    return config, subject, Database(database, config.sandbox)


def trained_with(model: Path, args: argparse.Namespace) -> Config:
    """The settings of a command line, the agent's and the sandbox's from the run that trained `model`."""
    recorded = read_object(model.resolve().parent.parent / "config.json")
    known = load_config(args.config, args.profile, args.overrides).model_dump()
    kept = [
        f"{section}.{name}={'null' if value is None else value}"
        for section in _RECORDED
        for name, value in (recorded.get(section) or {}).items()
        if name in known[section]
    ]
    return load_config(args.config, args.profile, [*kept, *args.overrides])


def newest_model(runs: Path, run_name: str = "*") -> Path | None:
    """The model of the training stage that finished last in the run `run_name`, or in any run."""
    manifests = sorted(
        (file for stage in ("sft", "grpo") for file in runs.glob(f"{run_name}/{stage}/manifest.json")),
        key=lambda file: file.stat().st_mtime,
    )
    models = [Path((read_manifest(file.parent) or {"outputs": {}})["outputs"].get("model", "")) for file in manifests]
    return next((model for model in reversed(models) if (model / "config.json").is_file()), None)


@contextlib.contextmanager
def serving(subject: Path | Endpoint, config: Config, *, announce: bool = False) -> Iterator[Endpoint]:
    """The endpoint of a subject: its own, that of a running `serve` with the same model, or of a server started here.

    `announce` lets `ask` find the server meanwhile. Everything said goes to stderr.
    """
    runs = Path(config.runs_dir).resolve()
    if isinstance(subject, Endpoint):
        check_subject(subject)
        yield subject
        return
    model = subject.resolve()
    check_model_folder(model, "the model")
    state = read_object(runs / STATE_FILE)
    same = state.get("model") == str(model) and state.get("context") == config.agent.context_tokens
    if same and answers(f"{state.get('endpoint')}/models"):
        yield Endpoint(str(state["endpoint"]), model)
        return
    folder = runs / "serving"
    with contextlib.ExitStack() as stack:
        with contextlib.redirect_stdout(sys.stderr):
            print(f"starting the model server for {model} (log: {folder / 'vllm.log'}) …", flush=True)
            if not announce:
                print("it ends with this command; while `serve` runs, `ask` uses its server and is quick", flush=True)
            url = stack.enter_context(vllm_server(model, config, folder))
        if announce:
            state = {"model": str(model), "endpoint": url, "context": config.agent.context_tokens, "pid": os.getpid()}
            write_json(runs / STATE_FILE, state)
            stack.callback(_withdraw, runs / STATE_FILE)
        yield Endpoint(url, model)


def _withdraw(file: Path) -> None:
    """Remove the state file unless another `serve` has written it since."""
    if read_object(file).get("pid") == os.getpid():
        file.unlink(missing_ok=True)


def describe(config: Config, subject: Path | Endpoint, database: Database) -> str:
    """What a command would use, one line each."""
    model = subject if isinstance(subject, Path) else f"endpoint {subject.url} (tokenizer {subject.tokenizer})"
    limits = json.dumps(config.agent.model_dump())
    return f"model {model}\ndatabase {database.path}, {len(database.schema.tables)} tables\nlimits {limits}"
