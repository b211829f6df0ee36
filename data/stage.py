"""The data stage: prepares into `<run>/data` once, and again only when what it depends on has changed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from data.prepare import prepare
from data.sources import find_source
from shared.config.schema import Config
from shared.errors import UserError
from shared.records import read_questions
from shared.runs.manifest import RunDirectory, attempt, fingerprint, finish_stage, finished

VERSION = 3  # raise when the same settings give other data
_SPLITS = ("train", "val", "test")


def run(config: Config, run: RunDirectory) -> Path:
    """Prepare the data of the run unless that is done; returns the folder with train, val and test.jsonl."""
    mark = _fingerprint(config, run)
    manifest = finished(run.data, mark)
    if manifest:
        print(f"data: already prepared in {run.data}")
    else:
        started = time.monotonic()
        with attempt(run.data, mark):
            counts = prepare(config, run.data)
        outputs = {split: str(run.data / f"{split}.jsonl") for split in _SPLITS} | databases(run)
        manifest = finish_stage(run.data, mark, seconds=time.monotonic() - started, outputs=outputs, counts=counts)
    print(table(manifest["counts"]))
    return run.data


def databases(run: RunDirectory) -> dict[str, str]:
    """The database files of all questions and their copies, by db_id: a data stage is complete only while they are there."""
    questions = (question for split in _SPLITS for question in read_questions(run.data / f"{split}.jsonl"))
    files = {}
    for question in questions:
        files[f"database {question.db_id}"] = question.database
        if question.copies:
            files[f"copies {question.db_id}"] = question.copies
    return files


def plan(config: Config, run: RunDirectory) -> list[str]:
    """What `run` would do, as lines to print; changes nothing."""
    source = _source(config)
    state = "already prepared" if finished(run.data, _fingerprint(config, run)) else "to be prepared"
    what = (
        f"Spider layout in {source}" if source else f"demo, {config.data.questions_per_database} questions a database"
    )
    files = [f"  writes {run.data / split}.jsonl" for split in _SPLITS]
    return [f"data: {state}", f"  source: {what}", *files]


def table(counts: dict[str, Any]) -> str:
    """Questions by difficulty, database and split, as text."""
    lines = [f"{'questions':28}" + "".join(f"{split:>8}" for split in _SPLITS)]
    for kind in ("difficulty", "databases"):
        lines += [_line(f"  {name}", row) for name, row in counts[kind].items()]
    lines.append(_line("all", counts["questions"]))
    kinds = ", ".join(
        f"{number} on {kind.replace('_', ' ')}s" for kind, number in sorted(counts["split_kinds"].items())
    )
    lines.append(f"test: {kinds}; unseen: {', '.join(counts['unseen_databases']) or 'none'}")
    if counts["decontaminated"]:
        lines.append(f"taken out of train and val, because data.avoid asks them too: {counts['decontaminated']}")
    if counts["skipped"] or counts["empty_golds"]:
        lines.append(f"rows skipped: {counts['skipped']}; golds with an empty result (kept): {counts['empty_golds']}")
    return "\n".join(lines)


def _line(name: str, row: dict[str, int]) -> str:
    return f"{name:28}" + "".join(f"{row[split]:8}" for split in _SPLITS)


def _source(config: Config) -> Path | None:
    if config.data.spider_dir is None:
        return None
    source = Path(config.data.spider_dir)
    if not source.is_dir():
        raise UserError(f"Setting data.spider_dir: there is no folder {source}; correct the path, set it to null for the demo "
                        "databases, or bring a CSV or JSONL file in with `python -m data import` first.")  # fmt: skip
    return source


def _fingerprint(config: Config, run: RunDirectory) -> str:
    """The folder counts too: questions name their databases by absolute path."""
    source = _source(config)
    return fingerprint(
        version=VERSION, settings=config.part_of("data"),
        folder=str(run.data), **({"source": source} if source else {}), **_avoided(config),
    )  # fmt: skip


def _avoided(config: Config) -> dict[str, Path]:
    """The question files of data.avoid, whose contents count."""
    if config.data.avoid is None:
        return {}
    avoided = Path(config.data.avoid)
    if not avoided.exists():
        raise UserError(f"Setting data.avoid: there is no {avoided}; correct the path or set it to null.")
    return {f"avoid {file.name}": file for file in find_source(avoided, None).files}
