"""The data stage: prepare databases, questions and splits in `<run>/data`; it reruns only when its inputs change."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.questions import EVIDENCE, Loaded, load
from data.sources import SourceRow, find_source, read_rows
from data.splits import Splits, leakage_check, make_splits
from data.sql_form import gold_key, question_key
from data.synthesis.demo import demo_questions
from shared.config.schema import Config
from shared.errors import UserError
from shared.records import Question, portable, read_questions, write_jsonl
from shared.reward.perturbed_copies import make_copies
from shared.runs.manifest import RunDirectory, attempt, fingerprint, finish_stage, finished
from shared.runs.output_paths import refuse_overwriting

VERSION = 7  # raise when the same settings give other data
_SPLITS = ("train", "val", "test")
_LISTED = 20  # skipped rows printed; all of them are in skipped.jsonl


def run(config: Config, run: RunDirectory) -> Path:
    """Prepare the data of the run unless that is done; returns the folder with train, val and test.jsonl."""
    mark = _fingerprint(config, run)
    manifest = finished(run.data, mark)
    if manifest:
        print(f"data: already prepared in {run.data}")
    else:
        started = time.monotonic()
        if config.data.spider_dir is not None:
            refuse_overwriting([run.data], [Path(config.data.spider_dir)])
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
    source = _source(config)
    state = "already prepared" if finished(run.data, _fingerprint(config, run)) else "to be prepared"
    demo = f"demo databases, {config.data.questions_per_database} questions each"
    files = [f"  writes {run.data / split}.jsonl" for split in _SPLITS]
    return [f"data: {state}", f"  source: {source or demo}", *files]


def prepare(config: Config, folder: Path) -> dict[str, Any]:
    """Write train.jsonl, val.jsonl and test.jsonl into `folder` (demo: databases/ too) and return what is in them.

    The counts: `questions`, `difficulty`, `databases` and `split_kinds` by split, `unseen_databases`, `skipped` rows,
    `empty_golds`, and how many questions were `decontaminated`. Raises UserError for bad rows (data.bad_rows=fail) and
    settings that leave a split empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = _source(config)
    if source is None:
        loaded = Loaded(demo_questions(config, folder.resolve() / "databases"))
    else:
        loaded = _read(config, source, folder)
    sizes = {question.db_id: Path(question.database).stat().st_size for question in loaded.questions}
    splits = make_splits(loaded.questions, config.data, config.seed, sizes)
    if len(splits.unseen) < config.data.unseen_databases:
        print(
            f"{len(splits.unseen)} of {len(sizes)} databases held out for tests instead of data.unseen_databases="
            f"{config.data.unseen_databases}: at most a third of the databases and of the questions",
            flush=True,
        )
    leakage_check(splits.train, splits.val, splits.test)
    counts = {"decontaminated": _decontaminate(splits, config)}
    if config.data.copies:
        _add_copies(splits, folder.resolve() / "copies", config)
    for name, questions in splits.items():
        file = folder / f"{name}.jsonl"
        write_jsonl(file, [portable(question, file, folder) for question in questions])
    return counts | {
        "questions": {name: len(questions) for name, questions in splits.items()},
        "difficulty": _by(splits, "difficulty"),
        "databases": _by(splits, "db_id"),
        "split_kinds": dict(Counter(question.split_kind for question in splits.test)),
        "unseen_databases": sorted(splits.unseen),
        "skipped": len(loaded.bad_rows),
        "empty_golds": loaded.empty_golds,
    }


def _read(config: Config, source: Path, folder: Path) -> Loaded:
    """The usable questions of a data set; bad rows are listed in `folder`/skipped.jsonl."""
    loaded = load(source, config.sandbox, skip_bad_rows=config.data.bad_rows == "skip")
    skipped = [{"file": place.file, "row": place.line, "reason": reason} for place, reason in loaded.bad_rows]
    if skipped:
        write_jsonl(folder / "skipped.jsonl", skipped)
    for place, reason in loaded.bad_rows[:_LISTED]:
        print(f"skipped {place}: {reason}")
    if len(skipped) > _LISTED:
        print(f"skipped {len(skipped) - _LISTED} more, see {folder / 'skipped.jsonl'}")
    if not loaded.questions:
        raise UserError(f"{source} holds no usable question; correct its rows.")
    return loaded


def _decontaminate(splits: Splits, config: Config) -> int:
    """Remove the questions of an evaluation set from train and val, by question text or gold; returns how many."""
    if config.data.avoid is None:
        return 0
    found = [*read_rows(find_source(Path(config.data.avoid)))]
    rows = [row for _, row in found if isinstance(row, SourceRow)]
    if not rows:
        why = f", the first ({found[0][0]}) because {found[0][1]}" if found else ""
        raise UserError(f"Setting data.avoid: no question can be read from {config.data.avoid}{why}.")
    texts, golds = {question_key(row.question) for row in rows}, {gold_key(row.gold_sql) for row in rows}

    def is_avoided(question: Question) -> bool:
        return question_key(question.question.split(EVIDENCE)[0]) in texts or gold_key(question.gold_sql) in golds

    before = len(splits.train) + len(splits.val)
    for split in (splits.train, splits.val):
        split[:] = [question for question in split if not is_avoided(question)]
    if not splits.train:
        raise UserError(
            f"Setting data.avoid: {config.data.avoid} holds every training question; evaluate on other ones."
        )
    return before - len(splits.train) - len(splits.val)


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
        lines.append(f"removed from train and val because data.avoid holds them too: {counts['decontaminated']}")
    if counts["skipped"] or counts["empty_golds"]:
        lines.append(f"rows skipped: {counts['skipped']}; golds with an empty result (kept): {counts['empty_golds']}")
    return "\n".join(lines)


def _source(config: Config) -> Path | None:
    """The data set that data.spider_dir names; None for the demo databases."""
    if config.data.spider_dir is None:
        return None
    source = Path(config.data.spider_dir)
    if not source.exists():
        raise UserError(
            f"Setting data.spider_dir: there is no {source}; correct the path, set it to null for the demo databases, "
            "or import a data set with `python -m data import` first."
        )
    return source


def _fingerprint(config: Config, run: RunDirectory) -> str:
    """The folder counts too: questions name their databases by absolute path."""
    source, avoided = _source(config), {}
    if config.data.avoid is not None:
        if not Path(config.data.avoid).exists():
            raise UserError(f"Setting data.avoid: there is no {config.data.avoid}; correct the path or set it to null.")
        avoided = {f"avoid {file.name}": file for file in find_source(Path(config.data.avoid)).files}
    return fingerprint(
        version=VERSION,
        settings=config.part_of("data"),
        **({"source": source} if source else {}),
        **avoided,
    )
