"""Stage 1 of a run: traces, fine-tuning, merge; finished parts are kept, an interrupted one continues.

    run.sft/{traces.jsonl, val_traces.jsonl, checkpoints/, metrics.jsonl, merged/, manifest.json}
    run.sft/{traces.too_long.jsonl, …}    what the agent's limits leave out, for `python -m stage2_grpo budget`

The manifest is written last. Its `outputs.model` is the merged folder, which later stages take as SFT_MODEL_PATH.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shared.agent.prompts import SYSTEM_PROMPT, TOOLS
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.folder import check_model_folder, local_path, tool_template
from shared.models.tokenizer import Tokenizer
from shared.records import JsonlTail, Message, Question, read_questions, write_jsonl
from shared.runs.manifest import (
    RunDirectory,
    attempt,
    fingerprint,
    finish_stage,
    finished,
    model_cache,
    question_file,
    read_manifest,
    write_json,
)
from stage1_sft import teacher
from stage1_sft.base_model import planned_folder, resolve
from stage1_sft.synthesize import synthesize
from stage1_sft.traces import Trace

VERSION = 3  # raise when the same settings and data give another model
_VAL_SHARE = 0.03  # validation traces for each training trace; every evaluation pays for them
_MIN_VAL = 12
_PROBED = 3  # validation conversations on which the merge is verified


def run(config: Config, run: RunDirectory) -> Path:
    """Train the stage unless that is done; returns the merged model folder and prints SFT_MODEL_PATH."""
    mark = _fingerprint(config, run)
    merged = run.sft / "merged"
    if _is_finished(run, mark):
        print(f"sft: already trained in {run.sft}")
    else:
        _train(config, run, mark, merged)
    print(f"SFT_MODEL_PATH={merged}", flush=True)
    return merged


def make_traces(config: Config, run: RunDirectory, base: Path) -> tuple[list[Trace], list[Trace], dict[str, Any]]:
    """Training and validation traces of the run with their counts, synthesised once and re-read afterwards."""
    tokenizer = Tokenizer.from_folder(base)
    limits = {"train": config.sft.max_traces, "val": max(_MIN_VAL, round(config.sft.max_traces * _VAL_SHARE))}
    traces: dict[str, list[Trace]] = {}
    counts: dict[str, Any] = {}
    for split, limit in limits.items():
        kept = _kept(_trace_files(run)[split]) or _made(split, limit, config, run, tokenizer)
        traces[split], counts[split] = kept
    return traces["train"], traces["val"], counts


def _made(
    split: str, limit: int, config: Config, run: RunDirectory, tokenizer: Tokenizer
) -> tuple[list[Trace], dict[str, Any]]:
    """The traces of a split with their counts, as a later start finds them on disk."""
    file = _trace_files(run)[split]
    questions = _drawn(read_questions(run.data / f"{split}.jsonl"), config.seed)
    taught, bill = _taught(questions[:limit], config, tokenizer, run)
    rest = [question for question in questions if question.id not in taught]
    rows, too_long, dropped = synthesize(
        rest, limit=limit - len(taught), config=config, tokenizer=tokenizer, label=split
    )
    write_jsonl(file.with_suffix(".too_long.jsonl"), too_long)
    if not rows and not taught:
        raise UserError(
            f"None of the questions in {run.data / f'{split}.jsonl'} gives a trace ({dict(dropped)}); check their "
            "gold SQL and databases, and agent.max_turns and agent.max_turn_tokens."
        )
    written = write_jsonl(file, [*taught.values(), *rows])
    write_json(_counts_file(file), {"traces": written, "from_teacher": len(taught), "dropped": dropped, **bill})
    kept = _kept(file)
    assert kept is not None
    return kept


def _kept(file: Path) -> tuple[list[Trace], dict[str, Any]] | None:
    """The traces of an earlier start with their counts, which are written last; None unless all of them are there."""
    traces = JsonlTail(file).new_rows()
    try:
        counts = json.loads(_counts_file(file).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return (traces, counts) if counts.get("traces") == len(traces) else None


def _counts_file(traces: Path) -> Path:
    return traces.with_suffix(".counts.json")


def _drawn(questions: Iterable[Question], seed: int) -> list[Question]:
    """The questions in a seeded order that does not depend on theirs."""
    order = sorted(questions, key=lambda question: question.id)
    random.Random(f"{seed}").shuffle(order)
    return order


def _taught(
    questions: Sequence[Question], config: Config, tokenizer: Tokenizer, run: RunDirectory
) -> tuple[dict[str, Trace], dict[str, Any]]:
    """The traces that a teacher gives, by question id, and its bill under `teacher`; both empty without a teacher."""
    if config.teacher.endpoint is None:
        return {}, {}
    traces, bill = teacher.teach(questions, config, tokenizer, run)
    print(teacher.bill_line(bill), flush=True)
    return traces, {"teacher": bill}


def only_traces(config: Config, run: RunDirectory) -> None:
    """Synthesise the traces and stop; a later `run` with the same settings takes them over."""
    mark = _fingerprint(config, run)
    if _is_finished(run, mark):
        print(f"sft: already trained in {run.sft}; its traces are {_trace_files(run)['train']}")
        return
    base = resolve(config.model, model_cache(config))
    with attempt(run.sft, mark):
        _, _, counts = make_traces(config, run, base)
    for split, file in _trace_files(run).items():
        print(f"{file}: {counts[split]['traces']} traces, dropped {counts[split]['dropped'] or 'none'}")


def plan(config: Config, run: RunDirectory) -> list[str]:
    """What `run` would do and where, as lines to print; changes nothing."""
    ready = all(file.exists() for file in _data_files(run))
    done = ready and _is_finished(run, _fingerprint(config, run))
    sft = config.sft
    lines = [
        f"sft: {'already trained' if done else 'to be trained'}",
        f"  base model {planned_folder(config.model, model_cache(config))}",
        *[f"  reads {file}{'' if file.exists() else ' (not there yet)'}" for file in _data_files(run)],
        f"  up to {sft.max_traces} traces, LoRA {sft.lora_rank}/{sft.lora_alpha}, {sft.epochs} epoch(s), "
        f"batch {sft.batch_size * sft.gradient_accumulation}, learning rate {sft.learning_rate:g}",
    ]
    outputs = [*_trace_files(run).values(), run.sft / "checkpoints", run.sft / "metrics.jsonl", run.sft / "merged"]
    return [*lines, *[f"  writes {path}" for path in outputs]]


def _train(config: Config, run: RunDirectory, mark: str, merged: Path) -> None:
    from transformers import AutoTokenizer

    from stage1_sft.dataset import encode_all
    from stage1_sft.export import merge
    from stage1_sft.train import train

    started = time.monotonic()
    base = resolve(config.model, model_cache(config))
    with attempt(run.sft, mark):
        traces, val_traces, counts = make_traces(config, run, base)
        tokenizer = AutoTokenizer.from_pretrained(base)
        examples, too_long = encode_all(traces, tokenizer, config.sft.max_length)
        val, val_too_long = encode_all(val_traces, tokenizer, config.sft.max_length)
        if not examples or not val:
            raise UserError(
                f"Every trace is longer than sft.max_length ({config.sft.max_length} tokens); raise it or lower "
                "agent.observation_tokens."
            )
    counts["train"]["too_long"], counts["val"]["too_long"] = too_long, val_too_long
    print(f"sft: {len(examples)} traces to train on, {len(val)} to validate; dropped {counts}", flush=True)
    trained = train(base, examples, val, config, run.sft)
    print(f"sft: merging {trained.adapter.name} and verifying it ...", flush=True)
    verified = merge(base, trained.adapter, merged, _probes(val_traces))
    finish_stage(
        run.sft, mark, seconds=time.monotonic() - started, outputs={"model": str(merged), "adapter": str(trained.adapter)},
        base_model=str(base), model_setting=config.model, counts=counts, figures={**trained.figures, **verified},
    )  # fmt: skip


def _probes(traces: Sequence[Trace]) -> list[list[Message]]:
    """Conversations up to their query, the turn in which most can go wrong."""
    probes = []
    for trace in traces[:_PROBED]:
        queries = [i for i, message in enumerate(trace["messages"]) if "execute_sql" in json.dumps(message)]
        probes.append(trace["messages"][: queries[-1]])
    return probes


def _is_finished(run: RunDirectory, mark: str) -> bool:
    """The manifest is there and so is the model it speaks of; a model deleted since is merged again."""
    if not finished(run.sft, mark):
        return False
    try:
        check_model_folder(run.sft / "merged")
    except UserError:
        return False
    return True


def _fingerprint(config: Config, run: RunDirectory) -> str:
    """Hash of all that the model depends on: settings of this stage, tools and limits, data, base model, wording."""
    train, val = (question_file(run, split) for split in ("train", "val"))
    settings = config.part_of("sft")
    if not config.teacher.endpoint:
        del settings["teacher"]
    return fingerprint(
        version=VERSION,
        settings=settings,
        model=_identity(config.model),
        prompt=[SYSTEM_PROMPT, TOOLS, tool_template()],
        train=train,
        val=val,
        data=(read_manifest(run.data) or {}).get("fingerprint"),  # covers the databases, too
    )


def _identity(model: str) -> list[Any]:
    """The name of a model, and for a local folder also the size and time of its files."""
    folder = local_path(model)
    if not folder.is_dir():
        return [model]
    stats = {file.name: file.stat() for file in folder.iterdir() if file.is_file()}
    return [str(folder.resolve()), sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())]


def _data_files(run: RunDirectory) -> tuple[Path, Path]:
    return run.data / "train.jsonl", run.data / "val.jsonl"


def _trace_files(run: RunDirectory) -> dict[str, Path]:
    return {"train": run.sft / "traces.jsonl", "val": run.sft / "val_traces.jsonl"}
