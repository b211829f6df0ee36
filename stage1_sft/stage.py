"""Stage 1 of a run: traces, fine-tuning, merge. Finished parts are kept, an interrupted one continues.

    run.sft/{traces.jsonl, val_traces.jsonl, checkpoints/, metrics.jsonl, merged/, manifest.json}
    run.sft/{traces.too_long.jsonl, …}    what the agent's limits leave out, for `python -m stage2_grpo budget`
    run.sft/round-N/{episodes.jsonl, traces.jsonl, checkpoints/, metrics.jsonl, merged/}    with sft.rounds

In a self-taught round the model trained last plays the training questions; its shortest right episodes take the place
of their questions' traces, and the base model is trained anew on the result.

The manifest is written last. Its `outputs.model` is the last merged folder, which later stages take as SFT_MODEL_PATH.
"""

from __future__ import annotations

import gc
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlglot import exp

from shared.agent.prompts import prompts_of
from shared.cli.machine import Needs, look, refuse
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.folder import local_path, tool_template
from shared.models.tokenizer import Tokenizer
from shared.records import JsonlTail, Question, read_questions, write_jsonl
from shared.reward.queries import parse
from shared.runs.manifest import (
    RunDirectory,
    attempt,
    fingerprint,
    finish_stage,
    finished,
    model_cache,
    question_file,
    read_manifest,
    read_object,
    write_json,
)
from shared.runs.output_paths import refuse_overwriting
from stage1_sft import teacher
from stage1_sft.base_model import locate, resolve
from stage1_sft.synthesize import synthesize
from stage1_sft.traces import Trace
from stage1_sft.wording import LANGUAGES

VERSION = 6  # raise when the same settings and data give another model
TRACE_FILES = {"train": "traces.jsonl", "val": "val_traces.jsonl"}  # by split
UNKNOWN = "unknown"  # language of questions whose final answers are bare values
_VAL_SHARE = 0.03  # validation traces for each training trace; every evaluation pays for them
_MIN_VAL = 12
_PROBED = 3  # validation conversations on which the merge is verified


def run(config: Config, run: RunDirectory) -> Path:
    """Train the stage unless that is done; returns the merged model folder and prints SFT_MODEL_PATH."""
    mark = stage_fingerprint(config, run)
    if finished(run.sft, mark):
        print(f"sft: already trained in {run.sft}")
    else:
        _train(config, run, mark)
    merged = Path((read_manifest(run.sft) or {})["outputs"]["model"])
    print(f"SFT_MODEL_PATH={merged}", flush=True)
    return merged


def only_traces(config: Config, run: RunDirectory) -> None:
    """Synthesise the traces and stop; a later `run` with the same settings takes them over."""
    mark = stage_fingerprint(config, run)
    if finished(run.sft, mark):
        print(f"sft: already trained in {run.sft}; its traces are {run.sft / TRACE_FILES['train']}")
        return
    base = resolve(config.model, model_cache(config))
    refuse_overwriting([run.sft], [base, Path(config.model)])
    with attempt(run.sft, mark):
        _, _, counts = make_traces(config, run, base)
    for split, file in TRACE_FILES.items():
        print(f"{run.sft / file}: {counts_line(counts[split])}")


def plan(config: Config, run: RunDirectory) -> list[str]:
    """What `run` would do and where, as lines to print; changes nothing."""
    inputs = [run.data / f"{split}.jsonl" for split in TRACE_FILES]
    done = all(file.exists() for file in inputs) and finished(run.sft, stage_fingerprint(config, run))
    sft = config.sft
    return [
        f"sft: {'already trained' if done else 'to be trained'}",
        f"  base model {locate(config.model, model_cache(config)) or f'{config.model} (from the model hub)'}",
        *[f"  reads {file}{'' if file.exists() else ' (not there yet)'}" for file in inputs],
        f"  up to {sft.max_traces} traces, LoRA {sft.lora_rank}/{sft.lora_alpha}, {sft.epochs} epoch(s), "
        f"batch {sft.batch_size * sft.gradient_accumulation}, learning rate {sft.learning_rate:g}",
        *[f"  writes {run.sft / name}" for name in (*TRACE_FILES.values(), "checkpoints", "metrics.jsonl", "merged")],
    ]


