"""The data stage: prepare databases, questions and splits in `<run>/data`; it reruns only when its inputs change."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.questions import avoided_keys, load_sources
from data.sources import find_source
from data.splits import Splits, leakage_check, make_splits
from shared.config.schema import Config
from shared.errors import UserError
from shared.records import portable, read_questions, write_jsonl
from shared.reward.perturbed_copies import make_copies
from shared.runs.manifest import RunDirectory, attempt, fingerprint, finish_stage, finished
from shared.runs.output_paths import refuse_overwriting

VERSION = 7  # raise when the same settings give other data
_SPLITS = ("train", "val", "test")


def run(config: Config, run: RunDirectory) -> Path:
    """Prepare the data of the run unless that is done; returns the folder with train, val and test.jsonl."""
    mark = _fingerprint(config)
    manifest = finished(run.data, mark)
    if manifest:
        print(f"data: already prepared in {run.data}")
    else:
        started = time.monotonic()
        refuse_overwriting([run.data], [Path(source.path) for source in config.data.sources if source.path != "demo"])
        with attempt(run.data, mark):
            counts = prepare(config, run.data)
        outputs = {split: str(run.data / f"{split}.jsonl") for split in _SPLITS}
        for split in _SPLITS:  # the stage is complete only while the databases of its questions are there
            for question in read_questions(run.data / f"{split}.jsonl"):
                outputs[f"database {question.db_id}"] = question.database
                if question.copies:
                    outputs[f"copies {question.db_id}"] = question.copies
        manifest = finish_stage(run.data, mark, seconds=time.monotonic() - started, outputs=outputs, counts=counts)
    print(table(manifest["counts"]))
    return run.data


def plan(config: Config, run: RunDirectory) -> list[str]:
    """What `run` would do, as lines to print; changes nothing."""
    state = "already prepared" if finished(run.data, _fingerprint(config)) else "to be prepared"
    demo = f"demo databases, {config.data.questions_per_database} questions each"
    sources = [(demo if source.path == "demo" else source.path, source.use) for source in config.data.sources]
    named = [f"  source: {name}{'' if use == 'split' else f' ({use})'}" for name, use in sources]
    return [f"data: {state}", *named, *(f"  writes {run.data / split}.jsonl" for split in _SPLITS)]


def prepare(config: Config, folder: Path) -> dict[str, Any]:
    """Write train.jsonl, val.jsonl and test.jsonl into `folder` (demo: databases/ too) and return what is in them.

    The counts: `questions`, `difficulty`, `databases` and `split_kinds` by split, `unseen_databases`, `skipped` rows,
    `empty_golds`, and how many questions were `decontaminated`. Raises UserError for bad rows (data.bad_rows=fail) and
    settings that leave a split empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    avoided = avoided_keys(config)
    loaded = load_sources(config, folder)
    sizes = {question.db_id: Path(question.database).stat().st_size for question in loaded.questions}
    splits = make_splits(loaded.questions, config.data, config.seed, sizes, loaded.origins, avoided)
    wanted = config.data.unseen_databases
    if isinstance(wanted, int) and len(splits.unseen) < wanted:
        print(
            f"{len(splits.unseen)} of {len(sizes)} databases held out for tests instead of data.unseen_databases="
            f"{wanted}: at most a third of the databases and of the questions, none of a source with use: train",
            flush=True,
        )
    leakage_check(splits.train, splits.val, splits.test)
    if config.data.copies:
        _add_copies(splits, folder.resolve() / "copies", config)
    for name, questions in splits.items():
        file = folder / f"{name}.jsonl"
        write_jsonl(file, [portable(question, file, folder) for question in questions])
    return {
        "decontaminated": splits.removed,
        "questions": {name: len(questions) for name, questions in splits.items()},
        "difficulty": _by(splits, "difficulty"),
        "databases": _by(splits, "db_id"),
        "split_kinds": dict(Counter(question.split_kind for question in splits.test)),
        "unseen_databases": sorted(splits.unseen),
        "skipped": len(loaded.bad_rows),
        "empty_golds": loaded.empty_golds,
    }


def _add_copies(splits: Splits, folder: Path, config: Config) -> None:
    """Give the training questions perturbed copies of their databases; evaluation does not use copies."""
    golds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for question in splits.train:
        golds[question.db_id, question.database].append(question.gold_sql)
    for (db_id, database), queries in tqdm(golds.items(), desc="copying databases", unit="database", delay=2):
        make_copies(Path(database), queries, folder / db_id, config.data.copies, config.seed)
    splits.train = [dataclasses.replace(question, copies=str(folder / question.db_id)) for question in splits.train]


def _by(splits: Splits, attribute: str) -> dict[str, dict[str, int]]:
    """Number of questions by value of an attribute, then by split."""
    rows: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_SPLITS, 0))
    for name, questions in splits.items():
        for question in questions:
            rows[getattr(question, attribute)][name] += 1
    return dict(sorted(rows.items()))


def table(counts: dict[str, Any]) -> str:
    """Questions by difficulty, database and split, as text."""
    lines = [f"{'questions':28}" + "".join(f"{split:>8}" for split in _SPLITS)]
    rows = [(f"  {name}", row) for kind in ("difficulty", "databases") for name, row in counts[kind].items()]
    for name, row in [*rows, ("all", counts["questions"])]:
        lines.append(f"{name:28}" + "".join(f"{row[split]:8}" for split in _SPLITS))
    kinds = [f"{number} on {kind.replace('_', ' ')}s" for kind, number in sorted(counts["split_kinds"].items())]
    lines.append(f"test: {', '.join(kinds)}; unseen: {', '.join(counts['unseen_databases']) or 'none'}")
    if counts["decontaminated"]:
        lines.append(f"left out because the test or a source to avoid holds them too: {counts['decontaminated']}")
    if counts["skipped"] or counts["empty_golds"]:
        lines.append(f"rows skipped: {counts['skipped']}; golds with an empty result (kept): {counts['empty_golds']}")
    return "\n".join(lines)


def _fingerprint(config: Config) -> str:
    """The folders count too: questions name their databases by absolute path."""
    parts: dict[str, Path] = {}
    for source in config.data.sources:
        path = Path(source.path)
        if source.path == "demo":
            continue
        if not path.exists():
            raise UserError(
                f"Setting data.sources: there is no {path}; correct the path, write demo for the demo databases, or "
                "import a data set with `python -m data import` first."
            )
        if source.use == "avoid":  # its databases are not read
            parts |= {f"{path}: {file.name}": file for file in find_source(path).files}
        else:
            parts[f"source {path}"] = path
    return fingerprint(version=VERSION, settings=config.part_of("data"), **parts)
