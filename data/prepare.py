"""Prepares the data of a run: questions from the demo or a Spider folder, checked, split and written as JSONL."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data import spider
from data.demo.build import make_rows, write_database
from data.demo.domains import DOMAINS
from data.demo.generate import Taken, generate
from data.sources import SourceRow, find_source, read_rows
from data.splits import Splits, held_out_count, leakage_check, make_splits
from data.sql_form import gold_key, question_key
from shared.config.schema import Config
from shared.errors import UserError
from shared.records import Question, write_jsonl
from shared.reward.perturbed_copies import make_copies

_LISTED = 20  # skipped rows printed; all of them are in skipped.jsonl


def prepare(config: Config, folder: Path) -> dict[str, Any]:
    """Write train.jsonl, val.jsonl and test.jsonl into `folder` (demo: databases/ too) and return what is in them.

    The counts: `questions`, `difficulty`, `databases` and `split_kinds` by split, `unseen_databases`, `skipped` rows,
    `empty_golds`, and how many questions were `decontaminated`. Raises UserError for bad rows (data.bad_rows=fail) and
    settings that leave a split empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    loaded = _demo(config, folder) if config.data.spider_dir is None else _spider(config, folder)
    sizes = {question.db_id: Path(question.database).stat().st_size for question in loaded.questions}
    held_out = held_out_count(config.data.unseen_databases, len(sizes))
    if held_out < config.data.unseen_databases:
        print(f"{held_out} of {len(sizes)} databases held out for tests, because training needs some: data.unseen_databases is "
              f"{config.data.unseen_databases}", flush=True)  # fmt: skip
    splits = make_splits(loaded.questions, config.data, config.seed, sizes)
    leakage_check(splits.train, splits.val, splits.test)
    taken_out = _decontaminate(splits, config)
    splits.train = _with_copies(splits.train, folder.resolve() / "copies", config)
    for name, questions in splits.items():
        write_jsonl(folder / f"{name}.jsonl", questions)
    return _counts(splits, loaded) | {"decontaminated": taken_out}


def _decontaminate(splits: Splits, config: Config) -> int:
    """Take questions out of train and val that an evaluation set asks too, by question text or gold; returns how many."""
    if config.data.avoid is None:
        return 0
    found = [*read_rows(find_source(Path(config.data.avoid), None))]
    rows = [row for _, row in found if isinstance(row, SourceRow)]
    if not rows:
        why = f", the first ({found[0][0]}) because {found[0][1]}" if found else ""
        raise UserError(f"Setting data.avoid: no question can be read from {config.data.avoid}{why}.")
    texts, golds = {question_key(row.question) for row in rows}, {gold_key(row.gold_sql) for row in rows}
    before = len(splits.train) + len(splits.val)
    for split in (splits.train, splits.val):
        split[:] = [q for q in split if _text_key(q) not in texts and gold_key(q.gold_sql) not in golds]
    if not splits.train:
        raise UserError(
            f"Setting data.avoid: {config.data.avoid} holds every training question; evaluate on other ones."
        )
    return before - len(splits.train) - len(splits.val)


def _text_key(question: Question) -> str:
    return question_key(question.question.split(spider.EVIDENCE)[0])


def _with_copies(questions: Sequence[Question], folder: Path, config: Config) -> list[Question]:
    """The training questions with perturbed copies of their databases; evaluation knows no copies."""
    if not config.data.copies:
        return list(questions)
    golds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for question in questions:
        golds[question.db_id, question.database].append(question.gold_sql)
    for (db_id, database), queries in tqdm(golds.items(), desc="copying databases", unit="database", delay=2):
        make_copies(Path(database), queries, folder / db_id, config.data.copies, config.seed)
    return [dataclasses.replace(question, copies=str(folder / question.db_id)) for question in questions]


def _demo(config: Config, folder: Path) -> spider.Loaded:
    databases = folder.resolve() / "databases"
    databases.mkdir(exist_ok=True)
    taken = Taken()
    loaded = spider.Loaded()
    for domain in tqdm(DOMAINS, desc="making demo databases", unit="database", delay=2):
        path = databases / f"{domain.db_id}.sqlite"
        rows = make_rows(domain)
        write_database(domain, rows, path)
        drawn = generate(domain, rows, config.data.questions_per_database, config.seed, taken)
        loaded.questions += [dataclasses.replace(question, database=str(path)) for question in drawn]
    return loaded


def _spider(config: Config, folder: Path) -> spider.Loaded:
    source = Path(str(config.data.spider_dir))
    loaded = spider.load(source, config.sandbox, skip_bad_rows=config.data.bad_rows == "skip")
    if loaded.bad_rows:
        _list_skipped(loaded.bad_rows, folder / "skipped.jsonl")
    if not loaded.questions:
        raise UserError(f"{source} holds no usable question; correct its rows.")
    return loaded


def _list_skipped(rows: Sequence[spider.BadRow], path: Path) -> None:
    write_jsonl(path, rows)
    for row in rows[:_LISTED]:
        print(f"skipped {row.file}, row {row.row}: {row.reason}")
    if len(rows) > _LISTED:
        print(f"skipped {len(rows) - _LISTED} more, see {path}")


def _counts(splits: Splits, loaded: spider.Loaded) -> dict[str, Any]:
    test_kinds = Counter(question.split_kind for question in splits.test)
    return {
        "questions": {name: len(questions) for name, questions in splits.items()},
        "difficulty": _by(splits, "difficulty"),
        "databases": _by(splits, "db_id"),
        "split_kinds": dict(test_kinds),
        "unseen_databases": sorted({q.db_id for q in splits.test if q.split_kind == "unseen_database"}),
        "skipped": len(loaded.bad_rows),
        "empty_golds": loaded.empty_golds,
    }


def _by(splits: Splits, attribute: str) -> dict[str, dict[str, int]]:
    """Questions by value of an attribute, then by split."""
    table: dict[str, dict[str, int]] = {}
    for name, questions in splits.items():
        for question in questions:
            row = table.setdefault(getattr(question, attribute), {"train": 0, "val": 0, "test": 0})
            row[name] += 1
    return dict(sorted(table.items()))