def make_traces(config: Config, run: RunDirectory, base: Path) -> tuple[list[Trace], list[Trace], dict[str, Any]]:
    """Training and validation traces of the run with their counts, synthesised once and re-read afterwards."""
    tokenizer, counts = Tokenizer.from_folder(base), dict[str, Any]()
    limits = {"train": config.sft.max_traces, "val": max(_MIN_VAL, round(config.sft.max_traces * _VAL_SHARE))}
    traces: dict[str, list[Any]] = {}
    for split, limit in limits.items():
        file = run.sft / TRACE_FILES[split]
        counts_file = file.with_suffix(".counts.json")
        if read_object(counts_file).get("traces") != len(JsonlTail(file).new_rows()):  # the counts are written last
            write_json(counts_file, _write_traces(file, split, limit, config, run, tokenizer))
        traces[split], counts[split] = JsonlTail(file).new_rows(), read_object(counts_file)
    return traces["train"], traces["val"], counts


def _write_traces(
    file: Path, split: str, limit: int, config: Config, run: RunDirectory, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Write up to `limit` traces of a split, from the teacher where there is one; returns their counts."""
    questions = drawn(read_questions(run.data / f"{split}.jsonl"), config.seed)
    taught, bill = dict[str, Trace](), dict[str, Any]()
    if config.teacher.endpoint is not None:
        taught, bill["teacher"] = teacher.teach(questions[:limit], config, tokenizer, run)
        print(f"teacher: {teacher.bill_line(bill['teacher'])}", flush=True)
    rest = [question for question in questions if question.id not in taught]
    rows, too_long, ids = synthesize(rest, limit=limit - len(taught), config=config, tokenizer=tokenizer, label=split)
    write_jsonl(file.with_suffix(".too_long.jsonl"), too_long)
    counts = {
        "traces": write_jsonl(file, [*taught.values(), *rows]),
        "from_teacher": len(taught),
        "dropped": {reason: len(questions) for reason, questions in ids.items()},
        "languages": Counter(row["provenance"]["language"] or UNKNOWN for row in rows),
    }
    if not rows and not taught:
        raise UserError(
            f"None of the questions in {run.data / f'{split}.jsonl'} gives a trace ({counts_line(counts)}); check "
            "their gold SQL and databases, and agent.max_turns and agent.max_turn_tokens."
        )
    return {**counts, **bill}


def drawn(questions: Iterable[Question], seed: int) -> list[Question]:
    """The questions in a seeded order, each beginning of which is balanced over forms, tables and databases.

    A group is the questions of one form on equally many tables; databases take turns inside it. Its share of a
    beginning grows with the square root of its size (as languages are balanced in multilingual training) and with its
    number of tables; a small group comes early as a whole.
    """
    order = sorted(questions, key=lambda question: question.id)
    random.Random(f"{seed}").shuffle(order)
    groups: dict[tuple[str, int], list[Question]] = {}
    for question in order:
        tree = parse(question.gold_sql)
        tables = len({table.name.lower() for table in tree.find_all(exp.Table)}) if tree else 0
        groups.setdefault((question.form.partition("/")[0], max(1, tables)), []).append(question)
    places: dict[str, float] = {}
    for (_, tables), group in groups.items():
        turns = Counter[str]()
        for question in group:
            turns[question.db_id] += 1
            places[question.id] = turns[question.db_id]
        for place, question in enumerate(sorted(group, key=lambda question: places[question.id])):
            places[question.id] = (place + 0.5) / (tables * len(group) ** 0.5)
    return sorted(order, key=lambda question: places[question.id])


def counts_line(counts: Mapping[str, Any]) -> str:
    """How many traces a split has, what was dropped and why, and what its answers lack, in words."""
    parts, dropped = [f"{counts['traces']} traces"], counts["dropped"]
    if dropped:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
        parts.append(f"questions that gave none: {sum(dropped.values())} ({reasons})")
    if counts.get("too_long"):
        parts.append(f"traces left out as longer than agent.context_tokens: {counts['too_long']}")
    if neutral := counts["languages"].get(UNKNOWN):
        parts.append(
            f"traces that answer with bare values: {neutral}, because their questions are in none of the languages "
            f"in which answers are written ({', '.join(LANGUAGES)})"
        )
    return "; ".join(parts)


def _train(config: Config, run: RunDirectory, mark: str) -> None:
    from transformers import AutoTokenizer

    refuse(look(), Needs(config.profile))  # before the model is fetched
    started = time.monotonic()
    base = resolve(config.model, model_cache(config))
    refuse_overwriting([run.sft], [base, Path(config.model)])
    with attempt(run.sft, mark):
        traces, val_traces, counts = make_traces(config, run, base)
        tokenizer = AutoTokenizer.from_pretrained(base)
        examples, counts["train"]["too_long"] = _encoded(traces, tokenizer, config)
        val, counts["val"]["too_long"] = _encoded(val_traces, tokenizer, config)
    print("\n".join(f"sft: {split}: {counts_line(counts[split])}" for split in TRACE_FILES), flush=True)
    conversations = [trace["messages"] for trace in val_traces[:_PROBED]]
    queries = [max([2, *(i for i, turn in enumerate(each) if turn.get("tool_calls"))]) for each in conversations]
    probes = [each[:i] for each, i in zip(conversations, queries, strict=True)]
    folder, rounds = run.sft, list[dict[str, Any]]()
    trained = _fine_tune(base, examples, val, probes, config, folder)
    for number in range(1, config.sft.rounds + 1):
        model, folder = folder / "merged", run.sft / f"round-{number}"
        traces, brought = _self_taught(model, traces, config, run, folder)
        rounds.append(brought)
        examples, brought["too_long"] = _encoded(traces, tokenizer, config)
        trained = _fine_tune(base, examples, val, probes, config, folder)
    outputs = {"model": str(folder / "merged"), "adapter": trained["adapter"]}
    details = {"base_model": str(base), "model_setting": config.model, "counts": counts, "rounds": rounds}
    seconds = time.monotonic() - started
    finish_stage(run.sft, mark, seconds=seconds, outputs=outputs, figures=trained["figures"], **details)


def _encoded(traces: Sequence[Trace], tokenizer: Any, config: Config) -> tuple[list[Any], int]:
    """Examples of the traces, and how many were left out as longer than the context."""
    from stage1_sft.dataset import encode_all

    examples, too_long = encode_all(traces, tokenizer, config.agent.context_tokens)
    if not examples:
        raise UserError(
            f"Every trace is longer than agent.context_tokens ({config.agent.context_tokens}); raise it or lower "
            "agent.observation_tokens."
        )
    return examples, too_long


def _fine_tune(
    base: Path, examples: Sequence[Any], val: Sequence[Any], probes: Sequence[Any], config: Config, folder: Path
) -> dict[str, Any]:
    """Train `base` and merge into `folder`/merged unless that is done; returns the adapter and the figures."""
    import torch

    from stage1_sft.merge import merge
    from stage1_sft.train import train

    file, merged = folder / "trained.json", folder / "merged"
    if not (file.exists() and merged.exists()):
        shutil.rmtree(merged, ignore_errors=True)  # merged, but its figures were not written
        adapter, figures = train(base, examples, val, config, folder)
        print(f"sft: merging {adapter.name} and verifying it ...", flush=True)
        write_json(file, {"adapter": str(adapter), "figures": {**figures, **merge(base, adapter, merged, probes)}})
        gc.collect()
        torch.cuda.empty_cache()  # the server of a self-taught round needs the memory
    return read_object(file)


def _self_taught(
    model: Path, traces: Sequence[Trace], config: Config, run: RunDirectory, folder: Path
) -> tuple[list[Trace], dict[str, Any]]:
    """The traces with those replaced that `model` solves itself in a round, written to `folder`; and its bill."""
    by_id = {question.id: question for question in read_questions(run.data / "train.jsonl")}
    asked = [by_id[trace["id"]] for trace in traces[: config.sft.round_questions]]
    solved, bill = teacher.play_round(model, asked, config, folder)
    print(f"sft: {folder.name}: {teacher.bill_line(bill)}", flush=True)
    taught = [solved.get(trace["id"], trace) for trace in traces]
    write_jsonl(folder / TRACE_FILES["train"], taught)
    return taught, bill


def stage_fingerprint(config: Config, run: RunDirectory) -> str:
    """Hash of all that the model depends on: settings of this stage, tools and limits, data, base model, wording."""
    train, val = (question_file(run, split) for split in TRACE_FILES)
    model: list[Any] = [config.model]
    if (folder := local_path(config.model)).is_dir():
        stats = {file.name: file.stat() for file in folder.iterdir() if file.is_file()}
        model = [str(folder.resolve()), sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())]
    settings = config.part_of("sft")
    if not config.teacher.endpoint and not config.sft.rounds:
        del settings["teacher"]
    return fingerprint(
        version=VERSION,
        settings=settings,
        model=model,
        prompt=[*prompts_of(config.agent).mark, tool_template()],
        train=train,
        val=val,
        data=(read_manifest(run.data) or {}).get("fingerprint"),  # covers the databases, too
    )
